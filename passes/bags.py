"""Bags of embeddings: sums, means or largest values of rows of a table.

    embedding_bag(w, i, arange(0, 15, 3), sum)[0]   -->   sum(embedding(w, view(i, [5, 3])), 1)
    embedding_bag(w, i, offsets, max)[0]            -->   embedding_bag(w, i, offsets, max), without its other outputs

Bags of one size are rows of a matrix: they can be split by bag, and by the rows of the table.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopar.errors import CaptureError
from autopar.passes.rewrite import argument, calls, cast_like, new_node, renamed
from autopar.program import Program, args_of, place, shape_of
from autopar.runtime.kernels.embedding import BAG_MAX, BAG_MEAN, embedding_bag

aten = torch.ops.aten


def embedding_bags(program: Program) -> None:
    """Apply the rewrites above, in place.  Raises CaptureError for options that no rule covers."""
    graph = program.graph
    for node in calls(graph, aten.embedding_bag.padding_idx, aten._embedding_bag.default):
        roots = program.roots()
        for item in [i for i in node.users if args_of(i)[1] != 0]:
            if item.users or item.name in roots:
                raise CaptureError("an output of embedding_bag beside its rows is used", where=place(item))
            graph.erase_node(item)
        for option in ("scale_grad_by_freq", "sparse"):
            if argument(node, option):
                raise CaptureError(
                    f"embedding_bag with {option} has no rule", where=place(node), expected=f"{option}=False"
                )
        for item in list(node.users):
            with graph.inserting_before(item):
                size = _bag_size(node)
                renamed(program, item, _ragged(node) if size is None else _even(node, size))
        graph.erase_node(node)


def _bag_size(node: fx.Node) -> int | None:
    """How many indices each bag has, where all have as many and their values are added up."""
    indices, offsets = argument(node, "indices"), argument(node, "offsets")
    if offsets.target is not aten.arange.start_step or argument(node, "mode") == BAG_MAX:
        return None
    start, end, size = args_of(offsets)[:3]
    fits = start == 0 and end == shape_of(indices)[0] and end % size == 0 and not argument(node, "include_last_offset")
    return size if fits else None


def _ragged(node: fx.Node) -> fx.Node:
    names = ("weight", "indices", "offsets", "mode", "per_sample_weights", "include_last_offset", "padding_idx")
    padding = argument(node, "padding_idx")
    args = (*(argument(node, n) for n in names[:-1]), None if padding == -1 else padding)
    return new_node(node.graph, embedding_bag, args, like=node)


def _even(node: fx.Node, size: int) -> fx.Node:
    def call(target: Any, *args: Any) -> fx.Node:
        return new_node(node.graph, target, args, like=node)

    weight, indices, padding = (argument(node, n) for n in ("weight", "indices", "padding_idx"))
    shape = [shape_of(indices)[0] // size, size]
    bags = call(aten.view.default, indices, shape)
    rows = call(aten.embedding.default, weight, bags)
    given, count = argument(node, "per_sample_weights"), size
    if given is not None:
        rows = call(aten.mul.Tensor, rows, call(aten.view.default, given, [*shape, 1]))
    if padding is not None and padding >= 0:  # such rows are left out, and not counted
        kept = cast_like(call(aten.ne.Scalar, bags, padding), weight)
        rows = call(aten.mul.Tensor, rows, call(aten.unsqueeze.default, kept, -1))
        count = call(aten.clamp.default, call(aten.sum.dim_IntList, kept, [1], True), 1)
    total = call(aten.sum.dim_IntList, rows, [1])
    return call(aten.div.Tensor, total, count) if argument(node, "mode") == BAG_MEAN else total
