"""Types: every value of an emitted graph has a layout, and every node must fit the layouts of what it takes.

The layouts are derived from the graph alone: inputs are whole, weights are where the step holds them, a conversion
moves a value from one state to another, and an op has the outputs that its rule gives for these inputs.  What emission
noted on its nodes, and what the plan chose for its ops, is not read.  A graph that types computes the program's
function and its gradients: a sum that is pending, a cut that differs or a gradient that is not yet whole has another
type.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from autopar.layout import (
    I,
    Layout,
    Mesh,
    Move,
    S,
    dual,
    format_layout,
    forward_layout,
)
from autopar.passes.resolve import Resolved
from autopar.program import OutputName, args_of
from autopar.rules.analysis import Operation
from autopar.runtime.collectives import Step, convert
from autopar.runtime.parameters import use
from autopar.verify.fit import Fit
from autopar.verify.moves import Mistyped, advance, as_move
from autopar.verify.numbering import Numbering, tensors_of
from autopar.verify.places import whereabouts
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

    @property
    def fit(self) -> Fit:
        return Fit(self.resolved.analysis, self.mesh, self.rank.at)

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
                    layouts = [reading[n][1] for n in tensors_of(node, candidate.op)]
                    for strategy in self.fit.strategies(node, candidate.op, candidate.algorithm, layouts):
                        self.types.ops[node.name] = candidate.op
                        found[tuple(zip(candidate.outputs, strategy.outs, strict=True))] = None
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

    # ------------------------------------------------------------------------------------------ findings

    def finding(self, error: Mistyped, where: str) -> Finding:
        rank = mesh_text(self.mesh, self.rank.at)
        return Finding("types", error.what, f"{where} ({rank})", error.expected, error.got)

    def where(self, node: fx.Node) -> str:
        return whereabouts(node, self.types.ops)
