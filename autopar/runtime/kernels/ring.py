"""Ring attention: queries stay where they are, blocks of keys and values travel round the axis (arXiv 2310.01889).

    rank 0   q0 k0 v0        k3 v3        k2 v2        k1 v1
    rank 1   q1 k1 v1  -->   k0 v0  -->   k3 v3  -->   k2 v2     ...
    rank 2   q2 k2 v2        k1 v1        k0 v0        k3 v3
    rank 3   q3 k3 v3        k2 v2        k1 v1        k0 v0

The next block is on its way while the one that is there is worked on.  Backward they travel again, and with each goes
the gradient that ranks have added up for it, which is home after one hop more.  Kept for backward is what the rank
holds of q, k, v and the output, and two numbers a query.

Who sees what is decided on global positions: of equal blocks cut in one run the last rank does most of the work of
causal attention, and with every n-th row on one of n ranks (striped attention, arXiv 2311.09431) all do the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from autopar.layout import S, Split, middle
from autopar.runtime.collectives import Axis, part_view, take_part
from autopar.runtime.kernels.blocks import (
    Block,
    Dropped,
    Gradients,
    attend,
    attend_backward,
    finish,
    is_hidden,
    merge,
    nothing,
    wide,
)
from autopar.runtime.kernels.parts import Part, on_rank, positions, row_count
from autopar.runtime.kernels.shift import Arriving, start_shift, travel


def ring_attention(
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
    parts: Mapping[str, Part],
    pairs: Mapping[str, Part],
) -> Tensor:
    """`autopar.runtime.kernels.attention.attention` of local q [b, h r, s, e], k [b, h, t, e], v [b, h, t, f].

    mask: as wide as the rank's keys where it is the same for all queries, else with the columns of all keys.
    """
    weights = None
    if dropout_p > 0 and rng is not None:
        batch, heads, rows, _ = (positions(part, query.device) for part in dims)
        weights = _Weights(batch, heads, rows, dropout_p, rng, salt)
    return _attend(query, key, value, mask, is_causal, scale, parts["s"], pairs["s"], weights)


def ring_scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    parts: Mapping[str, Part],
    pairs: Mapping[str, Part],
) -> Tensor:
    """torch's own op, without dropout; shapes as in `ring_attention`."""
    return _attend(query, key, value, attn_mask, is_causal, scale, parts["s"], pairs["s"], None)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float | None,
    rows: Part,
    keys: Part,
    weights: _Weights | None,
) -> Tensor:
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    out: Tensor = _Attention.apply(
        q, k, v, mask, _Ring(keys, scale, positions(rows).contiguous() if causal else None, weights)
    )
    return out


class _Weights(NamedTuple):
    """Global positions of the weights' dimensions but the last, and how to drop weights by them."""

    batch: Tensor
    heads: Tensor
    rows: Tensor
    p: float
    rng: int
    salt: int


class _Ring(NamedTuple):
    """One call.  keys: what this rank holds of them.  causal: the global rows of its queries, if they count."""

    keys: Part
    scale: float
    causal: Tensor | None
    weights: _Weights | None

    @property
    def axis(self) -> Axis:
        return self.keys.cuts[0].axis

    def keys_of(self, source: int) -> Part:
        return on_rank(self.keys, self.axis, source)

    def blocks(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None
    ) -> Iterator[tuple[int, Block | None, Tensor, Tensor]]:
        """(rank of origin, what is seen of its keys, keys, values) round the ring; None where nothing is."""
        moving = [k, v, mask] if mask is not None and self.travels(mask) else [k, v]
        for source, (keys, values, *shown) in travel(moving, lambda source: self.shapes(moving, source), self.axis):
            part = mask
            if shown:
                (part,) = shown
            elif mask is not None:
                part = self.columns(mask, source)
            block = self.block(source, part, q.device)
            yield source, None if is_hidden(block, q.shape[2], keys.shape[2]) else block, wide(keys), wide(values)

    def travels(self, mask: Tensor) -> bool:
        """Whether the mask is cut as the keys are: one that differs between queries has the columns of all keys."""
        return mask.shape[-1] != self.keys.size

    def shapes(self, moving: Sequence[Tensor], source: int) -> list[tuple[int, ...]]:
        """Of the keys, values and mask of another rank."""
        n = row_count(self.keys_of(source))
        k, v, *mask = moving
        return [(*x.shape[:2], n, x.shape[3]) for x in (k, v)] + [(*x.shape[:-1], n) for x in mask]

    def part(self, mask: Tensor, source: int) -> tuple[Split, Axis]:
        """Where in a mask's columns the keys of a rank stand."""
        (cut,) = self.keys_of(source).cuts
        units = middle(S(0, cut.m, cut.N, cut.u), cut.axis.size)
        return Split(mask.dim() - 1, cut.m, units, self.keys.size // (cut.m * units)), cut.axis

    def columns(self, mask: Tensor, source: int) -> Tensor:
        return take_part(mask, *self.part(mask, source))

    def block(self, source: int, mask: Tensor | None, device: torch.device) -> Block:
        held, seen, dropped = self.keys_of(source), None, None
        if self.causal is not None and len(self.causal):
            seen = torch.searchsorted(positions(held).contiguous(), self.causal, right=True)
            if int(seen[0]) == row_count(held):
                seen = None
        if self.weights is not None:
            batch, heads, rows, p, rng, salt = self.weights
            dropped = Dropped((batch, heads, rows, positions(held, device)), p, rng, salt)
        return Block(self.scale, mask, seen, dropped)


@dataclass(slots=True)
class _Carried:
    """Gradients of what travels, which go with it and are added to on the way.  wanted: for which there are any."""

    ring: _Ring
    moving: Sequence[Tensor]
    wanted: Sequence[bool]
    arriving: Arriving | None = None

    def sizes(self, source: int) -> list[int]:
        return [math.prod(s) * w for s, w in zip(self.ring.shapes(self.moving, source), self.wanted, strict=True)]

    def add(self, source: int, found: Gradients | None) -> None:
        """Add to those of ``source``, which have come from the rank before, and send them on."""
        if not any(self.wanted):
            return
        terms: Sequence[Tensor | None] = () if found is None else (found.k, found.v, found.mask)
        flat = [g.reshape(-1) for g, w in zip(terms, self.wanted, strict=False) if w and g is not None]
        if self.arriving is None:
            total = torch.cat(flat) if flat else wide(self.moving[0]).new_zeros(sum(self.sizes(source)))
        else:
            total = self.arriving.wait()
            if flat:
                total += torch.cat(flat)
        axis = self.ring.axis
        self.arriving = start_shift(total, sum(self.sizes((source - 1) % axis.size)), axis)

    def home(self) -> list[Tensor | None]:
        """Those of this rank's own, from everyone."""
        if self.arriving is None:
            return [None] * len(self.moving)
        own = self.ring.shapes(self.moving, self.ring.axis.index)
        pieces = self.arriving.wait().split(self.sizes(self.ring.axis.index))
        return [p.reshape(s) if w else None for p, s, w in zip(pieces, own, self.wanted, strict=True)]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, ring: _Ring) -> Tensor:
        queries, total = wide(q), None
        for _, block, keys, values in ring.blocks(q, k, v, mask):
            if block is not None:
                new = attend(block, queries, keys, values)
                total = new if total is None else merge(total, new)
        total = nothing(queries, wide(v)) if total is None else total
        out = finish(total).to(q.dtype)
        ctx.save_for_backward(q, k, v, mask, out, total.total, total.peak)
        ctx.ring = ring
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, mask, out, total, peak = ctx.saved_tensors
        ring, needs = ctx.ring, ctx.needs_input_grad
        travels = mask is not None and ring.travels(mask)
        moving = [k, v, mask] if travels else [k, v]
        carried = _Carried(ring, moving, needs[1 : 1 + len(moving)])
        queries, upstream, result = wide(q), wide(grad), wide(out)
        dq, dmask = torch.zeros_like(queries), None
        if needs[3] and not travels:
            dmask = torch.zeros_like(wide(mask))
        for source, block, keys, values in ring.blocks(q, k, v, mask):
            found = None
            if block is not None:
                found = attend_backward(block, queries, keys, values, result, total, peak, upstream, needs[3])
                dq += found.q
                if dmask is not None and found.mask is not None:
                    columns = part_view(dmask, *ring.part(dmask, source))
                    columns.copy_(found.mask.reshape(columns.shape))
            carried.add(source, found)
        dk, dv, *of_mask = carried.home()
        if of_mask:
            (dmask,) = of_mask
        given = ((dq, q), (dk, k), (dv, v), (dmask, mask))
        return (
            *(g.to(x.dtype) if g is not None and w else None for (g, x), w in zip(given, needs, strict=False)),
            None,
        )
