"""Fault injection: damage to emitted graphs, what verify says of it, and whether it changes what a step computes.

The whole sweep, and its table:  pytest -m slow -s tests/local/test_damage.py
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from functools import partial
from typing import Any

import pytest
from damage import Damage, Graphs, damaged, every_damage, some
from equality import Prepared, assert_equal_runs, prepare, run_plan, sample, train
from models import MODELS

from autopar.passes.fold import expand
from autopar.passes.resolve import Resolved, resolve
from autopar.plan import Plan
from autopar.testing import run_local
from autopar.verify.numbering import Numbering, number_values
from autopar.verify.ranks import compare_ranks
from autopar.verify.report import Finding
from autopar.verify.step import check_step
from autopar.verify.subject import rank_graph
from autopar.verify.traffic import check_traffic
from autopar.verify.trial import Outcome, Trial, install, run_unsplit
from autopar.verify.types import check_types
from autopar.verify.widen import wide_model

COLUMNS = ("damages", "change a result", "types", "collectives", "either", "named", "step", "missed", "change nothing")


@dataclasses.dataclass(frozen=True, slots=True)
class Subject:
    """A plan whose graphs are damaged, and what one process computes."""

    prepared: Prepared
    plan: Plan
    resolved: Resolved
    numbering: Numbering
    graphs: Graphs
    trial: Trial
    expected: Outcome

    @property
    def names(self) -> dict[str, str]:
        return {node: p.name for node, p in self.prepared.bound.program.parameters.items()}


def subject(prepared: Prepared, sizes: tuple[int, ...], seed: int) -> Subject:
    case, bound = prepared.case, prepared.bound
    plan = sample(bound, sizes, seed)
    resolved = resolve(plan, bound, *expand(plan, bound))
    graphs = {at: rank_graph(resolved, at) for at in resolved.mesh.all_coordinates()}
    weights = dict(case.model.named_parameters(remove_duplicate=False))
    model = wide_model(weights, dict(case.model.named_buffers()), case.model)
    trial = Trial(model, bound, plan, case.batch, partial(run_local, world_size=plan.world_size), graphs=graphs)
    given = Subject(prepared, plan, resolved, number_values(bound), graphs, trial, run_unsplit(trial))
    assert not looked_at(given, graphs), "a right plan passes"
    assert not check_step(trial, given.expected)[0], "a right plan passes"
    return given


def looked_at(given: Subject, graphs: Graphs) -> dict[str, list[Finding]]:
    """What types and collectives say; nothing runs."""
    ranks = list(graphs.values())
    types = [check_types(given.resolved, given.numbering, r) for r in ranks]
    found = {
        "types": [f for t in types for f in t.findings] + compare_ranks(given.resolved, ranks, types),
        "collectives": [
            f for r, t in zip(ranks, types, strict=True) for f in check_traffic(given.resolved, r, t, False)
        ],
    }
    return {check: findings for check, findings in found.items() if findings}


def trained_alike(given: Subject, graphs: Graphs) -> bool:
    """Whether three AdamW steps by damaged graphs end where one process does: asks neither verify nor its step."""

    def job(module: Any, batch: Any) -> Any:
        install(module, graphs[module.coordinates])
        return train(module, batch)

    try:
        for run in run_plan(given.prepared, given.plan, job):
            assert_equal_runs(run, given.prepared.reference)
    except (AssertionError, RuntimeError, IndexError, ValueError, TypeError):
        return False
    return True


def judge(given: Subject, damage: Damage) -> Counter[str]:
    """One row of the table for one damage."""
    graphs = damaged(given.graphs, damage)
    found = looked_at(given, graphs)
    row = Counter({"damages": 1, **dict.fromkeys(found, 1), "either": int(bool(found))})
    if damage.waits:  # ranks would wait for each other: it is not run
        step, changes = False, True
    else:
        trial = dataclasses.replace(given.trial, graphs=graphs)
        step = bool(check_step(trial, given.expected, locate=False)[0])
        changes = step or not trained_alike(given, graphs)
    if not changes:
        return Counter({"damages": 1, "change nothing": 1})
    row += Counter({"change a result": 1, "step": int(step)})
    first = next((f for findings in found.values() for f in findings), None)
    if first is not None:
        row["named"] += not damage.where or any(w in first.where for w in damage.where)
    row["missed"] += not (found or step)
    return row


def sweep(
    models: tuple[str, ...], meshes: tuple[tuple[int, ...], ...], seeds: int, each: int
) -> dict[str, Counter[str]]:
    """``each`` damages of every model, mesh and random plan; rows by kind of damage."""
    rows: dict[str, Counter[str]] = {}
    for model in models:
        prepared = prepare(MODELS[model]())
        for sizes in meshes:
            for seed in range(seeds):
                given = subject(prepared, sizes, seed)
                for damage in some(given.graphs, given.names, each, random.Random(f"{model} {sizes} {seed}")):
                    rows[damage.kind] = rows.get(damage.kind, Counter()) + judge(given, damage)
    return rows


def show(rows: dict[str, Counter[str]]) -> Counter[str]:
    """Print the table; returns its last row."""
    total: Counter[str] = sum(rows.values(), Counter())
    print("\n" + f"{'':<28}" + "".join(f"{c:>16}" for c in COLUMNS))
    for kind, row in [*sorted(rows.items()), ("all", total)]:
        print(f"{kind:<28}" + "".join(f"{row[c]:>16}" for c in COLUMNS))
    return total


def assert_caught(total: Counter[str]) -> None:
    changing = total["change a result"]
    assert changing > total["damages"] / 2
    assert total["missed"] == 0
    assert total["either"] >= 0.95 * changing
    assert total["named"] >= 0.95 * total["either"]


def test_damage_is_found_without_running() -> None:
    total = show(sweep(("mlp", "gpt2-3-heads"), ((2, 2),), seeds=1, each=18))
    assert_caught(total)


@pytest.mark.parametrize(("kind", "text"), [("wrong scale", "values part at"), ("wrong backward", "gradients part at")])
def test_a_step_names_the_node_where_values_or_gradients_part(kind: str, text: str) -> None:
    given = subject(prepare(MODELS["mlp"]()), (2, 2), 0)
    named = 0
    for damage in every_damage(given.graphs, given.names):
        if damage.kind == kind and damage.target.startswith("convert"):
            trial = dataclasses.replace(given.trial, graphs=damaged(given.graphs, damage))
            for finding in check_step(trial, given.expected)[0]:
                named += text in finding.where and any(w in finding.where for w in damage.where)
    assert named


@pytest.mark.slow
def test_at_least_five_hundred_damages() -> None:
    models = ("mlp", "gpt2-3-heads", "bert-unpadded", "llama-padded", "resnet")
    total = show(sweep(models, ((2,), (3,), (2, 2)), seeds=2, each=22))
    assert total["damages"] >= 500
    assert_caught(total)
