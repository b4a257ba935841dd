"""Conversions at run time: one differentiable function that moves a local tensor between two states of one axis.

Every function takes the local tensor and an `Axis`.  A shard is given as a `Split`, the way the rank sees it: the local
dimension is (outer, units, inner) with this axis undone, and the rank holds the units that torch.chunk gives it.
Gathers pad unequal shards, and a rank with an empty shard takes part in every collective, forward and backward.
Buffers are contiguous: gloo gives wrong values on strided views without an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.layout import I, P, R, Split, chunk_bounds, dual

# torch 2.13 renamed these; 2.11 knows the old names only
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True, slots=True, eq=False)
class Axis:
    """This rank's place on one mesh axis.  ``group`` is None on an axis of one rank."""

    name: str
    size: int
    index: int
    group: Any = None
    backend: str = ""


LocalState = Split | str


class Step(NamedTuple):
    """One conversion of a chain, as a node's argument."""

    axis: Axis
    src: LocalState
    dst: LocalState


# --------------------------------------------------------------------------------------------- local moves


def _bounds(split: Split, axis: Axis) -> tuple[int, int]:
    return chunk_bounds(split.units, axis.size, axis.index)


def _unfold(x: Tensor, split: Split, units: int) -> Tensor:
    """View of ``x`` with the split dimension as (outer, units, inner)."""
    return x.reshape(*x.shape[: split.dim], split.outer, units, split.inner, *x.shape[split.dim + 1 :])


def _fold(x: Tensor, dim: int) -> Tensor:
    rows = x.shape[dim] * x.shape[dim + 1] * x.shape[dim + 2]
    return x.reshape(*x.shape[:dim], rows, *x.shape[dim + 3 :])


def part_view(x: Tensor, split: Split, axis: Axis) -> Tensor:
    """This rank's shard of a whole value, a view of it: the split dimension as (outer, units, inner)."""
    low, high = _bounds(split, axis)
    return _unfold(x, split, split.units).narrow(split.dim + 1, low, high - low)


def take_part(x: Tensor, split: Split, axis: Axis) -> Tensor:
    """This rank's shard of a whole value."""
    low, high = _bounds(split, axis)
    if split.outer == 1:
        return x.narrow(split.dim, low * split.inner, (high - low) * split.inner)
    return _fold(part_view(x, split, axis), split.dim)


def pad_part(x: Tensor, split: Split, axis: Axis) -> Tensor:
    """The whole value with this rank's shard in its place and zeros elsewhere: a term of a sum."""
    low, high = _bounds(split, axis)
    shape = list(x.shape)
    shape[split.dim] = split.outer * split.units * split.inner
    out = x.new_zeros(shape)
    part_view(out, split, axis).copy_(_unfold(x, split, high - low))
    return out


# --------------------------------------------------------------------------------------------- collectives


def _carried(x: Tensor) -> Tensor:
    """``x`` as a dtype that every backend carries, contiguous; bits are kept."""
    x = x.resolve_conj().resolve_neg().contiguous()  # a pending sign is a flag that no backend knows
    if x.dtype is torch.bool:
        return x.view(torch.uint8)
    return torch.view_as_real(x) if x.is_complex() else x


def _restored(x: Tensor, like: Tensor) -> Tensor:
    if like.dtype is torch.bool:
        return x.view(torch.bool)
    return torch.view_as_complex(x) if like.is_complex() else x


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type in which terms of a sum are added: 16-bit floats in fp32."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def all_reduce(x: Tensor, axis: Axis) -> Tensor:
    """Sum over the axis, in a tensor of its own; 16-bit floats are summed in fp32."""
    term = x.to(sum_dtype(x.dtype))
    buffer = _carried(term)
    if term is x and x.is_contiguous():  # then it is the caller's own memory
        buffer = buffer.clone()
    dist.all_reduce(buffer, group=axis.group)
    return _restored(buffer, term).to(x.dtype)


def start_broadcast(x: Tensor, axis: Axis, source: int) -> Any:
    """Start to send rank ``source``'s contiguous ``x`` into that of all others: work, or None with nothing to send."""
    if axis.size == 1 or not x.numel():
        return None
    return dist.broadcast(_carried(x), group=axis.group, group_src=source, async_op=True)


def start_reduce(x: Tensor, axis: Axis, target: int) -> tuple[Tensor, Any]:
    """Start to add up every rank's ``x``, which is lost: (what then is the sum on rank ``target``, work or None)."""
    term = x.to(sum_dtype(x.dtype)).contiguous()
    if axis.size == 1 or not x.numel():
        return term, None
    return term, dist.reduce(_carried(term), group=axis.group, group_dst=target, async_op=True)


def gather_rows(row: Tensor, axis: Axis) -> Tensor:
    """``row`` of every rank, one after the other.

    gloo's own all-gather is 1.5 to 3 times slower than one broadcast per rank straight into the result.
    """
    out = row.new_empty((axis.size * row.shape[0], *row.shape[1:]))
    if axis.backend != "gloo":
        _all_gather(out, row, group=axis.group)
        return out
    places = out.chunk(axis.size) if row.shape[0] else ()
    if places:
        places[axis.index].copy_(row)
    work = [dist.broadcast(p, group=axis.group, group_src=i, async_op=True) for i, p in enumerate(places)]
    for w in work:
        w.wait()
    return out


def start_reduce_rows(rows: Tensor, axis: Axis) -> tuple[Tensor, Any, Callable[[Tensor], Tensor]]:
    """Start to reduce: (buffer, work, what makes this rank's row of the sum from the buffer once work is done).

    gloo's own reduce-scatter is 2 to 3 times slower than an all-to-all and a local sum.
    """
    if axis.backend != "gloo":
        row = rows.new_empty((rows.shape[0] // axis.size, *rows.shape[1:]))
        return row, _reduce_scatter(row, rows, group=axis.group, async_op=True), lambda r: r
    received = torch.empty_like(rows)
    work = dist.all_to_all_single(received, rows, group=axis.group, async_op=True)
    return received, work, lambda r: r.reshape(axis.size, -1, *rows.shape[1:]).sum(0)


def reduce_rows(rows: Tensor, axis: Axis) -> Tensor:
    """This rank's row of the sum of ``rows`` over ranks."""
    buffer, work, finish = start_reduce_rows(rows, axis)
    work.wait()
    return finish(buffer)


def stack_parts(x: Tensor, split: Split, axis: Axis) -> Tensor:
    """A whole value as (n, largest part): the parts one after the other, each padded to the largest."""
    n, units = axis.size, split.units
    largest = -(-units // n)
    whole = _unfold(x, split, units).movedim(split.dim + 1, 0)
    if largest * n != units:
        whole = torch.cat([whole, whole.new_zeros(largest * n - units, *whole.shape[1:])])
    return whole.reshape(n, -1)


def unstack_parts(parts: Tensor, split: Split, axis: Axis, shape: tuple[int, ...]) -> Tensor:
    """Inverse of `stack_parts`; ``shape`` is the whole value's local shape.

    Contiguous: torch's own convolution refuses some weights that are not, and most ops are slower on them.
    """
    n, units = axis.size, split.units
    rest = (*shape[: split.dim], split.outer, split.inner, *shape[split.dim + 1 :])
    whole = parts.reshape(n * -(-units // n), *rest)[:units]
    if split.dim != 0 or split.outer != 1:
        whole = whole.movedim(0, split.dim + 1)
    return whole.reshape(shape).contiguous()


def stack_part(x: Tensor, split: Split, axis: Axis) -> Tensor:
    """This rank's shard as one row of `stack_parts`."""
    low, high = _bounds(split, axis)
    part = _unfold(x, split, high - low).movedim(split.dim + 1, 0)
    missing = -(-split.units // axis.size) - (high - low)
    if missing:
        part = torch.cat([part, part.new_zeros(missing, *part.shape[1:])])
    return part.reshape(-1)


def unstack_part(row: Tensor, split: Split, axis: Axis, shape: tuple[int, ...]) -> Tensor:
    """Inverse of `stack_part`; ``shape`` is the whole value's local shape."""
    low, high = _bounds(split, axis)
    rest = (*shape[: split.dim], split.outer, split.inner, *shape[split.dim + 1 :])
    part = row.reshape(-(-split.units // axis.size), *rest)[: high - low]
    return _fold(part.movedim(0, split.dim + 1), split.dim).contiguous()


def whole_shape(part: Tensor, split: Split) -> tuple[int, ...]:
    return (*part.shape[: split.dim], split.outer * split.units * split.inner, *part.shape[split.dim + 1 :])


def all_gather(x: Tensor, split: Split, axis: Axis) -> Tensor:
    """The whole value from every rank's shard."""
    shape = whole_shape(x, split)
    row = _carried(stack_part(x, split, axis))
    return unstack_parts(_restored(gather_rows(row, axis), x), split, axis, shape)


def reduce_scatter(x: Tensor, split: Split, axis: Axis) -> Tensor:
    """This rank's shard of the sum; 16-bit floats are summed in fp32."""
    term = x.to(sum_dtype(x.dtype))
    rows = _carried(stack_parts(term, split, axis).reshape(-1))
    row = reduce_rows(rows, axis)
    return unstack_part(_restored(row, term), split, axis, tuple(x.shape)).to(x.dtype)


def all_to_all(x: Tensor, src: Split, dst: Split, axis: Axis) -> Tensor:
    """From the shard ``src`` to the shard ``dst`` of one value, cut along two dimensions."""
    n = axis.size
    low, high = _bounds(src, axis)
    held = high - low
    mine = _unfold(x, src, held)  # cut this along dst: every rank gets its part of what we hold
    shift = 2 if dst.dim > src.dim else 0
    view = Split(dst.dim + shift, dst.outer, dst.units, dst.inner)
    pieces = []
    for i in range(n):
        a, b = chunk_bounds(dst.units, n, i)
        pieces.append(_fold(_unfold(mine, view, dst.units).narrow(view.dim + 1, a, b - a), view.dim).contiguous())
    a, b = _bounds(dst, axis)
    shape = list(x.shape)
    shape[dst.dim] = dst.outer * (b - a) * dst.inner
    sizes = []
    for i in range(n):
        c, d = chunk_bounds(src.units, n, i)
        sizes.append([*shape[: src.dim], src.outer, d - c, src.inner, *shape[src.dim + 1 :]])
    sent = [_carried(p).reshape(-1) for p in pieces]
    row = sent[0].new_empty(0)
    double = 2 if x.is_complex() else 1
    counts = [_numel(s) * double for s in sizes]
    received = row.new_empty(sum(counts))
    dist.all_to_all_single(received, torch.cat(sent), counts, [p.numel() for p in sent], group=axis.group)
    parts = []
    for chunk, size in zip(received.split(counts), sizes, strict=True):
        if x.is_complex():
            chunk = chunk.reshape(-1, 2)
        parts.append(_restored(chunk, x).reshape(size))
    return _fold(torch.cat(parts, src.dim + 1), src.dim)


def exchange_counts(counts: Tensor, widths: Sequence[int], axis: Axis) -> Tensor:
    """``widths[i]`` of the numbers to rank i; what comes of every rank, one after the other."""
    mine = widths[axis.index]
    received = counts.new_empty(mine * axis.size)
    dist.all_to_all_single(received, counts, [mine] * axis.size, list(widths), group=axis.group)
    return received


def _exchanged(x: Tensor, sent: list[int], received: list[int], axis: Axis) -> Tensor:
    buffer = _carried(x)
    width = _numel(list(buffer.shape[1:]))
    out = buffer.new_empty((sum(received), *buffer.shape[1:]))
    come, go = ([n * width for n in rows] for rows in (received, sent))
    dist.all_to_all_single(out.view(-1), buffer.view(-1), come, go, group=axis.group)
    return _restored(out, x)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int], axis: Axis) -> Tensor:
        ctx.way = (received, sent, axis)
        return _exchanged(x, sent, received, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _exchanged(grad, *ctx.way), None, None, None


def exchange_rows(x: Tensor, sent: Sequence[int], received: Sequence[int], axis: Axis) -> Tensor:
    """Rows of ``x``, ``sent[i]`` of them to rank i, in order; from rank i come ``received[i]``.  Gradients go back."""
    made: Tensor = _Exchange.apply(x, list(sent), list(received), axis)
    return made


def _numel(size: list[int]) -> int:
    out = 1
    for n in size:
        out *= n
    return out


def move(x: Tensor, axis: Axis, src: LocalState, dst: LocalState) -> Tensor:
    """The value in ``dst`` from the value in ``src``; no gradient."""
    if src == dst or axis.size == 1:
        return x
    if isinstance(src, Split):
        if dst == P:
            return pad_part(x, src, axis)
        if isinstance(dst, Split):
            if dst.dim == src.dim:  # two cuts of one dimension overlap in no regular way: through the whole value
                return take_part(all_gather(x, src, axis), dst, axis).contiguous()
            return all_to_all(x, src, dst, axis)
        return all_gather(x, src, axis)
    if src == P:
        return reduce_scatter(x, dst, axis) if isinstance(dst, Split) else all_reduce(x, axis)
    if isinstance(dst, Split):
        return take_part(x, dst, axis).contiguous()
    if dst == P:
        return x if axis.index == 0 else torch.zeros_like(x)
    return x


def dual_state(state: LocalState) -> LocalState:
    return state if isinstance(state, Split) else dual(state)  # type: ignore[return-value]


class _Convert(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, src: LocalState, dst: LocalState) -> Tensor:
        ctx.step = (axis, src, dst)
        y = move(x, axis, src, dst)
        return x.view_as(x) if y is x else y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        axis, src, dst = ctx.step
        return move(grad, axis, dual_state(dst), dual_state(src)), None, None, None

    @staticmethod
    def spmd_typecheck(*, x: Any, axis: Axis, src: LocalState, dst: LocalState) -> Any:
        """What the public checker spmd_types, where it is on, takes for the type of the result."""
        return spmd_type(x, axis, src, dst)


def spmd_type(x: Any, axis: Axis, src: LocalState, dst: LocalState) -> Any:
    """The type, in the words of the spmd_types package, of ``x`` moved from ``src`` to ``dst``.  Raises its errors."""
    import spmd_types
    from spmd_types import rules

    cut = isinstance(src, Split), isinstance(dst, Split)
    ends: dict[str, Any] = {
        "src": spmd_types.S(src.dim) if isinstance(src, Split) else getattr(spmd_types, src),
        "dst": spmd_types.S(dst.dim) if isinstance(dst, Split) else getattr(spmd_types, dst),
    }
    if cut == (True, True):
        return rules.all_to_all(x, axis.name, **ends)
    if src == P:
        return (rules.reduce_scatter if cut[1] else rules.all_reduce)(x, axis.name, **ends)
    if cut[0] and dst != P:
        return rules.all_gather(x, axis.name, **ends)
    return rules.convert(x, axis.name, **ends)


def convert(x: Tensor, axis: Axis, src: LocalState, dst: LocalState) -> Tensor:
    """``x`` moved from ``src`` to ``dst`` on ``axis``; its gradient takes the way back between the dual states."""
    if axis.size == 1:
        return x
    if x.requires_grad and torch.is_grad_enabled():
        converted: Tensor = _Convert.apply(x, axis, src, dst)
        return converted
    return move(x, axis, src, dst)


__all__ = ["Axis", "I", "P", "R", "Split", "Step", "convert", "move"]
