"""Which part of a factor this rank holds, and where its rows stand in the whole."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from autopar.layout import S, bounds, fraction, middle
from autopar.runtime.collectives import Axis


class AxisCut(NamedTuple):
    """The factor is seen as (m, N, u); ``axis`` cuts N as torch.chunk does."""

    axis: Axis
    m: int
    N: int
    u: int


class Part(NamedTuple):
    """A factor of ``size`` rows and its cuts, from the outside in; without cuts the whole of it."""

    size: int
    cuts: tuple[AxisCut, ...] = ()


def on_rank(part: Part, axis: Axis, index: int) -> Part:
    """What the rank at ``index`` of ``axis`` holds where this one holds ``part``."""
    there = replace(axis, index=index)
    return part._replace(cuts=tuple(c._replace(axis=there) if c.axis is axis else c for c in part.cuts))


def row_count(part: Part) -> int:
    """How many rows this rank holds."""
    rows = part.size
    for cut in part.cuts:
        held, whole = fraction(S(0, cut.m, cut.N, cut.u), cut.axis.size, cut.axis.index)
        rows = rows * held // whole
    return rows


def positions(part: Part, device: torch.device | str = "cpu") -> Tensor:
    """Global rows that this rank holds, int64 [local rows]."""
    rows = torch.arange(part.size, device=device)
    for cut in part.cuts:
        shard = S(0, cut.m, cut.N, cut.u)
        units = middle(shard, cut.axis.size)
        low, high = bounds(shard, cut.axis.size, cut.axis.index)
        inner = part.size // (cut.m * units)
        rows = rows.reshape(-1, units, inner)[:, low:high].reshape(-1)
    return rows


def local_index(index: Tensor, part: Part) -> tuple[Tensor, Tensor]:
    """(local row, inside) of global rows ``index``; rows that another rank holds give 0 and False."""
    local, rest = torch.zeros_like(index), index
    inside = (index >= 0) & (index < part.size)
    remaining, done = part.size, 1
    for cut in part.cuts:
        shard = S(0, cut.m, cut.N, cut.u)
        units = middle(shard, cut.axis.size)
        low, high = bounds(shard, cut.axis.size, cut.axis.index)
        groups = cut.m // done
        size = remaining // groups
        local = local * groups + torch.div(rest, size, rounding_mode="floor")
        rest = rest % size
        inner = size // units
        unit = torch.div(rest, inner, rounding_mode="floor")
        rest = rest % inner
        inside = inside & (unit >= low) & (unit < high)
        local = local * (high - low) + (unit - low)
        remaining, done = inner, cut.m * units
    local = local * remaining + rest
    return torch.where(inside, local, torch.zeros_like(local)), inside
