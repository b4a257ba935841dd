"""Normalisation by parts: statistics of a dimension that ranks share, exact for uneven and empty shards."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

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
    axes = [cut.axis for cut in part.cuts]
    mean = _total(x.sum(-1, keepdim=True), axes) / part.size
    centred = x - mean
    variance = _total(centred.square().sum(-1, keepdim=True), axes) / part.size
    y = centred * torch.rsqrt(variance + eps)
    if weight is not None:
        y = y * weight
    return y if bias is None else y + bias


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
        shape = [1, -1] + [1] * (x.dim() - 2)
        y = x if weight is None else x * weight.reshape(shape)
        return y if bias is None else y + bias.reshape(shape), running_mean, running_var
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
    """`batch_norm` with the batch split: the statistics are those of the whole batch."""
    if rng is None and running_mean is not None:
        return batch_norm(x, weight, bias, running_mean, running_var, momentum, eps, None)
    axes = [cut.axis for part in parts.values() for cut in part.cuts]
    over = [d for d in range(x.dim()) if d != 1]
    # a rank's rows may be none, so the count is that of the whole: batch size times positions
    count = parts["n"].size * math.prod(x.shape[2:])
    shape = [1, -1] + [1] * (x.dim() - 2)
    mean = _total(x.sum(over), axes) / count
    centred = x - mean.reshape(shape)
    variance = _total(centred.square().sum(over), axes) / count
    y = centred * torch.rsqrt(variance + eps).reshape(shape)
    if weight is not None:
        y = y * weight.reshape(shape)
    if bias is not None:
        y = y + bias.reshape(shape)
    if running_mean is None or running_var is None:
        return y, running_mean, running_var
    with torch.no_grad():
        new_mean = running_mean * (1 - momentum) + mean * momentum
        new_var = running_var * (1 - momentum) + variance * (momentum * count / max(count - 1, 1))
    return y, new_mean, new_var
