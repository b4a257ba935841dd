"""Experts: rows that each go through the weights of one expert of several, with rows or experts split over ranks.

What is done to a row is a *body*, steps that work row by row, each (name, arguments, keyword arguments):

    linear  (rows, w, transposed)      times the matrix of the row's expert: weight w is [e, n, k], or [e, k, n]
    take    (w,)                       the vector of the row's expert: weight w is [e, n]
    piece   (rows, k, g, strided)      the k-th of g equal pieces of the columns, or every g-th column from k on
    aten.*  any op that works element by element

``"%0"`` among the arguments stands for the op's own rows, ``"%3"`` for what the third step made.  Rows are sorted by
expert once and multiplied expert by expert: no row has a copy of its expert's weights.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.runtime.collectives import exchange_counts, exchange_rows
from autopar.runtime.kernels.parts import Part, local_index, on_rank, positions

Step = tuple[str, Sequence[Any], Mapping[str, Any]]
LINEAR, TAKE, PIECE = "linear", "take", "piece"


def experts(x: Tensor, ids: Tensor, weights: Sequence[Tensor], body: Sequence[Step], spare: bool = False) -> Tensor:
    """Every row of ``x`` [s, h] through ``body`` with the weights of its expert.

    ids: int [s]; a negative one counts from the last expert, as an index does.  spare: rows of experts that there are
    not become zero; else they raise IndexError.
    """
    return _by_expert(x, _known(ids, weights[0].shape[0], spare), weights, body)


def experts_parts(
    x: Tensor,
    ids: Tensor,
    weights: Sequence[Tensor],
    body: Sequence[Step],
    spare: bool = False,
    *,
    parts: Mapping[str, Part],
) -> Tensor:
    """`experts` where every rank has all rows and some experts: rows of other experts are zero, a term of a sum."""
    local, inside = local_index(_known(ids, parts["e"].size, spare), parts["e"])
    return _by_expert(x, torch.where(inside, local, weights[0].shape[0]), weights, body)


def experts_exchange(
    x: Tensor,
    ids: Tensor,
    weights: Sequence[Tensor],
    body: Sequence[Step],
    spare: bool = False,
    *,
    parts: Mapping[str, Part],
    pairs: Mapping[str, Part],
) -> Tensor:
    """`experts` where ranks have other rows and other experts: rows go to the rank of their expert and come back."""
    held = pairs["s"]
    axis = held.cuts[0].axis
    of_rank = [positions(on_rank(held, axis, r), ids.device) for r in range(axis.size)]
    place = torch.empty(held.size + 1, dtype=torch.long, device=ids.device)  # of an expert among all, rank by rank
    place[torch.cat(of_rank)] = torch.arange(held.size, device=ids.device)
    place[held.size] = held.size
    key = place[_known(ids, held.size, spare)]
    counts = _counts(key, held.size)
    widths = [len(r) for r in of_rank]
    mine = widths[axis.index]
    arriving = exchange_counts(counts.to(ids.dtype), widths, axis).reshape(axis.size, mine)
    sent, received = [int(c.sum()) for c in counts.split(widths)], arriving.sum(1).tolist()
    order = key.argsort(stable=True)[: sum(sent)]
    got = exchange_rows(x.index_select(0, order), sent, received, axis)
    expert = torch.arange(mine, device=ids.device).repeat(axis.size).repeat_interleave(arriving.flatten())
    back = exchange_rows(_by_expert(got, expert, weights, body), received, sent, axis)
    return back.new_zeros(x.shape[0], back.shape[1]).index_copy(0, order, back)


def _known(ids: Tensor, count: int, spare: bool) -> Tensor:
    """Experts of rows, ``count`` for those that there are not."""
    ids = torch.where(ids < 0, ids + count, ids).long()
    strange = (ids < 0) | (ids >= count)
    if not spare and bool(strange.any()):
        raise IndexError(f"expert {int(ids[strange][0])} of a row is not one of {count}")
    return torch.where(strange, count, ids)


def _counts(key: Tensor, count: int) -> Tensor:
    """Rows of each expert, int64 [count]; those of none are left out."""
    return torch.bincount(key, minlength=count + 1)[:count]


def _by_expert(x: Tensor, key: Tensor, weights: Sequence[Tensor], body: Sequence[Step]) -> Tensor:
    """Rows through the weights of experts ``key``; rows whose key is the number of experts are zero."""
    counts = _counts(key, weights[0].shape[0])
    rows = counts.tolist()
    order = key.argsort(stable=True)[: sum(rows)]
    values = [x.index_select(0, order)]

    def operand(arg: Any) -> Any:
        return values[int(arg[1:])] if isinstance(arg, str) and arg.startswith("%") else arg

    for name, args, kwargs in body:
        first, *rest = map(operand, args)
        if name == LINEAR:
            made: Tensor = _Product.apply(first, weights[rest[0]], rows, rest[1])
            values.append(made)
        elif name == TAKE:
            values.append(weights[first].index_select(0, key.index_select(0, order)))
        elif name == PIECE:
            k, g, strided = rest
            wide = first.unflatten(-1, (-1, g) if strided else (g, first.shape[-1] // g))
            values.append(wide.select(-1 if strided else -2, k))
        else:
            _, op, overload = name.split(".")
            values.append(getattr(getattr(torch.ops.aten, op), overload)(first, *rest, **kwargs))
    y = values[-1]
    return y.new_zeros(x.shape[0], y.shape[1]).index_copy(0, order, y)


class _Product(torch.autograd.Function):
    """Rows, sorted by expert, times their experts' matrices.

    Every rank keeps each weight once, whatever rows and experts it has: a weight that was gathered is gathered again
    where the backward pass needs it, by all ranks together.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, rows: Sequence[int], transposed: bool) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight if ctx.needs_input_grad[0] else None)
        ctx.rows, ctx.transposed, ctx.shape = rows, transposed, weight.shape
        out = x.new_empty(x.shape[0], weight.shape[2 if transposed else 1])
        for e, low, high in _spans(rows):
            torch.mm(x[low:high], weight[e] if transposed else weight[e].t(), out=out[low:high])
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad_x = grad_weight = None
        if weight is not None:
            grad_x = grad.new_empty(grad.shape[0], ctx.shape[1 if ctx.transposed else 2])
            for e, low, high in _spans(ctx.rows):
                torch.mm(grad[low:high], weight[e].t() if ctx.transposed else weight[e], out=grad_x[low:high])
        if x is not None:
            grad_weight = grad.new_zeros(ctx.shape)
            for e, low, high in _spans(ctx.rows):
                a, b = (x, grad) if ctx.transposed else (grad, x)
                torch.mm(a[low:high].t(), b[low:high], out=grad_weight[e])
        return grad_x, grad_weight, None, None


def _spans(rows: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(expert, first row, last) of those that have rows."""
    ends = list(itertools.accumulate(rows))
    return ((e, end - n, end) for e, (n, end) in enumerate(zip(rows, ends, strict=True)) if n)


__all__ = ["experts", "experts_exchange", "experts_parts"]
