"""Cross entropy as a sum and a count, so that ignored labels and uneven batches come out exact on every split."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.layout import I, P
from autopar.runtime.collectives import convert
from autopar.runtime.kernels.parts import Part, local_index
from autopar.runtime.kernels.reduce import largest


def cross_entropy_sum(
    logits: Tensor,
    target: Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    weight: Tensor | None = None,
) -> Tensor:
    """Sum of the losses of the targets that are not ignored; logits [b, c, ...], target [b, ...], weight [c]."""
    if logits.element_size() == 2:  # a 16-bit sum would overflow or round where the mean does not
        losses = F.cross_entropy(
            logits, target, weight, ignore_index=ignore_index, reduction="none", label_smoothing=label_smoothing
        )
        return losses.float().sum()
    return F.cross_entropy(
        logits, target, weight, ignore_index=ignore_index, reduction="sum", label_smoothing=label_smoothing
    )


def cross_entropy_count(target: Tensor, ignore_index: int, dtype: torch.dtype, weight: Tensor | None = None) -> Tensor:
    """How many targets are not ignored, or the sum of their classes' weights [c], as a number of ``dtype``."""
    counts = target != ignore_index
    if weight is None:
        return counts.sum().to(dtype)
    return torch.where(counts, weight[torch.where(counts, target, 0)].to(dtype), 0.0).sum()


def cross_entropy_sum_parts(
    logits: Tensor,
    target: Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    weight: Tensor | None = None,
    *,
    parts: Mapping[str, Part],
) -> Tensor:
    """`cross_entropy_sum` with the classes split."""
    losses = _losses(logits, target, weight, ignore_index, label_smoothing, parts["c"])
    return losses.float().sum() if losses.element_size() == 2 else losses.sum()


def cross_entropy_parts(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = 0,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    *,
    parts: Mapping[str, Part],
) -> Tensor:
    """Cross entropy of every target, with the classes split; ``reduction`` is 0, none."""
    return _losses(logits, target, weight, ignore_index, label_smoothing, parts["c"])


def _losses(
    logits: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, label_smoothing: float, part: Part
) -> Tensor:
    """Loss of every target: three reductions of one number per target, no gathered logits; five with class weights."""
    axes = [cut.axis for cut in part.cuts]
    shifted = logits - largest(logits, [1], axes)
    total = shifted.exp().sum(1)
    local, inside = local_index(target, part)

    def picked(values: Tensor) -> Tensor:
        """Entries of the targets' classes, where this rank holds them; ``values`` are [b, c, ...]."""
        if not logits.shape[1]:
            return values.sum(1)  # nothing, but part of the graph
        found = values.gather(1, local.unsqueeze(1)).squeeze(1)
        return torch.where(inside, found, torch.zeros_like(found))

    weights = None
    if weight is not None:
        weights = weight.reshape(1, -1, *[1] * (logits.dim() - 2)).expand_as(logits)
    # a loss is the sum over classes of share * (log total - shifted): a number times log total, less another number
    scale = torch.ones_like(total) if weights is None else picked(weights)
    chosen = picked(shifted) if weights is None else picked(shifted * weights)
    if label_smoothing:  # every class has the share label_smoothing / c of the target
        spread = shifted if weights is None else shifted * weights
        chosen = chosen * (1 - label_smoothing) + spread.sum(1) * (label_smoothing / part.size)
        if weights is not None:
            scale = scale * (1 - label_smoothing) + weights.sum(1) * (label_smoothing / part.size)
    for axis in axes:
        total, chosen = convert(total, axis, P, I), convert(chosen, axis, P, I)
        if weights is not None:
            scale = convert(scale, axis, P, I)
    losses = scale * total.log() - chosen
    return torch.where(target != ignore_index, losses, torch.zeros_like(losses))
