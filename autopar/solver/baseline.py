"""Legal plans that need no solver: data parallel, ZeRO, everything on every rank, and a greedy one.

They are priced like any plan.  A search that runs out of time returns the best of them that fits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from autopar.layout import I, Layout, P, S
from autopar.rules.derive import Strategy
from autopar.solver.decisions import Decisions, Place
from autopar.solver.lattice import Lattice
from autopar.solver.prices import full_states, gradient_states
from autopar.solver.space import Space, Weight
from autopar.solver.spread import Field, Floats, spreading


def baselines(space: Space, zero: int | None = None) -> Iterator[tuple[str, Decisions]]:
    """Name and decisions of each; ``zero`` keeps to one stage of ZeRO."""
    stages = (0, 3) if zero is None else (zero,)
    taken: list[dict[str, int]] = []
    for name, strategy in (
        ("data parallel", greedy(space, _whole_weights(space))),
        ("greedy", greedy(space)),
        ("everything on every rank", _invariant(space)),
    ):
        if strategy is None or strategy in taken:
            continue
        taken.append(strategy)
        for stage in stages:
            places = {w.edge.name: place(space, w, strategy, stage) for w in space.weights}
            yield f"{name}, ZeRO-{stage}" if stage else name, Decisions(strategy, places)


def _whole_weights(space: Space) -> Callable[[str, Strategy], bool]:
    """Keeps the strategies that split no weight."""
    weights = {(use.op, use.position) for w in space.weights for use in w.edge.uses}

    def keep(op: str, strategy: Strategy) -> bool:
        return not any(isinstance(s, S) for i, layout in enumerate(strategy.ins) if (op, i) in weights for s in layout)

    return keep


def _invariant(space: Space) -> dict[str, int] | None:
    """Every op on whole, invariant values; None where a pin forbids it."""
    out = {}
    for op, options in space.strategies.items():
        found = [k for k, s in enumerate(options) if all(c.kind == I for c in s.choices)]
        if not found:
            return None
        out[op] = found[0]
    return out


def greedy(space: Space, keep: Callable[[str, Strategy], bool] = lambda op, strategy: True) -> dict[str, int]:
    """Op by op the cheapest strategy, given those before it: its price, conversions, and reduction of gradients."""
    m = space.prices.microbatches
    touching: dict[str, list[tuple[int, int]]] = {op.name: [] for op in space.ops}  # (flow, use; -1 for the producer)
    for f, flow in enumerate(space.flows):
        if flow.producer is not None:
            touching[flow.producer].append((f, -1))
            for u, use in enumerate(flow.edge.uses):
                touching[use.op].append((f, u))
    weights: dict[str, list[tuple[Weight, int]]] = {}
    for weight in space.weights:
        for u, use in enumerate(weight.edge.uses):
            weights.setdefault(use.op, []).append((weight, u))
    ways = _Ways(space)
    out: dict[str, int] = {}

    def cost(op: str, k: int) -> float:
        total = space.costs[op][k].seconds * space.count(op) * m
        for f, u in touching[op]:
            flow = space.flows[f]
            assert flow.outs is not None and flow.producer is not None
            if u >= 0:
                if flow.producer in out:
                    total += flow.edge.count * m * ways.cost(f, flow.outs[out[flow.producer]], flow.needs[u][k])
                continue
            for v, use in enumerate(flow.edge.uses):
                if use.op in out:
                    total += flow.edge.count * m * ways.cost(f, flow.outs[k], flow.needs[v][out[use.op]])
            if flow.edge.whole:
                total += flow.edge.count * m * ways.cost(f, flow.outs[k], space.invariant)
        for weight, u in weights.get(op, ()):
            layout = weight.needs[u][k]
            if weight.backward is not None:
                base = full_states(layout)
                total += weight.edge.count * ways.between(weight.backward, gradient_states(layout), base)
                total += weight.edge.count * space.prices.update(weight.value, base)
        return total

    for op in space.ops:
        legal = [k for k, s in enumerate(space.strategies[op.name]) if keep(op.name, s)]
        options = legal or range(len(space.strategies[op.name]))
        out[op.name] = min(options, key=lambda k: (round(cost(op.name, k), 12), k))
    return out


class _Ways:
    """Costs of the cheapest ways from one layout, remembered per lattice."""

    def __init__(self, space: Space):
        self.space = space
        self.fields: dict[int, Field] = {}
        self.known: dict[tuple[int, Layout], Floats] = {}

    def cost(self, flow: int, source: Layout, target: Layout) -> float:
        return self.between(self.space.flows[flow].grid, source, target)

    def between(self, grid: Lattice, source: Layout, target: Layout) -> float:
        if id(grid) not in self.fields:
            self.fields[id(grid)] = spreading(grid)
        field, key = self.fields[id(grid)], (id(grid), source)
        if key not in self.known:
            self.known[key] = field.distances([field.at(source)])[0]
        return float(self.known[key][field.at(target)])


def place(space: Space, weight: Weight, strategy: dict[str, int], stage: int) -> Place:
    """Where ZeRO of ``stage`` (0 for none) puts a weight that ops use by ``strategy``."""
    used = [need[strategy[use.op]] for use, need in zip(weight.edge.uses, weight.needs, strict=True)]
    axes = range(len(space.mesh.axes))
    full = [full_states(layout) for layout in used]
    held = tuple(full[0][a] if all(f[a] == full[0][a] for f in full) else I for a in axes)
    if held not in weight.forward.index:
        held = space.invariant
    shape, numel = weight.value.shape, space.prices.numel

    def smallest(layouts: list[Layout]) -> Layout:
        return min(layouts, key=lambda layout: numel(shape, layout))

    alike = [s for s in weight.stored if all(s[a] == held[a] for a in axes if isinstance(held[a], S))]
    if stage == 0:
        plain = [s for s in weight.stored if all(s[a] == held[a] or s[a] == I for a in axes)]
        stored = held if held in weight.stored else smallest(plain or list(weight.stored))
    else:
        stored = smallest(alike or list(weight.stored))
    if stage == 3:
        held = stored
    if weight.backward is None:
        return Place(stored, held, None)
    made = [gradient_states(layout) for layout in used]
    later = tuple(P if any(g[a] == P for g in made) and not isinstance(held[a], S) else held[a] for a in axes)
    accumulated = later if stage < 2 and later in weight.backward.index else stored
    return Place(stored, held, accumulated)
