"""Ring attention by itself: every kind of mask, what it sends, what it holds, and the order in which rows are dealt."""

from __future__ import annotations

import math
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from calls import KEY, captured
from equality import Prepared, run_plan
from models import BATCH as SEQUENCES
from models import Case, gpt2
from proving import prove, prove_call
from sequences import RING, ULYSSES, sequence_plan
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from written import randn

from autopar import api
from autopar.passes.emit import emit
from autopar.passes.fold import expand
from autopar.passes.resolve import resolve
from autopar.program import target_name
from autopar.rules.analysis import causal_share, contract
from autopar.rules.derive import Choice, apply, axis_choices, parse_choice
from autopar.rules.factors import Cut
from autopar.rules.work import crowding
from autopar.runtime.collectives import Axis
from autopar.runtime.kernels import blocks
from autopar.runtime.kernels.attention import attention
from autopar.runtime.kernels.parts import AxisCut, Part, on_rank, positions, row_count
from autopar.runtime.kernels.ring import ring_attention
from autopar.runtime.module import ParallelModule
from autopar.testing import run_local

LOWEST = torch.finfo(torch.float64).min


# ------------------------------------------------------------------------------------------------ proofs


def places(*sizes: int) -> dict[str, Any]:
    return {"dims": [Part(n) for n in sizes]}


def some(seed: int, *shape: int) -> Tensor:
    """Marks, with one row of none."""
    marks = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) > 0.4
    marks[..., 2, :] = False
    return marks


def lowest() -> Tensor:
    """A mask as older models write it: the lowest number instead of -inf, rows of nothing else, and a row of -inf."""
    mask = torch.zeros(2, 1, 8, 8, dtype=torch.float64)
    mask[0, 0, 2], mask[1, 0, :, 5], mask[1, 0, 3] = -math.inf, LOWEST, LOWEST
    return nn.Buffer(mask)


torch.manual_seed(4)
Q8, K8, V8, COTANGENT = (randn(2, 4, 8, 6) for _ in range(4))
Q5, K7, V7 = randn(2, 4, 5, 6), randn(2, 4, 7, 6), randn(2, 4, 7, 3)
WINDOW = (torch.arange(8)[:, None] - torch.arange(8)).abs() < 3

CALLS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = {
    "full": (F.scaled_dot_product_attention, (Q8, K8, V8), {}),
    "cross, values of another width": (F.scaled_dot_product_attention, (Q5, K7, V7), {}),
    "marks": (F.scaled_dot_product_attention, (Q8, K8, V8, some(1, 2, 1, 8, 8)), {}),
    "a window": (F.scaled_dot_product_attention, (Q8, K8, V8, WINDOW), {}),
    "marks of keys": (F.scaled_dot_product_attention, (Q5, K7, V7, torch.rand(2, 1, 1, 7) > 0.3), {}),
    "a trained bias": (F.scaled_dot_product_attention, (Q8, K8, V8, randn(1, 4, 8, 8)), {}),
    "a trained bias of keys": (F.scaled_dot_product_attention, (Q5, K7, V7, randn(2, 1, 1, 7)), {}),
    "the lowest number": (F.scaled_dot_product_attention, (Q8, K8, randn(2, 4, 8, 3), lowest()), {}),
    "grouped": (
        F.scaled_dot_product_attention,
        (Q8, K8[:, :2], V8[:, :2], some(2, 2, 1, 8, 8)),
        {"enable_gqa": True, "scale": 0.3},
    ),
    "causal": (attention, (Q8, K8, V8, None, True, None, 0.0, KEY, 0), places(2, 4, 8, 8)),
    "causal, odd": (
        attention,
        (*(x[:, :, :7] for x in (Q8, K8, V8)), None, True, 0.3, 0.0, KEY, 0),
        places(2, 4, 7, 7),
    ),
    "causal, grouped": (attention, (Q8, K8[:, :2], V8[:, :2], None, True, None, 0.0, KEY, 0), places(2, 4, 8, 8)),
    "causal, fewer queries": (attention, (Q5, K7, V7, None, True, None, 0.0, KEY, 0), places(2, 4, 5, 7)),
    "dropout": (attention, (Q5, K7[:, :2], V7[:, :2], None, False, None, 0.4, KEY, 1), places(2, 4, 5, 7)),
    "causal, marks, dropout": (
        attention,
        (Q8, K8, V8, some(3, 2, 1, 8, 8), True, None, 0.4, KEY, 2),
        places(2, 4, 8, 8),
    ),
}


# proven a few rows at a time too, or as a part of another case
ELSEWHERE = {"full", "marks", "a trained bias", "causal, grouped", "dropout"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if n in ELSEWHERE else []) for n in CALLS])
def test_every_way_to_cut_it(name: str, figure: Callable[[str], None]) -> None:
    """Even, uneven, empty and strided shards of rows, with other factors on a second axis; values and gradients."""
    report = prove(*CALLS[name], meshes=[(3,), (4,), (2, 2)])
    report.check()
    figure(f"{sum(report.checked.values())} strategies")


@pytest.mark.parametrize("name", ["marks", "a trained bias", "causal, grouped", "causal, marks, dropout"])
def test_it_is_right_a_few_rows_at_a_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where torch's own kernel is not taken."""
    monkeypatch.setattr(blocks, "_TILE", 100)
    monkeypatch.setattr(blocks, "_diagonal", lambda *given: None)
    prove(*CALLS[name], meshes=[(2,), (4,)]).check()


def test_masks_that_it_cannot_take_are_not_offered() -> None:
    """A mask with one column for all keys, and weights that torch itself would drop."""
    rows = captured(F.scaled_dot_product_attention, (Q5, K7, V7, randn(2, 1, 5, 1))).calls[0]
    drawn = captured(torch.ops.aten.scaled_dot_product_attention.default, (Q5, K7, K7, None, 0.5)).calls[0]
    for call in (rows, drawn):
        assert not [c for c in axis_choices(call.op.type, {}, 2) if c.kind == "ring"]


def test_gradients_are_whole() -> None:
    """Every rank's keys hear from all ranks' queries: each of 4 ranks alone would give about a quarter."""
    call = captured(*CALLS["full"]).calls[0]
    assert prove_call(call, [(4,)]).checked[call.name] > 4
    with mock.patch("autopar.runtime.kernels.ring._Carried.add", _only_own):
        wrong = prove_call(call, [(4,)]).wrong
    assert wrong and all("ring" in w and "gradient 1" in w for w in wrong)


def _only_own(self: Any, source: int, found: Any) -> None:
    """Damage: gradients do not travel."""
    if source == self.ring.axis.index and found is not None:
        flat = torch.cat([found.k.reshape(-1), found.v.reshape(-1)])
        self.arriving = mock.Mock(wait=lambda: flat)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_narrow_types_are_summed_in_fp32(dtype: torch.dtype) -> None:
    """Values within a rounding of the type of those in float64, gradients within a few."""
    given = [x.to(dtype) for x in (Q8, K8, V8, COTANGENT)]
    *inputs, upstream = (x.double() for x in given)
    inputs = [x.requires_grad_() for x in inputs]
    out = F.scaled_dot_product_attention(*inputs, is_causal=True)
    expected = [out.detach(), *torch.autograd.grad(out, inputs, upstream)]
    eps = torch.finfo(dtype).eps
    for rank, found in enumerate(run_local(lambda rank: ring_of(rank, 4, *given), 4)):
        for k, (mine, whole) in enumerate(zip(found, expected, strict=True)):
            assert mine.dtype is dtype
            allowed = eps * (8 if k or dtype is torch.float32 else 1)
            wanted = whole[:, :, 2 * rank : 2 * rank + 2]
            torch.testing.assert_close(mine.double(), wanted, rtol=allowed, atol=allowed)


def ring_of(rank: int, n: int, q: Tensor, k: Tensor, v: Tensor, upstream: Tensor) -> list[Tensor]:
    """This rank's rows of causal attention and of its gradients; all is given whole, and cut in one run a rank."""
    axis = Axis("x", n, rank, dist.group.WORLD)
    part = Part(q.shape[2], (AxisCut(axis, 1, q.shape[2], 1),))
    dims = [Part(q.shape[0]), Part(q.shape[1]), part, Part(part.size)]
    first, last = int(positions(part)[0]), int(positions(part)[-1]) + 1
    inputs = [x[:, :, first:last].detach().requires_grad_() for x in (q, k, v)]
    mask = (None, True, None, 0.0, None, 0)
    out = ring_attention(*inputs, *mask, dims=dims, parts={"s": part}, pairs={"s": part})
    return [out.detach(), *torch.autograd.grad(out, inputs, upstream[:, :, first:last])]


def test_strides_do_not_matter() -> None:
    """torch's kernel gives wrong numbers for rows whose elements are apart."""
    apart = [x.mT.contiguous().mT for x in (Q8, K8, V8, COTANGENT)]
    expected = run_local(lambda rank: ring_of(rank, 2, Q8, K8, V8, COTANGENT), 2)
    torch.testing.assert_close(run_local(lambda rank: ring_of(rank, 2, *apart), 2), expected)


# ------------------------------------------------------------------------------------------------ what it sends


class Heads(nn.Module):
    """Attention between linears; ``heads`` of queries on ``shared`` of keys and values."""

    def __init__(self, heads: int, shared: int) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(16, 4 * heads), nn.Linear(16, 4 * shared), nn.Linear(16, 4 * shared)
        self.out = nn.Linear(4 * heads, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(-2))


LENGTH, HEADS, WIDTH = 16, 8, 4


def heads(shared: int) -> Case:
    torch.manual_seed(0)
    batch = {"x": torch.randn(SEQUENCES, LENGTH, 16).double(), "y": torch.randn(SEQUENCES, LENGTH, 16).double()}
    return Case(Heads(HEADS, shared).double(), batch, lambda out, batch: F.mse_loss(out, batch["y"]))


@contextmanager
def counted() -> Iterator[Callable[[int], float]]:
    """Bytes that ranks hand to others in all-to-alls, by which rings and changes of shards are sent."""
    sent: Counter[int] = Counter()
    lock, real = threading.Lock(), dist.all_to_all_single

    def count(out: Tensor, given: Tensor, takes: Any, gives: Any, group: Any = None, **options: Any) -> Any:
        with lock:
            sent[dist.get_rank()] += (given.numel() - gives[dist.get_rank(group)]) * given.element_size()
        return real(out, given, takes, gives, group=group, **options)

    with mock.patch.object(dist, "all_to_all_single", count):
        yield lambda rank: float(sent[rank])


@pytest.mark.parametrize("p", [pytest.param(2, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize("shared", [HEADS, HEADS // 2], ids=["all", "grouped"])
@pytest.mark.parametrize("kind", [RING, ULYSSES])
def test_bytes_are_the_closed_forms(kind: str, shared: int, p: int) -> None:
    """Of the collectives that are called, and of those that the plan is priced by."""
    case = heads(shared)
    bound = api.understand(case.model, case.batch, case.loss_fn)
    plan = sequence_plan(bound, (p,), (kind,), LENGTH, whole=True)
    tokens, g = SEQUENCES * LENGTH * HEADS * WIDTH * 8, shared / HEADS
    forward, both = {
        RING: (2 * g * (p - 1) / p * tokens, 2 * g * (3 * p - 2) / p * tokens),
        ULYSSES: (2 * (1 + g) * (p - 1) / p**2 * tokens, 4 * (1 + g) * (p - 1) / p**2 * tokens),
    }[kind]

    def job(module: ParallelModule, batch: Any) -> tuple[float, float]:
        rank = dist.get_rank()
        with torch.no_grad():
            module(**batch)
        once = of(rank)
        module.forward_backward(batch)
        return once, of(rank) - once

    with counted() as of:
        found = run_plan(Prepared(case, bound, None), plan, job)  # type: ignore[arg-type]
    assert found == [(forward, both)] * p
    emitted = emit(resolve(plan, bound, *expand(plan, bound)), (0,), outputs=False)
    priced = [c for c in emitted.conversions if c.kind in ("permute", "all-to-all")]
    assert sum(c.forward_bytes for c in priced) == forward
    assert sum(c.forward_bytes + c.backward_bytes for c in priced) == both


# ------------------------------------------------------------------------------------------------ what it holds


class Live(TorchDispatchMode):
    """Bytes of the storages that ops make, now and at most."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {x.untyped_storage()._cdata for x in torch.utils._pytree.tree_leaves((args, kwargs)) if _is_real(x)}
        out = func(*args, **(kwargs or {}))
        for x in torch.utils._pytree.tree_leaves(out):
            if _is_real(x) and x.untyped_storage()._cdata not in given | self.known:
                self.add(x.untyped_storage())
        return out

    def add(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        self.known.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)

        def freed() -> None:
            self.known.discard(key)
            self.now -= size

        weakref.finalize(storage, freed)


def _is_real(x: Any) -> bool:
    return isinstance(x, Tensor) and x.layout is torch.strided


def peak_of(length: int, p: int, kind: str = RING) -> int:
    """Most bytes that a rank has at a time in one step, without its weights."""
    case = gpt2(length=length, layers=3)
    case.model.float()
    bound = api.understand(case.model, case.batch, case.loss_fn)
    plan = sequence_plan(bound, (p,) if p > 1 else (), (kind,) if p > 1 else (), length, whole=True)

    def job(module: ParallelModule, batch: Any) -> int:
        module.forward_backward(batch)  # so that gradients and masks are there
        with Live() as live:
            module.forward_backward(batch)
        return live.peak

    return max(run_plan(Prepared(case, bound, None), plan, job))  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------ who does what


@pytest.mark.parametrize(("size", "n"), [(8, 2), (8, 4), (12, 3), (7, 3)])
def test_work_is_counted_by_positions(size: int, n: int) -> None:
    """`crowding` against counting the pairs of a query and a key that it sees, on every rank."""
    call = captured(
        attention, (*(randn(1, 1, size, 4) for _ in range(3)), None, True, None, 0.0, KEY, 0), places(1, 1, size, size)
    ).calls[0]
    op = call.op
    for cut in [Cut(1, size, 1), *([Cut(size // n, n, 1)] if size % n == 0 else [])]:
        strategy = apply(op.type, [Choice("ring", "s", cut, partner=("t", cut))], (n,))
        assert strategy is not None
        ranks = [Part(size, (AxisCut(Axis("x", n, i), *cut),)) for i in range(n)]
        most = max(int((positions(r) + 1).sum()) for r in ranks)
        evenly = row_count(ranks[0]) * (size + 1) / 2
        assert crowding(op.rule, strategy, (n,)) == pytest.approx(most / evenly)


def test_who_computes_whole_rows_computes_twice_the_half() -> None:
    """Of 4 ranks with a run of rows each the last does 7/4 of an equal share; the op itself, which hides, 2."""
    op = captured(*CALLS["causal"]).calls[0].op
    found = {}
    for text in ("split s", "ring s with t", "ring s at 2,4,1 with t at 2,4,1", "split h"):
        strategy = apply(op.type, [parse_choice(text, op.rule)], (4,))
        assert strategy is not None
        found[text] = crowding(op.rule, strategy, (4,))
    assert found == {
        "split s": 2.0,
        "ring s with t": pytest.approx((7 + 8) / 9),
        "ring s at 2,4,1 with t at 2,4,1": pytest.approx((4 + 8) / 9),
        "split h": 1.0,
    }


def test_the_context_grows_with_the_ranks(figure: Callable[[str], None]) -> None:
    """4 ranks run 4 times the context of one at the same peak of activations."""
    one, four, alone = peak_of(64, 1), peak_of(256, 4), peak_of(256, 1)
    figure(f"a context of 256 takes {alone:,} bytes on one rank, {four:,} on each of 4; one of 64 on one rank {one:,}")
    assert four < 1.05 * one
    assert alone > 3.9 * one


@pytest.mark.parametrize("sizes", [(4,), (2, 2)])
def test_rows_are_dealt_out_where_it_would_be_felt(sizes: tuple[int, ...]) -> None:
    """By default where causal attention is a tenth of the arithmetic; then so is all that the rows go through."""
    short, long = (api.understand(c.model, c.batch) for c in (gpt2(length=16, layers=1), gpt2(length=128, layers=1)))
    assert causal_share(short) < 0.1 < causal_share(long)
    assert contract(short, sizes).points is short.points
    analysis = contract(long, sizes)
    plain = contract(long, sizes, balanced=False)
    assert [o.name for o in analysis.operations] == [o.name for o in plain.operations]
    for kind in ("attention", "layer_norm", "embedding", "linear"):
        op = next(o for o in analysis.operations if kind in target_name(o.node))
        (rows,) = (f for f in op.rule.outs[0][2 if kind == "attention" else 1])
        for n in {*sizes, 4}:
            assert Cut(128 // n, n, 1) in analysis.factor_points(op)[rows]
            assert Cut(128 // n, n, 1) not in plain.factor_points(op)[rows]


def test_blocks_that_no_row_sees_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 4 ranks with one run each, rank i attends to i + 1 blocks; with rows in turn all attend to all 4."""
    attended: Counter[str] = Counter()
    real = blocks.attend

    def attend(*given: Any) -> Any:
        attended[threading.current_thread().name] += 1
        return real(*given)

    monkeypatch.setattr("autopar.runtime.kernels.ring.attend", attend)
    run_local(lambda rank: ring_of(rank, 4, Q8, K8, V8, COTANGENT), 4)
    assert attended == {"rank0": 1, "rank1": 2, "rank2": 3, "rank3": 4}


def test_parts_of_other_ranks() -> None:
    axes = [Axis("x", 2, 1), Axis("y", 3, 0)]
    part = Part(12, (AxisCut(axes[0], 1, 12, 1), AxisCut(axes[1], 2, 6, 1)))
    assert positions(part).tolist() == [6, 7]
    assert positions(on_rank(part, axes[0], 0)).tolist() == [0, 1]
    assert positions(on_rank(part, axes[1], 2)).tolist() == [10, 11]
    assert row_count(part) == 2
