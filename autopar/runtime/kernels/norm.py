"""Normalisation by parts: statistics of a dimension that ranks share, exact for uneven and empty shards."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.layout import P, R
from autopar.runtime.collectives import Axis, convert
from autopar.runtime.kernels.parts import Part


def _total(x: Tensor, axes: Sequence[Axis]) -> Tensor:
    """Sum of ``x`` over the axes; every rank's share of the result's gradient counts."""
    for axis in axes:
        x = convert(x, axis, P, R)
    return x


def _standardised(
    x: Tensor, over: list[int], count: int, axes: Sequence[Axis], eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(x standardised, mean, variance) over the dimensions ``over``; all ranks together hold ``count`` rows of them."""
    mean = _total(x.sum(over, keepdim=True), axes) / count
    centred = x - mean
    variance = _total(centred.square().sum(over, keepdim=True), axes) / count
    return centred * torch.rsqrt(variance + eps), mean, variance


def _affine(y: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """``y * weight + bias`` by channel; y is [b, c, ...]."""
    shape = [1, -1] + [1] * (y.dim() - 2)
    if weight is not None:
        y = y * weight.reshape(shape)
    return y if bias is None else y + bias.reshape(shape)


class _Nothing(torch.autograd.Function):
    """A norm of no elements, as one node like torch's own, which keeps the weight.

    Ranks that hold something and ranks that do not must ask for kept weights and hand over gradients in one order:
    both may communicate.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.bias = None if bias is None else torch.zeros_like(bias)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (weight,) = ctx.saved_tensors
        return grad, None if weight is None else torch.zeros_like(weight), ctx.bias


def _nothing(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    made: Tensor = _Nothing.apply(x, weight, bias)
    return made


def layer_norm_parts(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = False,
    *,
    parts: Mapping[str, Part],
) -> Tensor:
    """Layer norm over the last dimension, split over ranks: two reductions of one number per row."""
    part = parts["n"]
    y, _, _ = _standardised(x, [-1], part.size, [cut.axis for cut in part.cuts], eps)
    if weight is not None:
        y = y * weight
    return y if bias is None else y + bias


def rms_norm_parts(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    parts: Mapping[str, Part],
) -> Tensor:
    """RMS norm over the last dimension, split over ranks: one reduction of one number per row."""
    part = parts["n"]
    square = _total(x.square().sum(-1, keepdim=True), [cut.axis for cut in part.cuts]) / part.size
    y = x * torch.rsqrt(square + (torch.finfo(x.dtype).eps if eps is None else eps))
    return y if weight is None else y * weight


def group_norm(x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Group norm; x is [b, (g c), ...] with ``groups`` groups on this rank."""
    if not x.numel():  # torch's raises on a rank without channels; what it holds still belongs to the graph
        return _nothing(x, weight, bias)
    return F.group_norm(x, groups, weight, bias, eps)


def group_norm_parts(
    x: Tensor,
    groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    parts: Mapping[str, Part],
) -> Tensor:
    """`group_norm` with channels of a group, or positions, split over ranks."""
    axes = [cut.axis for part in parts.values() for cut in part.cuts]
    count = math.prod(part.size for part in parts.values())
    width = x.shape[1] // max(groups, 1) * math.prod(x.shape[2:])  # never -1: what a rank holds may be nothing
    grouped = x.reshape(x.shape[0], groups, width)
    y, _, _ = _standardised(grouped, [-1], count, axes, eps)
    return _affine(y.reshape(x.shape), weight, bias)


def batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    rng: int | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Batch norm as a function: (y, new running mean, new running variance); x is [b, c, ...].

    ``rng`` None means evaluation: running statistics are used and left alone.
    """
    if not x.shape[1]:  # torch's raises on a rank without channels; what it holds still belongs to the graph
        return _nothing(x, weight, bias), running_mean, running_var
    if rng is None and running_mean is not None:
        return F.batch_norm(x, running_mean, running_var, weight, bias, False, momentum, eps), running_mean, running_var
    mean = None if running_mean is None else running_mean.clone()
    var = None if running_var is None else running_var.clone()
    return F.batch_norm(x, mean, var, weight, bias, True, momentum, eps), mean, var


def batch_norm_parts(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    rng: int | None,
    *,
    parts: Mapping[str, Part],
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """`batch_norm` with the batch or positions split: the statistics are those of the whole batch."""
    if rng is None and running_mean is not None:
        return batch_norm(x, weight, bias, running_mean, running_var, momentum, eps, None)
    axes = [cut.axis for part in parts.values() for cut in part.cuts]
    # a rank's rows may be none, so the count is that of the whole: batch size times positions
    count = math.prod(part.size for part in parts.values())
    y, mean, variance = _standardised(x, [d for d in range(x.dim()) if d != 1], count, axes, eps)
    y, mean, variance = _affine(y, weight, bias), mean.flatten(), variance.flatten()
    if running_mean is None or running_var is None:
        return y, running_mean, running_var
    with torch.no_grad():
        new_mean = running_mean * (1 - momentum) + mean * momentum
        new_var = running_var * (1 - momentum) + variance * (momentum * count / max(count - 1, 1))
    return y, new_mean, new_var


def batch_norm_stateless(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Batch norm that keeps no running statistics and uses those of the batch in evaluation too."""
    return batch_norm(x, weight, bias, None, None, 0.0, eps, None)[0]


def batch_norm_stateless_parts(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, *, parts: Mapping[str, Part]
) -> Tensor:
    """`batch_norm_stateless` with the batch or positions split."""
    return batch_norm_parts(x, weight, bias, None, None, 0.0, eps, None, parts=parts)[0]


def batch_norm_fixed(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor, eps: float
) -> Tensor:
    """Batch norm by statistics that do not depend on the batch: affine in x, channel by channel."""
    if not x.numel():
        return _nothing(x, weight, bias)
    return F.batch_norm(x, mean, var, weight, bias, False, 0.0, eps)


def instance_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    momentum: float,
    eps: float,
    rng: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Instance norm that keeps running statistics: (y, new mean, new variance), which are means over the batch.

    ``rng`` None means evaluation, as in `batch_norm`; x is [b, c, ...].
    """
    whole = {"n": Part(x.shape[0])} | {f"b{i}": Part(n) for i, n in enumerate(x.shape[2:])}
    return instance_norm_parts(x, weight, bias, running_mean, running_var, momentum, eps, rng, parts=whole)


def instance_norm_parts(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    momentum: float,
    eps: float,
    rng: int | None,
    *,
    parts: Mapping[str, Part],
) -> tuple[Tensor, Tensor, Tensor]:
    """`instance_norm` with the batch or positions split."""
    if rng is None:
        return batch_norm_fixed(x, weight, bias, running_mean, running_var, eps), running_mean, running_var
    batch = parts["n"]
    positions = [part for name, part in parts.items() if name != "n"]
    axes = [cut.axis for part in positions for cut in part.cuts]
    count = math.prod(part.size for part in positions)
    y, mean, variance = _standardised(x, list(range(2, x.dim())), count, axes, eps)
    with torch.no_grad():
        over = [cut.axis for cut in batch.cuts]
        new_mean, new_var = (_total(v.flatten(1).sum(0), over) / batch.size for v in (mean, variance))
        new_mean = running_mean * (1 - momentum) + new_mean * momentum
        new_var = running_var * (1 - momentum) + new_var * (momentum * count / max(count - 1, 1))
    return _affine(y, weight, bias), new_mean, new_var
