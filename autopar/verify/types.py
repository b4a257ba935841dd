"""Types: every value of an emitted graph has a layout, and every node must fit the layouts of what it takes.

The layouts are derived from the graph alone: inputs are whole, weights are where the step holds them, a conversion
moves a value from one state to another, and an op has the outputs that its rule gives for these inputs.  What emission
noted on its nodes, and what the plan chose for its ops, is not read.  A graph that types computes the program's
function and its gradients: a sum that is pending, a cut that differs or a gradient that is not yet whole has another
type.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from autopar.layout import (
    I,
    Layout,
    Mesh,
    Move,
    P,
    R,
    S,
    dual,
    format_layout,
    format_state,
    forward_layout,
    local_shape,
)
from autopar.passes.resolve import Resolved
from autopar.program import OutputName, args_of, place
from autopar.rules.analysis import Operation
from autopar.rules.derive import Choice, Strategy, apply, factor_size, splittable
from autopar.rules.factors import Cut, dimension_cut, factor_cut
from autopar.rules.notation import Algorithm
from autopar.runtime.collectives import Step, convert
from autopar.runtime.kernels.parts import AxisCut, Part
from autopar.runtime.parameters import use
from autopar.verify.moves import Mistyped, advance, as_move
from autopar.verify.numbering import RESHAPE, Candidate, Numbering, arguments_by_name, tensors_of
from autopar.verify.report import Finding
from autopar.verify.subject import RankGraph, mesh_text

Typed = tuple[int, Layout]  # a value's number and its layout
Outputs = tuple[Typed, ...]  # of one call


@dataclass(frozen=True, slots=True)
class Moved:
    """A conversion that a graph makes.  value: its name in the program.  forward, backward: in which pass."""

    node: str
    value: str
    move: Move
    forward: bool
    backward: bool


@dataclass(slots=True)
class Types:
    """What one rank's graph was found to be.

    values: every way in which a node can be read (more than one only where shards are so small that views look alike);
    an op that gives several tensors has one entry for each.  moved: its conversions.  findings: at most one of the
    graph, the first, and those of the weights.
    """

    values: dict[str, tuple[Outputs, ...]] = field(default_factory=dict)
    ops: dict[str, Operation] = field(default_factory=dict)
    strategies: dict[str, Strategy] = field(default_factory=dict)
    moved: list[Moved] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)


def check_types(resolved: Resolved, numbering: Numbering, rank: RankGraph) -> Types:
    """Derive the layout of every node of one rank's graph."""
    checker = _Checker(resolved, numbering, rank)
    checker.weights()
    checker.graph()
    return checker.types


@dataclass(slots=True)
class _Checker:
    resolved: Resolved
    numbering: Numbering
    rank: RankGraph
    types: Types = field(default_factory=Types)
    handed: dict[str, int] = field(default_factory=dict)  # gradients that each weight hands over
    plain: set[str] = field(default_factory=set)
    held: dict[str, str] = field(default_factory=dict)  # placeholder of a weight -> its node in the program

    @property
    def mesh(self) -> Mesh:
        return self.resolved.mesh

    def text(self, layout: Layout) -> str:
        return format_layout(layout, self.mesh.axes)

    # ------------------------------------------------------------------------------------------ weights

    def weights(self) -> None:
        """Once a step: from where a weight is stored to where it is held, and its gradient back."""
        for node, parameter in self.resolved.analysis.program.parameters.items():
            stored, ways = self.resolved.parameters[node], self.rank.ways[node]
            trained = self.resolved.analysis.values[node].differentiable
            try:
                for what, layout in (("stored", stored.stored), ("held", stored.held)):
                    if any(not isinstance(s, S) and s != I for s in layout):
                        raise Mistyped(f"a weight cannot be {what} so", "S or I on every axis", self.text(layout))
                self.walk(
                    node, stored.stored, stored.held, ways.gather, "a weight does not get where the step holds it"
                )
                if trained:
                    what = "a gradient does not get where its weight is stored"
                    self.walk(node, stored.accumulated, stored.stored, ways.final, what)
            except Mistyped as error:
                self.types.findings.append(self.finding(error, parameter.name))

    def walk(self, node: str, start: Layout, goal: Layout, way: Sequence[Step], what: str) -> None:
        shape, layout = self.resolved.analysis.values[node].shape, start
        for step in way:
            after = advance(layout, step, shape, self.mesh, self.rank.at, True)
            self.moved(node, node, layout, after, way is self.rank.ways[node].gather)
            layout = after
        if layout != goal:
            raise Mistyped(what, self.text(goal), self.text(layout))

    def moved(self, node: str, value: str, before: Layout, after: Layout, forward: bool, both: bool = False) -> None:
        move = as_move(before, after)
        self.types.moved.append(Moved(node, value, move, forward or both, both or not forward))

    # ------------------------------------------------------------------------------------------ the graph

    def graph(self) -> None:
        kinds = iter(self.rank.inputs)
        for node in self.rank.graph.nodes:
            try:
                if node.op == "placeholder":
                    self.placeholder(node, *next(kinds))
                elif node.op == "output":
                    self.results(node)
                else:
                    self.types.values[node.name] = self.call(node)
            except Mistyped as error:
                self.types.findings.append(self.finding(error, self.where(node)))
                return

    def placeholder(self, node: fx.Node, kind: str, name: str) -> None:
        if node.name != name:
            raise Mistyped("a placeholder is handed what another one stands for", node.name, f"{kind} {name}")
        if kind in ("axis", "rng", "gradients"):
            return
        whole = (I,) * len(self.mesh.sizes)
        if kind != "parameter":
            self.types.values[node.name] = ((self.typed(name, whole),),)
            return
        self.held[node.name] = name
        if not self.resolved.analysis.values[name].differentiable:
            self.types.values[node.name] = ((self.typed(name, self.resolved.parameters[name].held),),)

    def typed(self, name: str, layout: Layout) -> Typed:
        return self.numbering.numbers[name], layout

    def value(self, number: int) -> Any:
        return self.resolved.analysis.values[self.numbering.values[number]]

    def read(self, node: Any) -> tuple[Typed, ...]:
        """Every way to read a node that holds one tensor."""
        if node.name in self.held and node.name not in self.types.values:
            self.take_plainly(node)
        if node.name not in self.types.values:
            raise Mistyped("a node takes what is no tensor of the program", "a tensor", node.name)
        return tuple(outputs[0] for outputs in self.types.values[node.name])

    def take_plainly(self, node: fx.Node) -> None:
        """Ops take the weight itself: autograd's gradient of it is what accumulates."""
        name = self.held[node.name]
        stored = self.resolved.parameters[name]
        layout = tuple(dual(s) for s in stored.accumulated)
        if forward_layout(layout) != stored.held:
            raise Mistyped(
                "a weight is used as it is held, but its gradient then is not as it accumulates",
                f"a use of {self.resolved.analysis.program.parameters[name].name} that moves it, or its gradient: "
                f"held {self.text(stored.held)}, accumulated {self.text(stored.accumulated)}",
                "no move",
            )
        self.plain.add(name)
        self.types.values[node.name] = ((self.typed(name, layout),),)

    def call(self, node: fx.Node) -> tuple[Outputs, ...]:
        if node.target is convert:
            return tuple((t,) for t in self.conversion(node))
        if node.target is use:
            return ((self.use(node),),)
        if node.target is operator.getitem:
            source, k = node.args
            if not isinstance(source, fx.Node) or not isinstance(k, int):
                raise Mistyped("an output that is no output", "getitem(call, k)", str(node.args))
            return tuple(dict.fromkeys((outputs[k],) for outputs in self.types.values[source.name]))
        return self.operation(node)

    def conversion(self, node: fx.Node) -> tuple[Typed, ...]:
        x, axis, src, dst = args_of(node)
        found: list[Typed] = []
        error: Mistyped | None = None
        for number, layout in self.read(x):
            value = self.value(number)
            try:
                after = advance(
                    layout,
                    Step(axis, src, dst),
                    value.shape,
                    self.mesh,
                    self.rank.at,
                    value.differentiable,
                )
            except Mistyped as e:
                error = error or e
                continue
            if not found:
                self.moved(node.name, value.name, layout, after, True, both=value.differentiable)
            found.append((number, after))
        if error is not None and not found:
            raise error
        return tuple(found)

    def use(self, node: fx.Node) -> Typed:
        """The layout of a weight in a use: where its gradient's way starts says in which state an op must take it."""
        weight, gradients, key, forward, backward = args_of(node)
        name = self.held.get(getattr(weight, "name", ""))
        if name is None:
            raise Mistyped("a use of what is no weight", "a weight", str(weight))
        value, stored = self.resolved.analysis.values[name], self.resolved.parameters[name]
        parameter = self.resolved.analysis.program.parameters[name]
        if key != parameter.name:
            raise Mistyped("a weight hands its gradient to another", parameter.name, str(key))
        layout, moves = stored.held, []
        for step in forward:
            after = advance(layout, step, value.shape, self.mesh, self.rank.at, False)
            moves.append((layout, after, True))
            layout = after
        if value.differentiable:
            if gradients is None:
                raise Mistyped("the gradient of a weight is dropped", "gradients", "None")
            full, layout = layout, stored.accumulated
            for step in reversed(backward):
                before = advance(
                    layout, Step(step.axis, step.dst, step.src), value.shape, self.mesh, self.rank.at, True
                )
                moves.append((before, layout, False))
                layout = before
            layout = tuple(dual(s) for s in layout)
            if forward_layout(layout) != full:
                raise Mistyped(
                    f"{parameter.name} is used in another layout than its gradient has when it sets out",
                    f"a gradient in {self.text(tuple(dual(s) for s in full))}, or P where the weight is whole",
                    f"a gradient in {self.text(tuple(dual(s) for s in layout))}",
                )
            self.handed[parameter.name] = self.handed.get(parameter.name, 0) + 1
        for before, after, way in moves:
            self.moved(node.name, name, before, after, way)
        return self.typed(name, layout)

    def results(self, node: fx.Node) -> None:
        """Loss, outputs and new buffers: the program's own, whole on every rank."""
        program = self.resolved.analysis.program
        (loss, leaves, buffers), *_ = args_of(node)
        wanted: list[tuple[str, Any, Any]] = [("the loss", loss, program.loss)] if program.loss is not None else []
        if leaves:
            wanted += [
                ("an output", leaf, name)
                for leaf, name in zip(leaves, program.outputs, strict=True)
                if isinstance(name, OutputName)
            ]
        wanted += [
            (f"the new value of {buffer}", got, name)
            for got, (buffer, name) in zip(buffers, program.mutations.items(), strict=True)
        ]
        whole = (I,) * len(self.mesh.sizes)
        for what, got, name in wanted:
            readings = self.read(got)
            if self.typed(name, whole) in readings:
                continue
            number, layout = readings[0]
            if number != self.numbering.numbers[name]:
                raise Mistyped(f"{what} is another value", name, self.numbering.values[number])
            raise Mistyped(f"{what} is not whole on every rank", I, self.text(layout))
        counted = {k: self.handed.get(k, 0) for k in self.handed}
        for name in self.plain:
            key = program.parameters[name].name
            counted[key] = counted.get(key, 0) + 1
        if counted != dict(self.rank.uses):
            name = next(k for k in sorted({*counted, *self.rank.uses}) if counted.get(k) != self.rank.uses.get(k))
            raise Mistyped(
                f"{name} hands over another number of gradients than its reduction waits for",
                str(self.rank.uses.get(name, 0)),
                str(counted.get(name, 0)),
            )

    # ------------------------------------------------------------------------------------------ operations

    def operation(self, node: fx.Node) -> tuple[Outputs, ...]:
        inputs = {n: self.read(n) for n in node.all_input_nodes if n.name in self.held or n.name in self.types.values}
        found: dict[Outputs, None] = {}
        error: Mistyped | None = None
        for picked in itertools.product(*inputs.values()):
            reading = dict(zip(inputs, picked, strict=True))

            def number(n: fx.Node, reading: dict[fx.Node, Typed] = reading) -> Any:
                return reading[n][0] if n in reading else n.name

            for candidate in self.numbering.look_up(node, number):
                try:
                    for outputs in self.strategies(node, candidate, reading):
                        found[outputs] = None
                except Mistyped as e:
                    error = error or e
                    self.types.ops.setdefault(node.name, candidate.op)
        if not found:
            raise error or Mistyped(
                "a call that the program does not make",
                "an op of the program on these values, with these arguments",
                str(node.format_node()),
            )
        return tuple(found)

    def strategies(self, node: fx.Node, candidate: Candidate, reading: dict[fx.Node, Typed]) -> list[Outputs]:
        """Layouts of the outputs that the rule gives for these inputs.  Raises Mistyped where there are none."""
        op, sizes = candidate.op, self.mesh.sizes
        layouts = [reading[n][1] for n in tensors_of(node, op)]
        per_axis = [self.choices(op, candidate.algorithm, [lay[a] for lay in layouts], a) for a in range(len(sizes))]
        out, error = [], None
        for choices in itertools.product(*per_axis):
            strategy = apply(op.type, choices, sizes)
            try:
                if strategy is None:
                    raise Mistyped(
                        "cuts of its inputs do not go together", "cuts that nest", ", ".join(map(str, choices))
                    )
                self.compare(op, strategy, layouts)
                self.local_arguments(node, op, strategy, candidate.algorithm)
            except Mistyped as e:
                error = error or e
                continue
            self.types.ops[node.name], self.types.strategies[node.name] = op, strategy
            out.append(tuple(zip(candidate.outputs, strategy.outs, strict=True)))
        if not out:
            raise error or Mistyped("no choice fits")
        return out

    def choices(self, op: Operation, algorithm: Algorithm | None, states: Sequence[Any], axis: int) -> list[Choice]:
        """How the op can run on one axis, its inputs being in these states."""
        rule, n, name = op.rule, self.mesh.sizes[axis], self.mesh.axes[axis]

        def kind(factor: str) -> str:
            return algorithm.name if algorithm is not None and factor in algorithm.splits else "split"

        cuts: dict[Choice, int] = {}
        for i, state in enumerate(states):
            if isinstance(state, S):
                hit = factor_cut(rule.ins[i], state, n, rule.sizes)
                if hit is None:
                    raise Mistyped(
                        f"input {i} is cut on {name} across factors", "a cut of one factor", format_state(state)
                    )
                cuts.setdefault(Choice(kind(hit[0]), *hit), i)
        if cuts:
            choice, *others = cuts
            if others:
                raise Mistyped(
                    f"inputs are cut apart on {name}",
                    f"{choice} for all, as for input {cuts[choice]}",
                    f"{others[0]} for input {cuts[others[0]]}",
                )
            if (choice.kind, choice.factor) not in splittable(rule):
                raise Mistyped(
                    f"an input is cut on {name} along a dimension that the op needs whole", "no cut", str(choice)
                )
            return [choice]
        if P in states:
            terms = []
            for product in rule.form:
                carriers = [i for i in product if states[i] == P]
                if len(carriers) != 1:
                    break
                terms.append(carriers[0])
            if not rule.form or len(terms) < len(rule.form):
                raise Mistyped(
                    f"a pending sum over {name} goes into an op that is not linear in it",
                    f"linear: {rule.form or 'in nothing'}",
                    self.states_text(states),
                )
            return [Choice(P, terms=tuple(terms))]
        flows = {s for s, d in zip(states, op.type.differentiable_ins, strict=True) if d}
        if len(flows) > 1:
            raise Mistyped(
                f"replicated and invariant inputs are mixed on {name}", "R, or I, for all", self.states_text(states)
            )
        if flows == {I}:
            return [Choice(I)]
        made = [f for f in rule.factors if not any(f in d for t in rule.ins for d in t) and f not in rule.whole]
        choices = [Choice(R if flows else I)]
        for factor in made:  # a dimension that the op makes is of any size that its arguments say
            choices += [Choice(kind(factor), factor, cut) for cut in self.cuts(op, factor, axis)]
        return choices

    def cuts(self, op: Operation, factor: str, axis: int) -> list[Cut]:
        """Candidate cuts of a factor that no input has: those that travel along the program, by themselves and inside
        what other axes cut."""
        others = [n for a, n in enumerate(self.mesh.sizes) if a != axis]
        groups = {math.prod(some) for k in range(len(others) + 1) for some in itertools.combinations(others, k)}
        size = op.rule.sizes[factor]
        found: dict[Cut, None] = {}
        for cut in self.resolved.analysis.factor_points(op)[factor]:
            found[cut] = None
            for outside in {c.m for c in self.resolved.analysis.factor_points(op)[factor]}:
                for m in (outside * g for g in groups):
                    if size % (m * cut.u) == 0:
                        found[Cut(m, size // m // cut.u, cut.u)] = None
        return list(found)

    def states_text(self, states: Sequence[Any]) -> str:
        return ", ".join(format_state(s) for s in states)

    def compare(self, op: Operation, strategy: Strategy, layouts: Sequence[Layout]) -> None:
        for i, (wanted, got) in enumerate(zip(strategy.ins, layouts, strict=True)):
            if wanted != got:
                raise Mistyped(
                    f"input {i} ({op.inputs[i]}) is in a layout that does not go with the others",
                    self.text(wanted),
                    self.text(got),
                )

    def local_arguments(self, node: fx.Node, op: Operation, strategy: Strategy, algorithm: Algorithm | None) -> None:
        """Sizes among the arguments are local, and parts say what this rank holds."""
        sizes, at, given = self.mesh.sizes, self.rank.at, arguments_by_name(node, op)
        if node.target is RESHAPE and op.rule.reshapes:
            wanted = local_shape(op.type.out_shapes[0], strategy.outs[0], sizes, at)
            if tuple(args_of(node)[1]) != wanted:
                raise Mistyped("a reshape to another shape than the rank's", str(list(wanted)), str(args_of(node)[1]))
            return

        def rows(names: Sequence[str]) -> int:
            out = 1
            for f in names:
                out *= factor_size(op.rule, strategy, f, sizes, at)
            return out

        for name, dims in op.rule.size_args.items():
            expected: Any = rows(dims) if dims and isinstance(dims[0], str) else [rows(d) for d in dims]
            got = given.get(name)
            if (list(got) if isinstance(got, (list, tuple)) else got) != expected:
                raise Mistyped(f"argument {name} is not this rank's size", str(expected), str(got))
        for name, dims in op.rule.part_args.items():
            self.same_parts(name, [self.part(op, strategy, d) for d in dims], list(given.get(name) or ()))
        if algorithm is not None:
            splits = [f for f in algorithm.splits if f in op.rule.sizes]
            splits += [op.rule.images[f] for f in splits if f in op.rule.images]
            parts = given.get("parts") or {}
            self.same_parts("parts", [self.part(op, strategy, (f,)) for f in splits], [parts.get(f) for f in splits])

    def same_parts(self, name: str, expected: Sequence[Part], got: Sequence[Any]) -> None:
        def text(part: Any) -> str:
            if part is None:
                return "nothing"
            return f"{part.size} rows" + "".join(f", {c.axis} cuts {(c.m, c.N, c.u)}" for c in part.cuts)

        if list(map(text, expected)) != list(map(text, got)):
            raise Mistyped(
                f"argument {name} does not say what this rank holds",
                "; ".join(map(text, expected)),
                "; ".join(map(text, got)),
            )

    def part(self, op: Operation, strategy: Strategy, names: Sequence[str]) -> Part:
        """What this rank holds of a dimension of these factors; axes by name."""
        cuts = []
        for factor in names:
            for axis, cut in strategy.cuts(factor):
                image = dimension_cut((tuple(names),), factor, cut, op.rule.sizes)
                assert image is not None  # the factor is among the names
                cuts.append(AxisCut(self.mesh.axes[axis], *image[1:]))  # type: ignore[arg-type]
        whole = math.prod(op.rule.sizes.get(f, 1) for f in names)
        return Part(whole, tuple(sorted(cuts, key=lambda c: c.m)))

    # ------------------------------------------------------------------------------------------ findings

    def finding(self, error: Mistyped, where: str) -> Finding:
        rank = mesh_text(self.mesh, self.rank.at)
        return Finding("types", error.what, f"{where} ({rank})", error.expected, error.got)

    def where(self, node: fx.Node) -> str:
        return _where(node, self.types.ops)


def _where(node: fx.Node, ops: Mapping[str, Operation]) -> str:
    """Module path and source line: of the op that the node is, else of those that it lies between."""
    if node.name in ops:
        return f"{node.name}, {place(ops[node.name].node)}"
    before = _nearest(node, lambda n: n.all_input_nodes, lambda n: n.name in ops)
    after = _nearest(node, lambda n: list(n.users), lambda n: bool(n.meta.get("where")))
    text = [node.name]
    if after is not None:
        text.append(f"in or before {after.meta['where']}")
    if before is not None:
        text.append(f"after {before.name} of {place(ops[before.name].node)}")
    return ", ".join(text)


def _nearest(
    node: fx.Node, beside: Callable[[fx.Node], Sequence[fx.Node]], wanted: Callable[[fx.Node], bool]
) -> fx.Node | None:
    """The first node, by distance from ``node``, that is wanted."""
    queue, seen = deque([node]), {node}
    while queue:
        known = queue.popleft()
        if wanted(known):
            return known
        new = [n for n in beside(known) if n not in seen]
        queue.extend(new)
        seen.update(new)
    return None


def compare_ranks(resolved: Resolved, graphs: Sequence[RankGraph], types: Sequence[Types]) -> list[Finding]:
    """Ranks run the same calls in the same order, on the same values in the same layouts: else they would wait for each
    other, or mix parts of different cuts."""
    for graph, found in zip(graphs[1:], types[1:], strict=True):
        pairs = itertools.zip_longest(graphs[0].graph.nodes, graph.graph.nodes)
        for mine, theirs in pairs:
            if mine is None or theirs is None or mine.op != theirs.op or mine.target != theirs.target:
                what, expected, got = "ranks run other calls", str(mine), str(theirs)
            elif set(found.values.get(theirs.name, ())).isdisjoint(types[0].values.get(mine.name, ())) and (
                mine.name in types[0].values and theirs.name in found.values
            ):
                what = "ranks hold one value in different layouts"
                expected, got = (_reading(resolved, t, n) for t, n in ((types[0], mine), (found, theirs)))
            else:
                continue
            where = _where(mine or theirs, types[0].ops if mine is not None else found.ops)
            return [Finding("types", what, f"{where} ({mesh_text(resolved.mesh, graph.at)})", expected, got)]
    return []


def _reading(resolved: Resolved, types: Types, node: fx.Node) -> str:
    """Values and layouts of a node, as a person reads them."""
    first = types.values[node.name][0]
    return ", ".join(f"value {number} in {format_layout(layout, resolved.mesh.axes)}" for number, layout in first)
