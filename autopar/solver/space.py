"""What can be chosen on one mesh: strategies of every representative op, and the layouts that each of them needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from autopar.errors import PlanError
from autopar.layout import I, Layout, Mesh, P, R, S, State
from autopar.passes.fold import Edge, Folding, edges
from autopar.program import place
from autopar.rules.analysis import Analysis, Operation, Value
from autopar.rules.derive import Choice, Strategy, strategies
from autopar.solver.lattice import Lattice, lattice, states_per_axis
from autopar.solver.prices import OpPrice, Prices, full_states, gradient_states
from autopar.solver.storage import storable, storage_states

Keep = Callable[[Operation, Strategy], bool]
KeepChoice = Callable[[Operation, Choice, int], bool]  # of one axis


def every_strategy(op: Operation, strategy: Strategy) -> bool:
    return True


def every_choice(op: Operation, choice: Choice, axis: int) -> bool:
    return True


_SMALL_WEIGHT = 0.002  # a weight with less than this part of all elements is stored as it is used, or whole


@dataclass(frozen=True, slots=True)
class Flow:
    """How an activation may travel.

    outs: its layout by strategy of its producer, None for what is not computed (it starts invariant).
    needs: for each use, the layout by strategy of the user.
    """

    edge: Edge
    value: Value
    producer: str | None
    outs: tuple[Layout, ...] | None
    needs: tuple[tuple[Layout, ...], ...]
    grid: Lattice


@dataclass(frozen=True, slots=True)
class Weight:
    """How a parameter may be stored, gathered and used, and its gradient reduced; see `model`.

    forward: lattice of the weight, in states I and S.  backward: of its gradient, in states P, I and S, None for a
    frozen one.  stored: the layouts that it may be kept in.
    """

    edge: Edge
    value: Value
    name: str
    needs: tuple[tuple[Layout, ...], ...]
    forward: Lattice
    backward: Lattice | None
    stored: tuple[Layout, ...]


@dataclass(frozen=True, slots=True)
class Space:
    """Everything a plan on one mesh decides."""

    analysis: Analysis
    folding: Folding
    mesh: Mesh
    prices: Prices
    ops: tuple[Operation, ...]
    strategies: dict[str, tuple[Strategy, ...]]
    costs: dict[str, tuple[OpPrice, ...]]
    flows: tuple[Flow, ...]
    weights: tuple[Weight, ...]

    def count(self, op: str) -> int:
        return self.folding.counts[op]

    @property
    def invariant(self) -> Layout:
        return (I,) * len(self.mesh.axes)


def build(
    analysis: Analysis,
    folding: Folding,
    mesh: Mesh,
    prices: Prices,
    keep: Keep = every_strategy,
    keep_choice: KeepChoice = every_choice,
    *,
    all_storage: bool = False,
    inside: bool = False,
) -> Space:
    """Enumerate.  The filters restrict strategies; ``all_storage``: every weight may be split, however small.

    inside: weights may be stored split within the cuts they are used in, whatever the order of axes.

    Raises PlanError where an op is left without a strategy.
    """
    sizes = mesh.sizes
    ops = tuple(op for op in analysis.operations if folding.ops[op.name] == op.name)
    all_edges = edges(analysis, folding)
    wanted: dict[str, list[tuple[int, str]]] = {}
    for edge in all_edges:
        for use in edge.uses:
            wanted.setdefault(use.op, []).append((use.position, use.name))
    moved: dict[tuple[str, Layout], Layout | None] = {}

    def to_root(name: str, layout: Layout) -> Layout | None:
        if name not in analysis.views:
            return layout
        key = (name, layout)
        if key not in moved:
            moved[key] = analysis.to_root(name, layout)
        return moved[key]

    chosen: dict[str, tuple[Strategy, ...]] = {}
    costs: dict[str, tuple[OpPrice, ...]] = {}
    for op in ops:
        uses = wanted.get(op.name, [])
        legal = tuple(
            s
            for s in strategies(op.type, analysis.factor_points(op), sizes, keep=partial(keep_choice, op))
            if keep(op, s) and all(to_root(name, s.ins[i]) is not None for i, name in uses)
        )
        if not legal:
            raise PlanError(
                "no way is left to run an op",
                where=f"{op.name}, {place(op.node)}",
                expected="at least one strategy under the pins and the search options",
                got="none",
                hint="loosen the pins",
            )
        chosen[op.name] = legal
        ins, outs = [analysis.values[v] for v in op.inputs], [analysis.values[v] for v in op.outputs]
        costs[op.name] = tuple(prices.op(op, s, ins, outs) for s in legal)

    producers = {v: (op.name, k) for op in ops for k, v in enumerate(op.outputs)}
    flows: list[Flow] = []
    weights: list[Weight] = []
    trained = sum(_elements(e, analysis) for e in all_edges if analysis.values[e.name].kind == "parameter")
    grids: dict[object, Lattice] = {}
    for edge in all_edges:
        value = analysis.values[edge.name]
        needs = tuple(
            tuple(_known(to_root(use.name, s.ins[use.position])) for s in chosen[use.op]) for use in edge.uses
        )
        if value.kind == "parameter":
            small = not all_storage and _elements(edge, analysis) < _SMALL_WEIGHT * trained
            weights.append(_weight(edge, value, needs, analysis, prices, small=small, inside=inside))
            continue
        producer = producers.get(edge.representative)
        made = None if producer is None else tuple(s.outs[producer[1]] for s in chosen[producer[0]])
        invariant = (I,) * len(sizes)
        ends = [invariant, *(made or ()), *(n for need in needs for n in need)]
        states = states_per_axis(ends, len(sizes))
        key = (value.shape, value.dtype, value.differentiable, states)
        if key not in grids:
            grids[key] = _grid(value, states, prices)
        flows.append(Flow(edge, value, producer[0] if producer else None, made, needs, grids[key]))
    return Space(analysis, folding, mesh, prices, ops, chosen, costs, tuple(flows), tuple(weights))


def _known(layout: Layout | None) -> Layout:
    assert layout is not None  # strategies with a need that the root cannot show were dropped
    return layout


def _elements(edge: Edge, analysis: Analysis) -> int:
    count = edge.count
    for n in analysis.values[edge.name].shape:
        count *= n
    return count


def _grid(value: Value, states: tuple[tuple[State, ...], ...], prices: Prices) -> Lattice:
    """P -> R is left out: P -> I -> R costs the same."""
    return lattice(
        value.shape,
        states,
        prices.sizes,
        lambda axis, source, target, n: prices.move_of(value, axis, source, target, n).seconds,
        lambda source, target: (source, target) != (P, R),
    )


def _weight(
    edge: Edge,
    value: Value,
    needs: tuple[tuple[Layout, ...], ...],
    analysis: Analysis,
    prices: Prices,
    *,
    small: bool,
    inside: bool,
) -> Weight:
    sizes = prices.sizes
    ends = [full_states(n) for need in needs for n in need]
    kept = [] if small else storage_states(value.shape, ends, sizes, inside=inside)
    states = states_per_axis([(I,) * len(sizes), *ends, *kept], len(sizes))
    forward = lattice(
        value.shape,
        states,
        sizes,
        lambda axis, source, target, n: prices.weight_move_of(value, axis, source, target, n, gradient=False).seconds,
    )
    backward = None
    if value.differentiable:
        made = [gradient_states(n) for need in needs for n in need]
        partial = [tuple(P if P in {m[a] for m in made} else I for a in range(len(sizes)))]
        backward = lattice(
            value.shape,
            states_per_axis([*forward.layouts, *partial], len(sizes)),
            sizes,
            lambda axis, source, target, n: (
                prices.weight_move_of(value, axis, source, target, n, gradient=True).seconds
            ),
        )
    stored = tuple(layout for layout in forward.layouts if storable(value.shape, layout, sizes))
    if small:
        used = set(ends)
        stored = tuple(layout for layout in stored if layout in used or all(s == I for s in layout))
    name = analysis.program.parameters[edge.name].name
    return Weight(edge, value, name, needs, forward, backward, stored)


def is_full(state: State) -> bool:
    return not isinstance(state, S)
