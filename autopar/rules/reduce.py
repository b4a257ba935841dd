"""Reductions."""

from __future__ import annotations

import torch
from torch import fx

from autopar.program import args_of, call_arguments, shape_of, tensor_inputs
from autopar.rules.notation import Dims, Rule
from autopar.rules.registry import algorithm, algorithms_of, computed
from autopar.runtime.kernels.reduce import log_softmax_parts, logsumexp_parts, softmax_parts


def reduced_dims(node: fx.Node, dims: list[int], keep: bool) -> tuple[Dims, Dims, dict[str, int], list[str]]:
    """(input, output, sizes, reduced factors) of a reduction over ``dims``."""
    shape = shape_of(tensor_inputs(node)[0])
    sizes = {f"d{i}": n for i, n in enumerate(shape) if n != 1}
    whole = tuple(() if n == 1 else (f"d{i}",) for i, n in enumerate(shape))
    out = tuple(() if i in dims else f for i, f in enumerate(whole) if keep or i not in dims)
    return whole, out, sizes, [f for i in dims for f in whole[i]]


@computed("aten.sum.dim_IntList", "aten.sum.default")
def _sum(node: fx.Node) -> Rule:
    rank, args = len(shape_of(tensor_inputs(node)[0])), args_of(node)
    dims = args[1] if rank and len(args) > 1 and args[1] else range(rank)
    keep = bool(args[2]) if len(args) > 2 else bool(node.kwargs.get("keepdim", False))
    ins, out, sizes, reduced = reduced_dims(node, [d % rank for d in dims], keep)
    return Rule((ins,), (out,), sizes, ((0,),), sums=frozenset(reduced))


_ALONG = (
    "aten.amax.default",
    "aten.amin.default",
    "aten.max.default",
    "aten.min.default",
    "aten.prod.default",
    "aten.prod.dim_int",
    "aten.any.default",
    "aten.any.dim",
    "aten.any.dims",
    "aten.all.default",
    "aten.all.dim",
    "aten.all.dims",
    "aten.linalg_vector_norm.default",
    "aten.logsumexp.default",
    "aten.softmax.int",
    "aten._softmax.default",
    "aten.log_softmax.int",
    "aten._log_softmax.default",
)


@computed(*_ALONG)
def _along(node: fx.Node) -> Rule:
    """Ops that look along some dimensions, r0 r1 ..., and work row by row elsewhere."""
    shape, given = shape_of(tensor_inputs(node)[0]), call_arguments(node).get("dim")
    listed = list(given) if isinstance(given, (list, tuple)) else [] if given is None else [given]
    dims = {d % len(shape) for d in listed if shape} or set(range(len(shape)))
    names = [f"{'r' if i in dims else 'd'}{i}" for i in range(len(shape))]
    ins = tuple((f,) if n > 1 else () for f, n in zip(names, shape, strict=True))
    out = shape_of(node)
    outs = ins
    if out != shape or not shape:
        kept = tuple(() if i in dims else f for i, f in enumerate(ins))
        outs = kept if len(out) == len(shape) else tuple(f for i, f in enumerate(kept) if i not in dims)
    sizes = {f: n for f, n in zip(names, shape, strict=True) if n != 1}
    whole = frozenset(f for f in sizes if f[0] == "r")
    name = str(node.target)
    saves: tuple[tuple[str, int], ...] = (("in", 0), ("out", 0))
    if "softmax" in name:
        saves = (("out", 0),)
    elif node.meta["val"].dtype is torch.bool:
        saves = ()
    return Rule((ins,), (outs,), sizes, whole=whole, saves=saves, algorithms=algorithms_of(node))


_REDUCED = "r0 r1 r2 r3 r4 r5"
algorithm("aten.softmax.int", "parts", splits=_REDUCED, run=softmax_parts)
algorithm("aten.log_softmax.int", "parts", splits=_REDUCED, run=log_softmax_parts)
algorithm("aten.logsumexp.default", "parts", splits=_REDUCED, run=logsumexp_parts)
