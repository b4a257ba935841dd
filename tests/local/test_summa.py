"""Streamed SUMMA: in 2D, 2.5D and 3D it equals one process, passes verify, and holds no whole operand."""

from __future__ import annotations

import dataclasses
import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import ledger
import models
import msgspec
import pytest
import torch
import torch.nn.functional as F
from equality import Prepared, assert_equals_one_process, forced, mesh_of, prepare
from models import Case, line, weighted
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

import autopar
from autopar import api
from autopar.layout import Split
from autopar.passes.fold import expand
from autopar.passes.resolve import Resolved, resolve
from autopar.plan import Plan
from autopar.program import target_name
from autopar.rules.analysis import Bound, Operation
from autopar.rules.derive import _nested, _with_partners, apply, parse_choice
from autopar.runtime.collectives import Axis, convert
from autopar.runtime.dtensor import runtime_axes
from autopar.runtime.kernels import summa
from autopar.runtime.kernels.parts import AxisCut, Part
from autopar.runtime.kernels.summa import Run, linear_stream, slices
from autopar.solver.prices import prices
from autopar.testing import run_local
from autopar.verify.numbering import number_values
from autopar.verify.step import check_step
from autopar.verify.subject import RankGraph, rank_graph
from autopar.verify.traffic import sent_by_plan
from autopar.verify.trial import Trial
from autopar.verify.types import check_types

Sizes = tuple[int, ...]
Choices = tuple[str, ...]

ROWS, COLUMNS = "stream b0 with k", "stream n with k"


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


def lines_of(bound: Bound) -> list[Operation]:
    return [op for op in bound.operations if target_name(op.node) == "aten.linear.default"]


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
    plan = forced(given.bound, sizes, {op.name: nested(op, sizes, texts) for op in lines_of(given.bound)}, seed)
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
    "2D of 9, gathered": ((3, 3), ("split b0", "split n")),
    "2.5D of 12, gathered": ((3, 2, 2), ("split b1", "split b0", "split n")),
    "2.5D of 12": ((3, 2, 2), ("split b1", ROWS, COLUMNS)),
}


LINES = [(name, mode) for mode in MODES for name in ("even", "odd", "thin")]
LINES += [(name, mode) for mode in MORE for name in ("odd", "thin")] + [("odd", mode) for mode in LARGE]
BLOCKS = [(name, mode) for mode in ("2D", "2.5D", "3D") for name in ("gpt2", "bert", "llama")]
BLOCKS += [("gpt2", mode) for mode in ("2D unequal", *LARGE)]
# dear ones, beside others of their kind: test_tensor_modes runs GPT-2 in every mode
KEPT = ("llama", "2D")
DEAR = [(name, mode) for name in ("gpt2", "bert", "llama") for mode in ("2D", "2.5D", "3D") if (name, mode) != KEPT]
DEAR += [("gpt2", mode) for mode in LARGE if mode != "2.5D of 12"] + [
    ("odd", mode) for mode in LARGE if "gathered" in mode
]


def by_day(cases: list[tuple[str, str]]) -> list[Any]:
    return [pytest.param(*case, marks=[pytest.mark.slow] if case in DEAR else []) for case in cases]


@pytest.mark.parametrize(("name", "mode"), by_day(LINES))
def test_a_linear_equals_one_process(name: str, mode: str) -> None:
    assert_streamed(name, *(MODES | MORE | LARGE)[mode])


@pytest.mark.parametrize(("name", "mode"), by_day(BLOCKS))
def test_a_block_equals_one_process(name: str, mode: str) -> None:
    assert_streamed(name, *(MODES | LARGE)[mode])


# ------------------------------------------------------------------------------------------------ verify


def with_fingerprints(case: Case, mode: str) -> Plan:
    """A plan of the model itself, as `autopar.parallelize` makes it."""
    bound, (sizes, texts) = api.understand(case.model, case.batch, case.loss_fn), MODES[mode]
    plan = forced(bound, sizes, {op.name: nested(op, sizes, texts) for op in lines_of(bound)})
    cluster = autopar.ClusterSpec(nodes=1, devices_per_node=plan.world_size, device="cpu")
    return msgspec.structs.replace(plan, fingerprints=api.fingerprints(bound.program, cluster))


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("even", "2D"),
        ("odd", "2D unequal"),
        ("gpt2", "2.5D"),
        pytest.param("llama", "3D", marks=pytest.mark.slow),
    ],
)
def test_streamed_plans_pass_every_check(name: str, mode: str) -> None:
    """Types, the public checker, bytes of collectives, and a step."""
    case = prepared(name).case
    report = autopar.verify_plan(with_fingerprints(case, mode), case.model, case.batch, loss_fn=case.loss_fn)
    assert report.ok and set(report.left_out) <= {"the model itself"}, str(report)  # GPT-2 draws random numbers


def streamed_graphs() -> tuple[Prepared, Plan, Resolved, dict[tuple[int, ...], RankGraph]]:
    """A linear with equal shards, and its graphs."""
    given, ends = prepare(line((4, 6, 12), 24, bias=False, loss=weighted)), ("split d0", "split d2")
    ops = {"add": ends, "linear": (ROWS, COLUMNS), "mul": ends, "sum_1": ends}
    plan = ledger.decided(given.bound, (2, 2), ops, {"shift": "x:S0 y:S2", "line.weight": "x:S1 y:S0"})
    resolved = resolve(plan, given.bound, *expand(plan, given.bound))
    return given, plan, resolved, {at: rank_graph(resolved, at) for at in resolved.mesh.all_coordinates()}


def test_the_bytes_that_ranks_send_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product that sends a shard twice gives the right numbers."""
    given, plan, resolved, _ = streamed_graphs()
    whole, _ = sent_by_plan(resolved, (0, 0), False)
    trial = Trial(given.case.model, given.bound, plan, given.case.batch, lambda job: run_local(job, 4))
    findings, outcomes, _ = check_step(trial)
    assert not findings and all(o.sent == whole for o in outcomes)
    once = summa.start_broadcast
    monkeypatch.setattr(summa, "start_broadcast", lambda x, a, i: (once(x, a, i).wait(), once(x, a, i))[1])
    findings, outcomes, _ = check_step(trial)
    assert not findings and all(o.sent[a] > whole[a] for o in outcomes for a in "xy")


@pytest.mark.parametrize("keyword", ["parts", "pairs"])
def test_a_wrong_part_is_found(keyword: str) -> None:
    given, _, resolved, graphs = streamed_graphs()
    numbering = number_values(given.bound)
    for rank in graphs.values():
        assert not check_types(resolved, numbering, rank).findings
        (node,) = [n for n in rank.graph.nodes if n.target is linear_stream]
        told = dict(node.kwargs[keyword])
        factor = next(f for f, part in told.items() if part.cuts)
        (cut,) = told[factor].cuts
        told[factor] = Part(told[factor].size, (cut._replace(m=2, N=cut.N // 2),))
        node.kwargs = {**node.kwargs, keyword: told}
        (found,) = check_types(resolved, numbering, rank).findings
        assert keyword in found.what and "line" in found.where


# ------------------------------------------------------------------------------------------------ prices


def test_a_streamed_product_is_priced_as_it_runs() -> None:
    """It sends the closed form, hides what the device lets it, and holds two slices beside its shards."""
    _, _, resolved, _ = streamed_graphs()
    op = next(o for o in resolved.analysis.operations if o.name == "linear")
    ins, outs = ([resolved.analysis.values[v] for v in names] for names in (op.inputs, op.outputs))
    cluster = autopar.ClusterSpec(nodes=1, devices_per_node=4, device="cpu")
    q = 2
    costs = {}
    for overlap in (0.0, 1.0):
        known = prices(dataclasses.replace(cluster, overlap=overlap), (q, q))
        costs[overlap] = known.op(op, resolved.strategies["linear"], ins, outs)
    serial, overlapped = costs[0.0], costs[1.0]
    whole, output = 8 * (4 * 6 * 12 + 12 * 24), 8 * 4 * 6 * 24
    assert serial.sent == overlapped.sent == 3 * (q - 1) * whole / q**2
    assert serial.hidden == 0.0 < overlapped.hidden
    communication = serial.communication + serial.communication_back
    assert overlapped.seconds == pytest.approx(serial.seconds - overlapped.hidden)
    assert overlapped.hidden <= communication * (q - 1) / q
    shards = (whole + output) / q**2
    assert serial.transient == 2 * (shards + 2 * whole / q**2)  # and their gradients
    gathered = apply(op.type, [parse_choice("split b0", op.rule), parse_choice("split n", op.rule)], (q, q))
    assert gathered is not None
    plain = prices(cluster, (q, q)).op(op, gathered, ins, outs)
    assert plain.forward < serial.forward  # one product of full depth


# ------------------------------------------------------------------------------------------------ the walk


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_terms_of_16_bits_are_added_up_in_fp32(dtype: torch.dtype) -> None:
    """256 + 1 + 1, term by term: in bfloat16 the ones would be lost."""
    large = {torch.bfloat16: 256.0, torch.float16: 2048.0}[dtype]
    whole = torch.ones(3, 3).fill_diagonal_(large)

    def job(rank: int) -> tuple[Tensor, ...]:
        (axis,) = runtime_axes(mesh_of((3,)), init_device_mesh("cpu", (3,), mesh_dim_names=("x",)), (rank,))
        row, column = whole[rank : rank + 1].to(dtype), whole[:, rank : rank + 1].to(dtype)
        one, part = torch.ones(1, 3, dtype=dtype), Part(3, (AxisCut(axis, 1, 3, 1),))
        a, b = row.clone().requires_grad_(), one[:, :1].clone().requires_grad_()  # rows split, the weight along k
        linear_stream(a, b, parts={"k": Part(3)}, pairs={"b0": part}).sum().backward()
        c, d = one[:, :1].clone().requires_grad_(), row.clone().requires_grad_()  # columns, the input along k
        linear_stream(c, d, parts={"k": Part(3)}, pairs={"n": part}).sum().backward()
        with torch.no_grad():
            y = linear_stream(column.t().contiguous(), b, parts={"k": Part(3)}, pairs={"b0": part})
        return y, b.grad, c.grad  # type: ignore[return-value]

    for rank, found in enumerate(run_local(job, 3)):
        for x in found:
            assert x.dtype is dtype and x.item() == large + 2, rank


def test_columns_are_few_runs() -> None:
    assert summa._runs([0, 1, 2, 3]) == (Run(0, 4, 4, 1),)
    assert summa._runs([1, 2, 5, 6, 9, 10]) == (Run(1, 2, 4, 3),)
    assert summa._runs([0, 2, 3, 7]) == (Run(0, 1, 1, 1), Run(2, 2, 2, 1), Run(7, 1, 1, 1))
    assert summa._runs([]) == ()


def test_equal_cuts_are_walked_rank_by_rank() -> None:
    cut = ((1, 12, 1, 3, -1),)
    assert [(s.width, s.owners) for s in slices(12, cut, cut)] == [(4, (0, 0)), (4, (1, 1)), (4, (2, 2))]


def test_unequal_cuts_are_refined() -> None:
    found = slices(12, ((1, 12, 1, 3, -1),), ((1, 12, 1, 2, -1),))
    assert [(s.width, s.owners) for s in found] == [(4, (0, 0)), (2, (1, 0)), (2, (1, 1)), (4, (2, 1))]


class Products(TorchDispatchMode):
    """How many slices had been sent off when each product began; ``started`` grows from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.started, self.seen = 0, list[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm_):
            self.seen.append(self.started)
        return func(*args, **(kwargs or {}))


def test_the_next_slice_travels_while_one_is_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    here, once = threading.local(), summa.start_broadcast

    def start(x: Tensor, axis: Axis, owner: int) -> Any:
        here.products.started += 1
        return once(x, axis, owner)

    monkeypatch.setattr(summa, "start_broadcast", start)

    def job(rank: int) -> tuple[list[int], list[int]]:
        mesh = mesh_of((Q, Q))
        x, y = runtime_axes(mesh, init_device_mesh("cpu", (Q, Q), mesh_dim_names=mesh.axes), mesh.coordinates(rank))
        a, b = shards(x, y)
        with Products() as forward:
            here.products = forward
            out = stream(a, b, x, y)
        with Products() as backward:
            here.products = backward
            out.sum().backward()
        return forward.seen, backward.seen

    for forward, backward in run_local(job, Q * Q):
        assert forward == [4, 6, 6]  # of each operand this slice and the next
        assert backward == [4, 4, 6, 6, 6, 6]


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
