"""A program seen through its rules: operations, values, views, candidate cuts.

Views only relabel, so they are no operations of their own: a value and its views are one *root* and names for it, and
whoever needs a view in some layout needs the root in the layout that relabels to it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from autopar.layout import Layout, S, Shape, is_valid
from autopar.program import Program, dtype_of, is_continuous, is_tensor, output_values, shape_of, tensor_inputs
from autopar.rules.derive import OpType
from autopar.rules.factors import Cut, factor_cut, relabel
from autopar.rules.notation import Rule
from autopar.rules.points import Points, cut_points, factor_points, more_cut_points
from autopar.rules.registry import rule_for

_FELT = 0.1  # of the arithmetic


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor of the program, whole.  kind: parameter, buffer, constant, input, or op."""

    name: str
    shape: Shape
    dtype: torch.dtype
    differentiable: bool
    kind: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Operation:
    """A call with its rule; names of the values it takes and makes."""

    name: str
    node: fx.Node
    type: OpType
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    @property
    def rule(self) -> Rule:
        return self.type.rule


@dataclass(frozen=True, slots=True)
class View:
    """``name`` relabels ``source``."""

    name: str
    source: str
    node: fx.Node
    rule: Rule


@dataclass(frozen=True, slots=True)
class Analysis:
    """operations: in order, views that cannot be contracted on this mesh among them.  views: the contracted ones."""

    program: Program
    axis_sizes: tuple[int, ...]
    operations: tuple[Operation, ...]
    values: dict[str, Value]
    views: dict[str, View]
    points: Points

    def root(self, name: str) -> str:
        while name in self.views:
            name = self.views[name].source
        return name

    def to_root(self, name: str, layout: Layout) -> Layout | None:
        """The root's layout that shows as ``layout`` on ``name``; None if there is none.

        Cuts of two dimensions may become cuts of one, and those need not nest.
        """
        while name in self.views:
            view = self.views[name]
            moved = relabel(layout, view.rule.outs[0], view.rule.ins[0], self.axis_sizes, view.rule.sizes)
            if moved is None or not is_valid(self.values[view.source].shape, moved, self.axis_sizes):
                return None
            layout, name = moved, view.source
        return layout

    def factor_points(self, op: Operation) -> dict[str, tuple[Cut, ...]]:
        tensors = [*zip(op.rule.ins, op.inputs, strict=True), *zip(op.rule.outs, op.outputs, strict=True)]
        return factor_points(op.rule, [(dims, self.points[v]) for dims, v in tensors])


def analyse(program: Program, axis_sizes: Sequence[int]) -> Analysis:
    """Bind every rule, carry cut points to a fixpoint, contract views.  Raises RuleError for an op without a rule."""
    return contract(bind_program(program), axis_sizes)


@dataclass(frozen=True, slots=True)
class Bound:
    """The part of an analysis that does not depend on the mesh."""

    program: Program
    operations: tuple[Operation, ...]
    values: dict[str, Value]
    points: Points


def bind_program(program: Program) -> Bound:
    values: dict[str, Value] = {}
    operations: list[Operation] = []
    for node in program.graph.nodes:
        if node.op == "placeholder":
            if is_tensor(node):
                kind = (
                    "parameter"
                    if node.name in program.parameters
                    else "buffer"
                    if node.name in program.buffers
                    else "constant"
                    if node.name in program.constants
                    else "input"
                )
                trained = kind == "parameter" and program.parameters[node.name].requires_grad
                values[node.name] = Value(
                    node.name, shape_of(node), node.meta["val"].dtype, trained and program.loss is not None, kind
                )
            continue
        if node.name in values:  # a getitem: made with its call
            continue
        rule = rule_for(node)
        inputs = tensor_inputs(node)
        flows = [values[v.name].differentiable for v in inputs]
        stops = node.target is torch.ops.aten.detach.default
        outputs = []
        metas = node.meta["val"] if isinstance(node.meta["val"], (list, tuple)) else [node.meta["val"]]
        for k, (value, meta) in enumerate(zip(output_values(node), metas, strict=True)):
            name = f"{node.name}.{k}" if value is None else value.name
            differentiable = any(flows) and not stops and is_continuous(meta.dtype)
            values[name] = Value(name, tuple(meta.shape), meta.dtype, differentiable, "op")
            outputs.append(name)
        op_type = OpType(
            rule,
            tuple(shape_of(v) for v in inputs),
            tuple(values[o].shape for o in outputs),
            tuple(flows),
            tuple(values[o].differentiable for o in outputs),
            tuple(is_continuous(dtype_of(v)) for v in inputs),
            tuple(d is torch.bool for d in (*map(dtype_of, inputs), *(m.dtype for m in metas))),
        )
        operations.append(Operation(node.name, node, op_type, tuple(v.name for v in inputs), tuple(outputs)))
    shapes = {v.name: v.shape for v in values.values()}
    points = cut_points([(o.rule, o.inputs, o.outputs) for o in operations], shapes)
    return Bound(program, tuple(operations), values, points)


def contract(bound: Bound, axis_sizes: Sequence[int], *, balanced: bool | None = None) -> Analysis:
    """Take out the views through which every candidate cut can be seen, on axes of these sizes.

    balanced: whether the rows of causal attention may be dealt out one by one (`balanced_points`); None: where that
    attention is a tenth of the arithmetic, so that uneven shares of it would be felt.
    """
    views, operations = {}, []
    for op in bound.operations:
        if op.rule.view and _transparent(op, bound.points, axis_sizes):
            views[op.outputs[0]] = View(op.outputs[0], op.inputs[0], op.node, op.rule)
        else:
            operations.append(op)
    balanced = causal_share(bound) >= _FELT if balanced is None else balanced
    points = balanced_points(bound, axis_sizes) if balanced else bound.points
    return Analysis(bound.program, tuple(axis_sizes), tuple(operations), bound.values, views, points)


def causal_share(bound: Bound) -> float:
    """Which part of the arithmetic causal attention is."""
    flops = {
        o.name: sum(c * math.prod(o.rule.sizes[f] for f in fs) for c, fs in o.rule.flops) for o in bound.operations
    }
    causal = sum(flops[o.name] for o in bound.operations if o.rule.causal)
    return causal / sum(flops.values()) if causal else 0.0


def balanced_points(bound: Bound, axis_sizes: Sequence[int]) -> Points:
    """Candidate cuts with those that deal the rows of causal attention out in turn, so that all ranks do the same.

    n ranks take every n-th row each; with several axes there are the same for all of them together, where one cuts
    what is another's.
    """
    more: dict[tuple[str, int], set[Cut]] = {}
    hands = {n for n in (*axis_sizes, math.prod(axis_sizes)) if n > 1}
    for op in bound.operations:
        rows = op.rule.sizes.get(op.rule.causal, 1)
        cuts = {Cut(rows // n, n, 1) for n in hands if rows % n == 0 and rows > n}
        for dims, name in (*zip(op.rule.ins, op.inputs, strict=True), *zip(op.rule.outs, op.outputs, strict=True)):
            for d, names in enumerate(dims):
                if names == (op.rule.causal,) and cuts:
                    more.setdefault((name, d), set()).update(cuts)
    if not more:
        return bound.points
    return more_cut_points([(o.rule, o.inputs, o.outputs) for o in bound.operations], bound.points, more)


def _transparent(op: Operation, points: Points, axis_sizes: Sequence[int]) -> bool:
    for dims, name in ((op.rule.ins[0], op.inputs[0]), (op.rule.outs[0], op.outputs[0])):
        for d, cuts in enumerate(points[name]):
            if not dims[d]:
                continue
            for cut in cuts:
                for n in axis_sizes:
                    even = S(d, cut.m, cut.N * cut.u, 1) if cut.N % n == 0 else S(d, *cut)
                    if cut.N > 1 and n <= even.N and factor_cut(dims, even, n, op.rule.sizes) is None:
                        return False
    return True
