"""The ledger of one linear: in every mode ranks send exactly what theory says, and what emission lists."""

from __future__ import annotations

import functools
import math
from typing import Any

import ledger
import pytest
from equality import Prepared, prepare
from models import line, weighted

from autopar.layout import local_shape
from autopar.passes.fold import expand
from autopar.passes.resolve import resolve
from autopar.plan import Plan

Sizes = tuple[int, ...]
Choices = tuple[str, ...]

ROWS, COLUMNS = "stream b0 with k", "stream n with k"

SHAPE, OUT = (6, 6, 24), 48
INPUT, WEIGHT, OUTPUT = 6 * 6 * 24 * 8, 24 * 48 * 8, 6 * 6 * 48 * 8  # bytes in float64


@functools.cache
def measured() -> Prepared:
    return prepare(line(SHAPE, OUT, bias=False, loss=weighted))


def column(p: int) -> tuple[Any, ...]:
    return (p,), ("I",), ("split n",), ("split d2",), "I", "x:S0", (0, 0, 0), (2 * (p - 1), 0, 0)


def row(p: int) -> tuple[Any, ...]:
    return (p,), ("split d2",), ("split k",), ("I",), "x:S2", "x:S1", (0, 0, 2 * (p - 1)), (0, 0, 0)


def square(q: int, times: int, *choices: str) -> tuple[Any, ...]:
    ends = ("split d0", "split d2")
    back = (times * (q - 1), times * (q - 1), 0)
    return (q, q), ends, choices, ends, "x:S0 y:S2", "x:S1 y:S0", (q - 1, q - 1, 0), back


def tesseract(q: int, d: int) -> tuple[Any, ...]:
    ends, choices = ("split d1", "split d0", "split d2"), ("split b1", ROWS, COLUMNS)
    back = (2 * (q - 1), 2 * (q - 1) * d + 2 * (d - 1), 0)
    return (d, q, q), ends, choices, ends, "x:S1 y:S0 z:S2", "y:S1 z:S0", (q - 1, (q - 1) * d, 0), back


def cube(times: int, choices: Choices) -> tuple[Any, ...]:
    stored = "x:S0 y:S2(2,12,1) z:S2", "x:S1(2,12,1) y:S0 z:S1"
    before, after = ("split d0", "split d2 at 2,12,1", "split d2"), ("split d0", "split d2", "split d1")
    return (2, 2, 2), before, choices, after, *stored, (1, 1, 1), (times, times, 1)


# ranks; how the ops before, the linear and the ops after are split; stored layouts of input and weight; and how often
# input, weight and output are sent, forward and backward, in units of their whole size, by all ranks together
LEDGER = {
    **{f"1D column of {p}": column(p) for p in (2, 4, 8)},
    **{f"1D row of {p}": row(p) for p in (2, 4, 8)},
    **{f"2D gathered, q={q}": square(q, 1, "split b0", "split n") for q in (2, 3)},
    **{f"2D streamed, q={q}": square(q, 2, ROWS, COLUMNS) for q in (2, 3)},
    **{f"2.5D streamed, q=2 d={d}": tesseract(2, d) for d in (2, 3)},
    "3D gathered": cube(1, ("split b0", "split n", "split k")),
    "3D streamed": cube(2, (f"{ROWS} at 2,12,1", f"{COLUMNS} at 2,12,1", "split k")),
}
FORMULAS = {  # forward and backward together, as published
    **{f"2D gathered, q={q}": 2 * (q - 1) * (INPUT + WEIGHT) for q in (2, 3)},
    **{f"2D streamed, q={q}": 3 * (q - 1) * (INPUT + WEIGHT) for q in (2, 3)},
    **{f"2.5D streamed, q=2 d={d}": 3 * (INPUT + d * WEIGHT) + 2 * (d - 1) * WEIGHT for d in (2, 3)},
    "3D gathered": 2 * (INPUT + WEIGHT + OUTPUT),
    "3D streamed": 3 * INPUT + 3 * WEIGHT + 2 * OUTPUT,
}


def plan_of(mode: str) -> Plan:
    sizes, before, choices, after, shift, weight, *_ = LEDGER[mode]
    ops = {"add": before, "linear": choices, "mul": after, "sum_1": after}
    return ledger.decided(measured().bound, sizes, ops, {"shift": shift, "line.weight": weight})


@pytest.mark.parametrize("mode", LEDGER)
def test_a_linear_sends_what_theory_says(mode: str) -> None:
    sizes, _, _, after, _, _, forward, backward = LEDGER[mode]
    given, plan = measured(), plan_of(mode)
    sent, listed = ledger.sent(given.case, given.bound, plan), ledger.listed(given.bound, plan)
    assert (sent.forward, sent.backward, sent.again) == (listed.forward, listed.backward, 0.0)
    # the loss is one number, added up over every axis that splits what it is made of
    loss = sum(plan.world_size * 2 * (n - 1) // n * 8 for n, c in zip(sizes, after, strict=True) if c != "I")
    parts = (INPUT, WEIGHT, OUTPUT)
    assert sum(sent.forward.values()) == sum(n * s for n, s in zip(forward, parts, strict=True)) + loss
    assert sum(sent.backward.values()) == sum(n * s for n, s in zip(backward, parts, strict=True))
    assert sent.total - loss == FORMULAS.get(mode, sent.total - loss)


@pytest.mark.parametrize("sizes", [(2, 3), (3, 2)])
def test_unequal_axes_send_each_shard_once(sizes: Sizes) -> None:
    """The walk goes through the common refinement of both cuts: no shard travels twice, whatever its size."""
    x, y = sizes
    ends = ("split d0", "split d2")
    ops = {"add": ends, "linear": (ROWS, COLUMNS), "mul": ends, "sum_1": ends}
    case = line((5, 7, 10), 13, bias=False, loss=weighted)
    bound = prepare(case).bound
    plan = ledger.decided(bound, sizes, ops, {"shift": "x:S0 y:S2", "line.weight": "x:S1 y:S0"})
    sent = ledger.sent(case, bound, plan)
    weight, whole = 10 * 13 * 8, 5 * 7 * 10 * 8
    assert sent.forward == {"x": (x - 1) * (weight + 2 * y * 8), "y": (y - 1) * (whole + 2 * x * 8)}  # and the loss
    assert sent.backward == {"x": 2 * (x - 1) * weight, "y": 2 * (y - 1) * whole}


def test_weights_are_held_in_shards() -> None:
    """Of the weight's h h' numbers a rank holds one in p in 2D and 3D, one in q^2 in 2.5D, all through the step."""
    given = measured()
    for mode, ranks in {"2D streamed, q=3": 9, "3D streamed": 8, "2.5D streamed, q=2 d=3": 4}.items():
        plan, sizes = plan_of(mode), LEDGER[mode][0]
        stored = resolve(plan, given.bound, *expand(plan, given.bound)).parameters["p_model_line_weight"]
        for layout in (stored.stored, stored.held, stored.accumulated):
            kept = local_shape((OUT, SHAPE[-1]), layout, sizes, (0,) * len(sizes))
            assert math.prod(kept) * ranks == OUT * SHAPE[-1]
