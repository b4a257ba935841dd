"""The search over meshes, and the options that bound it."""

from __future__ import annotations

import pytest
from test_fold import Residual, batch, bind
from test_solver import cluster, gpt2

from autopar.cluster import ClusterSpec
from autopar.errors import PlanError
from autopar.layout import Mesh
from autopar.rules.analysis import Bound
from autopar.solver import search as searching
from autopar.solver.ilp import solve
from autopar.solver.search import Search, factorisations


def test_factorisations_are_all_and_ordered() -> None:
    found = list(factorisations(12))
    assert {m.sizes for m in found} == {
        (12,),
        (2, 6),
        (6, 2),
        (3, 4),
        (4, 3),
        (2, 2, 3),
        (2, 3, 2),
        (3, 2, 2),
    }
    assert len(found) == 8
    assert [m.sizes for m in factorisations(7)] == [(7,)]
    assert [m.sizes for m in factorisations(1)] == [()]


@pytest.mark.parametrize(
    "option",
    [
        {"pp": 2},
        {"microbatches": 4},
        {"schedule": "1f1b"},
        {"recompute": "full"},
    ],
)
def test_options_that_are_not_implemented_are_refused(option: dict[str, object]) -> None:
    with pytest.raises(PlanError, match="not yet"):
        Search(**option).check()  # type: ignore[arg-type]


def test_a_mesh_that_does_not_fill_the_cluster_is_refused() -> None:
    with pytest.raises(PlanError, match="does not fill"):
        Search(mesh={"dp": 3}).meshes(4)
    with pytest.raises(PlanError, match="ZeRO"):
        Search(zero=4).check()
    assert Search(mesh=[{"x": 4}, {"a": 2, "b": 2}]).meshes(4) == (Mesh(("x",), (4,)), Mesh(("a", "b"), (2, 2)))


@pytest.fixture(scope="module")
def small() -> Bound:
    return gpt2(8, 16, 32)


def test_the_search_finds_the_best_mesh(small: Bound) -> None:
    machines = cluster(intra_node_latency=1e-6, intra_node_bandwidth=1e9)
    alone = {m: solve(small, machines, mesh=m, gap=1e-4).solver.objective for m in factorisations(4)}
    found = solve(small, machines, gap=1e-4)
    assert found.solver.objective == pytest.approx(min(alone.values()), rel=1e-4)
    assert found.solver.status == "optimal"
    assert found.solver.bound <= min(alone.values()) * (1 + 1e-9)


def test_one_rank_has_a_plan(small: Bound) -> None:
    plan = solve(small, ClusterSpec("1xH100"))
    assert plan.axes == ()
    assert plan.predicted.comm_bytes == 0


def test_three_axes_are_improved_from_two_and_called_a_heuristic(monkeypatch: pytest.MonkeyPatch) -> None:
    small = bind(Residual([16, 16]), batch())
    machines = cluster(8, intra_node_latency=1e-7, intra_node_bandwidth=1e8, memory_bandwidth=1e9, launch_overhead=0.0)
    exact = solve(small, machines, mesh=Mesh(("dp", "tp", "cp"), (2, 2, 2)), gap=1e-4)
    monkeypatch.setattr(searching, "_LARGEST", 0)
    found = solve(small, machines)
    flat = min(solve(small, machines, mesh=m).solver.objective for m in factorisations(8, 2))
    assert found.solver.objective <= flat * (1 + 1e-9)
    if len(found.axes) == 3:
        assert found.solver.objective >= exact.solver.objective * (1 - 1e-4)
    assert found.solver.status == ("optimal" if found.solver.gap <= 0.01 else "heuristic")


def test_within_its_time(small: Bound) -> None:
    plan = solve(small, cluster(8), time_limit=0.5)
    assert plan.solver.seconds < 20
    assert plan.solver.status in ("optimal", "time_limit", "heuristic")
