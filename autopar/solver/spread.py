"""Cheapest ways over a whole lattice of layouts at once, on dense arrays with one dimension per mesh axis."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.layout import Layout
from autopar.solver.lattice import Lattice, states_per_axis

Floats = NDArray[np.float64]
_AT_ONCE = 1 << 21  # numbers in a temporary array


@dataclass(frozen=True, slots=True)
class Field:
    """A lattice as arrays: values over it are vectors of ``size``, infinite where there is no layout.

    place: position of each of the lattice's nodes.  costs: per axis (ranks before, source, target, ranks after), the
    cheapest way that changes this axis alone.  tails, heads, prices: of the lattice's arcs, in its order.
    """

    lattice: Lattice
    size: int
    place: NDArray[np.int64]
    costs: tuple[Floats, ...]
    tails: NDArray[np.int64]
    heads: NDArray[np.int64]
    prices: Floats

    def at(self, layout: Layout) -> int:
        return int(self.place[self.lattice.index[layout]])

    def places(self, layouts: Sequence[Layout]) -> NDArray[np.int64]:
        return self.place[[self.lattice.index[layout] for layout in layouts]]

    def spread(self, values: Floats, *, back: bool = False) -> Floats:
        """Of each node the least of a value plus the way from where it stands; ``back``: the way to there.

        ``values``: vectors as the rows of a matrix, or one vector.
        """
        if values.ndim == 1:
            return self.spread(values[None], back=back)[0]
        rows = max(1, _AT_ONCE // max(c.size for c in self.costs)) if self.costs else len(values)
        if len(values) > rows:
            parts = [self.spread(values[k : k + rows], back=back) for k in range(0, len(values), rows)]
            return np.concatenate(parts)
        while True:
            start = values
            for cost in self.costs:
                before, n, _, after = cost.shape
                v = values.reshape(len(values), before, n, after)
                if back:
                    values = (v[:, :, None] + cost).min(axis=3).reshape(values.shape)
                else:
                    values = (v[:, :, :, None] + cost).min(axis=2).reshape(values.shape)
            if len(self.costs) < 2 or np.array_equal(start, values):
                return values

    def distances(self, places: Sequence[int] | NDArray[np.int64], *, back: bool = False) -> Floats:
        """A row per place: the cost of the way from it to every node; ``back``: from every node to it."""
        values = np.full((len(places), self.size), np.inf)
        values[np.arange(len(places)), places] = 0.0
        return self.spread(values, back=back)


def spreading(lattice: Lattice) -> Field:
    """The field of a lattice; ways that take two steps on one axis are closed first."""
    count = len(lattice.layouts[0])
    states = states_per_axis(lattice.layouts, count)
    shape = tuple(map(len, states))
    number = [{state: i for i, state in enumerate(s)} for s in states]
    nodes = np.array([[number[a][s] for a, s in enumerate(layout)] for layout in lattice.layouts], dtype=np.int64)
    nodes = nodes.reshape(len(lattice.layouts), count)
    strides = np.array([math.prod(shape[a + 1 :]) for a in range(count)], dtype=np.int64)
    place: NDArray[np.int64] = nodes @ strides
    tails, heads, axes = (np.asarray(x, dtype=np.int64) for x in (lattice.tails, lattice.heads, lattice.axes))
    prices = np.asarray(lattice.costs)
    costs = []
    for a, n in enumerate(shape):
        before, after = math.prod(shape[:a]), math.prod(shape[a + 1 :])
        cost = np.full((before, n, n, after), np.inf)
        cost[:, np.arange(n), np.arange(n)] = 0.0
        mine = axes == a
        at = place[tails[mine]]
        cost[at // (n * after), nodes[tails[mine], a], nodes[heads[mine], a], at % after] = prices[mine]
        for k in range(n):
            np.minimum(cost, cost[:, :, k, None] + cost[:, None, k], out=cost)
        costs.append(cost)
    return Field(lattice, math.prod(shape), place, tuple(costs), place[tails], place[heads], prices)
