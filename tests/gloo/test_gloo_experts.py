"""Rows on their way to experts and back between real processes, experts and ranks without rows among them."""

from __future__ import annotations

from typing import Any

import pytest
from equality import Run, assert_equal_runs, forced, prepare, train, widened
from models import mixture
from processes import run_processes, values

from autopar import api
from autopar.plan import Plan
from autopar.program import target_name

pytestmark = pytest.mark.gloo

CHOICES = [("exchange s with e",), ("exchange s at 1,7,2 with e",), ("parts e",)]


def train_all(rank: int, plans: list[str]) -> list[Run]:
    case = mixture()
    bound = widened(case)[1]()
    return [train(api.build(case.model, bound, Plan.from_json(t)), case.batch) for t in plans]


def test_experts_on_processes_equal_one_process() -> None:
    """Four experts on three ranks: the last has none.  Outputs, gradients, the norm, weights after three steps."""
    reference: Any = prepare(mixture())
    (op,) = (op for op in reference.bound.operations if target_name(op.node) == "autopar.experts")
    plans = [forced(reference.bound, (3,), {op.name: c}, seed) for seed, c in enumerate(CHOICES)]
    for found in values(run_processes(train_all, 3, [p.to_json() for p in plans])):
        for run in found:
            assert_equal_runs(run, reference.reference)
