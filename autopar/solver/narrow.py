"""A space without what no plan below a given time can contain: exact, for everything that is dropped is bounded.

Strategies go by their own bound; layouts of a value, or of a weight, by the cheapest plan that passes through them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from autopar.layout import I, Layout
from autopar.solver.bounds import Bounds, Conveyed, Kept, least_by
from autopar.solver.lattice import Lattice, leaving
from autopar.solver.prices import full_states, gradient_states
from autopar.solver.space import Flow, Space, Weight
from autopar.solver.spread import Field, Floats

Mask = NDArray[np.bool_]


def narrow(made: Bounds, limit: float) -> Space | None:
    """What is left for plans that take less than ``limit`` seconds; None where there are none."""
    space = made.space
    kept = {op.name: np.flatnonzero(b < limit) for op, b in zip(space.ops, made.strategies, strict=True)}
    if not all(map(len, kept.values())):
        return None
    rest = [np.maximum(made.rest(op) - made.least[op], 0.0) for op in range(len(space.ops))]
    for r, b in zip(rest, made.strategies, strict=True):
        r[b >= limit] = np.inf
    room = limit - made.total
    flows: list[Flow] = []
    passed: dict[str, Mask] = {}
    stored: dict[str, Mask] = {}
    forward: dict[str, Mask] = {}
    backward: dict[str, Mask] = {}
    for factor in made.factors:
        spare = _spare(factor, rest)
        if isinstance(factor, Conveyed):
            _meet(passed, factor.flow.edge.name, factor.through(spare) < room)
            continue
        name = factor.weight.edge.name
        layouts, ahead, back = _of_weight(factor, spare, made.shared(factor.block))
        _meet(stored, name, layouts < room)
        _meet(forward, name, ahead < room)
        if back is not None:
            _meet(backward, name, back < room)
    smaller: dict[tuple[int, bytes], Lattice] = {}
    for flow in space.flows:
        needs = tuple(
            tuple(need[k] for k in kept[use.op]) for use, need in zip(flow.edge.uses, flow.needs, strict=True)
        )
        outs = None if flow.outs is None or flow.producer is None else tuple(flow.outs[k] for k in kept[flow.producer])
        grid = flow.grid
        if outs is not None:
            ends = [space.invariant, *outs, *(layout for need in needs for layout in need)]
            arcs = _connected(grid, passed[flow.edge.name], ends)
            key = (id(grid), arcs.tobytes())
            if key not in smaller:
                smaller[key] = _part(grid, arcs)
            grid = smaller[key]
        flows.append(replace(flow, outs=outs, needs=needs, grid=grid))
    weights: list[Weight] = []
    for weight in space.weights:
        name = weight.edge.name
        needs = tuple(
            tuple(need[k] for k in kept[use.op]) for use, need in zip(weight.edge.uses, weight.needs, strict=True)
        )
        places = tuple(layout for layout, m in zip(weight.stored, stored[name], strict=True) if m)
        if not places:
            return None
        used = [layout for need in needs for layout in need]
        ends = [*places, *map(full_states, used)]
        ahead_part = _part(weight.forward, _connected(weight.forward, forward[name], ends))
        back_part = None
        if weight.backward is not None:
            ends = [*places, *map(gradient_states, used)]
            back_part = _part(weight.backward, _connected(weight.backward, backward[name], ends))
        weights.append(replace(weight, needs=needs, forward=ahead_part, backward=back_part, stored=places))
    return replace(
        space,
        strategies={op: tuple(space.strategies[op][k] for k in ks) for op, ks in kept.items()},
        costs={op: tuple(space.costs[op][k] for k in ks) for op, ks in kept.items()},
        flows=tuple(flows),
        weights=tuple(weights),
    )


def _meet(masks: dict[str, Mask], name: str, mask: Mask) -> None:
    masks[name] = masks[name] & mask if name in masks else mask


def _spare(factor: Conveyed | Kept, rest: list[Floats]) -> list[Floats]:
    """What a terminal's op exceeds its minimum by at the least, by place; once for an op with several terminals."""
    return [
        least_by(at, rest[op] / factor.ops.count(op), len(given))
        for op, at, given in zip(factor.ops, factor.places, factor.given, strict=True)
    ]


def _of_weight(factor: Kept, spare: list[Floats], share: float) -> tuple[Floats, Floats, Floats | None]:
    """How much plans exceed the bound by: with each stored layout, and by each arc of the weight and its gradient."""
    ends = [g + s / factor.scale for g, s in zip(factor.given, spare, strict=True)]
    cost = factor.by_stored(share)
    gather, reduce = np.zeros_like(cost), np.zeros_like(cost)
    for k, end in enumerate(ends):
        gather = np.maximum(gather, _column(factor.gather[k], k, len(ends)))
        reduce = np.maximum(reduce, _column(factor.reduce[k] * share, k, len(ends)))
        cost = cost + _column(end[None], k, len(ends))
    others = [tuple(a for a in range(1, cost.ndim) if a != k + 1) for k in range(len(ends))]
    field = factor.forward
    stored = field.distances(field.places(factor.weight.stored))
    ahead = np.full(len(field.lattice.tails), np.inf)
    for k, needs in enumerate(factor.needs):
        need = field.distances(field.places([full_states(n) for n in needs]), back=True)
        np.minimum(ahead, _by_arc(field, (cost - gather).min(axis=others[k]), stored, need), out=ahead)
    back = None
    if factor.backward is not None:
        field = factor.backward
        stored = field.distances(field.places(factor.weight.stored), back=True)
        back = np.full(len(field.lattice.tails), np.inf)
        for k, needs in enumerate(factor.needs):
            made = field.distances(field.places([gradient_states(n) for n in needs]))
            rest = (cost - reduce).min(axis=others[k])
            np.minimum(back, _by_arc(field, rest.T, made * share, stored * share, share), out=back)
        back *= factor.scale
    return cost.min(axis=tuple(range(1, cost.ndim))) * factor.scale, ahead * factor.scale, back


def _by_arc(field: Field, cost: Floats, sources: Floats, targets: Floats, share: float = 1.0) -> Floats:
    """By arc the least over i, j of cost[i, j] + from source i to its tail + the arc + from its head to target j."""
    out = np.full(len(field.lattice.tails), np.inf)
    for j in np.flatnonzero(np.isfinite(cost).any(axis=0)):
        start = (cost[:, j, None] + sources).min(axis=0)
        np.minimum(out, start[field.tails] + targets[j][field.heads], out=out)
    return out + field.prices * share


def _column(values: Floats, terminal: int, terminals: int) -> Floats:
    """``values`` (stored, needs of one use) in (stored, needs of every use)."""
    shape = [values.shape[0], *([1] * terminals)]
    shape[terminal + 1] = values.shape[1]
    return values.reshape(shape)


def _connected(grid: Lattice, arcs: Mask, ends: Iterable[Layout]) -> Mask:
    """With a way from every end to every other: each can become invariant axis by axis, and back."""
    pairs: dict[int, None] = {}
    count = len(grid.layouts)
    for layout in dict.fromkeys(ends):
        chain = [grid.index[(*(I,) * axis, *layout[axis:])] for axis in range(len(layout) + 1)]
        for a, b in itertools.pairwise(chain):
            pairs.update(dict.fromkeys((a * count + b, b * count + a)))
    keys = np.asarray(grid.tails, dtype=np.int64) * count + np.asarray(grid.heads, dtype=np.int64)
    return arcs | np.isin(keys, np.fromiter(pairs, dtype=np.int64, count=len(pairs)))


def _part(grid: Lattice, arcs: Mask) -> Lattice:
    """The lattice of some of the arcs, and of the layouts on them."""
    if arcs.all():
        return grid
    which = np.flatnonzero(arcs)
    tails, heads = np.asarray(grid.tails, dtype=np.int64)[which], np.asarray(grid.heads, dtype=np.int64)[which]
    used = np.zeros(len(grid.layouts), dtype=bool)
    used[tails] = used[heads] = used[grid.index[(I,) * len(grid.layouts[0])]] = True
    number = np.cumsum(used) - 1
    layouts = tuple(layout for layout, u in zip(grid.layouts, used, strict=True) if u)
    return Lattice(
        layouts,
        {layout: k for k, layout in enumerate(layouts)},
        tuple(number[tails].tolist()),
        tuple(number[heads].tolist()),
        tuple(grid.axes[a] for a in which),
        tuple(grid.costs[a] for a in which),
        leaving(number[tails], len(layouts)),
    )
