"""Cross entropy as a sum and a count, so that ignored labels and uneven batches come out exact on every split."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from autopar.layout import I, P
from autopar.runtime.collectives import convert
from autopar.runtime.kernels.parts import Part, local_index


def cross_entropy_sum(logits: Tensor, target: Tensor, ignore_index: int = -100, label_smoothing: float = 0.0) -> Tensor:
    """Sum of the losses of the targets that are not ignored; logits [b, c, ...], target [b, ...]."""
    if logits.element_size() == 2:  # a 16-bit sum would overflow or round where the mean does not
        losses = F.cross_entropy(
            logits, target, ignore_index=ignore_index, reduction="none", label_smoothing=label_smoothing
        )
        return losses.float().sum()
    return F.cross_entropy(logits, target, ignore_index=ignore_index, reduction="sum", label_smoothing=label_smoothing)


def cross_entropy_count(target: Tensor, ignore_index: int, dtype: torch.dtype) -> Tensor:
    """How many targets are not ignored, as a number of ``dtype``."""
    return (target != ignore_index).sum().to(dtype)


def cross_entropy_sum_parts(
    logits: Tensor,
    target: Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    *,
    parts: Mapping[str, Part],
) -> Tensor:
    """`cross_entropy_sum` with the classes split: three reductions of one number per target, no gathered logits."""
    part = parts["c"]
    axes = [cut.axis for cut in part.cuts]
    empty = not logits.shape[1]
    with torch.no_grad():
        top = logits.new_full(target.shape, -math.inf) if empty else logits.amax(1)
        for axis in axes:
            if axis.size > 1:
                top = top.contiguous()
                dist.all_reduce(top, op=dist.ReduceOp.MAX, group=axis.group)
    shifted = logits - top.unsqueeze(1)
    total = shifted.exp().sum(1)
    local, inside = local_index(target, part)
    if empty:
        picked = shifted.sum(1)  # nothing, but part of the graph
    else:
        picked = shifted.gather(1, local.unsqueeze(1)).squeeze(1)
        picked = torch.where(inside, picked, torch.zeros_like(picked))
    if label_smoothing:  # every class has the share label_smoothing / c of the target
        picked = picked * (1 - label_smoothing) + shifted.sum(1) * (label_smoothing / part.size)
    for axis in axes:
        total, picked = convert(total, axis, P, I), convert(picked, axis, P, I)
    losses = total.log() - picked
    losses = torch.where(target != ignore_index, losses, torch.zeros_like(losses))
    return losses.float().sum() if losses.element_size() == 2 else losses.sum()
