"""Between the cut of a factor and the cut of a dimension: the same rows, seen from the op and from the tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from autopar.layout import Layout, S, Shape, State, bounds, canonical, fraction, middle, nests
from autopar.rules.notation import Dims


class Cut(NamedTuple):
    """A cut of a factor: seen as (m, N, u), N is cut as torch.chunk does.  As `layout.S`, without a dimension."""

    m: int
    N: int
    u: int


def dimension_cut(dims: Dims, factor: str, cut: Cut, sizes: Mapping[str, int]) -> tuple[int, int, int, int] | None:
    """The cut of ``factor`` on the tensor whose dimensions are ``dims``: (dim, m, N, u), or None without the factor."""
    for d, names in enumerate(dims):
        if factor in names:
            k = names.index(factor)
            outer = math.prod(sizes[f] for f in names[:k])
            inner = math.prod(sizes[f] for f in names[k + 1 :])
            return d, outer * cut.m, cut.N, cut.u * inner
    return None


def factor_cut(dims: Dims, state: S, n: int, sizes: Mapping[str, int]) -> tuple[str, Cut] | None:
    """The factor that ``state`` cuts on an axis of ``n`` ranks, and its cut; None where no single factor is cut."""
    names = dims[state.dim]
    outer = 1
    for k, factor in enumerate(names):
        size, inner = sizes[factor], math.prod(sizes[f] for f in names[k + 1 :])
        if state.m % outer == 0 and size % (state.m // outer) == 0:
            m = state.m // outer
            rest = size // m
            if state.N % n == 0:
                if rest % n == 0:
                    return factor, Cut(m, rest, 1)
            elif state.u % inner == 0 and m * state.N * (state.u // inner) == size:
                return factor, Cut(m, state.N, state.u // inner)
        outer *= size
    return None


def relabel(layout: Layout, src: Dims, dst: Dims, axis_sizes: Sequence[int], sizes: Mapping[str, int]) -> Layout | None:
    """``layout`` of a tensor with dimensions ``src``, seen with dimensions ``dst``; None where it cannot be."""
    out: list[State] = []
    for state, n in zip(layout, axis_sizes, strict=True):
        if not isinstance(state, S):
            out.append(state)
            continue
        found = factor_cut(src, state, n, sizes)
        if found is None:
            return None
        image = dimension_cut(dst, *found, sizes)
        if image is None:
            return None
        out.append(canonical(S(*image), n))
    return tuple(out)


def local_size(
    size: int, cuts: Sequence[tuple[int, Cut]], axis_sizes: Sequence[int], coordinates: Sequence[int]
) -> int:
    """Rows of a factor that the rank holds; ``cuts`` are (axis, cut)."""
    for axis, cut in cuts:
        part, whole = fraction(S(0, *cut), axis_sizes[axis], coordinates[axis])
        size = size * part // whole
    return size


def mean_position(
    size: int, cuts: Sequence[tuple[int, Cut]], axis_sizes: Sequence[int], coordinates: Sequence[int]
) -> float:
    """Of the rows of a factor that the rank holds, from 0; ``cuts`` are (axis, cut), and leave it some."""
    mean = (size - 1) / 2
    for axis, cut in cuts:
        state, n = S(0, *cut), axis_sizes[axis]
        units = middle(state, n)
        low, high = bounds(state, n, coordinates[axis])
        mean += ((low + high - 1) - (units - 1)) / 2 * (size // (cut.m * units))
    return mean


def cuts_nest(size: int, cuts: Sequence[tuple[int, Cut]], axis_sizes: Sequence[int]) -> bool:
    return len(cuts) < 2 or nests([(*cut, axis_sizes[axis]) for axis, cut in cuts], size)


def common_refinement(a: Shape, b: Shape) -> tuple[Dims, Dims, dict[str, int], frozenset[str]]:
    """Factors of both shapes of a view: (8, 6) -> (4, 12) is (f0 f1) f2 -> f0 (f1 f2).

    Where two shapes share no divisor the dimensions up to the next common boundary are opaque, returned as the last
    item; they may not be split.
    """
    left: list[list[str]] = [[] for _ in a]
    right: list[list[str]] = [[] for _ in b]
    sizes: dict[str, int] = {}
    opaque: set[str] = set()

    def new(kind: str, size: int) -> str:
        name = f"{kind}{len(sizes)}"
        sizes[name] = size
        return name

    i = j = 0
    x, y = (a[0] if a else 1), (b[0] if b else 1)
    while True:
        while x == 1 and i < len(a) - 1:
            i += 1
            x = a[i]
        while y == 1 and j < len(b) - 1:
            j += 1
            y = b[j]
        if x == 1 or y == 1:
            break
        common = math.gcd(x, y)
        if common > 1:
            factor = new("f", common)
            left[i].append(factor)
            right[j].append(factor)
            x //= common
            y //= common
            continue
        for side, k, size in ((left, i, x), (right, j, y)):
            factor = new("o", size)
            side[k].append(factor)
            opaque.add(factor)
        while x != y:
            side, shape = (left, a) if x < y else (right, b)
            if x < y:
                i += 1
                k = i
                x *= shape[k]
            else:
                j += 1
                k = j
                y *= shape[k]
            factor = new("o", shape[k])
            side[k].append(factor)
            opaque.add(factor)
        x = y = 1
    return tuple(map(tuple, left)), tuple(map(tuple, right)), sizes, frozenset(opaque)
