"""Look-ups in, and writes to, a dimension whose rows are split over ranks.

A look-up gives zero for rows that other ranks hold: a term of a sum.  A write drops what belongs to other ranks: it
goes to one more row, which is cut off again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from autopar.runtime.kernels.parts import Part, local_index

Parts = Mapping[str, Part]


def _local(index: Tensor, part: Part) -> tuple[Tensor, Tensor]:
    """`local_index`, where negative rows count from the end."""
    index = index.long()
    return local_index(torch.where(index < 0, index + part.size, index), part)


def _seen(out: Tensor, inside: Tensor) -> Tensor:
    return torch.where(inside, out, torch.zeros_like(out))


def _one_more(x: Tensor, dim: int) -> Tensor:
    """``x`` with a row of zeros at the end of ``dim``."""
    shape = list(x.shape)
    shape[dim] = 1
    return torch.cat([x, x.new_zeros(shape)], dim)


# ------------------------------------------------------------------------------------------------ look-ups


def index_parts(x: Tensor, indices: Sequence[Tensor | None], *, parts: Parts) -> Tensor:
    """A term of ``x[indices]``; ``parts``: of the indexed dimension d under ``i{d}``."""
    local, inside = list(indices), torch.ones((), dtype=torch.bool, device=x.device)
    for d, index in enumerate(indices):
        part = parts.get(f"i{d}")
        if index is None or part is None or not part.cuts:
            continue
        local[d], here = _local(index, part)
        inside = inside & here
        if not x.shape[d]:
            x = _one_more(x, d)
    out = torch.ops.aten.index.Tensor(x, local)
    places = [d for d, index in enumerate(indices) if index is not None]
    together = places[-1] - places[0] == len(places) - 1
    behind = x.dim() - len(places) - (places[0] if together else 0)  # dimensions after those of the indices
    return _seen(out, inside.reshape(*inside.shape, *[1] * behind))


def index_select_parts(x: Tensor, dim: int, index: Tensor, *, parts: Parts) -> Tensor:
    """A term of ``index_select(x, dim, index)``."""
    dim %= x.dim()
    local, inside = _local(index.reshape(-1), parts["v"])
    out = (x if x.shape[dim] else _one_more(x, dim)).index_select(dim, local)
    return _seen(out, inside.reshape(-1, *[1] * (x.dim() - dim - 1)))


def gather_parts(x: Tensor, dim: int, index: Tensor, sparse_grad: bool = False, *, parts: Parts) -> Tensor:
    """A term of ``gather(x, dim, index)``."""
    dim %= x.dim()
    local, inside = local_index(index, parts["v"])
    return _seen((x if x.shape[dim] else _one_more(x, dim)).gather(dim, local), inside)


# ------------------------------------------------------------------------------------------------ writes


def _written(x: Tensor, dim: int, index: Tensor, parts: Parts, write: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """``write(x, index)`` on this rank's rows."""
    dim %= x.dim()
    rows = x.shape[dim]
    local, inside = _local(index, parts["v"])
    return write(_one_more(x, dim), torch.where(inside, local, rows)).narrow(dim, 0, rows)


def scatter_parts(x: Tensor, dim: int, index: Tensor, src: Tensor | float, *, parts: Parts) -> Tensor:
    return _written(x, dim, index, parts, lambda y, i: torch.scatter(y, dim, i, src))


def scatter_add_parts(x: Tensor, dim: int, index: Tensor, src: Tensor, *, parts: Parts) -> Tensor:
    return _written(x, dim, index, parts, lambda y, i: y.scatter_add(dim, i, src))


def scatter_reduce_parts(
    x: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, *, include_self: bool = True, parts: Parts
) -> Tensor:
    return _written(x, dim, index, parts, lambda y, i: y.scatter_reduce(dim, i, src, reduce, include_self=include_self))


def index_add_parts(x: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1, parts: Parts) -> Tensor:
    return _written(x, dim, index, parts, lambda y, i: y.index_add(dim, i, source, alpha=alpha))


def index_copy_parts(x: Tensor, dim: int, index: Tensor, source: Tensor, *, parts: Parts) -> Tensor:
    return _written(x, dim, index, parts, lambda y, i: y.index_copy(dim, i, source))


def index_fill_parts(x: Tensor, dim: int, index: Tensor, value: float | Tensor, *, parts: Parts) -> Tensor:
    return _written(x, dim, index, parts, lambda y, i: y.index_fill(dim, i, value))


def index_put_parts(
    x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False, *, parts: Parts
) -> Tensor:
    """``x[indices] = values``; ``parts`` as of `index_parts`."""
    local, out, cut = list(indices), x, []
    for d, index in enumerate(indices):
        part = parts.get(f"i{d}")
        if index is None or part is None or not part.cuts:
            continue
        place, inside = _local(index, part)
        local[d] = torch.where(inside, place, x.shape[d])
        out = _one_more(out, d)
        cut.append(d)
    out = torch.ops.aten.index_put.default(out, local, values, accumulate)
    for d in cut:
        out = out.narrow(d, 0, x.shape[d])
    return out
