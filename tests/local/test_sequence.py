"""A whole model split along its sequence, in every way the field knows, equals one process in every number."""

from __future__ import annotations

import functools
from collections.abc import Callable

import models
import msgspec
import pytest
from equality import Prepared, assert_equals_one_process, prepare
from models import Case
from sequences import BATCH, MEGATRON, RING, ULYSSES, sequence_plan

import autopar
from autopar import api
from autopar.plan import Plan
from autopar.program import target_name
from autopar.rules.analysis import Bound

MODELS: dict[str, Callable[[int], Case]] = {
    "gpt2": lambda length: models.gpt2(length=length),
    "gpt2, 3 heads": lambda length: models.gpt2(heads=3, layers=1, length=length),
    "bert, padded": lambda length: models.bert(layers=1, length=length),
    "llama, grouped, padded": lambda length: models.llama(padded=True, layers=1, length=length),
    "mistral, window": lambda length: models.mistral(length=length),
    "cross attention": models.cross_attention,
}
KINDS = {
    "ring 2": ((2,), (RING,), False),
    "ring 4": ((4,), (RING,), False),
    "ring 2 balanced": ((2,), (RING,), True),
    "ring 4 balanced": ((4,), (RING,), True),
    "ulysses 2": ((2,), (ULYSSES,), False),
    "ulysses 4": ((4,), (ULYSSES,), False),
    "megatron 2": ((2,), (MEGATRON,), False),
    "megatron 4": ((4,), (MEGATRON,), False),
    "ring x ulysses": ((2, 2), (RING, ULYSSES), False),
    "ring x ulysses balanced": ((2, 2), (RING, ULYSSES), True),
    "ulysses x ring balanced": ((2, 2), (ULYSSES, RING), True),
    "data x ring": ((2, 2), (BATCH, RING), False),
    "data x ring balanced": ((2, 2), (BATCH, RING), True),
    "data x megatron": ((2, 2), (BATCH, MEGATRON), False),
}
EVERY = [(m, k, n) for m in MODELS for k, (*_, dealt) in KINDS.items() for n in (7, 8) if n == 8 or not dealt]
# every day: each kind on one model, and each model and length by some kinds
DAILY = [(m, k, n) for i, (m, k, n) in enumerate(EVERY) if (m, n) == ("gpt2", 8) or not i % 16]


@functools.cache
def prepared(name: str, length: int) -> Prepared:
    return prepare(MODELS[name](length))


def choices_of(plan: Plan, bound: Bound, kind: str) -> list[str]:
    """What the ops of a kind do, by axis."""
    names = {o.name for o in bound.operations if kind in target_name(o.node)}
    return [" | ".join(o.choices) for o in plan.ops if o.name in names]


def check(name: str, kind: str, length: int) -> None:
    ready, (sizes, kinds, striped) = prepared(name, length), KINDS[kind]
    plan = sequence_plan(ready.bound, sizes, kinds, length, striped=striped)
    attention = choices_of(plan, ready.bound, "attention")
    assert attention
    for wanted in {RING: "ring s", ULYSSES: "split h", MEGATRON: "split h", BATCH: "split b"}.items():
        assert wanted[0] not in kinds or all(wanted[1] in c for c in attention), attention
    if striped:
        assert all("ring s at" in c for c in attention), attention
    kept = choices_of(plan, ready.bound, "linear") + choices_of(plan, ready.bound, "layer_norm")
    if BATCH not in kinds and len(sizes) == 1 and name != "cross attention":
        assert all("split" in c for c in kept), kept
    assert_equals_one_process(ready, plan, f"{name}, {kind}, {length} positions")


@pytest.mark.parametrize(("name", "kind", "length"), DAILY)
def test_sequence_splits_equal_one_process(name: str, kind: str, length: int) -> None:
    check(name, kind, length)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind", "length"), [case for case in EVERY if case not in DAILY])
def test_every_sequence_split_equals_one_process(name: str, kind: str, length: int) -> None:
    check(name, kind, length)


@pytest.mark.parametrize("kind", ["ring 2", "ring x ulysses balanced"])
def test_attention_dropout_does_not_depend_on_the_ring(kind: str) -> None:
    ready = prepare(models.gpt2(padded=True, dropout=0.3, layers=1, length=8), exact=False)
    sizes, kinds, striped = KINDS[kind]
    plan = sequence_plan(ready.bound, sizes, kinds, 8, striped=striped)
    assert_equals_one_process(ready, plan, kind)


@pytest.mark.parametrize(("name", "kind"), [("gpt2", "ring x ulysses balanced"), ("llama, grouped, padded", "ring 4")])
def test_such_plans_pass_every_check(name: str, kind: str) -> None:
    case, (sizes, kinds, striped) = MODELS[name](8), KINDS[kind]
    bound = api.understand(case.model, case.batch, case.loss_fn)
    other = autopar.random_plan(case.model, "1x4xcpu", case.batch, loss_fn=case.loss_fn)
    plan = sequence_plan(bound, sizes, kinds, 8, striped=striped)
    plan = msgspec.structs.replace(plan, fingerprints=other.fingerprints)
    report = autopar.verify_plan(plan, case.model, case.batch, loss_fn=case.loss_fn)
    assert report.ok, str(report)
    assert report.counts["ranks that ran a step"] == 4
