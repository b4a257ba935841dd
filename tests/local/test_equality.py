"""No plan changes the mathematics: random plans, and the solver's, equal one process in every number."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from equality import Prepared, assert_equals_one_process, mesh_of, prepare, run_plan, sample
from models import DROPOUT, MODELS
from torch import Tensor
from torch.utils import _pytree as pytree

from autopar import api
from autopar.cluster import ClusterSpec
from autopar.program import target_name
from autopar.rules.analysis import Analysis, Bound, Operation, contract
from autopar.rules.derive import Choice, Strategy, apply, axis_choices
from autopar.runtime import collectives
from autopar.runtime.collectives import Axis, Split
from autopar.solver import sample as sampling

SEEDS = {(2,): 2, (4,): 2, (2, 2): 2, (3, 2): 1, (2, 2, 2): 1}  # random plans per model, by mesh: 10 x 8 in all


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
    found = all(analysis.to_root(v, layout) is not None for v, layout in zip(op.inputs, strategy.ins, strict=True))
    return strategy if found else None


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


@pytest.mark.parametrize("n", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_every_enumerated_strategy_runs(
    prepared: Prepared, n: int, monkeypatch: pytest.MonkeyPatch, figure: Callable[[str], None]
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
    figure(f"{len(ran)} of {len(every)} (op, choice) pairs on {n} ranks in {plans} plans")


# ------------------------------------------------------------------------------------------------ damage


def _no_sum(x: Tensor, axis: Axis) -> Tensor:
    return x


def _twice(x: Tensor, axis: Axis) -> Tensor:
    return 2 * ALL_REDUCE(x, axis)


def _neighbour(x: Tensor, split: Split, axis: Axis) -> Tensor:
    return TAKE_PART(x, split, replace(axis, index=axis.size - 1 - axis.index))


def _no_zeros(x: Tensor, split: Split, axis: Axis) -> Tensor:
    return ALL_GATHER(x, split, axis)


ALL_REDUCE, TAKE_PART, ALL_GATHER = collectives.all_reduce, collectives.take_part, collectives.all_gather


@pytest.mark.parametrize(
    ("name", "damage"),
    [("all_reduce", _no_sum), ("all_reduce", _twice), ("take_part", _neighbour), ("pad_part", _no_zeros)],
    ids=["a sum dropped", "a sum doubled", "the neighbour's rows", "every rank gives the whole sum"],
)
def test_damaged_conversions_are_caught(name: str, damage: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """What these tests are worth: with one conversion wrong, a plan no longer equals one process."""
    prepared = prepare(MODELS["mlp"]())
    plans = [sample(prepared.bound, (2,), seed) for seed in range(6)]
    monkeypatch.setattr(collectives, name, damage)
    caught = 0
    for plan in plans:
        try:
            assert_equals_one_process(prepared, plan, "damaged")
        except (AssertionError, RuntimeError, ValueError):  # wrong numbers, or rows that do not fit
            caught += 1
    assert caught >= 3, "most random plans contain every kind of conversion"


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
