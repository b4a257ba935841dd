"""Plan files: the same plan gives the same bytes, a damaged file says where, a foreign plan is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from models import mlp
from refused import refused
from torch import nn

import autopar
from autopar import api
from autopar.errors import PlanError, RuntimeMismatch
from autopar.layout import I, Move, P, R, S
from autopar.passes.emit import emit
from autopar.passes.fold import expand
from autopar.passes.resolve import resolve
from autopar.plan import Plan, find_path, format_move, parse_move
from autopar.rules.analysis import Bound

CLUSTER = "4xcpu"


@pytest.fixture(scope="module")
def plan() -> Plan:
    case = mlp()
    return autopar.random_plan(case.model, CLUSTER, case.batch, seed=3, loss_fn=case.loss_fn)


@pytest.fixture(scope="module")
def bound() -> Bound:
    case = mlp()
    return api.understand(case.model, case.batch, case.loss_fn)


# ------------------------------------------------------------------------------------------------ to and from files


def test_saves_and_loads_the_same_bytes(plan: Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "a.json")
    again = Plan.load(tmp_path / "a.json")
    again.save(tmp_path / "b.json")
    assert again == plan and again.id == plan.id
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()


def test_the_same_seed_gives_the_same_plan(plan: Plan) -> None:
    case = mlp()
    assert (
        autopar.random_plan(case.model, CLUSTER, case.batch, seed=3, loss_fn=case.loss_fn).to_json() == plan.to_json()
    )
    assert autopar.random_plan(case.model, CLUSTER, case.batch, seed=4, loss_fn=case.loss_fn).id != plan.id


def test_the_id_is_of_what_runs_not_of_how_it_was_found(plan: Plan) -> None:
    changed = json.loads(plan.to_json())
    changed["solver"]["seconds"] = 12.5
    assert Plan.from_json(json.dumps(changed)).id == plan.id
    changed["ops"][0]["choices"] = ["I"]
    assert Plan.from_json(json.dumps(changed)).id != plan.id


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with refused(PlanError, "the plan file cannot be read", "none.json"):
        Plan.load(tmp_path / "none.json")


Change = Callable[[dict[str, Any]], object]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda d: d.pop("ops"), "missing required field `ops`"),
        (lambda d: d.update(speed=1), "unknown field `speed`"),
        (lambda d: d.update(ops={}), "Expected `array`, got `object` - at `$.ops`"),
        (lambda d: d["ops"][1].update(choices="I"), "Expected `array`, got `str` - at `$.ops[1].choices`"),
        (lambda d: d["ops"][0].update(name=7), "Expected `str`, got `int` - at `$.ops[0].name`"),
        (lambda d: d["ops"][0].pop("name"), "missing required field `name` - at `$.ops[0]`"),
        (lambda d: d["axes"].append(["x"]), "at `$.axes[1]`"),
        (lambda d: d["axes"][0].__setitem__(1, "4"), "Expected `int`, got `str` - at `$.axes[0][1]`"),
        (lambda d: d["predicted"].update(step_time="fast"), "at `$.predicted.step_time`"),
        (lambda d: d["predicted"].update(step_time=float("nan")), "NaN is no finite number"),
        (lambda d: d["solver"].update(bound=float("-inf")), "-Infinity is no finite number"),
        (lambda d: d.update(version=2), "unknown plan version where: hand.json expected: 1 got: 2"),
        (lambda d: d.update(version="1"), "Expected `int`, got `str` - at `$.version`"),
    ],
)
def test_a_damaged_file_says_where(plan: Plan, change: Change, says: str) -> None:
    data = json.loads(plan.to_json())
    change(data)
    with refused(PlanError, "where: hand.json", says):
        Plan.from_json(json.dumps(data), where="hand.json")


def test_a_truncated_file_is_refused(plan: Plan) -> None:
    text = plan.to_json()
    for end in (0, 1, len(text) // 3, len(text) - 3):
        with refused(PlanError, "the plan file is damaged", "line"):
            Plan.from_json(text[:end])


def test_a_key_that_stands_twice_is_refused(plan: Plan) -> None:
    text = plan.to_json().replace('"cluster":', '"cluster": "8xH100",\n "cluster":', 1)
    with refused(PlanError, "the plan file is damaged", "key 'cluster' stands twice in one object"):
        Plan.from_json(text)


@pytest.mark.parametrize("text", ["[]", "null", "3", '"plan"', "[" * 100_000])
def test_json_that_is_no_plan_is_refused(text: str) -> None:
    with refused(PlanError, "the plan file is damaged"):
        Plan.from_json(text)


# ------------------------------------------------------------------------------------------------ for what it was made


def test_a_plan_of_another_model_is_refused(plan: Plan) -> None:
    case = mlp()
    other = nn.Sequential(nn.Linear(7, 13)).double()
    bound = api.understand(other, (case.batch["x"],), lambda out, batch: out.sum())
    with refused(PlanError, "the plan is for another model or batch", "plan again for this model and this batch size"):
        api.check_plan(plan, bound, autopar.ClusterSpec(CLUSTER))


def test_a_plan_for_another_batch_size_is_refused(plan: Plan) -> None:
    case = mlp()
    smaller = {k: v[:3] for k, v in case.batch.items()}
    with refused(PlanError, "the plan is for another model or batch"):
        autopar.parallelize(case.model, CLUSTER, smaller, plan=plan, loss_fn=case.loss_fn)


def test_a_plan_for_another_cluster_is_refused(plan: Plan, bound: Bound) -> None:
    with refused(PlanError, "the plan is for another cluster"):
        api.check_plan(plan, bound, autopar.ClusterSpec("4xH100"))


def test_a_plan_for_another_world_is_refused(plan: Plan) -> None:
    """One process, a plan for four: an error before anything runs, with the launcher's line."""
    case = mlp()
    with refused(RuntimeMismatch, "another number of processes", "expected: 4", "torchrun --nproc-per-node 4"):
        autopar.parallelize(case.model, CLUSTER, case.batch, plan=plan, loss_fn=case.loss_fn)


# ------------------------------------------------------------------------------------------------ against the program


def apply_to(bound: Bound, data: dict[str, Any]) -> None:
    """Read every decision against the program, as `build` does before anything runs."""
    plan = Plan.from_json(json.dumps(data))
    resolved = resolve(plan, bound, *expand(plan, bound))
    emit(resolved, (0,), True)


def decision(data: dict[str, Any], kind: str, name: str) -> dict[str, Any]:
    return next(d for d in data[kind] if name in d["name"])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda d: d["ops"].remove(decision(d, "ops", "linear")), "the plan does not decide this op where: linear, up"),
        (lambda d: decision(d, "ops", "relu").update(choices=["I", "I"]), "one choice per mesh axis where: relu"),
        (lambda d: decision(d, "ops", "relu").update(choices=["P 0"]), "a choice cannot be read where: relu"),
        (lambda d: decision(d, "ops", "relu").update(choices=["split q"]), "a choice cannot be read where: relu"),
        (
            lambda d: d["ops"][0].update(name="other"),
            "the plan decides an op that the program does not have where: other",
        ),
        (
            lambda d: d["values"].append({"name": "v", "moves": []}),
            "decides a value that the program does not have where: v",
        ),
        (lambda d: d["parameters"][0].update(name="w"), "decides a parameter that the program does not have where: w"),
        (lambda d: d["parameters"].append(d["parameters"][0]), "the plan decides a parameter twice where: up.weight"),
        (lambda d: d["parameters"][0].update(stored="x:S7"), "a layout cannot be read where: up.weight"),
        (lambda d: d["parameters"][0].update(gather=["x:S0 -> I"]), "a move cannot be read where: up.weight"),
        (lambda d: d["parameters"][0].update(use=["x:S0(2,1,5) > x:S0(7,2,1)"]), "cannot be read where: up.weight"),
    ],
)
def test_a_decision_that_does_not_fit_the_program_is_named(plan: Plan, bound: Bound, change: Change, says: str) -> None:
    data = json.loads(plan.to_json())
    apply_to(bound, data)  # as it is, it fits
    change(data)
    with refused(PlanError, says):
        apply_to(bound, data)


def test_a_value_without_a_way_is_named(plan: Plan, bound: Bound) -> None:
    """Moves that were cut out of the file leave some op without its operand."""
    data = json.loads(plan.to_json())
    data["values"] = []
    with refused(PlanError, "the plan does not say how a value gets where it is needed"):
        apply_to(bound, data)


# ------------------------------------------------------------------------------------------------ moves


def test_moves_read_back() -> None:
    move = Move((S(0, 3, 4, 1), I), 1, S(1, 1, 5, 1))
    assert format_move(move, ("dp", "tp")) == "dp:S0(3,4,1) > tp:S1"
    assert parse_move("dp:S0(3,4,1) > tp:S1", ("dp", "tp"), (12, 5)) == move


@pytest.mark.parametrize("text", ["", "dp:S0", "dp:S0 > pp:I", "dp:S0 > tp", "dp:S0 -> tp:I"])
def test_refuses_text_that_is_no_move(text: str) -> None:
    with pytest.raises(ValueError, match=r"is no move|is no state"):
        parse_move(text, ("dp", "tp"), (12, 5))


def test_the_shortest_way_along_given_moves() -> None:
    cut = S(0, 1, 12, 1)
    moves = (Move((P,), 0, R), Move((R,), 0, cut), Move((P,), 0, cut), Move((cut,), 0, I))
    assert find_path((P,), (I,), moves) == (moves[2], moves[3])
    assert find_path((I,), (P,), moves) is None
    assert find_path((I,), (I,), moves) == ()
