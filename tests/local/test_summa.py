"""Streamed SUMMA: in 2D, 2.5D and 3D it equals one process, sends what theory says, and holds no whole operand."""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable
from typing import Any

import ledger
import models
import pytest
import torch
import torch.nn.functional as F
from equality import Prepared, assert_equals_one_process, forced, mesh_of, prepare
from models import Case
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.layout import Split, local_shape
from autopar.passes.fold import expand
from autopar.passes.resolve import resolve
from autopar.program import target_name
from autopar.rules.analysis import Operation
from autopar.rules.derive import _nested, _with_partners, parse_choice
from autopar.runtime.collectives import Axis, convert
from autopar.runtime.dtensor import runtime_axes
from autopar.runtime.kernels.parts import AxisCut, Part
from autopar.runtime.kernels.summa import Run, _runs, linear_stream, slices
from autopar.testing import run_local

Sizes = tuple[int, ...]
Choices = tuple[str, ...]

ROWS, COLUMNS = "stream b0 with k", "stream n with k"


class Line(nn.Module):
    """One linear; the gradient of its input is that of ``shift``."""

    def __init__(self, shape: Sizes, out: int, bias: bool) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(shape))
        self.line = nn.Linear(shape[-1], out, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.line(x + self.shift)


def line(shape: Sizes, out: int, bias: bool = True, loss: Callable[[Tensor, Tensor], Tensor] = F.mse_loss) -> Case:
    torch.manual_seed(0)
    batch = {"x": torch.randn(shape).double(), "y": torch.randn(*shape[:-1], out).double()}
    return Case(Line(shape, out, bias).double(), batch, lambda y, batch: loss(y, batch["y"]))


def product(y: Tensor, weights: Tensor) -> Tensor:
    return (y * weights).sum()


# ------------------------------------------------------------------------------------------------ equality


@functools.cache
def prepared(name: str) -> Prepared:
    made: dict[str, Callable[[], Case]] = {
        "even": lambda: line((4, 6, 12), 24),
        "odd": lambda: line((5, 7, 10), 13),
        "thin": lambda: line((2, 3, 2), 2),  # on three ranks one has nothing
        "gpt2": lambda: models.gpt2(heads=3, layers=1),
        "bert": lambda: models.bert(layers=1),
        "llama": lambda: models.llama(padded=True, layers=1),
    }
    return prepare(made[name]())


def nested(op: Operation, sizes: Sizes, texts: Choices) -> Choices:
    """The choices, each inside the cuts that others make of the same factor."""
    choices: list[Any] = []
    for text in texts:
        choice = _nested(parse_choice(text, op.rule), choices, sizes)
        assert choice is not None, f"{text} does not fit"
        choices.append(choice)
    fitted = _with_partners(choices, sizes)
    assert fitted is not None, f"{texts} do not fit"
    return tuple(map(str, fitted))


def assert_streamed(name: str, sizes: Sizes, texts: Choices, seed: int = 0) -> None:
    """All linears run so, all else at random."""
    given = prepared(name)
    lines = [op for op in given.bound.operations if target_name(op.node) == "aten.linear.default"]
    plan = forced(given.bound, sizes, {op.name: nested(op, sizes, texts) for op in lines}, seed)
    assert_equals_one_process(given, plan, f"{name} by {', '.join(texts)}")


MODES: dict[str, tuple[Sizes, Choices]] = {
    "2D": ((2, 2), (ROWS, COLUMNS)),
    "2D unequal": ((2, 3), (ROWS, COLUMNS)),
    "2.5D": ((2, 2, 2), ("split b1", ROWS, COLUMNS)),
    "3D": ((2, 2, 2), (ROWS, COLUMNS, "split k")),
}
MORE: dict[str, tuple[Sizes, Choices]] = {
    "rows streamed": ((3,), (ROWS,)),
    "columns streamed": ((3,), (COLUMNS,)),
    "2D turned": ((3, 2), (COLUMNS, ROWS)),
    "2D of later rows": ((2, 2), ("stream b1 with k", COLUMNS)),
    "rows streamed beside columns": ((2, 2), (ROWS, "split n")),
    "2D of a pending sum": ((2, 2, 2), ("P 0,2", ROWS, COLUMNS)),
}
LARGE: dict[str, tuple[Sizes, Choices]] = {
    "2D of 9": ((3, 3), (ROWS, COLUMNS)),
    "2.5D of 12": ((3, 2, 2), ("split b1", ROWS, COLUMNS)),
}


LINES = [(name, mode) for mode in MODES for name in ("even", "odd", "thin")]
LINES += [(name, mode) for mode in MORE for name in ("odd", "thin")] + [("odd", mode) for mode in LARGE]
BLOCKS = [(name, mode) for mode in ("2D", "2.5D", "3D") for name in ("gpt2", "bert", "llama")]
BLOCKS += [("gpt2", mode) for mode in ("2D unequal", *LARGE)]


@pytest.mark.parametrize(("name", "mode"), LINES)
def test_a_linear_equals_one_process(name: str, mode: str) -> None:
    assert_streamed(name, *(MODES | MORE | LARGE)[mode])


@pytest.mark.parametrize(("name", "mode"), BLOCKS)
def test_a_block_equals_one_process(name: str, mode: str) -> None:
    assert_streamed(name, *(MODES | LARGE)[mode])


# ------------------------------------------------------------------------------------------------ the ledger

SHAPE, OUT = (6, 6, 24), 48
INPUT, WEIGHT, OUTPUT = 6 * 6 * 24 * 8, 24 * 48 * 8, 6 * 6 * 48 * 8  # bytes in float64


@functools.cache
def measured() -> Prepared:
    return prepare(line(SHAPE, OUT, bias=False, loss=product))


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


@pytest.mark.parametrize("mode", LEDGER)
def test_a_linear_sends_what_theory_says(mode: str) -> None:
    sizes, before, choices, after, shift, weight, forward, backward = LEDGER[mode]
    given = measured()
    ops = {"add": before, "linear": choices, "mul": after, "sum_1": after}
    plan = ledger.decided(given.bound, sizes, ops, {"shift": shift, "line.weight": weight})
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
    case = line((5, 7, 10), 13, bias=False, loss=product)
    bound = prepare(case).bound
    plan = ledger.decided(bound, sizes, ops, {"shift": "x:S0 y:S2", "line.weight": "x:S1 y:S0"})
    sent = ledger.sent(case, bound, plan)
    weight, whole = 10 * 13 * 8, 5 * 7 * 10 * 8
    assert sent.forward == {"x": (x - 1) * (weight + 2 * y * 8), "y": (y - 1) * (whole + 2 * x * 8)}  # and the loss
    assert sent.backward == {"x": 2 * (x - 1) * weight, "y": 2 * (y - 1) * whole}


# ------------------------------------------------------------------------------------------------ the walk


def test_columns_are_few_runs() -> None:
    assert _runs([0, 1, 2, 3]) == (Run(0, 4, 4, 1),)
    assert _runs([1, 2, 5, 6, 9, 10]) == (Run(1, 2, 4, 3),)
    assert _runs([0, 2, 3, 7]) == (Run(0, 1, 1, 1), Run(2, 2, 2, 1), Run(7, 1, 1, 1))
    assert _runs([]) == ()


def test_equal_cuts_are_walked_rank_by_rank() -> None:
    cut = ((1, 12, 1, 3, -1),)
    assert [(s.width, s.owners) for s in slices(12, cut, cut)] == [(4, (0, 0)), (4, (1, 1)), (4, (2, 2))]


def test_unequal_cuts_are_refined() -> None:
    found = slices(12, ((1, 12, 1, 3, -1),), ((1, 12, 1, 2, -1),))
    assert [(s.width, s.owners) for s in found] == [(4, (0, 0)), (2, (1, 0)), (2, (1, 1)), (4, (2, 1))]


# ------------------------------------------------------------------------------------------------ memory


class Live(TorchDispatchMode):
    """Bytes of tensors that are made inside and live: now, and at most."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {x.untyped_storage()._cdata for x in torch.utils._pytree.tree_leaves((args, kwargs)) if _is_tensor(x)}
        out = func(*args, **(kwargs or {}))
        for x in torch.utils._pytree.tree_leaves(out):
            if _is_tensor(x) and x.untyped_storage()._cdata not in self.known | given:
                self.add(x.untyped_storage())
        return out

    def add(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = storage._cdata, storage.nbytes()

        def gone() -> None:
            self.known.discard(key)
            self.now -= nbytes

        self.known.add(key)
        self.now += nbytes
        self.most = max(self.most, self.now)
        weakref.finalize(storage, gone)


def _is_tensor(x: object) -> bool:
    return isinstance(x, Tensor)


Q = 3
X, W, Y = 4 * 5 * 8, 7 * 5 * 8, 4 * 7 * 8  # bytes of a rank's shards: x is [12, 15], w is [21, 15]


def shards(x: Axis, y: Axis) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    whole, weight = torch.randn(12, 15).double(), torch.randn(21, 15).double()
    mine = whole.chunk(Q)[x.index].chunk(Q, 1)[y.index], weight.chunk(Q)[y.index].chunk(Q, 1)[x.index]
    return mine[0].contiguous().requires_grad_(), mine[1].contiguous().requires_grad_()


def stream(a: Tensor, b: Tensor, x: Axis, y: Axis) -> Tensor:
    def part(*axes: Axis) -> Part:
        return Part(15, tuple(AxisCut(axis, 1, 15, 1) for axis in axes))

    return linear_stream(a, b, parts={"k": part()}, pairs={"b0": part(x), "n": part(y)})


def gather(a: Tensor, b: Tensor, x: Axis, y: Axis) -> Tensor:
    split = Split(1, 1, Q, 5)
    return F.linear(convert(a, y, split, "R"), convert(b, x, split, "R"))


def held(product: Callable[..., Tensor]) -> list[tuple[int, int, int]]:
    """Bytes beside its shards that a rank holds, of every rank: at most while it multiplies forward, what it keeps for
    backward, and at most in backward."""
    mesh = mesh_of((Q, Q))

    def job(rank: int) -> tuple[int, int, int]:
        x, y = runtime_axes(mesh, init_device_mesh("cpu", (Q, Q), mesh_dim_names=mesh.axes), mesh.coordinates(rank))
        a, b = shards(x, y)
        kept: dict[int, int] = {}

        def keep(t: Tensor) -> Tensor:
            kept[t.untyped_storage()._cdata] = t.untyped_storage().nbytes()
            return t

        with Live() as forward, torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            out = product(a, b, x, y)
        grad = torch.ones_like(out)
        with Live() as backward:
            torch.autograd.grad(out, (a, b), grad)
        return forward.most, sum(kept.values()), backward.most

    return run_local(job, mesh.size)


def test_no_operand_is_ever_whole() -> None:
    """A streamed product holds two slices of each operand at most, and keeps its shards; a gathered one all of both."""
    streamed, gathered = held(stream), held(gather)
    apart = [4, 5, 7, 8]  # among threads the first rank of a group does the others' copies
    assert max(streamed[r][0] for r in apart) == 2 * (X + W) + Y
    assert {kept for _, kept, _ in streamed} == {X + W}
    # of each operand two slices, of its gradient two, one of them on its way, and the rank's own
    assert max(streamed[r][2] for r in apart) <= 5 * (X + W)
    assert min(gathered[r][0] for r in apart) >= Q * (X + W) + Y
    assert {kept for _, kept, _ in gathered} == {Q * (X + W)}


def test_weights_are_held_in_shards() -> None:
    """Of the weight's h h' numbers a rank holds one in p in 2D and 3D, one in q^2 in 2.5D, all through the step."""
    given = measured()
    for mode, ranks in {"2D streamed, q=3": 9, "3D streamed": 8, "2.5D streamed, q=2 d=3": 4}.items():
        sizes, before, choices, after, shift, weight, *_ = LEDGER[mode]
        ops = {"add": before, "linear": choices, "mul": after, "sum_1": after}
        plan = ledger.decided(given.bound, sizes, ops, {"shift": shift, "line.weight": weight})
        stored = resolve(plan, given.bound, *expand(plan, given.bound)).parameters["p_model_line_weight"]
        for layout in (stored.stored, stored.held, stored.accumulated):
            kept = local_shape((OUT, SHAPE[-1]), layout, sizes, (0,) * len(sizes))
            assert math.prod(kept) * ranks == OUT * SHAPE[-1]
