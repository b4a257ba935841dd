"""Attention of some queries to some of the keys, in terms that add up to the attention to all of them.

    part = attend(block, q, k, v)       of every block of keys
    all  = merge(part, merge(...))      whatever the order
    out  = finish(all)                  what softmax over all keys gives

A part is (sum of weights times values, sum of weights, largest score), the weights relative to the largest score
(Milakov, Gimelshein 2018, arXiv 1805.02867).  Two numbers a row, rather than the logarithm of the sum, which would be
lost in the largest score where a mask adds the lowest number there is.  Everything is fp32, or float64 where the
inputs are.

Shapes: q [b, h r, s, e], k [b, h, t, e], v [b, h, t, f]; r queries to a key and value.  At no time are the scores of
more than a tile of rows held.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.runtime.collectives import sum_dtype
from autopar.runtime.kernels.dropout import keep_mask

aten = torch.ops.aten

_TILE = 1 << 21  # scores at a time


class Dropped(NamedTuple):
    """Which weights are dropped: global positions of the weights' dimensions, and what the mask is a hash of."""

    rows: tuple[Tensor, Tensor, Tensor, Tensor]
    p: float
    rng: int
    salt: int


class Block(NamedTuple):
    """What queries may see of a block of keys.

    mask: bool, True where they do, or what is added to the scores, broadcast to [b, h r, s, t].
    seen: int64 on the CPU, rising: row i sees the first ``seen[i]`` keys; None for all.
    """

    scale: float
    mask: Tensor | None = None
    seen: Tensor | None = None
    dropped: Dropped | None = None


class Partial(NamedTuple):
    """values [b, h r, s, f]; total and peak [b, h r, s]."""

    values: Tensor
    total: Tensor
    peak: Tensor


class Gradients(NamedTuple):
    """Of q, k, v and, where it was asked for, of the mask."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None


def wide(x: Tensor) -> Tensor:
    """``x`` in a type that sums are made in."""
    return x.to(sum_dtype(x.dtype))


def is_hidden(block: Block, rows: int, keys: int) -> bool:
    """Whether no row sees any key."""
    return not rows or not keys or (block.seen is not None and int(block.seen[-1]) == 0)


def attend(block: Block, q: Tensor, k: Tensor, v: Tensor) -> Partial:
    """The part of one block."""
    diagonal = _diagonal(block, q, k, v)
    if diagonal is not None:
        first, keys, causal = diagonal
        given = map(_dense, (q[:, :, first:], k[:, :, :keys], v[:, :, :keys]))
        values, peak = aten._scaled_dot_product_flash_attention_for_cpu(*given, 0.0, causal, scale=block.scale)
        part = Partial(values, torch.ones_like(peak), peak)
        if not first:
            return part
        blank = nothing(q[:, :, :first], v)
        return Partial(*(torch.cat(both, 2) for both in zip(blank, part, strict=True)))
    out = nothing(q, v)
    for tile in _tiles(block, q, k):
        weights = tile.scores
        peak = weights.amax(-1, keepdim=True)
        weights = weights.sub_(_finite(peak)).exp_()
        out.peak[:, :, tile.rows] = peak.flatten(1, 2).squeeze(-1)
        out.total[:, :, tile.rows] = weights.sum(-1).flatten(1, 2)
        if tile.kept is not None:
            weights = weights * tile.kept
        product = _joined(weights) @ v[:, :, : tile.keys]
        out.values[:, :, tile.rows] = product.reshape(*tile.shape, v.shape[-1])
    return out


def nothing(q: Tensor, v: Tensor) -> Partial:
    """The part of no keys."""
    values = q.new_zeros(*q.shape[:-1], v.shape[-1])
    return Partial(values, q.new_zeros(q.shape[:-1]), q.new_full(q.shape[:-1], -math.inf))


def merge(a: Partial, b: Partial) -> Partial:
    """The part of the keys of both; ``a`` is used up."""
    peak = torch.maximum(a.peak, b.peak)
    one, two = ((x.peak - _finite(peak)).exp_() for x in (a, b))
    total = a.total.mul_(one).addcmul_(b.total, two)
    values = a.values.mul_(one.unsqueeze(-1)).addcmul_(b.values, two.unsqueeze(-1))
    return Partial(values, total, peak)


def finish(part: Partial) -> Tensor:
    """Attention to all the keys that are in; a row that sees none gives zeros, as torch's does."""
    return part.values / _some(part.total).unsqueeze(-1)


def attend_backward(
    block: Block,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    total: Tensor,
    peak: Tensor,
    grad: Tensor,
    mask_gradient: bool,
) -> Gradients:
    """Gradients by way of one block of keys.

    out, total, peak: of all keys.  grad: the gradient of ``out``.
    """
    diagonal = _diagonal(block, q, k, v)
    if diagonal is not None:
        first, keys, causal = diagonal
        logsumexp = (peak + total.log())[:, :, first:]
        near = [_dense(x[:, :, :keys]) for x in (k, v)]
        grad, q, out = (_dense(x[:, :, first:]) for x in (grad, q, out))
        dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, *near, out, logsumexp, 0.0, causal, scale=block.scale
        )
        rest = (0, 0, 0, k.shape[2] - keys)
        return Gradients(F.pad(dq, (0, 0, first, 0)), F.pad(dk, rest), F.pad(dv, rest), None)
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    dmask = torch.zeros_like(wide(block.mask)) if mask_gradient and block.mask is not None else None
    delta = (grad * out).sum(-1)
    h, r = k.shape[1], _group(q, k)

    def rows(x: Tensor, at: slice) -> Tensor:
        """Rows of a tile, [b, h, r rows, ...]."""
        part = x[:, :, at]
        return part.reshape(x.shape[0], h, r * part.shape[2], *x.shape[3:])

    for tile in _tiles(block, q, k):
        near_k, near_v = k[:, :, : tile.keys], v[:, :, : tile.keys]
        of_k, of_v = dk[:, :, : tile.keys], dv[:, :, : tile.keys]
        scores = _joined(tile.scores)
        weights = scores.sub_(_finite(rows(peak, tile.rows)).unsqueeze(-1)).exp_()
        weights /= _some(rows(total, tile.rows)).unsqueeze(-1)
        upstream = rows(grad, tile.rows)
        flow = upstream @ near_v.mT
        if tile.kept is None:
            of_v += weights.mT @ upstream
        else:
            kept = _joined(tile.kept)
            of_v += (weights * kept).mT @ upstream
            flow *= kept
        flow = flow.sub_(rows(delta, tile.rows).unsqueeze(-1)).mul_(weights)
        if dmask is not None:
            _add_summed(dmask, flow.reshape(*tile.shape, tile.keys), tile)
        flow *= block.scale
        dq[:, :, tile.rows] = (flow @ near_k).reshape(*tile.shape, q.shape[-1])
        of_k += flow.mT @ rows(q, tile.rows)
    return Gradients(dq, dk, dv, dmask)


# ------------------------------------------------------------------------------------------------ tiles


class _Tile(NamedTuple):
    """Some rows and the first ``keys`` keys.  scores, kept: [b, h, r, rows, keys].  shape: (b, h r, rows)."""

    rows: slice
    keys: int
    shape: tuple[int, int, int]
    scores: Tensor
    kept: Tensor | None


def _tiles(block: Block, q: Tensor, k: Tensor) -> Iterator[_Tile]:
    """Scores of the rows that see anything, some rows at a time; -inf where a key is not seen."""
    b, heads, s, _ = q.shape
    h, r, t = k.shape[1], _group(q, k), k.shape[2]
    mask = None if block.mask is None else _grouped(block.mask, h, r)
    step = max(1, _TILE // max(1, b * heads * t))
    for start in range(0, s, step):
        stop = min(start + step, s)
        keys = t if block.seen is None else int(block.seen[stop - 1])
        if not keys:
            continue
        here = slice(start, stop)
        some = q[:, :, here].reshape(b, h, r * (stop - start), q.shape[-1])
        scores = (some @ k[:, :, :keys].mT).mul_(block.scale).reshape(b, h, r, stop - start, keys)
        if mask is not None:
            part = _cropped(mask, here, keys)
            scores = scores.masked_fill_(~part, -math.inf) if part.dtype is torch.bool else scores.add_(part)
        if block.seen is not None and int(block.seen[start]) < keys:
            seen = block.seen[here].to(q.device)
            scores.masked_fill_(torch.arange(keys, device=q.device) >= seen.unsqueeze(-1), -math.inf)
        kept = None
        if block.dropped is not None:
            d = block.dropped
            batch, head, row, key = d.rows
            keep = keep_mask((batch, head, row[here], key[:keys]), d.p, d.rng, d.salt, q.device)
            kept = keep.reshape(scores.shape).to(scores.dtype).mul_(1 / (1 - d.p) if d.p < 1 else 0.0)
        yield _Tile(here, keys, (b, heads, stop - start), scores, kept)


def _group(q: Tensor, k: Tensor) -> int:
    """Queries to a key."""
    return q.shape[1] // k.shape[1] if k.shape[1] else 1


def _grouped(mask: Tensor, h: int, r: int) -> Tensor:
    """The mask with five dimensions, as the scores of a tile."""
    mask = mask.reshape(*[1] * (4 - mask.dim()), *mask.shape)
    return mask.unsqueeze(2) if mask.shape[1] == 1 else mask.unflatten(1, (h, r))


def _cropped(mask: Tensor, rows: slice, keys: int) -> Tensor:
    if mask.shape[-2] > 1:
        mask = mask[..., rows, :]
    return mask[..., :keys] if mask.shape[-1] > 1 else mask


def _add_summed(total: Tensor, flow: Tensor, tile: _Tile) -> None:
    """Add the gradient of a tile's scores, summed over what the mask is broadcast along."""
    where = total.reshape(*[1] * (4 - total.dim()), *total.shape)  # a view
    summed = [d for d in range(4) if where.shape[d] == 1 and flow.shape[d] != 1]
    flow = flow.sum(summed, keepdim=True) if summed else flow
    _cropped(where, tile.rows, tile.keys).add_(flow)


def _joined(x: Tensor) -> Tensor:
    """[b, h, r, rows, keys] -> [b, h, r rows, keys]: the rows of one key."""
    return x.flatten(2, 3)


def _finite(peak: Tensor) -> Tensor:
    """What scores are taken relative to: where all are -inf the weights are zeros, not nan."""
    return peak.masked_fill(peak == -math.inf, 0.0)


def _some(total: Tensor) -> Tensor:
    return total.masked_fill(total == 0, 1.0)


# ------------------------------------------------------------------------------------------------ torch's kernel


def _diagonal(block: Block, q: Tensor, k: Tensor, v: Tensor) -> tuple[int, int, bool] | None:
    """(first row, keys, causal) where torch's own kernel for the CPU does the block; the rows before see nothing."""
    if block.mask is not None or block.dropped is not None or q.device.type != "cpu" or q.shape[-1] != v.shape[-1]:
        return None
    if not (q.numel() and k.numel()):
        return None
    if block.seen is None:
        return 0, k.shape[2], False
    s, t = q.shape[2], k.shape[2]
    lead = int(block.seen[0])  # 1: rows see up to their own position, 0: those before it
    if s != t or lead > 1 or s < 2 or not torch.equal(block.seen, torch.arange(lead, s + lead)):
        return None
    return 1 - lead, s - 1 + lead, True


def _dense(x: Tensor) -> Tensor:
    """``x`` with the elements of a row side by side: of others the kernel makes wrong numbers, without an error."""
    return x if x.stride(-1) == 1 else x.contiguous()
