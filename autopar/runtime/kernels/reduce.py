"""Reductions by parts: of one dimension that ranks share, exact for uneven and empty shards."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.layout import I, P, R
from autopar.runtime.collectives import Axis, convert
from autopar.runtime.kernels.parts import Part


def largest(x: Tensor, dims: Sequence[int], axes: Sequence[Axis]) -> Tensor:
    """Maximum over ``dims``, kept with size 1, of what all ranks hold; without gradient."""
    with torch.no_grad():
        empty = not all(x.shape[d] for d in dims)
        shape = [1 if d in {e % x.dim() for e in dims} else n for d, n in enumerate(x.shape)]
        top = x.new_full(shape, -math.inf) if empty else x.amax(tuple(dims), keepdim=True)
        for axis in axes:
            if axis.size > 1:
                top = top.contiguous()
                dist.all_reduce(top, op=dist.ReduceOp.MAX, group=axis.group)
    return top


def _exponentials(
    x: Tensor, dims: Sequence[int], parts: Mapping[str, Part], state: str
) -> tuple[Tensor, Tensor, Tensor]:
    """(x - top, its exponentials' sum over all ranks in ``state``, top): what softmax and its kin are made of."""
    axes = [cut.axis for part in parts.values() for cut in part.cuts]
    top = largest(x, dims, axes)
    top = torch.where(top.isinf(), torch.zeros_like(top), top)
    shifted = x - top
    total = shifted.exp().sum(tuple(dims), keepdim=True)
    for axis in axes:
        total = convert(total, axis, P, state)
    return shifted, total, top


def softmax_parts(x: Tensor, dim: int, dtype: torch.dtype | None = None, *, parts: Mapping[str, Part]) -> Tensor:
    """Softmax along a dimension that ranks share: two reductions of one number per row."""
    shifted, total, _ = _exponentials(x if dtype is None else x.to(dtype), [dim], parts, R)
    return shifted.exp() / total


def log_softmax_parts(x: Tensor, dim: int, dtype: torch.dtype | None = None, *, parts: Mapping[str, Part]) -> Tensor:
    """Log-softmax along a dimension that ranks share: two reductions of one number per row."""
    shifted, total, _ = _exponentials(x if dtype is None else x.to(dtype), [dim], parts, R)
    return shifted - total.log()


def logsumexp_parts(x: Tensor, dim: Sequence[int], keepdim: bool = False, *, parts: Mapping[str, Part]) -> Tensor:
    """Logsumexp over dimensions that ranks share; every rank has the whole result and all of its gradient."""
    _, total, top = _exponentials(x, dim, parts, I)
    out = total.log() + top
    return out if keepdim else out.squeeze(tuple(dim))
