"""Streamed SUMMA: a linear whose operands are both split along the contraction, which is walked in slices.

One axis may split the input's rows and, along the contraction, the weight; another one the weight's rows and, along
the contraction, the input.  The rank that owns a slice sends it to the others of its axis while the slice before is
multiplied, so that no operand is ever held whole: of each at most this slice and the next.  The backward pass walks
again, and each slice's gradient is summed where the slice lives.  Source: SUMMA (van de Geijn and Watts 1997), as
Optimus (arXiv 2104.05343) trains with it; rows may be split further (2.5D, Tesseract, arXiv 2105.14500).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from autopar.runtime.collectives import Axis, start_broadcast, start_reduce, sum_dtype
from autopar.runtime.kernels.parts import AxisCut, Part, positions


class Run(NamedTuple):
    """Columns of a shard: ``times`` many times ``length`` of them, each beginning ``period`` after the one before."""

    start: int
    length: int
    period: int
    times: int


Columns: TypeAlias = tuple[Run, ...]
Ints: TypeAlias = tuple[tuple[int, int, int, int, int], ...]  # of each cut (m, N, u), ranks, place: WALKED for all
WALKED = -1


class Slice(NamedTuple):
    """``width`` rows of the contraction that are one rank's of the input and one's of the weight: whose, and where."""

    width: int
    owners: tuple[int, int]
    columns: tuple[Columns, Columns]


class Walk(NamedTuple):
    """axes: along which the input, and the weight, are walked.  widths: columns of this rank's shards of them."""

    slices: tuple[Slice, ...]
    axes: tuple[Axis | None, Axis | None]
    widths: tuple[int, int]


# --------------------------------------------------------------------------------------------- the walk


@lru_cache(maxsize=1024)
def slices(size: int, x: Ints, w: Ints) -> tuple[Slice, ...]:
    """The common refinement of two ways to cut ``size`` rows of the contraction, in the order of the rows."""
    owner, column = torch.full((size,), -1), torch.full((size,), -1)
    shards = _shards(size, w)
    for i, rows in enumerate(shards):
        owner[rows], column[rows] = i, torch.arange(len(rows))
    found = []
    for j, rows in enumerate(_shards(size, x)):
        for i in range(len(shards)):
            mine = (owner[rows] == i).nonzero().flatten()
            if len(mine):
                columns = _runs(mine.tolist()), _runs(column[rows[mine]].tolist())
                found.append((int(rows[mine[0]]), Slice(len(mine), (j, i), columns)))
    return tuple(s for _, s in sorted(found))


def _shards(size: int, cuts: Ints) -> list[Tensor]:
    """The rows that each rank of the axis which is walked holds."""
    ranks = next((n for *_, n, at in cuts if at == WALKED), 1)

    def part(k: int) -> Part:
        return Part(size, tuple(AxisCut(Axis("", n, k if at == WALKED else at), *cut) for *cut, n, at in cuts))

    return [positions(part(k)) for k in range(ranks)]


def _runs(columns: Sequence[int]) -> Columns:
    """Ascending columns as few runs."""
    ends: list[list[int]] = []  # of each run of neighbours: where it starts and how long it is
    for c in columns:
        if ends and c == sum(ends[-1]):
            ends[-1][1] += 1
        else:
            ends.append([c, 1])
    out: list[Run] = []
    for start, length in ends:
        last = out[-1] if out else None
        if (
            last is not None
            and last.length == length
            and (last.times == 1 or start == last.start + last.times * last.period)
        ):
            period = (start - last.start) // last.times
            out[-1] = last._replace(period=period, times=last.times + 1)
        else:
            out.append(Run(start, length, length, 1))
    return tuple(out)


def walk(x: Part, w: Part, shared: Part) -> Walk:
    """How an input and a weight that hold these parts of the contraction are walked; ``shared``: what both hold of it
    together with the other ranks of the axes that are walked."""
    known = [cut.axis for cut in shared.cuts]
    a, b = (next((c.axis for c in part.cuts if all(c.axis is not k for k in known)), None) for part in (x, w))

    def ints(part: Part, walked: Axis | None) -> Ints:
        return tuple((c.m, c.N, c.u, c.axis.size, WALKED if c.axis is walked else c.axis.index) for c in part.cuts)

    found = slices(shared.size, ints(x, a), ints(w, b))
    mine = [sum(s.width for s in found if axis is None or s.owners[k] == axis.index) for k, axis in enumerate((a, b))]
    return Walk(found, (a, b), (mine[0], mine[1]))


# --------------------------------------------------------------------------------------------- slices of shards


def _views(shard: Tensor, columns: Columns) -> Iterator[Tensor]:
    """[rows, times, length] of each run."""
    for start, length, period, times in columns:
        span = (times - 1) * period + length
        yield shard.narrow(1, start, span).unfold(1, length, period)


def _cut_out(shard: Tensor, columns: Columns) -> Tensor:
    """The columns, contiguous; the shard itself where they are all of it."""
    rows = shard.shape[0]
    parts = [v.reshape(rows, run.length * run.times) for v, run in zip(_views(shard, columns), columns, strict=True)]
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts, 1)


def _put(shard: Tensor, columns: Columns, value: Tensor) -> None:
    low = 0
    for view, run in zip(_views(shard, columns), columns, strict=True):
        width = run.length * run.times
        view.copy_(value.narrow(1, low, width).unflatten(1, (run.times, run.length)))
        low += width


def _start(shard: Tensor, s: Slice, k: int, axis: Axis | None) -> tuple[Tensor, Any]:
    """(the slice of the ``k``-th operand, what to wait for until it is there)."""
    if axis is None:
        return _cut_out(shard, s.columns[k]), None
    owner = s.owners[k]
    piece = _cut_out(shard, s.columns[k]) if axis.index == owner else shard.new_empty(shard.shape[0], s.width)
    return piece, start_broadcast(piece, axis, owner)


def _travel(way: Walk, x: Tensor | None, w: Tensor | None) -> Iterator[tuple[Slice, Any, Any]]:
    """Each slice of both operands, of those that are given; the next is on its way while one is used.

    Every rank of an axis starts the same collectives in the same order.  The user forgets a slice before it asks for
    the next: then there are two at most.
    """

    def start(s: Slice) -> list[tuple[Any, Any]]:
        return [(None, None) if shard is None else _start(shard, s, k, way.axes[k]) for k, shard in enumerate((x, w))]

    coming = start(way.slices[0]) if way.slices else []
    for t, s in enumerate(way.slices):
        for _, work in coming:
            if work is not None:
                work.wait()
        here = [piece for piece, _ in coming]
        coming = start(way.slices[t + 1]) if t + 1 < len(way.slices) else []
        yield s, *here


def _hand_over(
    part: Tensor, axis: Axis | None, owner: int, shard: Tensor, columns: Columns
) -> Callable[[], None] | None:
    """Put a term of a slice's gradient where the slice lives; what is returned ends it."""
    if axis is None:
        _put(shard, columns, part)
        return None
    buffer, work = start_reduce(part, axis, owner)

    def finish() -> None:
        if work is not None:
            work.wait()
        if axis.index == owner:
            _put(shard, columns, buffer)

    return finish


# --------------------------------------------------------------------------------------------- the product


def _multiply(x: Tensor, w: Tensor, bias: Tensor | None, way: Walk) -> Tensor:
    """``x w^T + bias`` of x [rows, k] and w [n, k]; terms of 16-bit floats are added up in fp32."""
    total: Tensor | None = None
    for _, a, b in _travel(way, x, w):
        if total is None:
            total = torch.mm(a, b.t()) if bias is None else torch.addmm(bias, a, b.t())
        elif sum_dtype(x.dtype) is x.dtype:
            total.addmm_(a, b.t())
        else:
            total = total.to(sum_dtype(x.dtype)).add_(torch.mm(a, b.t()))
        del a, b
    if total is None:  # this rank's part of the contraction is empty, and so is that of all that it talks to
        total = x.new_zeros(x.shape[0], w.shape[0])
        return total if bias is None else total.add_(bias)
    return total.to(x.dtype)


class _Stream(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, way: Walk) -> Tensor:
        ctx.way, ctx.shapes = way, (x.shape, w.shape)
        needed = ctx.needs_input_grad
        ctx.save_for_backward(x if needed[1] else None, w if needed[0] else None)
        return _multiply(x, w, bias, way)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x, w), way = ctx.saved_tensors, ctx.way
        dx, dw = (
            grad.new_empty(shape) if needed else None
            for shape, needed in zip(ctx.shapes, ctx.needs_input_grad, strict=False)
        )
        ending: list[Callable[[], None] | None] = []
        for s, a, b in _travel(way, x, w):
            started = []
            if dx is not None:
                started.append(_hand_over(torch.mm(grad, b.conj()), way.axes[0], s.owners[0], dx, s.columns[0]))
            if dw is not None:
                started.append(_hand_over(torch.mm(grad.t(), a.conj()), way.axes[1], s.owners[1], dw, s.columns[1]))
            del a, b
            _finish(ending)
            ending = started
        _finish(ending)
        return dx, dw, grad.sum(0) if ctx.needs_input_grad[2] else None, None


def _finish(ending: Sequence[Callable[[], None] | None]) -> None:
    for finish in ending:
        if finish is not None:
            finish()


def linear_stream(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, parts: Mapping[str, Part], pairs: Mapping[str, Part]
) -> Tensor:
    """``F.linear`` of shards: x [..., k of this rank], weight [n, k of this rank], each with its own part of k.

    pairs: "n": the part of k that x holds, where an axis splits n and so x along k; a factor of rows: the part that
    the weight holds.  Returns [..., n], a term of the sum over axes that split k itself.  Every rank of the axes that
    are walked takes part, also with empty shards.  Raises ValueError where shards are not those of ``parts``.
    """
    shared = parts["k"]
    rows = next((part for factor, part in pairs.items() if factor != "n"), shared)
    way = walk(pairs.get("n", shared), rows, shared)
    if (x.shape[-1], weight.shape[-1]) != way.widths:
        raise ValueError(
            f"a streamed product of {list(x.shape)} and {list(weight.shape)}: by its parts this rank holds "
            f"{way.widths[0]} columns of the input and {way.widths[1]} of the weight"
        )
    flat = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias)):
        y: Tensor = _Stream.apply(flat, weight, bias, way)
    else:
        y = _multiply(flat, weight, bias, way)
    return y.reshape(*x.shape[:-1], weight.shape[0])
