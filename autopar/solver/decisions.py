"""Decisions of one mesh, before they are written as a plan: a strategy per op, a place per weight.

Routes follow from them: the cheapest tree of conversions from what a value's producer makes to what its users want.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.layout import I, Layout, Move, P, R, dual, format_layout
from autopar.plan import OpDecision, ParameterDecision, ValueDecision, format_move
from autopar.rules.derive import Strategy
from autopar.solver.lattice import Lattice, cheapest_tree
from autopar.solver.model import Columns
from autopar.solver.prices import full_states, gradient_states
from autopar.solver.space import Space, Weight


@dataclass(frozen=True, slots=True)
class Place:
    """Where a weight is stored, held and its gradient accumulated; the last is None for a frozen weight."""

    stored: Layout
    held: Layout
    accumulated: Layout | None


@dataclass(frozen=True, slots=True)
class Decisions:
    """strategy: index by op.  places: by the weight's node name."""

    strategy: dict[str, int]
    places: dict[str, Place]


def read(space: Space, columns: Columns, values: NDArray[np.float64]) -> Decisions:
    """Decisions of a solution; of columns that are not quite integral the largest, the first of equals."""

    def largest(among: dict[Layout, int]) -> Layout:
        return max(among, key=lambda layout: round(float(values[among[layout]]), 6))

    strategy = {op: int(np.argmax(np.round(values[c.start : c.stop], 6))) for op, c in columns.strategy.items()}
    places = {
        name: Place(
            largest(stored),
            largest(columns.held[name]),
            largest(columns.accumulated[name]) if name in columns.accumulated else None,
        )
        for name, stored in columns.stored.items()
    }
    return Decisions(strategy, places)


def chosen(space: Space, decisions: Decisions, op: str) -> Strategy:
    return space.strategies[op][decisions.strategy[op]]


def write(
    space: Space, decisions: Decisions
) -> tuple[tuple[OpDecision, ...], tuple[ValueDecision, ...], tuple[ParameterDecision, ...]]:
    """The decisions as a plan writes them, representatives only."""
    axes = space.mesh.axes
    ops = tuple(OpDecision(op.name, tuple(map(str, chosen(space, decisions, op.name).choices))) for op in space.ops)
    values = []
    for flow in space.flows:
        if flow.outs is None or flow.producer is None:
            source = space.invariant
        else:
            source = flow.outs[decisions.strategy[flow.producer]]
        targets = [need[decisions.strategy[use.op]] for use, need in zip(flow.edge.uses, flow.needs, strict=True)]
        if flow.edge.whole:
            targets.append(space.invariant)
        moves = _route(flow.grid, source, targets)
        if moves:
            values.append(ValueDecision(flow.edge.name, tuple(format_move(m, axes) for m in moves)))
    weights = tuple(_weight(space, decisions, weight) for weight in space.weights)
    return ops, tuple(values), weights


def _route(grid: Lattice, source: Layout, targets: Sequence[Layout]) -> list[Move]:
    tree = cheapest_tree(grid, source, targets)
    assert tree is not None  # whatever cuts clash, I lies between them
    return [grid.move(arc) for arc in tree[1]]


def _weight(space: Space, decisions: Decisions, weight: Weight) -> ParameterDecision:
    axes = space.mesh.axes
    place = decisions.places[weight.edge.name]
    used = [need[decisions.strategy[use.op]] for use, need in zip(weight.edge.uses, weight.needs, strict=True)]
    use: dict[Move, None] = {}
    for layout in used:
        use.update(dict.fromkeys(_route(weight.forward, place.held, [full_states(layout)])))
        use.update(dict.fromkeys(steps(full_states(layout), [(a, P) for a, s in enumerate(layout) if s == P])))
    gather = _route(weight.forward, place.stored, [place.held])
    reduce: dict[Move, None] = {}
    final: list[Move] = []
    if weight.backward is not None and place.accumulated is not None:
        for layout in used:
            made = tuple(dual(s) for s in layout)
            reduce.update(dict.fromkeys(steps(made, [(a, I) for a, s in enumerate(made) if s == R])))
            reduce.update(dict.fromkeys(_route(weight.backward, gradient_states(layout), [place.accumulated])))
        final = _route(weight.backward, place.accumulated, [place.stored])

    def text(moves: Sequence[Move] | dict[Move, None]) -> tuple[str, ...]:
        return tuple(format_move(m, axes) for m in moves)

    return ParameterDecision(
        weight.name,
        format_layout(place.stored, axes),
        format_layout(place.held, axes),
        format_layout(place.accumulated or place.stored, axes),
        text(gather),
        text(use),
        text(reduce),
        text(final),
    )


def steps(layout: Layout, changes: Sequence[tuple[int, str]]) -> list[Move]:
    """Moves that change the states of some axes one after another, free ones."""
    moves = []
    for axis, target in changes:
        moves.append(Move(layout, axis, target))
        layout = moves[-1].result
    return moves


__all__ = ["Decisions", "Place", "chosen", "read", "steps", "write"]
