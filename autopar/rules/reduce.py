"""Reductions."""

from __future__ import annotations

from torch import fx

from autopar.program import args_of, shape_of, tensor_inputs
from autopar.rules.notation import Dims, Rule
from autopar.rules.registry import computed


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
    dims = args[1] if len(args) > 1 and args[1] else range(rank)
    keep = bool(args[2]) if len(args) > 2 else bool(node.kwargs.get("keepdim", False))
    ins, out, sizes, reduced = reduced_dims(node, [d % rank for d in dims], keep)
    return Rule((ins,), (out,), sizes, ((0,),), sums=frozenset(reduced))


@computed("aten.amax.default", "aten.amin.default", "aten.softmax.int", "aten._softmax.default", "aten.log_softmax.int")
def _whole_over_dims(node: fx.Node) -> Rule:
    """Ops that look along some dimensions and are pointwise elsewhere."""
    shape, args = shape_of(tensor_inputs(node)[0]), args_of(node)
    dims = args[1] if len(args) > 1 else list(range(len(shape)))
    dims = [d % len(shape) for d in (dims if isinstance(dims, (list, tuple)) else [dims])]
    same = shape_of(node) == shape
    ins, out, sizes, reduced = reduced_dims(node, dims, len(shape_of(node)) == len(shape))
    return Rule((ins,), (ins if same else out,), sizes, whole=frozenset(reduced), saves=(("out", 0),))
