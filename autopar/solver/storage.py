"""How a weight may be kept between steps: as what torch's DTensor can describe."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

from autopar.layout import I, Layout, S, Shape, State, canonical, is_even, is_valid, split_factor


def storable(shape: Shape, layout: Layout, sizes: Sequence[int]) -> bool:
    """Whether a DTensor can have this layout.

    Axis by axis each cuts what those before it have left: plainly, or, on one axis of each dimension, evenly in groups
    (a strided shard).  Where later axes cut that dimension too the groups are theirs.  Everywhere else the weight is
    whole.
    """
    if any(not isinstance(state, S) and state != I for state in layout):
        return False
    strided: set[int] = set()
    for axis, state in enumerate(layout):
        if not isinstance(state, S):
            continue
        groups = split_factor(layout, axis, sizes)
        if groups > 1:
            later = [b for b in range(axis + 1, len(layout)) if isinstance(s := layout[b], S) and s.dim == state.dim]
            theirs = not later or groups == math.prod(sizes[b] for b in later)
            if state.dim in strided or not theirs or not is_even(state, sizes[axis]):
                return False
            strided.add(state.dim)
        elif state.u != 1:
            return False
    return True


def is_plain(layout: Layout, sizes: Sequence[int]) -> bool:
    """Whether a storable layout needs no strided cut."""
    return all(split_factor(layout, a, sizes) == 1 for a, state in enumerate(layout) if isinstance(state, S))


def storage_states(shape: Shape, used: Iterable[Layout], sizes: Sequence[int], *, inside: bool = False) -> list[Layout]:
    """Layouts to store a weight of ``shape`` in, beside those it is used in: any axis on any dimension.

    Cuts that do not divide are offered only for a weight that no cut of that axis divides.  inside: any one axis on
    which a use is whole also within the cuts of that use, whatever the order of axes.
    """
    even = [any(d % n == 0 for d in shape) for n in sizes]
    out: list[Layout] = []
    for dims in itertools.product(range(-1, len(shape)), repeat=len(sizes)):
        layout: list[State] = []
        taken = [1] * len(shape)
        for axis, (d, n) in enumerate(zip(dims, sizes, strict=True)):
            if d < 0:
                layout.append(I)
                continue
            rows = shape[d] // taken[d]
            if shape[d] % taken[d] or rows < 2 or (rows % n and (even[axis] or -(-rows // n) * (n - 1) >= rows)):
                break
            layout.append(canonical(S(d, taken[d], rows, 1), n))
            taken[d] *= n
        else:
            if is_valid(shape, tuple(layout), sizes) and storable(shape, tuple(layout), sizes):
                out.append(tuple(layout))
    if inside:
        for use in dict.fromkeys(used):
            out += _within(shape, use, sizes)
    return out


def _within(shape: Shape, used: Layout, sizes: Sequence[int]) -> list[Layout]:
    """``used`` with one more axis, which cuts what the others leave of a dimension."""
    out = []
    for axis, n in enumerate(sizes):
        for dim, size in enumerate(shape):
            taken = max(
                (s.m * m for s, m in zip(used, sizes, strict=True) if isinstance(s, S) and s.dim == dim), default=1
            )
            if isinstance(used[axis], S) or size % (taken * n):
                continue
            layout = (*used[:axis], S(dim, taken, size // taken, 1), *used[axis + 1 :])
            if is_valid(shape, layout, sizes) and storable(shape, layout, sizes):
                out.append(layout)
    return out
