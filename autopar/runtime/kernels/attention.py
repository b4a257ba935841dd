"""Attention where the plain op cannot be used: causal with a part of the queries, or with dropout on the weights."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.runtime.kernels.dropout import dropout
from autopar.runtime.kernels.parts import Part, positions


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    dropout_p: float,
    rng: int | None,
    salt: int,
    *,
    dims: Sequence[Part],
) -> Tensor:
    """Scaled dot-product attention; q [b, h r, s, e], k [b, h, t, e], v [b, h, t, v], r queries to a key and value.

    dims: what part of the weights' dimensions (b, h, s, t) this rank holds.  The causal mask speaks of global query
    rows, so a rank with some of them sees exactly what it should.
    """
    rows = dims[-2]
    with_dropout = dropout_p > 0 and rng is not None
    if is_causal and rows.cuts:
        here = positions(rows, query.device)[:, None] >= positions(dims[-1], query.device)[None]
        mask = here if mask is None else mask & here if mask.dtype is torch.bool else mask.masked_fill(~here, -math.inf)
        is_causal = False
    if not with_dropout:
        grouped = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(query, key, value, mask, 0.0, is_causal, scale=scale, enable_gqa=grouped)
    if query.shape[1] != key.shape[1]:
        key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], 1) for x in (key, value))
    scores = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        tril = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~tril, -math.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype is torch.bool else scores + mask
    weights = torch.ops.aten._safe_softmax(scores, -1)  # a row that sees nothing gives zero, as in torch's own
    return dropout(weights, dropout_p, rng, salt, dims=dims) @ value
