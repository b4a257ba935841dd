"""How a weight may be kept between steps: as what torch's DTensor can describe."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from autopar.layout import I, Layout, S, Shape, State, canonical, is_even, is_valid


def storable(shape: Shape, layout: Layout, sizes: Sequence[int]) -> bool:
    """Whether a DTensor can have this layout.

    On each dimension either plain cuts, nested in the order of the mesh's axes and uneven on the last only, or one
    strided cut that divides; everywhere else the weight is whole.
    """
    if any(not isinstance(state, S) and state != I for state in layout):
        return False
    cuts = _cuts(layout, sizes)
    return all(_plain(c, shape[d]) or (len(c) == 1 and is_even(*c[0])) for d, c in cuts.items())


def is_plain(shape: Shape, layout: Layout, sizes: Sequence[int]) -> bool:
    """Whether a storable layout needs no strided cut."""
    return all(_plain(c, shape[d]) for d, c in _cuts(layout, sizes).items())


def _cuts(layout: Layout, sizes: Sequence[int]) -> dict[int, list[tuple[S, int]]]:
    """Cuts with their axis' size, by dimension."""
    out: dict[int, list[tuple[S, int]]] = {}
    for state, n in zip(layout, sizes, strict=True):
        if isinstance(state, S):
            out.setdefault(state.dim, []).append((state, n))
    return out


def _plain(cuts: Sequence[tuple[S, int]], size: int) -> bool:
    m = 1
    for k, (state, n) in enumerate(cuts):
        if state.m != m or state.u != 1 or size // m != state.N or (k < len(cuts) - 1 and state.N % n):
            return False
        m *= n
    return True


def storage_states(shape: Shape, used: Iterable[Layout], sizes: Sequence[int]) -> list[Layout]:
    """Layouts to store a weight of ``shape`` in, beside those it is used in: any axis on any dimension.

    Cuts that do not divide are offered only for a weight that no cut of that axis divides.
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
    return out
