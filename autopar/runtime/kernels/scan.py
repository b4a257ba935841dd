"""Sums along a dimension whose rows are split over ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.layout import R, S, Split, middle
from autopar.runtime.collectives import convert
from autopar.runtime.kernels.parts import Part


def cumsum_parts(x: Tensor, dim: int, *, dtype: torch.dtype | None = None, parts: Mapping[str, Part]) -> Tensor:
    """``cumsum(x, dim)``: of the rank's own rows, plus the sum of all rows before them.

    Nested cuts leave the rank one run of rows in every group of groups; only sums of runs travel.
    """
    (part,) = parts.values()
    rows = x.movedim(dim, -1)
    groups, done = [], 1
    for cut in part.cuts:  # a cut that is uneven is the last one: the units that the rank holds of it are one run
        groups.append(cut.m // done)
        done = cut.m * middle(S(0, cut.m, cut.N, cut.u), cut.axis.size)
    runs = rows.reshape(*rows.shape[:-1], *groups, rows.shape[-1] // math.prod(groups))
    own = runs.cumsum(-1, dtype=dtype)
    total = runs.sum(-1, dtype=own.dtype)
    before = torch.zeros_like(total)
    for level, cut in enumerate(reversed(part.cuts)):
        n, k = cut.axis.size, cut.axis.index
        every = convert(total.unsqueeze(0), cut.axis, Split(0, 1, n, 1), R)
        together = every.sum(0)  # over ranks: the whole of each innermost group
        earlier = every[:k].sum(0) + F.pad(together.cumsum(-1)[..., :-1], (1, 0))
        before = before + earlier.reshape(*earlier.shape, *[1] * level)
        total = together.sum(-1)
    return (own + before.unsqueeze(-1)).reshape(rows.shape).movedim(-1, dim)
