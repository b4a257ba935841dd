"""Dropouts of whole channels, and those that keep mean and variance, written with plain dropout.

torch defines them by random numbers of their own, which a functional graph shows and nobody recognises; as a dropout
of ones their masks are functions of global positions, as all dropout's are, and they are the identity in evaluation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten

_ALPHA = 1.7580993408473766  # the limit of SELU at minus infinity, negated


def spread_dropouts(graph: fx.Graph) -> None:
    """``feature_dropout(x, p, True)`` --> ``mul(x, dropout(ones, p, True))``, in place; the others alike."""
    for name, by_channel, alpha in (
        ("feature_dropout", True, False),
        ("alpha_dropout", False, True),
        ("feature_alpha_dropout", True, True),
    ):
        plain, in_place = getattr(aten, name).default, getattr(aten, name + "_").default
        for node in [n for n in graph.nodes if n.op == "call_function" and n.target in (plain, in_place)]:
            x, p, train = node.args
            with graph.inserting_before(node):
                new = _spread(graph, node, x, p, by_channel, alpha) if train and p else x
                if node.target is in_place and new is not x:
                    new = _caller(graph, node)(aten.copy_.default, x, new)
            node.replace_all_uses_with(new)
            graph.erase_node(node)


def _caller(graph: fx.Graph, like: fx.Node) -> Callable[..., fx.Node]:
    def call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = graph.call_function(target, args, kwargs)
        node.meta = {k: like.meta[k] for k in ("nn_module_stack", "stack_trace") if k in like.meta}
        values = fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
        with like.meta["val"].fake_mode:
            node.meta["val"] = target(*values[0], **values[1])
        return node

    return call


def _spread(graph: fx.Graph, node: fx.Node, x: Any, p: Any, by_channel: bool, alpha: bool) -> fx.Node:
    call = _caller(graph, node)
    value = x.meta["val"]
    shape = [*value.shape[:2], *[1] * (value.dim() - 2)] if by_channel else list(value.shape)
    ones = call(aten.ones.default, shape, dtype=value.dtype, device=value.device)
    kept = call(aten.dropout.default, ones, p, True)
    if not alpha or p == 1:
        return call(aten.mul.Tensor, x, kept)
    # what is kept is scaled and shifted, what is dropped is a number; a mask of ones is that of evaluation
    scale = 1 / math.sqrt((_ALPHA**2 * p + 1) * (1 - p))
    moved = call(aten.add.Tensor, call(aten.mul.Tensor, x, scale), _ALPHA * scale * p)
    out = call(aten.where.self, call(aten.gt.Scalar, kept, 1), moved, x)
    return call(aten.masked_fill.Scalar, out, call(aten.eq.Scalar, kept, 0), -_ALPHA * scale * (1 - p))
