"""The search over meshes, and the options that bound it."""

from __future__ import annotations

import pytest
from test_fold import Residual, batch, bind
from test_solver import cluster, gpt2

from autopar.cluster import ClusterSpec
from autopar.errors import PlanError
from autopar.layout import Mesh
from autopar.rules.analysis import Bound
from autopar.solver.ilp import solve
from autopar.solver.search import Search, factorisations, merged


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


# two nodes of four: fast links within a node, slow ones between
TWO_NODES = ClusterSpec(
    nodes=2,
    devices_per_node=4,
    device="cpu",
    intra_node_latency=1e-7,
    intra_node_bandwidth=1e10,
    inter_node_latency=1e-6,
    inter_node_bandwidth=1e8,
    launch_overhead=0.0,
    memory_bandwidth=1e10,
    peak_flops=1e11,
)


def test_three_axes_win_where_no_two_are_enough() -> None:
    """Two sequences and two heads leave the third factor of two to another dimension."""
    few = gpt2(2, 16, 32, layers=1, heads=2)
    found = solve(few, TWO_NODES)
    assert len(found.axes) == 3
    assert (found.solver.status, found.solver.gap <= 0.01) == ("optimal", True)
    flat = solve(few, TWO_NODES, search=Search(mesh=[m.as_dict() for m in factorisations(8, 2)]))
    assert flat.solver.status == "optimal"
    assert found.solver.objective < flat.solver.bound


def test_a_fourth_axis_is_refined_where_it_is_asked_for() -> None:
    few = bind(Residual([16]), batch())
    sixteen = cluster(16, intra_node_latency=1e-7, intra_node_bandwidth=1e8, memory_bandwidth=1e9, launch_overhead=0.0)
    assert max(len(m.axes) for m in Search().meshes(16)) == 3
    names = {"a": 2, "b": 2, "c": 2, "d": 2}
    plan = solve(few, sixteen, search=Search(mesh=names), time_limit=10)
    assert plan.mesh == names
    assert plan.solver.status in ("optimal", "heuristic", "time_limit")
    assert (plan.solver.status == "optimal") == (plan.solver.gap <= 0.01)
    assert 0 < plan.solver.bound <= plan.solver.objective
    pinned = solve(few, sixteen, search=Search(mesh=names), pins={"*": "d:I"}, time_limit=5)
    assert all("d:S" not in p.stored for p in pinned.parameters)


def test_the_meshes_that_one_refines() -> None:
    fine = Mesh(("a", "b", "c", "d"), (2, 3, 5, 7))
    assert {m.sizes: source for m, source in merged(fine, 2)} == {
        (2, 105): (0, 1, 1, 1),
        (6, 35): (0, 0, 1, 1),
        (30, 7): (0, 0, 0, 1),
    }
    assert next(m.as_dict() for m, _ in merged(fine, 3)) == {"a": 2, "b": 3, "c_d": 35}


@pytest.mark.parametrize(
    ("ranks", "wanted"),
    [(4, {(2, 2)}), (8, {(2, 2, 2)}), (9, {(3, 3)}), (12, {(3, 2, 2)}), (16, {(4, 2, 2), (4, 4)}), (64, {(4, 4, 4)})],
)
def test_square_and_cubic_meshes_are_among_the_candidates(ranks: int, wanted: set[tuple[int, ...]]) -> None:
    assert wanted <= {m.sizes for m in factorisations(ranks)}


def test_within_its_time(small: Bound) -> None:
    plan = solve(small, cluster(8), time_limit=0.5)
    assert plan.solver.seconds < 20
    assert plan.solver.status in ("optimal", "time_limit", "heuristic")
