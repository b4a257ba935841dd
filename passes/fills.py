"""Tensors that are made from no values: what they hold does not depend on the tensor that they are like.

zeros_like(x)                    -->  expand(full([1, 1], 0), [5, 6])      a constant, kept as one number
copy(x, y)                       -->  expand(y, [5, 6])                    x[:] = y, made functional
index_put(x, [mask], y)          -->  where(mask, y, x)                    x[mask] = y
conj(x)                          -->  conj_physical(x)                     not a flag that later ops must know of
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopar.passes.rewrite import argument, calls, cast_like, new_node, renamed
from autopar.program import Program, args_of, dtype_of, is_tensor, shape_of

aten = torch.ops.aten

# what fills the tensor: a number, or the name of the argument that says so; memory that was not written is zero
_FILLS: dict[Any, float | str] = {
    aten.empty.memory_format: 0,
    aten.empty_like.default: 0,
    aten.new_empty.default: 0,
    aten.fill.Scalar: "value",
    aten.full_like.default: "fill_value",
    aten.new_full.default: "fill_value",
    aten.new_ones.default: 1,
    aten.new_zeros.default: 0,
    aten.ones_like.default: 1,
    aten.zero.default: 0,
    aten.zeros_like.default: 0,
}


def fills(program: Program) -> None:
    """Apply the rewrites above, in place."""
    graph = program.graph
    for node in calls(graph, *_FILLS):
        fill = _FILLS[node.target]
        value = argument(node, fill) if isinstance(fill, str) else fill
        if isinstance(value, fx.Node):
            continue
        with graph.inserting_before(node):
            made = node.meta["val"]
            options = {"dtype": made.dtype, "device": made.device}
            one = new_node(graph, aten.full.default, ([1] * made.dim(), value), options, like=node)
            renamed(program, node, _expanded(one, node))
    for node in calls(graph, aten.copy.default, aten.fill.Tensor):
        with graph.inserting_before(node):
            renamed(program, node, _expanded(cast_like(args_of(node)[1], node), node))
    for node in calls(graph, aten.conj.default, aten._conj.default):
        with graph.inserting_before(node):
            renamed(program, node, new_node(graph, aten.conj_physical.default, args_of(node)[:1], like=node))
    for node in calls(graph, aten.index_put.default, aten._unsafe_index_put.default):
        chosen = _where(node)
        if chosen is not None:
            renamed(program, node, chosen)


def _expanded(x: fx.Node, like: fx.Node) -> fx.Node:
    if shape_of(x) == shape_of(like):
        return x
    return new_node(like.graph, aten.expand.default, (x, list(shape_of(like))), like=like)


def _where(node: fx.Node) -> fx.Node | None:
    """``where`` instead of a write by one mask of one value for all places; None where it is not that."""
    graph, (x, indices, values) = node.graph, args_of(node)[:3]
    given = [i for i in indices if i is not None]
    if len(given) != 1 or not is_tensor(given[0]) or dtype_of(given[0]) is not torch.bool:
        return None
    mask, front = given[0], indices.index(given[0])
    behind = len(shape_of(x)) - front - len(shape_of(mask))
    value, wide = shape_of(values), front + 1 + behind  # a write to [front ..., places, behind ...]
    if argument(node, "accumulate") or (len(value) > behind and value[len(value) - behind - 1] != 1):
        return None
    with graph.inserting_before(node):
        mask = new_node(graph, aten.view.default, (mask, [*shape_of(mask), *[1] * behind]), like=node)
        if len(value) > behind + 1:  # the places are as many dimensions as the mask has
            shape = [*[1] * (wide - len(value)), *value]
            shape[front : front + 1] = [1] * len(shape_of(given[0]))
            values = new_node(graph, aten.view.default, (values, shape), like=node)
        return new_node(graph, aten.where.self, (mask, values, x), like=node)
