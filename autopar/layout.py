"""The algebra of layouts: what every rank along a mesh axis holds of a value, and what it holds of its gradient.

A *state* is one of

    S(dim, m, N, u)   shard      a slice along dim, which is seen as (m, N, u): the axis cuts N as torch.chunk does,
                                 in units of u rows, once in each of m groups; the gradient is sharded alike
    R                 replicate  the same full value; the gradient is partial
    I                 invariant  the same full value; every rank already has the whole gradient
    P                 partial    a term of a pending sum; the gradient is replicated

and a *layout* is one state per mesh axis.  Positions are global: they always speak of the whole tensor, so converting
one axis never renames another.  Even cuts are kept in one canonical form, ``S(dim, m, D // m, 1)``.

Everything here is arithmetic on integers: no tensors, no process groups.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias


class S(NamedTuple):
    """Shard of tensor dimension ``dim``, seen as (m, N, u); a named tuple since the solver hashes millions of them."""

    dim: int
    m: int
    N: int
    u: int


R: Literal["R"] = "R"
I: Literal["I"] = "I"  # noqa: E741 - the field's letter, as in spmd_types
P: Literal["P"] = "P"

State: TypeAlias = S | str
Layout: TypeAlias = tuple[State, ...]
Shape: TypeAlias = tuple[int, ...]

_DUAL = {R: P, P: R, I: I}


@dataclass(frozen=True, slots=True)
class Mesh:
    """Named axes of a device mesh, slow link first; ranks are row-major, so the last axis changes fastest."""

    axes: tuple[str, ...]
    sizes: tuple[int, ...]

    @staticmethod
    def of(axes: Mapping[str, int]) -> Mesh:
        return Mesh(tuple(axes), tuple(axes.values()))

    @property
    def size(self) -> int:
        return math.prod(self.sizes)

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """Position of ``rank`` on every axis."""
        out = []
        for n in reversed(self.sizes):
            out.append(rank % n)
            rank //= n
        return tuple(reversed(out))

    def all_coordinates(self) -> Iterable[tuple[int, ...]]:
        return itertools.product(*(range(n) for n in self.sizes))

    def as_dict(self) -> dict[str, int]:
        return dict(zip(self.axes, self.sizes, strict=True))

    def __str__(self) -> str:
        return " ".join(f"{a}={n}" for a, n in zip(self.axes, self.sizes, strict=True)) or "one rank"


# ------------------------------------------------------------------------------------------------ one state


def dual(state: State) -> State:
    """State of the gradient of a value in ``state``."""
    return state if isinstance(state, S) else _DUAL[state]


def chunk_bounds(units: int, n: int, index: int) -> tuple[int, int]:
    """First and past-the-last unit of part ``index`` when torch.chunk cuts ``units`` into ``n``; may be empty."""
    size = -(-units // n)
    low = min(index * size, units)
    return low, min(low + size, units)


def is_even(shard: S, n: int) -> bool:
    return shard.N % n == 0


def canonical(shard: S, n: int) -> S:
    """The one form of a cut: an even cut does not depend on its unit, so (m, N, u) becomes (m, N * u, 1)."""
    return S(shard.dim, shard.m, shard.N * shard.u, 1) if shard.N % n == 0 else shard


def bounds(shard: S, n: int, index: int) -> tuple[int, int]:
    """Part ``index`` of the middle factor, in the units of `middle`."""
    return (index, index + 1) if is_even(shard, n) else chunk_bounds(shard.N, n, index)


def middle(shard: S, n: int) -> int:
    """How many units the cut factor has: n where it divides, N where it does not."""
    return n if is_even(shard, n) else shard.N


def fraction(shard: S, n: int, index: int) -> tuple[int, int]:
    """What part of the dimension rank ``index`` holds, as numerator and denominator."""
    low, high = bounds(shard, n, index)
    return high - low, middle(shard, n)


# ------------------------------------------------------------------------------------------------ layouts


def nests(cuts: Iterable[tuple[int, int, int, int]], size: int) -> bool:
    """Whether cuts (m, N, u, n) of one dimension of ``size`` rows nest: each starts where the one outside it ends.

    An axis that does not divide its factor must be the last one: nothing can cut groups of unequal size again.
    """
    end = 1
    for m, N, _, n in sorted(cuts):
        if m % end or size % m:
            return False
        end = m * n if N % n == 0 else m * N
        if size % end:
            return False
    ordered = sorted(cuts)
    return all(N % n == 0 and after[0] >= m * n for (m, N, _, n), after in itertools.pairwise(ordered))


def is_valid(shape: Shape, layout: Layout, sizes: Sequence[int]) -> bool:
    """Whether every dimension's cuts nest and no partial sum or replica is asked of a dimension that is not there."""
    seen: dict[int, list[tuple[int, int, int, int]]] = {}
    for state, n in zip(layout, sizes, strict=True):
        if isinstance(state, S):
            if state.dim >= len(shape) or state.m * state.N * state.u != shape[state.dim]:
                return False
            seen.setdefault(state.dim, []).append((state.m, state.N, state.u, n))
    return all(nests(cuts, shape[d]) for d, cuts in seen.items())


def local_shape(shape: Shape, layout: Layout, sizes: Sequence[int], coordinates: Sequence[int]) -> Shape:
    """Shape of the slice that the rank at ``coordinates`` holds."""
    out = list(shape)
    for state, n, index in zip(layout, sizes, coordinates, strict=True):
        if isinstance(state, S):
            part, whole = fraction(state, n, index)
            out[state.dim] = out[state.dim] * part // whole
    return tuple(out)


def largest_local_numel(shape: Shape, layout: Layout, sizes: Sequence[int]) -> int:
    """Elements on the fullest rank, which is always the first one of each axis."""
    return math.prod(local_shape(shape, layout, sizes, (0,) * len(sizes)))


class Split(NamedTuple):
    """A shard as the rank sees it: its local dimension ``dim`` is (outer, units, inner), with this axis undone.

    ``units`` are cut as torch.chunk does over the axis; the rank holds ``bounds`` of them.
    """

    dim: int
    outer: int
    units: int
    inner: int


def local_split(
    shape: Shape, layout: Layout, axis: int, shard: S, sizes: Sequence[int], coordinates: Sequence[int]
) -> Split:
    """The `Split` of ``shard`` on ``axis`` for the rank at ``coordinates``, all other axes of ``layout`` applied."""
    units = middle(shard, sizes[axis])
    outer, inner = shard.m, shape[shard.dim] // (shard.m * units)
    for other, state in enumerate(layout):
        if other != axis and isinstance(state, S) and state.dim == shard.dim:
            part, whole = fraction(state, sizes[other], coordinates[other])
            if state.m < shard.m:
                outer = outer * part // whole
            else:
                inner = inner * part // whole
    return Split(shard.dim, outer, units, inner)


def split_factor(layout: Layout, axis: int, sizes: Sequence[int]) -> int:
    """Groups in which ``axis`` cuts what the axes before it have left of its dimension: 1 for a plain cut of that.

    Cuts are even, but for the innermost.
    """
    state = layout[axis]
    assert isinstance(state, S)
    before = (b for b in range(axis) if isinstance(s := layout[b], S) and s.dim == state.dim and s.m < state.m)
    return state.m // math.prod(sizes[b] for b in before)


def cut_order(layout: Layout) -> list[int]:
    """Axes in the order in which a whole tensor is sliced: cuts of one dimension from the outside in."""
    return [a for _, _, a in sorted((s.dim, s.m, a) for a, s in enumerate(layout) if isinstance(s, S))]


# ------------------------------------------------------------------------------------------------ conversions


class Move(NamedTuple):
    """One conversion: the value leaves ``layout`` and enters the one with ``target`` on ``axis``."""

    layout: Layout
    axis: int
    target: State

    @property
    def result(self) -> Layout:
        return (*self.layout[: self.axis], self.target, *self.layout[self.axis + 1 :])


def _letter(state: State) -> str:
    return "S" if isinstance(state, S) else state


Collective: TypeAlias = Literal["local", "all-gather", "all-reduce", "reduce-scatter", "all-to-all"]

# (from, to) -> forward collective, backward collective, N sent forward, N sent backward; times (n - 1) / n.
_CONVERSIONS: dict[tuple[str, str], tuple[Collective, Collective, int, int]] = {
    ("S", R): ("all-gather", "reduce-scatter", 1, 1),
    ("S", I): ("all-gather", "local", 1, 0),
    (P, I): ("all-reduce", "local", 2, 0),
    (P, R): ("all-reduce", "all-reduce", 2, 2),
    (P, "S"): ("reduce-scatter", "all-gather", 1, 1),
    (I, R): ("local", "all-reduce", 0, 2),
    (I, "S"): ("local", "all-gather", 0, 1),
    (R, "S"): ("local", "local", 0, 0),
    ("S", P): ("local", "local", 0, 0),
    (R, I): ("local", "local", 0, 0),
    (I, P): ("local", "local", 0, 0),
    (R, P): ("local", "local", 0, 0),
}


class Conversion(NamedTuple):
    """What one conversion does: collectives and bytes sent per rank, forward and backward."""

    forward: Collective
    backward: Collective
    forward_bytes: float
    backward_bytes: float


def conversion(src: State, dst: State, n: int, nbytes: float) -> Conversion:
    """Collectives and bytes of ``src -> dst`` on an axis of ``n`` ranks.

    ``nbytes`` is the size of the value on one rank with this axis undone.  The backward pass is the conversion of the
    duals.  Source of the figures: ring algorithms, as in the table of the package's documentation.
    """
    if src == dst:
        return Conversion("local", "local", 0.0, 0.0)
    if isinstance(src, S) and isinstance(dst, S):
        sent = (n - 1) / n * nbytes / n
        return Conversion("all-to-all", "all-to-all", sent, sent)
    forward, backward, f, b = _CONVERSIONS[_letter(src), _letter(dst)]
    ring = (n - 1) / n * nbytes
    return Conversion(forward, backward, f * ring, b * ring)


def forward_layout(layout: Layout) -> Layout:
    """The forward side of a layout: R and I hold the same tensor, and differ in the gradient only."""
    return tuple(I if s == R else s for s in layout)


def default_path(shape: Shape, src: Layout, dst: Layout, sizes: Sequence[int]) -> tuple[Move, ...]:
    """Some legal sequence of one-axis conversions from ``src`` to ``dst``; through R where cuts would clash.

    The solver chooses the cheapest order itself; this is for values that it does not see (outputs, tests).
    """
    current, moves = src, []
    todo = [a for a in range(len(src)) if src[a] != dst[a]]
    while todo:
        for a in todo:
            move = Move(current, a, dst[a])
            if is_valid(shape, move.result, sizes):
                todo.remove(a)
                break
        else:  # every remaining target clashes with a cut that is still in place: undo one
            a = next(a for a in todo if isinstance(current[a], S))
            move = Move(current, a, R)
        moves.append(move)
        current = move.result
    return tuple(moves)


# ------------------------------------------------------------------------------------------------ text


_SHARD = re.compile(r"S(\d+)(?:\((\d+),(\d+),(\d+)\))?$")


def format_state(state: State) -> str:
    """``S0`` for a plain cut, ``S0(3,16,1)`` for one in three groups."""
    if not isinstance(state, S):
        return state
    return f"S{state.dim}" if (state.m, state.u) == (1, 1) else f"S{state.dim}({state.m},{state.N},{state.u})"


def parse_state(text: str, shape: Shape) -> State:
    """Inverse of `format_state`.  Raises ValueError with the text when it is no state of a tensor of ``shape``."""
    if text in _DUAL:
        return text
    match = _SHARD.match(text)
    if match is None:
        raise ValueError(f"{text!r} is no state: expected R, I, P, S<dim> or S<dim>(m,N,u)")
    dim = int(match[1])
    if dim >= len(shape):
        raise ValueError(f"{text!r} names dimension {dim} of a tensor with {len(shape)} dimensions")
    if match[2] is None:
        return S(dim, 1, shape[dim], 1)
    state = S(dim, int(match[2]), int(match[3]), int(match[4]))
    if state.m * state.N * state.u != shape[dim]:
        raise ValueError(f"{text!r}: {state.m} * {state.N} * {state.u} is not the dimension's size {shape[dim]}")
    return state


def format_layout(layout: Layout, axes: Sequence[str]) -> str:
    """``dp:S0 tp:R``; axes on which the value is invariant are left out, and a wholly invariant one is ``I``."""
    parts = [f"{a}:{format_state(s)}" for a, s in zip(axes, layout, strict=True) if s != I]
    return " ".join(parts) or I


def parse_layout(text: str, axes: Sequence[str], shape: Shape) -> Layout:
    """Inverse of `format_layout`.  Raises ValueError naming the part that is wrong."""
    states: list[State] = [I] * len(axes)
    if text == I:
        return tuple(states)
    for part in text.split():
        axis, _, state = part.partition(":")
        if axis not in axes:
            raise ValueError(f"{part!r} names no axis of the mesh: expected one of {', '.join(axes)}")
        states[list(axes).index(axis)] = parse_state(state, shape)
    return tuple(states)
