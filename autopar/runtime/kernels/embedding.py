"""Embedding with the vocabulary split over ranks; bags of embeddings."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.runtime.kernels.parts import Part, local_index

BAG_SUM, BAG_MEAN, BAG_MAX = 0, 1, 2  # torch's own numbers


def embedding_bag(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    mode: int,
    per_sample_weights: Tensor | None,
    include_last_offset: bool,
    padding_idx: int | None,
) -> Tensor:
    """Rows [bags, d] of torch's embedding_bag, without its other outputs.  weight: [v, d]; indices: [n]."""
    out: Tensor = torch.ops.aten.embedding_bag.padding_idx(
        weight, indices, offsets, False, mode, False, per_sample_weights, include_last_offset, padding_idx
    )[0]
    return out


def embedding_parts(
    weight: Tensor,
    indices: Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
    *,
    parts: Mapping[str, Part],
) -> Tensor:
    """A term of ``embedding(weight, indices)``: rows that other ranks hold are zero.

    weight: [local rows, d]; indices: any shape, global.  Row ``padding_idx`` gets no gradient, on whichever rank it is.
    """
    part = parts["v"]
    if not weight.shape[0]:  # an empty shard still belongs to the graph
        return weight.new_zeros(*indices.shape, weight.shape[1]) + weight.sum() * 0
    local, inside = local_index(indices, part)
    if padding_idx >= 0:
        row, here = local_index(torch.tensor(padding_idx), part)
        padding_idx = int(row) if bool(here) else -1
    out = F.embedding(local, weight, None if padding_idx < 0 else padding_idx)
    return out * inside.unsqueeze(-1).to(out.dtype)
