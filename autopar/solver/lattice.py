"""The lattice of layouts: nodes are the layouts that a value may pass through, arcs are conversions on one axis."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.layout import I, Layout, Move, P, R, S, Shape, State, fraction, is_valid

Price = Callable[[int, State, State, int], float]  # of (axis, source, target, elements with the axis undone)

_LETTERS = {I: 0, R: 1, P: 2}
_MAX_TERMINALS = 6  # up to so many different ends a tree of conversions is found exactly


def state_key(state: State) -> tuple[int, ...]:
    """A fixed order of states: I, R, P, then shards."""
    return (3, *state) if isinstance(state, S) else (_LETTERS[state],)


@dataclass(frozen=True, slots=True)
class Lattice:
    """layouts, and arcs as parallel tuples: tails and heads (indices), axes, seconds."""

    layouts: tuple[Layout, ...]
    index: dict[Layout, int]
    tails: tuple[int, ...]
    heads: tuple[int, ...]
    axes: tuple[int, ...]
    costs: tuple[float, ...]
    leaving: tuple[tuple[int, ...], ...]  # arcs by tail

    def move(self, arc: int) -> Move:
        axis = self.axes[arc]
        return Move(self.layouts[self.tails[arc]], axis, self.layouts[self.heads[arc]][axis])


def states_per_axis(layouts: Iterable[Layout], count: int) -> tuple[tuple[State, ...], ...]:
    """The states that occur on each of ``count`` axes, in a fixed order."""
    found: list[dict[State, None]] = [{} for _ in range(count)]
    for layout in layouts:
        for axis, state in enumerate(layout):
            found[axis][state] = None
    return tuple(tuple(sorted(states, key=state_key)) for states in found)


def lattice(
    shape: Shape,
    states: Sequence[Sequence[State]],
    sizes: Sequence[int],
    price: Price,
    allowed: Callable[[State, State], bool] = lambda source, target: True,
) -> Lattice:
    """All valid layouts with ``states`` per axis and every conversion between two that differ on one axis.

    A conversion that is no cheaper than two others is left out where both lead the same way: P -> R is P -> I -> R.
    """
    counts = tuple(map(len, states))
    codes = np.indices(counts).reshape(len(counts), math.prod(counts))
    valid = _valid(shape, states, sizes, codes)
    layouts = tuple(itertools.compress(itertools.product(*states), valid.tolist()))
    codes = codes[:, valid]
    number = np.cumsum(valid) - 1
    number[~valid] = -1
    flat = np.flatnonzero(valid)
    full = _elements(shape, states, sizes, codes, None)
    found: list[NDArray[np.int64]] = []
    prices: list[NDArray[np.float64]] = []
    for axis, options in enumerate(states):
        stride = math.prod(counts[axis + 1 :])
        undone = _elements(shape, states, sizes, codes, axis)
        for (s, source), (t, target) in itertools.permutations(enumerate(options), 2):
            if not allowed(source, target):
                continue
            tails = np.flatnonzero(codes[axis] == s)
            heads = number[flat[tails] + (t - s) * stride]
            tails, heads = tails[heads >= 0], heads[heads >= 0]
            whole = undone[tails]
            for state, nodes in ((source, tails), (target, heads)):
                if isinstance(state, S):  # the fullest rank's share decides where cuts are uneven
                    whole = np.maximum(whole, full[nodes] * sizes[axis])
            distinct, which = np.unique(whole, return_inverse=True)
            seconds = np.array([price(axis, source, target, n) for n in distinct.tolist()])
            found.append(np.stack([tails, np.full_like(tails, axis), np.full_like(tails, t), heads]))
            prices.append(seconds[which] if len(which) else np.zeros(0))
    arcs = np.concatenate(found, axis=1) if found else np.zeros((4, 0), dtype=np.int64)
    costs = np.concatenate(prices) if prices else np.zeros(0)
    order = np.lexsort(arcs[2::-1])
    tails, axes, _, heads = arcs[:, order]
    return Lattice(
        layouts,
        {layout: i for i, layout in enumerate(layouts)},
        tuple(tails.tolist()),
        tuple(heads.tolist()),
        tuple(axes.tolist()),
        tuple(costs[order].tolist()),
        leaving(tails, len(layouts)),
    )


def leaving(tails: NDArray[np.int64], count: int) -> tuple[tuple[int, ...], ...]:
    """Arcs by the node that they leave, of ``count`` nodes."""
    order = np.argsort(tails, kind="stable")
    ends = np.searchsorted(tails[order], np.arange(count + 1)).tolist()
    arcs = order.tolist()
    return tuple(tuple(arcs[a:b]) for a, b in itertools.pairwise(ends))


def _valid(
    shape: Shape, states: Sequence[Sequence[State]], sizes: Sequence[int], codes: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """`is_valid` of every combination: cuts nest where any two of them do."""

    def together(s: State, t: State, a: int, b: int) -> bool:
        same = isinstance(s, S) and isinstance(t, S) and s.dim == t.dim
        return not same or is_valid(shape, (s, t), (sizes[a], sizes[b]))

    out = np.ones(codes.shape[1], dtype=bool)
    for a, options in enumerate(states):
        out &= np.array([is_valid(shape, (s,), sizes[a : a + 1]) for s in options])[codes[a]]
        for b in range(a):
            pairs = np.array([[together(s, t, b, a) for t in options] for s in states[b]])
            out &= pairs[codes[b], codes[a]]
    return out


def _elements(
    shape: Shape,
    states: Sequence[Sequence[State]],
    sizes: Sequence[int],
    codes: NDArray[np.int64],
    undone: int | None,
) -> NDArray[np.int64]:
    """Elements on the fullest rank of every layout, with one axis undone; as `layout.largest_local_numel`."""
    dims = np.repeat(np.array(shape, dtype=np.int64)[:, None], codes.shape[1], axis=1)
    for axis, (options, n) in enumerate(zip(states, sizes, strict=True)):
        if axis == undone:
            continue
        for code, state in enumerate(options):
            if isinstance(state, S):
                part, whole = fraction(state, n, 0)
                here = codes[axis] == code
                dims[state.dim, here] = dims[state.dim, here] * part // whole
    return np.asarray(dims.prod(axis=0, dtype=np.int64))


def cheapest_tree(grid: Lattice, source: Layout, targets: Sequence[Layout]) -> tuple[float, tuple[int, ...]] | None:
    """The cheapest set of arcs through which ``source`` reaches every target, shared arcs paid once; None if none does.

    Exact (dynamic programming over subsets of targets, Dreyfus and Wagner 1971) up to six different targets; beyond
    that targets are joined one by one, each by the cheapest way from what is there already.
    """
    start = grid.index[source]
    ends = sorted({grid.index[t] for t in targets} - {start})
    if not ends:
        return 0.0, ()
    if len(ends) > _MAX_TERMINALS:
        return _join_one_by_one(grid, start, ends)
    into: list[list[int]] = [[] for _ in grid.layouts]
    for arc, head in enumerate(grid.heads):
        into[head].append(arc)
    best: dict[int, dict[int, tuple[float, int, tuple[int, ...]]]] = {}
    for mask in range(1, 1 << len(ends)):
        value: dict[int, tuple[float, int, tuple[int, ...]]] = {}
        if mask & (mask - 1) == 0:
            value[ends[mask.bit_length() - 1]] = (0.0, 0, ())
        else:
            part = (mask - 1) & mask
            while part > mask - part:
                for node, (cost, hops, arcs) in best[part].items():
                    other = best[mask - part].get(node)
                    if other is not None:
                        joined = (cost + other[0], hops + other[1], arcs + other[2])
                        if node not in value or joined < value[node]:
                            value[node] = joined
                part = (part - 1) & mask
        best[mask] = _spread(grid, into, value)
    found = best[(1 << len(ends)) - 1].get(start)
    return None if found is None else (found[0], tuple(sorted(set(found[2]))))


def _spread(
    grid: Lattice, into: Sequence[Sequence[int]], value: dict[int, tuple[float, int, tuple[int, ...]]]
) -> dict[int, tuple[float, int, tuple[int, ...]]]:
    """Dijkstra against the arcs from every node with a value; ties by number of arcs, then by their order."""
    heap = [(cost, hops, arcs, node) for node, (cost, hops, arcs) in value.items()]
    heapq.heapify(heap)
    done: dict[int, tuple[float, int, tuple[int, ...]]] = {}
    while heap:
        cost, hops, arcs, node = heapq.heappop(heap)
        if node in done:
            continue
        done[node] = (cost, hops, arcs)
        for arc in into[node]:
            tail = grid.tails[arc]
            if tail not in done:
                heapq.heappush(heap, (cost + grid.costs[arc], hops + 1, (arc, *arcs), tail))
    return done


def _join_one_by_one(grid: Lattice, start: int, ends: Sequence[int]) -> tuple[float, tuple[int, ...]] | None:
    reached, total = {start}, 0.0
    arcs: list[int] = []
    for end in ends:
        heap: list[tuple[float, int, tuple[int, ...], int]] = [(0.0, 0, (), node) for node in sorted(reached)]
        done: set[int] = set()
        while heap:
            cost, hops, path, node = heapq.heappop(heap)
            if node == end:
                break
            if node in done:
                continue
            done.add(node)
            for arc in grid.leaving[node]:
                if grid.heads[arc] not in done:
                    heapq.heappush(heap, (cost + grid.costs[arc], hops + 1, (*path, arc), grid.heads[arc]))
        else:
            return None
        total += cost
        arcs += path
        reached |= {grid.heads[arc] for arc in path}
    return total, tuple(sorted(set(arcs)))
