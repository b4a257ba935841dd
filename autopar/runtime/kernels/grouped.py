"""Products of rows with the matrix of the expert that each row belongs to, rows or experts split over ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.runtime.kernels.parts import Part, positions

Parts = Mapping[str, Part]


def _by_expert(op: Callable[..., Any], x: Tensor, weight: Tensor, ends: Tensor, parts: Parts) -> Tensor:
    """Rows [s, n] of ``x`` [s, k] times ``weight`` [e, k, n]; rows of other ranks' experts are zero.

    ends: the global row at which each expert's rows end, for all experts.
    """
    rows, experts = positions(parts["s"], x.device), positions(parts["e"], x.device)
    here = torch.searchsorted(rows.contiguous(), ends.long().contiguous())  # the same, in the rank's own rows
    if not parts["e"].cuts:
        every: Tensor = op(x, weight, here.to(ends.dtype))
        return every
    owner = torch.searchsorted(here, torch.arange(x.shape[0], device=x.device), right=True)
    mine = torch.isin(owner, experts).nonzero().squeeze(1)
    counts = here.diff(prepend=here.new_zeros(1))[experts]
    out = op(x[mine], weight, counts.cumsum(0).to(ends.dtype))
    return out.new_zeros(x.shape[0], weight.shape[2]).index_copy(0, mine, out)


def grouped_mm_parts(
    x: Tensor, weight: Tensor, ends: Tensor, bias: None = None, out_dtype: torch.dtype | None = None, *, parts: Parts
) -> Tensor:
    """torch's ``_grouped_mm`` of rows with experts; it takes widths of 16 bytes and multiples, so parts are padded."""
    unit = 16 // x.element_size()

    def op(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        if not len(weight):  # nothing to do, but part of the graph
            return x.new_zeros(x.shape[0], weight.shape[2]) + (x.sum() + weight.sum()) * 0
        k, n = weight.shape[1:]
        wide, high = (max(-(-size // unit), 1) * unit - size for size in (n, k))
        x, weight = F.pad(x, (0, high)).contiguous(), F.pad(weight, (0, wide, 0, high)).contiguous()
        out: Tensor = torch.ops.aten._grouped_mm.default(x, weight, ends, None, out_dtype)
        return out[:, :n]

    return _by_expert(op, x, weight, ends, parts)


def grouped_mm_fallback_parts(x: Tensor, weight: Tensor, ends: Tensor, *, parts: Parts) -> Tensor:
    """The op that Hugging Face's experts call where torch's own does not run.

    It keeps the weight on ranks without experts too: one that was gathered is gathered again by all ranks or by none.
    """
    return _by_expert(torch.ops.transformers.grouped_mm_fallback.default, x, weight, ends, parts)
