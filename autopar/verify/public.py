"""The public checker of the spmd_types package over an emitted graph: one process, no group, tensors without data.

Every node runs on meta tensors that carry the checker's types, in its global mode.  Conversions are typed by the hook
of our own functions.  What it cannot type (attention, reshapes to literal sizes, lookups by parts) is held to the
plan's layouts at its borders, inside ``local_map``, and listed.
"""

from __future__ import annotations

import operator
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import spmd_types
import torch
from spmd_types import checker
from spmd_types.types import SpmdTypeError
from torch import Tensor, fx

from autopar.layout import I, Layout, R, S, Shape, Split, chunk_bounds, dual, local_shape, parse_layout
from autopar.passes.resolve import Resolved
from autopar.program import args_of, place, target_name
from autopar.rules.analysis import Operation, Value
from autopar.rules.factors import relabel
from autopar.runtime.collectives import Axis, LocalState, Step, convert, spmd_type
from autopar.runtime.parameters import use
from autopar.verify.numbering import tensors_of
from autopar.verify.report import Finding
from autopar.verify.subject import RankGraph, mesh_text

_ONE_AT_A_TIME = threading.Lock()  # the checker patches torch for all threads


def check(resolved: Resolved, rank: RankGraph) -> tuple[list[Finding], dict[str, int]]:
    """(what the checker refuses first, if anything; ops that it cannot type, with how often they occur)."""
    stride, axes = 1, {}
    for name, n in reversed(resolved.mesh.as_dict().items()):
        axes[name] = spmd_types.MeshAxis.of(n, stride)
        stride *= n
    walk = _Walk(resolved, rank)
    named = {a: axes[a] for a in resolved.mesh.axes}
    with _ONE_AT_A_TIME, spmd_types.set_current_mesh(named), checker.typecheck(local=False):
        try:
            walk.graph()
        except _Refused as refused:
            return [refused.finding], dict(walk.untyped)
    return [], dict(walk.untyped)


# a damaged graph may break the checker's own assumptions: each is a reason not to believe the graph
_ERRORS = (SpmdTypeError, AssertionError, AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0] or type(error).__name__


class _Refused(Exception):
    def __init__(self, finding: Finding) -> None:
        self.finding = finding


@dataclass(slots=True)
class _Walk:
    resolved: Resolved
    rank: RankGraph
    env: dict[fx.Node, Any] = field(default_factory=dict)
    untyped: Counter[str] = field(default_factory=Counter)
    makers: dict[str, Operation] = field(default_factory=dict)

    def graph(self) -> None:
        operations = self.resolved.analysis.operations
        self.makers = {v: op for op in operations for v in (*op.outputs, f"{op.name}.call")}
        kinds = iter(self.rank.inputs)
        for node in self.rank.graph.nodes:
            try:
                if node.op == "placeholder":
                    self.env[node] = self.placeholder(*next(kinds))
                elif node.op == "output":
                    self.results(node)
                else:
                    self.env[node] = self.call(node)
            except _ERRORS as error:
                raise _Refused(self.finding(node, error)) from None
        for name, ways in self.rank.ways.items():
            stored, value = self.resolved.parameters[name], self.value(name)
            try:
                self.follow(value, stored.stored, ways.gather, stored.held)
                if value.differentiable:
                    self.follow(value, stored.accumulated, ways.final, stored.stored)
            except _ERRORS as error:
                key = self.resolved.analysis.program.parameters[name].name
                raise _Refused(Finding("spmd_types", _first_line(error), key)) from None

    def finding(self, node: fx.Node, error: Exception) -> Finding:
        maker = self.makers.get(node.meta.get("value", ""))
        where = place(maker.node) if maker is not None else node.meta.get("where", "")
        text = f"{node.name}, {where} ({mesh_text(self.resolved.mesh, self.rank.at)})"
        return Finding("spmd_types", _first_line(error), text)

    def value(self, name: str) -> Value:
        return self.resolved.analysis.values[name]

    # ------------------------------------------------------------------------------------------ tensors with types

    def tensor(self, value: Value, layout: Layout) -> Tensor:
        shape = local_shape(value.shape, layout, self.resolved.mesh.sizes, self.rank.at)
        made = self.bare(shape, value.dtype, value.differentiable)
        return self.typed(made, layout)

    def bare(self, shape: Shape, dtype: torch.dtype, gradient: bool) -> Tensor:
        with spmd_types.no_typecheck():
            return torch.empty(shape, dtype=dtype, device="meta", requires_grad=gradient)

    def typed(self, x: Tensor, layout: Layout) -> Tensor:
        local, spec = self.types(layout, x.dim())
        spmd_types.assert_type(x, local, partition_spec=spec)
        return x

    def types(self, layout: Layout, dims: int) -> tuple[dict[Any, Any], Any]:
        """A layout in the checker's words: which dimension is cut, not where its cuts lie, which it cannot say."""
        mesh = self.resolved.mesh
        states = {
            name: state.dim if isinstance(state, S) else state
            for name, n, state in zip(mesh.axes, mesh.sizes, layout, strict=True)
            if n > 1
        }
        return _words(states, dims)

    def placeholder(self, kind: str, name: str) -> Any:
        if kind in ("axis", "rng", "gradients"):
            return name
        value, whole = self.value(name), (I,) * len(self.resolved.mesh.sizes)
        if kind != "parameter":
            return self.tensor(value, whole)
        stored = self.resolved.parameters[name]
        layout = tuple(dual(s) for s in stored.accumulated) if value.differentiable else stored.held
        return _Weight(name, self.tensor(value, layout))

    # ------------------------------------------------------------------------------------------ nodes

    def call(self, node: fx.Node) -> Any:
        if node.target is convert:
            x, axis, src, dst = args_of(node)
            return self.moved(self.operand(x), Step(axis, src, dst))
        if node.target is use:
            return self.use(node)
        return self.made(node)

    def operand(self, node: Any) -> Any:
        found = self.env[node]
        return found.plain if isinstance(found, _Weight) else found

    def moved(self, x: Tensor, step: Step) -> Tensor:
        """What a conversion makes, typed by the hook."""
        axis = self.axis(step)
        shape = moved_shape(tuple(x.shape), step.src, step.dst, axis)
        out = self.bare(shape, x.dtype, x.requires_grad)
        beside = self.beside(x, step)
        if not beside:
            spmd_types.rules.output(out, spmd_type(x, axis, step.src, step.dst))
            return out
        # its cuts of one dimension are undone from the inside out; ours in any order, so the others stand aside
        state = self.states(x)
        alone = self.stamped(
            self.bare(tuple(x.shape), x.dtype, x.requires_grad), {**state, **dict.fromkeys(beside, "R")}
        )
        spmd_types.rules.output(out, spmd_type(alone, axis, step.src, step.dst))
        after = self.states(out)
        out = self.bare(shape, x.dtype, x.requires_grad)
        return self.stamped(out, {**after, **{a: state[a] for a in beside}})

    def states(self, x: Tensor) -> dict[str, Any]:
        """State of a tensor on every axis: R, I, P, or the dimension that is cut."""
        local, spec = spmd_types.get_local_type(x), spmd_types.get_partition_spec(x) or ()
        out: dict[str, Any] = {}
        for name, n in self.resolved.mesh.as_dict().items():
            if n == 1:
                continue
            axis = spmd_types.normalize_axis(name)
            cut = [d for d, e in enumerate(spec) if e == axis or (isinstance(e, tuple) and axis in e)]
            out[name] = cut[0] if cut else local[axis].value
        return out

    def stamped(self, x: Tensor, states: dict[str, Any]) -> Tensor:
        """``x`` with these states; of several cuts of one dimension the axes stand in the mesh's order."""
        local, spec = _words(states, x.dim())
        spmd_types.assert_type(x, local, partition_spec=spec)
        return x

    def beside(self, x: Tensor, step: Step) -> list[str]:
        """Other axes that cut a dimension which the conversion cuts or makes whole."""
        dims = {s.dim for s in (step.src, step.dst) if isinstance(s, Split)}
        return [a for a, s in self.states(x).items() if a != step.axis.name and isinstance(s, int) and s in dims]

    def axis(self, step: Step) -> Axis:
        mesh = self.resolved.mesh
        k = mesh.axes.index(step.axis.name)
        return Axis(step.axis.name, mesh.sizes[k], self.rank.at[k])

    def use(self, node: fx.Node) -> Tensor:
        """Forward the weight, without gradient; then it is R where its gradient sets out as P."""
        weight, _, _, forward, backward = args_of(node)
        name = self.env[weight].name
        value, stored, axes = self.value(name), self.resolved.parameters[name], self.resolved.mesh.axes
        used = self.follow(value, stored.held, forward, None)
        if not value.differentiable:
            return used
        layout = parse_layout(node.meta["layout"], axes, value.shape) if "layout" in node.meta else None
        if layout is None:
            return used
        for axis, state in zip(axes, layout, strict=True):
            if state == R and self.states(used)[axis] == I:
                spmd_types.mutate_type(used, axis, src=spmd_types.I, dst=spmd_types.R)
        self.follow(value, tuple(dual(s) for s in layout), backward, stored.accumulated)
        with spmd_types.no_typecheck():
            used.requires_grad_(True)
        return used

    def follow(self, value: Value, start: Layout, way: Sequence[Step], goal: Layout | None) -> Tensor:
        """A weight, or a gradient, along its way."""
        x = self.typed(
            self.bare(local_shape(value.shape, start, self.resolved.mesh.sizes, self.rank.at), value.dtype, False),
            start,
        )
        for step in way:
            x = self.moved(x, step)
        if goal is not None:
            self.typed(x, goal)
        return x

    def made(self, node: fx.Node) -> Any:
        if node.target is operator.getitem:
            source, k = args_of(node)
            return self.env[source][k]
        name = node.meta.get("value", "")
        op = self.makers.get(name) or self.makers.get(f"{name}.call")
        view = self.resolved.analysis.views.get(name)
        if op is not None:
            strategy = self.resolved.strategies[op.name]
            operands, ins, outs = tensors_of(node, op), strategy.ins, strategy.outs
            outputs = op.outputs
        elif view is not None:
            layout = parse_layout(node.meta["layout"], self.resolved.mesh.axes, self.value(name).shape)
            inside = relabel(layout, view.rule.outs[0], view.rule.ins[0], self.resolved.mesh.sizes, view.rule.sizes)
            assert inside is not None
            operands, ins, outs, outputs = [args_of(node)[0]], (inside,), (layout,), (name,)
        else:
            raise SpmdTypeError(f"{node.name} is no op of the program")
        given = self.alike([self.operand(n) for n in operands], ins)
        several = op is not None and not isinstance(op.node.meta["val"], Tensor)
        try:
            rule = op.rule if op is not None else view.rule  # type: ignore[union-attr]
            if rule.size_args or rule.reshapes:
                raise _Unrunnable  # its sizes are local ones: globally they mean another op
            result = self.run(node, dict(zip(operands, given, strict=True)))
            parts = list(result) if several else [result]
            for part, layout in zip(parts, outs, strict=True):
                local, spec = self.border(layout, part)
                spmd_types.assert_type(part, local, partition_spec=spec)
        except (SpmdTypeError, _Unrunnable):
            result = self.bounded(given, ins, [self.value(o) for o in outputs], outs, several)
            self.untyped[target_name(node)] += 1
        return result

    def alike(self, given: list[Tensor], ins: Sequence[Layout]) -> list[Tensor]:
        """Inputs without a gradient as R or I, whichever the others are: they pass as either."""
        out = []
        for x in given:
            if not x.requires_grad:
                have = spmd_types.get_local_type(x)
                spec = spmd_types.get_partition_spec(x)
                local = {}
                for k, (name, n) in enumerate(self.resolved.mesh.as_dict().items()):
                    if n == 1:
                        continue
                    state = have[spmd_types.normalize_axis(name)]
                    if state in (spmd_types.R, spmd_types.I):
                        flows = {lay[k] for y, lay in zip(given, ins, strict=True) if y.requires_grad}
                        state = spmd_types.I if I in flows else spmd_types.R
                    local[name] = state
                with spmd_types.no_typecheck():
                    x = x.detach()
                spmd_types.assert_type(x, local, partition_spec=spec)
            out.append(x)
        return out

    def run(self, node: fx.Node, given: dict[Any, Tensor]) -> Any:
        if not isinstance(node.target, torch._ops.OpOverload):
            raise _Unrunnable  # our own functions: some communicate, none is known to the checker
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: given[n] if n in given else self.operand(n))
        try:
            return node.target(*args, **kwargs)
        except SpmdTypeError:
            raise
        except (RuntimeError, NotImplementedError, ValueError, IndexError, TypeError) as error:
            raise _Unrunnable from error

    def bounded(
        self, given: list[Tensor], ins: Sequence[Layout], values: Sequence[Value], outs: Sequence[Layout], several: bool
    ) -> Any:
        """An op that the checker cannot type, with the plan's layouts at its borders."""

        def body(*_: Tensor) -> Any:
            with spmd_types.no_typecheck():
                made = [
                    self.bare(
                        local_shape(v.shape, lay, self.resolved.mesh.sizes, self.rank.at), v.dtype, v.differentiable
                    )
                    for v, lay in zip(values, outs, strict=True)
                ]
            return tuple(made) if several else made[0]

        taken = tuple(self.border(lay, x) for lay, x in zip(ins, given, strict=True))
        left = tuple(self.types(lay, len(v.shape)) for v, lay in zip(values, outs, strict=True))
        mapped = spmd_types.local_map(in_types=taken, out_types=left if several else left[0])(body)
        return mapped(*given)

    def border(self, layout: Layout, x: Tensor) -> tuple[dict[Any, Any], Any]:
        local, spec = self.types(layout, x.dim())
        if not x.requires_grad:
            have = spmd_types.get_local_type(x)
            full = (spmd_types.R, spmd_types.I)
            for name, state in local.items():
                known = have[spmd_types.normalize_axis(name)]
                local[name] = known if known in full and state in full else state
        return local, spec

    def results(self, node: fx.Node) -> None:
        (loss, leaves, buffers), *_ = args_of(node)
        whole = (I,) * len(self.resolved.mesh.sizes)
        for x in [loss, *leaves, *buffers]:
            if isinstance(x, fx.Node) and self.operand(x).requires_grad:
                self.typed(self.operand(x), whole)


@dataclass(frozen=True, slots=True)
class _Weight:
    """A weight of the graph; plain: as ops take it without a `use`."""

    name: str
    plain: Tensor


class _Unrunnable(Exception):
    """An op that does not run on tensors without data."""


def _words(states: dict[str, Any], dims: int) -> tuple[dict[Any, Any], Any]:
    """(local types, partition spec) of states by axis: R, I, P or the dimension that is cut."""
    cuts = [tuple(a for a, s in states.items() if s == d) for d in range(dims)]
    local: dict[Any, Any] = {
        a: spmd_types.V if isinstance(s, int) else getattr(spmd_types, s) for a, s in states.items()
    }
    spec = spmd_types.PartitionSpec(*(None if not c else c[0] if len(c) == 1 else c for c in cuts))
    return local, spec if any(cuts) else None


def moved_shape(shape: Shape, src: LocalState, dst: LocalState, axis: Axis) -> Shape:
    """The local shape after a conversion."""
    out = list(shape)
    if isinstance(src, Split):
        out[src.dim] = src.outer * src.units * src.inner
    if isinstance(dst, Split):
        low, high = chunk_bounds(dst.units, axis.size, axis.index)
        out[dst.dim] = dst.outer * (high - low) * dst.inner
    return tuple(out)
