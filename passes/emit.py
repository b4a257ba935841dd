"""Emit: the graph that one rank runs, with every conversion a node of its own.

    h = linear(x, w)                        h = linear(x, w)
    y = linear(h, v)             -->        y = linear(h, v)
                                            y = convert(y, tp, "P", "I")

Ops call what they called before, on local tensors: sizes among their arguments become local, an algorithm takes the
place of an op that it splits, and an op that asks for positions is told which part the rank holds.  A value that
several ops need in one layout is converted once.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autopar.cost_model.collectives import sent_bytes
from autopar.errors import EmitError, PlanError
from autopar.layout import (
    I,
    Layout,
    Mesh,
    Move,
    S,
    Shape,
    Split,
    conversion,
    default_path,
    dual,
    format_layout,
    forward_layout,
    local_shape,
    local_split,
)
from autopar.passes.resolve import Resolved, Stored
from autopar.plan import find_path
from autopar.program import OutputName, call_arguments, is_tensor, module_path, place
from autopar.rules.analysis import Operation, View
from autopar.rules.derive import Strategy, algorithm_of
from autopar.rules.factors import relabel
from autopar.rules.notation import Rule, Traffic
from autopar.rules.work import factor_size
from autopar.runtime.collectives import Step, convert
from autopar.runtime.kernels.parts import AxisCut, Part
from autopar.runtime.parameters import use

aten = torch.ops.aten

for _kind in (Split, Step, Part, AxisCut):  # so that generated code can name what stands inside arguments
    fx.graph._register_custom_builtin(_kind.__name__, f"from {_kind.__module__} import {_kind.__name__}", _kind)

RNG, GRADIENTS = "rng", "gradients"


@dataclass(frozen=True, slots=True)
class Conversion:
    """A collective that the emitted graph contains; bytes per rank, forward and backward."""

    name: str
    kind: str
    axis: str
    where: str
    forward_bytes: float
    backward_bytes: float


@dataclass(frozen=True, slots=True)
class Emitted:
    """One rank's graph.  inputs: what each placeholder takes, as (kind, name).  outputs: loss, then output leaves, then
    the new values of buffers, as the graph returns them."""

    graph: fx.Graph
    inputs: tuple[tuple[str, str], ...]
    conversions: tuple[Conversion, ...]
    uses: dict[str, int]  # parameter name -> gradients that it hands over in one backward pass


@dataclass(slots=True)
class _Emitter:
    resolved: Resolved
    at: tuple[int, ...]
    free: bool = False  # values and weights may go ways that the plan does not name
    graph: fx.Graph = field(default_factory=fx.Graph)
    axes: list[Any] = field(default_factory=list)  # nodes, which stand for each Axis in steps and parts
    extra: dict[str, fx.Node] = field(default_factory=dict)  # rng, gradients
    ready: dict[tuple[str, Layout], fx.Node] = field(default_factory=dict)
    made_in: dict[str, Layout] = field(default_factory=dict)
    weights: dict[str, fx.Node] = field(default_factory=dict)
    conversions: list[Conversion] = field(default_factory=list)
    uses: dict[str, int] = field(default_factory=dict)
    plain: set[str] = field(default_factory=set)  # weights that ops take without a node
    where: str = ""

    @property
    def mesh(self) -> Mesh:
        return self.resolved.mesh

    def call(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> fx.Node:
        """A call of the emitted graph; untyped, for torch.fx's own type of arguments knows no steps and parts."""
        return self.graph.call_function(target, args, kwargs)

    # ------------------------------------------------------------------------------------------ values

    def get(self, name: str, layout: Layout, free: bool = False) -> fx.Node:
        """The node that holds value ``name`` in ``layout``; ``free``: any way there, planned or not."""
        if (name, layout) in self.ready:
            return self.ready[name, layout]
        analysis, free = self.resolved.analysis, free or self.free
        if name in analysis.views:
            view = analysis.views[name]
            source = analysis.to_root(name, layout)
            if source is None:
                raise EmitError("a view cannot be had in this layout", where=place(view.node), got=self.text(layout))
            node = self.view(view, layout, free)
        elif name in self.weights:
            node = self.use(name, layout, free)
        else:
            node = self.converted(name, layout, free)
        self.ready[name, layout] = node
        return node

    def view(self, view: View, layout: Layout, free: bool) -> fx.Node:
        rule = view.rule
        inside = relabel(layout, rule.outs[0], rule.ins[0], self.mesh.sizes, rule.sizes)
        assert inside is not None
        source = self.get(view.source, inside, free)
        if rule.reshapes:
            node = self.reshape(source, view.name, layout)
        else:
            node = self.call(view.node.target, (source, *view.node.args[1:]), dict(view.node.kwargs))
        return self.note(node, view.name, layout, place_of=view.node)

    def reshape(self, source: fx.Node, name: str, layout: Layout) -> fx.Node:
        shape = self.local(self.resolved.analysis.values[name].shape, layout)
        return self.call(aten.reshape.default, (source, list(shape)))

    def converted(self, name: str, layout: Layout, free: bool) -> fx.Node:
        value = self.resolved.analysis.values[name]
        start = self.made_in[name]
        path = find_path(start, layout, self.resolved.moves.get(name, ()))
        if path is None and free:
            path = default_path(value.shape, start, layout, self.mesh.sizes)
        if path is None:
            raise PlanError(
                "the plan does not say how a value gets where it is needed",
                where=f"{name} {self.where}",
                expected=f"moves from {self.text(start)} to {self.text(layout)}",
                got=f"{len(self.resolved.moves.get(name, ()))} moves",
            )
        node = self.ready[name, start]
        for move in path:
            known = self.ready.get((name, move.result))
            if known is None:
                axis, src, dst = self.step(value.shape, move)
                known = self.call(convert, (node, axis, src, dst))
                self.note(known, name, move.result, like=node)
                self.count(known.name, move, value.shape, value.dtype.itemsize, value.differentiable)
                self.ready[name, move.result] = known
            node = known
        return node

    def step(self, shape: Shape, move: Move) -> Step:
        """A move as this rank sees it."""
        sizes, at = self.mesh.sizes, self.at

        def state(s: Any) -> Any:
            return local_split(shape, move.layout, move.axis, s, sizes, at) if isinstance(s, S) else s

        return Step(self.axes[move.axis], state(move.layout[move.axis]), state(move.target))

    def use(self, name: str, layout: Layout, free: bool = False) -> fx.Node:
        """A use of a weight: forward from where it is held, its gradient to where it accumulates."""
        value = self.resolved.analysis.values[name]
        stored: Stored = self.resolved.parameters[name]
        full = forward_layout(layout)
        forward = find_path(stored.held, full, stored.use)
        produced = tuple(dual(s) for s in layout)
        backward = find_path(produced, stored.accumulated, stored.reduce) if value.differentiable else ()
        if free:  # an output of the model: no op of the plan uses it so
            sizes = self.mesh.sizes
            if forward is None:
                forward = tuple(default_path(value.shape, stored.held, full, sizes))
            if backward is None:
                backward = tuple(default_path(value.shape, produced, stored.accumulated, sizes))
        if forward is None or backward is None:
            raise PlanError(
                "the plan does not say how a weight gets where it is used, or its gradient back",
                where=f"{self.resolved.analysis.program.parameters[name].name} {self.where}",
                expected=f"moves from {self.text(stored.held)} to {self.text(full)}, and of the gradient from "
                f"{self.text(produced)} to {self.text(stored.accumulated)}",
            )
        key = self.resolved.analysis.program.parameters[name].name
        if not forward and (not value.differentiable or not (backward or free)):
            # nothing to do on either way: ops take the weight itself, which hands over one gradient for all of them
            if value.differentiable:
                self.plain.add(key)
            return self.weights[name]
        steps = [tuple(self.step(value.shape, m) for m in path) for path in (forward, backward)]
        gradients = self.extra[GRADIENTS] if value.differentiable else None
        node = self.call(use, (self.weights[name], gradients, key, *steps))
        if value.differentiable:
            self.uses[key] = self.uses.get(key, 0) + 1
        self.note(node, name, layout)
        for move, once in [(m, True) for m in forward] + [(m, False) for m in backward]:
            self.count(node.name, move, value.shape, value.dtype.itemsize, False, forward=once)
        return node

    def count(self, name: str, move: Move, shape: Shape, itemsize: int, both: bool, forward: bool = True) -> None:
        layout = list(move.layout)
        layout[move.axis] = I
        nbytes = float(itemsize)
        for n in self.local(shape, tuple(layout)):
            nbytes *= n
        cost = conversion(move.layout[move.axis], move.target, self.mesh.sizes[move.axis], nbytes)
        f, b = cost.forward_bytes, cost.backward_bytes if both else 0.0
        if f or b:
            kind = cost.forward if f else cost.backward
            axis = self.mesh.axes[move.axis]
            self.conversions.append(
                Conversion(name, kind, axis, self.where, f if forward else 0.0, b if forward else f)
            )

    def count_own(self, name: str, op: Operation) -> None:
        """What an op's algorithm says that it sends."""
        for axis, t, nbytes in own_traffic(self.resolved, op, self.at):
            sent = sent_bytes(t.kind, nbytes, self.mesh.sizes[axis])
            moved = Conversion(name, t.kind, self.mesh.axes[axis], self.where, sent * t.forward, sent * t.backward)
            self.conversions.append(moved)

    # ------------------------------------------------------------------------------------------ operations

    def operation(self, op: Operation) -> None:
        strategy = self.resolved.strategies[op.name]
        self.where = module_path(op.node)
        inputs = iter([self.get(v, lay) for v, lay in zip(op.inputs, strategy.ins, strict=True)])
        overrides = local_sizes(op.rule.size_args, op.rule, strategy, self.mesh.sizes, self.at)
        for name, dims in op.rule.part_args.items():
            overrides[name] = [self.part(op, strategy, names) for names in dims]
        target: Any = op.node.target
        algorithm = next((a for c in strategy.choices if (a := algorithm_of(op.rule, c)) is not None), None)
        if algorithm is not None:
            target = algorithm.run
            overrides["parts"] = {f: self.part(op, strategy, (f,)) for f in algorithm.factors(op.rule)}
            if algorithm.pairs:
                overrides["pairs"] = self.pairs(op, strategy)
        if op.rule.reshapes:
            node = self.reshape(next(inputs), op.outputs[0], strategy.outs[0])
        else:
            args, kwargs = local_arguments(op.node, inputs, overrides, self.extra)
            node = self.call(target, args, kwargs)
        self.note(node, op.name, strategy.outs[0], place_of=op.node)
        self.count_own(node.name, op)
        if isinstance(op.node.meta["val"], torch.Tensor):
            self.made(op.outputs[0], strategy.outs[0], node)
            return
        for k, (name, layout) in enumerate(zip(op.outputs, strategy.outs, strict=True)):
            item = self.call(operator.getitem, (node, k))
            self.note(item, name, layout, place_of=op.node)
            self.made(name, layout, item)

    def made(self, name: str, layout: Layout, node: fx.Node) -> None:
        self.made_in[name] = layout
        self.ready[name, layout] = node

    def part(self, op: Operation, strategy: Strategy, names: Sequence[str]) -> Part:
        """What this rank holds of the dimension with these factors."""
        sizes = [op.rule.sizes.get(f, 1) for f in names]
        found = []
        for k, factor in enumerate(names):
            outer, inner = math.prod(sizes[:k]), math.prod(sizes[k + 1 :])
            found += [
                AxisCut(self.axes[axis], outer * cut.m, cut.N, cut.u * inner) for axis, cut in strategy.cuts(factor)
            ]
        return Part(math.prod(sizes), tuple(sorted(found, key=lambda c: c.m)))

    def pairs(self, op: Operation, strategy: Strategy) -> dict[str, Part]:
        """By the factor that an axis splits, what tensors without it hold of its partner."""
        return {
            factor: Part(op.rule.sizes[partner], tuple(AxisCut(self.axes[axis], *cut) for axis, cut in cuts))
            for factor, partner, cuts in strategy.pairs()
        }

    # ------------------------------------------------------------------------------------------ notes

    def local(self, shape: Shape, layout: Layout) -> Shape:
        return local_shape(shape, layout, self.mesh.sizes, self.at)

    def text(self, layout: Layout) -> str:
        return format_layout(layout, self.mesh.axes)

    def note(
        self, node: fx.Node, name: str, layout: Layout, *, place_of: fx.Node | None = None, like: fx.Node | None = None
    ) -> fx.Node:
        value = self.resolved.analysis.values.get(name)
        node.meta["value"], node.meta["layout"] = name, self.text(layout)
        node.meta["shape"] = None if value is None else self.local(value.shape, layout)
        node.meta["where"] = module_path(place_of) if place_of is not None else self.where
        return node


def own_traffic(resolved: Resolved, op: Operation, at: tuple[int, ...]) -> Iterator[tuple[int, Traffic, float]]:
    """(axis, what, bytes of its tensor on the rank at ``at`` with the axis undone) of what an op's algorithm sends."""
    values, sizes, strategy = resolved.analysis.values, resolved.mesh.sizes, resolved.strategies[op.name]
    for axis, choice in enumerate(strategy.choices):
        algorithm = algorithm_of(op.rule, choice)
        if algorithm is None or algorithm.traffic is None:
            continue
        for t in algorithm.traffic(op.type, choice, sizes[axis]):
            where, i = t.tensor
            names, layouts = (op.inputs, strategy.ins) if where == "in" else (op.outputs, strategy.outs)
            value, layout = values[names[i]], (*layouts[i][:axis], I, *layouts[i][axis + 1 :])
            yield axis, t, float(value.dtype.itemsize * math.prod(local_shape(value.shape, layout, sizes, at)))


def local_arguments(
    node: fx.Node, inputs: Iterator[Any], overrides: Mapping[str, Any], extra: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The call's arguments with local tensors and sizes; ``inputs`` in the order in which the rule counts them.

    extra: what stands for other nodes (``rng``), by name.
    """

    def swap(arg: Any) -> Any:
        if is_tensor(arg):
            return next(inputs)
        if isinstance(arg, fx.Node):
            return extra[arg.name]
        if isinstance(arg, (list, tuple)) and not hasattr(arg, "_fields"):
            return type(arg)(swap(a) for a in arg)
        return arg

    given = {k: overrides.get(k, swap(v)) for k, v in call_arguments(node).items()}
    names = list(given)
    positional = names[: len(node.args)]
    kwargs = {k: v for k, v in given.items() if k not in positional}
    kwargs.update({k: v for k, v in overrides.items() if k not in given})
    return tuple(given[k] for k in positional), kwargs


def local_sizes(
    arguments: Mapping[str, Any], rule: Rule, strategy: Strategy, mesh_sizes: Sequence[int], at: Sequence[int]
) -> dict[str, Any]:
    """``arguments``, given in factors, as sizes on the rank at coordinates ``at``."""

    def one(names: Sequence[str]) -> int:
        return math.prod(factor_size(rule, strategy, f, mesh_sizes, at) for f in names)

    return {
        name: one(dims) if dims and isinstance(dims[0], str) else [one(names) for names in dims]
        for name, dims in arguments.items()
    }


def emit(resolved: Resolved, at: tuple[int, ...], outputs: bool, free: bool = False) -> Emitted:
    """The graph of the rank at coordinates ``at``.

    outputs: whether the model's own outputs are wanted, whole on every rank, beside the loss.  free: values may go
    ways that the plan does not name.
    """
    e = _Emitter(resolved, at, free)
    program = resolved.analysis.program
    whole = (I,) * len(at)
    kinds: list[tuple[str, str]] = []
    for axis in resolved.mesh.axes:
        e.axes.append(e.graph.placeholder(axis))
        kinds.append(("axis", axis))
    for name in (RNG, GRADIENTS):
        e.extra[name] = e.graph.placeholder(name)
        kinds.append((name, name))
    for node in program.graph.nodes:
        if node.op != "placeholder" or node.name == RNG:
            continue
        value = resolved.analysis.values[node.name]
        new = e.graph.placeholder(node.name)
        kinds.append((value.kind, node.name))
        if value.kind == "parameter":
            e.weights[node.name] = new
            e.note(new, node.name, resolved.parameters[node.name].held)
        else:
            e.made(node.name, whole, new)
            e.note(new, node.name, whole)
    for op in emitted_operations(resolved, outputs):
        e.operation(op)
    e.where = ""
    results: list[Any] = [None if program.loss is None else e.get(program.loss, whole)]
    leaves: list[Any] = []
    if outputs:
        leaves = [e.get(o, whole, free=True) if isinstance(o, OutputName) else o for o in program.outputs]
    results += [leaves, [e.get(v, whole) for v in program.mutations.values()]]
    e.graph.output(tuple(results))
    _drop_unused(e.graph, kinds)
    e.graph.lint()
    uses = {key: e.uses.get(key, 0) + (key in e.plain) for key in sorted({*e.uses, *e.plain})}
    return Emitted(e.graph, tuple(kinds), tuple(e.conversions), uses)


def emitted_operations(resolved: Resolved, outputs: bool) -> list[Operation]:
    """Operations that loss, buffers and (where wanted) outputs depend on, in order."""
    program, analysis = resolved.analysis.program, resolved.analysis
    roots = program.roots() if outputs or program.loss is None else [program.loss, *program.mutations.values()]
    live = {analysis.root(r) for r in roots}
    needed: set[str] = set()
    for op in reversed(analysis.operations):
        if any(o in live for o in op.outputs):
            needed.add(op.name)
            live.update(analysis.root(v) for v in op.inputs)
    return [op for op in analysis.operations if op.name in needed]


def _drop_unused(graph: fx.Graph, kinds: list[tuple[str, str]]) -> None:
    """Placeholders stay, so that every rank and variant is called alike; nothing else that is unused does."""
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users:
            graph.erase_node(node)
