"""No plan changes the mathematics: random plans, and the solver's, equal one process in every number."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from equality import Prepared, assert_equals_one_process, mesh_of, prepare, run_plan, sample
from models import DROPOUT, MODELS
from torch import Tensor
from torch.utils import _pytree as pytree

from autopar import api
from autopar.cluster import ClusterSpec
from autopar.layout import is_valid
from autopar.program import target_name
from autopar.rules.analysis import Analysis, Bound, Operation, contract
from autopar.rules.derive import Choice, Strategy, apply, axis_choices
from autopar.solver import sample as sampling

SEEDS = {(2,): 5, (4,): 4, (2, 2): 5, (3, 2): 4, (2, 2, 2): 3}  # random plans per model, by mesh: 9 x 21 in all


@pytest.fixture(scope="module", params=MODELS)
def prepared(request: pytest.FixtureRequest) -> Iterator[Prepared]:
    """Each model once, captured in float64 throughout, with the run of one process."""
    yield prepare(MODELS[request.param](), exact=request.param not in DROPOUT)


@pytest.mark.parametrize("sizes", SEEDS, ids=str)
def test_random_plans_equal_one_process(prepared: Prepared, sizes: tuple[int, ...]) -> None:
    """Every decision at random: strategies, the way of each conversion, where weights are stored, held, reduced."""
    for seed in range(SEEDS[sizes]):
        assert_equals_one_process(prepared, sample(prepared.bound, sizes, seed), f"seed {seed}")


@pytest.mark.parametrize("sizes", SEEDS, ids=str)
def test_the_solvers_plan_equals_one_process(prepared: Prepared, sizes: tuple[int, ...]) -> None:
    mesh = mesh_of(sizes)
    plan = api.solve(prepared.bound, ClusterSpec(nodes=1, devices_per_node=mesh.size, device="cpu"), mesh=mesh)
    assert_equals_one_process(prepared, plan, f"plan {plan.id} ({plan.solver.status})")


@pytest.mark.slow
@pytest.mark.parametrize("sizes", SEEDS, ids=str)
def test_many_more_random_plans_equal_one_process(prepared: Prepared, sizes: tuple[int, ...]) -> None:
    for seed in range(100, 120):
        assert_equals_one_process(prepared, sample(prepared.bound, sizes, seed), f"seed {seed}")


def test_torch_optimizers_work_on_the_parameters_themselves(prepared: Prepared) -> None:
    """AdamW over the module's own parameters, DTensors, as a user writes it."""
    assert_equals_one_process(prepared, sample(prepared.bound, (2, 2), 50), "seed 50", on_dtensors=True)


# ------------------------------------------------------------------------------------------------ every strategy


def reachable(analysis: Analysis, op: Operation, choice: Choice) -> Strategy | None:
    """The strategy that makes ``choice`` on the only axis; None where no value can be had as it needs."""
    strategy = apply(op.type, [choice], analysis.axis_sizes)
    if strategy is None:
        return None
    for name, layout in zip(op.inputs, strategy.ins, strict=True):
        wanted = analysis.to_root(name, layout)
        if wanted is None or not is_valid(analysis.values[analysis.root(name)].shape, wanted, analysis.axis_sizes):
            return None
    return strategy


Pair = tuple[str, str]  # an op and a choice, as text


def enumerated(bound: Bound, n: int) -> dict[str, list[tuple[Pair, Strategy]]]:
    """What every operation may do on one axis of ``n`` ranks."""
    analysis = contract(bound, (n,))
    out: dict[str, list[tuple[Pair, Strategy]]] = {}
    for op in analysis.operations:
        options = axis_choices(op.type, analysis.factor_points(op), n)
        found = [(c, reachable(analysis, op, c)) for c in options]
        out[op.name] = [((target_name(op.node), str(c)), s) for c, s in found if s is not None]
    return out


@pytest.mark.parametrize("n", [2, 3])
def test_every_enumerated_strategy_runs(
    prepared: Prepared, n: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every (op, choice) that the solver may pick on one axis is part of a plan that equals one process."""
    options = enumerated(prepared.bound, n)
    every = {pair for found in options.values() for pair, _ in found}
    ran: set[Pair] = set()
    plans = 0

    def pick(analysis: Analysis, op: Operation, rng: random.Random) -> Strategy:
        """A strategy that has not run yet, where there is one."""
        pair, strategy = rng.choice([o for o in options[op.name] if o[0] not in ran] or options[op.name])
        ran.add(pair)
        return strategy

    monkeypatch.setattr(sampling, "_reachable_strategy", pick)
    while ran != every:
        plan = sample(prepared.bound, (n,), plans)  # takes what has not run yet
        assert_equals_one_process(prepared, plan, f"directed plan {plans}")
        plans += 1
    with capsys.disabled():
        print(f"  {len(ran)} of {len(every)} (op, choice) pairs on {n} ranks in {plans} plans", end=" ")


# ------------------------------------------------------------------------------------------------ unmodified


@pytest.mark.parametrize("name", [n for n in MODELS if n not in DROPOUT])
def test_unmodified_models_equal_eager(name: str) -> None:
    """Hugging Face's own float32 casts left in: loss and outputs equal the user's eager model to 1e-6."""
    case = MODELS[name]()
    bound = api.understand(case.model, case.batch, case.loss_fn)
    inputs = {k: v for k, v in case.batch.items() if case.loss_fn is None or k != "y"}
    out = case.model(**inputs)
    loss = out.loss if case.loss_fn is None else case.loss_fn(out, case.batch)
    expected = [x.detach() for x in pytree.tree_leaves(out) if isinstance(x, Tensor)]
    unmodified = Prepared(case, bound, None)  # type: ignore[arg-type]

    def job(module: api.ParallelModule, batch: dict[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
        outputs = [x.detach() for x in pytree.tree_leaves(module(**batch)) if isinstance(x, Tensor)]
        return module.forward_backward(batch), outputs

    for sizes, seed in [((2,), 200), ((2, 2), 201), ((3, 2), 202)]:
        for found in run_plan(unmodified, sample(bound, sizes, seed), job):
            torch.testing.assert_close(found, (loss.detach(), expected), rtol=1e-6, atol=1e-6)
