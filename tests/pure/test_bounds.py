"""Bounds without a program, and programs narrowed by them: never above the true optimum, never without it."""

from __future__ import annotations

import heapq
import random
from dataclasses import replace

import numpy as np
import pytest
from brute_force import brute_force, random_program
from test_fold import Residual, batch, bind
from test_solver import cluster, gpt2

from autopar.layout import Layout, Mesh
from autopar.passes.fold import fold
from autopar.rules.analysis import Bound, contract
from autopar.solver import milp, stage
from autopar.solver.bounds import bounds
from autopar.solver.ilp import solve
from autopar.solver.lattice import Lattice
from autopar.solver.model import columns_of, formulate
from autopar.solver.narrow import narrow
from autopar.solver.prices import prices
from autopar.solver.space import Space, build
from autopar.solver.spread import spreading

FIGURES = {
    "intra_node_latency": 1e-7,
    "intra_node_bandwidth": 1e9,
    "memory_bandwidth": 1e9,
    "peak_flops": 1e9,
    "launch_overhead": 0.0,
}


def space_of(bound: Bound, sizes: tuple[int, ...], **figures: float) -> Space:
    mesh = Mesh(("a", "b", "c")[: len(sizes)], sizes)
    known = prices(cluster(mesh.size, **{**FIGURES, **figures}), sizes)
    return build(contract(bound, sizes), fold(bound), mesh, known)


def optimum(space: Space) -> float:
    problem, columns = formulate(space)
    return milp.solve(problem, gap=0.0).objective / columns.second


def only(space: Space, op: str, k: int) -> Space:
    """The space in which ``op`` runs by its strategy k."""
    strategies, costs = dict(space.strategies), dict(space.costs)
    strategies[op], costs[op] = strategies[op][k : k + 1], costs[op][k : k + 1]
    flows = tuple(
        replace(
            f,
            outs=f.outs[k : k + 1] if f.outs is not None and f.producer == op else f.outs,
            needs=tuple(n[k : k + 1] if u.op == op else n for u, n in zip(f.edge.uses, f.needs, strict=True)),
        )
        for f in space.flows
    )
    weights = tuple(
        replace(w, needs=tuple(n[k : k + 1] if u.op == op else n for u, n in zip(w.edge.uses, w.needs, strict=True)))
        for w in space.weights
    )
    return replace(space, strategies=strategies, costs=costs, flows=flows, weights=weights)


def dijkstra(grid: Lattice, start: Layout) -> list[float]:
    out = [float("inf")] * len(grid.layouts)
    out[grid.index[start]] = 0.0
    heap = [(0.0, grid.index[start])]
    while heap:
        cost, node = heapq.heappop(heap)
        for arc in grid.leaving[node]:
            if cost + grid.costs[arc] < out[grid.heads[arc]]:
                out[grid.heads[arc]] = cost + grid.costs[arc]
                heapq.heappush(heap, (out[grid.heads[arc]], grid.heads[arc]))
    return out


@pytest.mark.parametrize("sizes", [(4,), (2, 3), (2, 2, 2)], ids=str)
def test_a_spread_finds_the_cheapest_ways(sizes: tuple[int, ...]) -> None:
    space, rng = space_of(gpt2(6, 8, 16, layers=1, heads=2), sizes), random.Random(0)
    for flow in rng.sample(space.flows, 5):
        grid = flow.grid
        field, starts = spreading(grid), rng.sample(grid.layouts, min(4, len(grid.layouts)))
        there, back = field.distances(field.places(starts)), field.distances(field.places(starts), back=True)
        for row, start in enumerate(starts):
            assert there[row][field.place] == pytest.approx(dijkstra(grid, start), rel=1e-12, abs=0)
            for end in rng.sample(grid.layouts, min(4, len(grid.layouts))):
                way_back = dijkstra(grid, end)[grid.index[start]]
                assert back[row][field.at(end)] == pytest.approx(way_back, rel=1e-12, abs=0)


@pytest.mark.parametrize("overlap", [0.0, 0.6])
@pytest.mark.parametrize(("seed", "sizes"), [(0, (4,)), (1, (2, 2)), (2, (4,)), (3, (4,))], ids=str)
def test_no_bound_is_above_the_optimum(seed: int, sizes: tuple[int, ...], overlap: float) -> None:
    rng = random.Random(seed)
    bound = random_program(rng, 6) if seed % 2 else bind(Residual([16, 16]), batch())
    space = space_of(bound, sizes, overlap=overlap, intra_node_bandwidth=rng.choice([1e7, 1e9]))
    made, best = bounds(space), optimum(space)
    assert made.total <= best * (1 + 1e-6)
    assert made.total >= best * (0.98 if overlap == 0 else 0.9)  # and they say something
    for op, values in zip(space.ops, made.strategies, strict=True):
        assert values.max() < np.inf
        for k in rng.sample(range(len(values)), min(2, len(values))):
            assert values[k] <= optimum(only(space, op.name, k)) * (1 + 1e-6)


def test_a_bound_stops_at_the_cutoff() -> None:
    space = space_of(gpt2(8, 16, 32, layers=1), (2, 2))
    full = bounds(space).total
    assert bounds(space, full * 0.9).total <= full
    assert bounds(space, full * 0.9).total >= full * 0.9


def test_a_narrow_program_is_smaller_and_has_the_same_optimum() -> None:
    space = space_of(gpt2(4, 8, 16, layers=2, heads=2), (2, 2), intra_node_bandwidth=1e7, intra_node_latency=0.0)
    made = bounds(space)
    part = narrow(made, made.total * 1.01)
    assert part is not None
    assert columns_of(part) < columns_of(space) / 2
    assert optimum(part) == pytest.approx(optimum(space), rel=1e-6)
    assert narrow(made, made.total * 0.99) is None  # nothing is faster than the bound


@pytest.mark.parametrize("seed", [0, 1, 2, *(pytest.param(k, marks=pytest.mark.slow) for k in range(3, 8))])
def test_narrowed_programs_equal_brute_force(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without a limit of memory, which the bounds leave out."""
    monkeypatch.setattr(stage, "_DIRECT", 0)
    rng = random.Random(100 + seed)
    sizes = rng.choice([(2,), (4,)])
    bound, mesh = random_program(rng, 4), Mesh(("d",), sizes)
    machines = cluster(mesh.size, **{**FIGURES, "intra_node_bandwidth": rng.choice([1e8, 1e10])})
    analysis, known = contract(bound, sizes), prices(machines, sizes)
    free = brute_force(analysis, known, float("inf"))
    plan = solve(bound, machines, mesh=mesh, gap=0.0, memory_limit=1e12)
    assert plan.predicted.step_time == pytest.approx(free.seconds, rel=1e-5)
    assert plan.solver.status == "optimal"
    limit = free.smallest + (plan.predicted.peak_memory - free.smallest) * 0.3
    best = brute_force(analysis, known, limit)
    tight = solve(bound, machines, mesh=mesh, gap=0.0, memory_limit=limit)
    assert tight.predicted.step_time == pytest.approx(best.seconds, rel=1e-5)
    assert tight.solver.bound <= best.seconds * (1 + 1e-6)


class _Tiny(random.Random):
    """Chooses 2 for every size, so that each dimension can be cut once."""

    def choice(self, options):  # type: ignore[no-untyped-def]
        return 2 if options == [4, 6, 8] else super().choice(options)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_three_axes_equal_brute_force(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "_DIRECT", 0)
    bound, mesh = random_program(_Tiny(seed), 2), Mesh(("a", "b", "c"), (2, 2, 2))
    machines = cluster(8, **FIGURES)
    free = brute_force(contract(bound, mesh.sizes), prices(machines, mesh.sizes), float("inf"))
    plan = solve(bound, machines, mesh=mesh, gap=0.0, memory_limit=1e12)
    assert plan.predicted.step_time == pytest.approx(free.seconds, rel=1e-5)
    assert plan.solver.status == "optimal"
