"""The lattice of layouts: nodes are the layouts that a value may pass through, arcs are conversions on one axis."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from autopar.layout import I, Layout, Move, P, R, S, Shape, State, is_valid

Price = Callable[[Layout, int, State], float]

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
    layouts = tuple(c for c in itertools.product(*states) if is_valid(shape, c, sizes))
    index = {layout: i for i, layout in enumerate(layouts)}
    tails: list[int] = []
    heads: list[int] = []
    axes: list[int] = []
    costs: list[float] = []
    leaving: list[list[int]] = [[] for _ in layouts]
    for i, layout in enumerate(layouts):
        for axis, options in enumerate(states):
            source = layout[axis]
            before, after = layout[:axis], layout[axis + 1 :]
            for target in options:
                if target == source or not allowed(source, target):
                    continue
                j = index.get((*before, target, *after))
                if j is not None:
                    leaving[i].append(len(tails))
                    tails.append(i)
                    heads.append(j)
                    axes.append(axis)
                    costs.append(price(layout, axis, target))
    return Lattice(
        layouts, index, tuple(tails), tuple(heads), tuple(axes), tuple(costs), tuple(tuple(a) for a in leaving)
    )


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
