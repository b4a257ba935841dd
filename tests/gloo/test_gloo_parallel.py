"""Whole models on real processes: equal to one process, and nobody waits for a rank that is gone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from equality import Prepared, Run, assert_equal_runs, mesh_of, prepare, sample, train, widened
from models import MODELS
from processes import Outcome, run_processes, values

import autopar
import autopar.profiling
from autopar import api
from autopar.cluster import ClusterSpec
from autopar.plan import Plan

pytestmark = pytest.mark.gloo

NAMES = ["gpt2", "bert"]


def train_all(rank: int, plans: dict[str, list[str]]) -> dict[str, list[Run]]:
    """Train every model by each of its plans."""
    found = {}
    for name, texts in plans.items():
        case = MODELS[name]()
        bound = widened(case)[1]()
        found[name] = [train(api.build(case.model, bound, Plan.from_json(t)), case.batch) for t in texts]
    return found


@pytest.fixture(scope="module")
def references() -> dict[str, Prepared]:
    return {name: prepare(MODELS[name]()) for name in NAMES}


@pytest.fixture(scope="module", params=[(2,), (2, 2)], ids=str)
def runs(request: pytest.FixtureRequest, references: dict[str, Prepared]) -> Iterator[list[dict[str, list[Run]]]]:
    """What every rank found by the solver's plan and two random ones of each model."""
    mesh = mesh_of(request.param)
    cluster = ClusterSpec(nodes=1, devices_per_node=mesh.size, device="cpu")
    plans = {
        name: [api.solve(p.bound, cluster, mesh=mesh), *(sample(p.bound, mesh.sizes, seed) for seed in (300, 301))]
        for name, p in references.items()
    }
    texts = {name: [p.to_json() for p in found] for name, found in plans.items()}
    yield values(run_processes(train_all, mesh.size, texts))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("index", range(3), ids=["solver", "random 300", "random 301"])
def test_equals_one_process(
    runs: list[dict[str, list[Run]]], references: dict[str, Prepared], name: str, index: int
) -> None:
    """Outputs, losses, every gradient, the norm and the state after three AdamW steps, on every rank."""
    for found in runs:
        assert_equal_runs(found[name][index], references[name].reference)


# ------------------------------------------------------------------------------------------------ from a file


def parallelize_from_file(rank: int, path: str) -> tuple[float, bool]:
    """As a user does: the model, the cluster, the batch, a plan that was made elsewhere."""
    case = MODELS["gpt2"]()
    module = autopar.parallelize(case.model, "2xcpu", case.batch, plan=autopar.Plan.load(path))
    loss = module.forward_backward(case.batch)
    return float(loss), all(p.grad is not None for p in module.parameters())


def test_a_plan_made_here_runs_there(tmp_path: Path) -> None:
    case = MODELS["gpt2"]()
    autopar.plan(case.model, "2xcpu", case.batch).save(str(tmp_path / "plan.json"))
    for loss, complete in values(run_processes(parallelize_from_file, 2, str(tmp_path / "plan.json"))):
        assert complete and loss == pytest.approx(float(case.model(**case.batch).loss), rel=1e-6)


# ------------------------------------------------------------------------------------------------ trouble


def raise_on_one(rank: int) -> float:
    """Rank 1 gets a batch that was not planned for; the others are in the middle of a step."""
    case = MODELS["mlp"]()
    plan = autopar.random_plan(case.model, "3xcpu", case.batch, seed=1, loss_fn=case.loss_fn)
    module = autopar.parallelize(case.model, "3xcpu", case.batch, plan=plan, loss_fn=case.loss_fn)
    module.forward_backward(case.batch)
    wrong = {k: v[:2] for k, v in case.batch.items()}
    return float(module.forward_backward(wrong if rank == 1 else case.batch))


def test_no_rank_hangs_when_another_raises() -> None:
    outcomes = run_processes(raise_on_one, 3, timeout=90)
    assert not any(o.hung for o in outcomes)
    assert "an input differs from the example batch" in outcomes[1].error
    assert all(o.error for o in outcomes), "the others cannot have finished their step"


def unequal_plans(rank: int) -> None:
    case = MODELS["mlp"]()
    plan = autopar.random_plan(case.model, "2xcpu", case.batch, seed=rank, loss_fn=case.loss_fn)
    autopar.parallelize(case.model, "2xcpu", case.batch, plan=plan, loss_fn=case.loss_fn)


def smaller_world(rank: int) -> None:
    case = MODELS["mlp"]()
    plan = autopar.random_plan(case.model, "4xcpu", case.batch, loss_fn=case.loss_fn)
    autopar.parallelize(case.model, "4xcpu", case.batch, plan=plan, loss_fn=case.loss_fn)


@pytest.mark.parametrize(
    ("job", "says"),
    [(unequal_plans, "ranks hold unequal plans"), (smaller_world, "the plan is for another number of processes")],
)
def test_every_rank_refuses_before_anything_runs(job: Callable[[int], None], says: str) -> None:
    outcomes: list[Outcome] = run_processes(job, 2)
    assert all("RuntimeMismatch" in o.error and says in o.error for o in outcomes)


def profiled(rank: int) -> autopar.profiling.Profile:
    case = MODELS["gpt2"]()
    search = autopar.Search(mesh={"d": 2})
    cluster = ClusterSpec("2xcpu")
    return autopar.profile(case.model, cluster, case.batch, loss_fn=case.loss_fn, search=search, time_limit=1)


def test_collectives_are_measured_alike_on_every_rank() -> None:
    first, second = values(run_processes(profiled, 2))
    assert first.collectives == second.collectives and first.overlap == second.overlap
    assert set(first.collectives) == {"all-reduce", "all-gather", "reduce-scatter", "all-to-all"}
    for kind, by_ranks in first.collectives.items():
        times = by_ranks[2]
        assert list(times) == list(autopar.profiling.SIZES)
        assert times[2**24] > times[2**12] > 0, kind
    assert 0 <= first.overlap <= 1
