"""Every kind of conversion on real processes: what passes on threads may fail, or be wrong, on gloo."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from layouts import held, local_slice, whole
from processes import run_processes, values
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from autopar.layout import I, Mesh, Move, P, R, S, State, dual
from autopar.runtime.collectives import Axis, convert
from autopar.runtime.dtensor import runtime_axes, steps

pytestmark = pytest.mark.gloo

SHAPE = (4, 7, 1)  # on 2 ranks 2,2 / 4,3 / 1,0 rows; on 3 ranks 2,2,0 / 3,3,1 / 1,0,0
STATES: list[State] = [S(0, 1, 4, 1), S(0, 2, 2, 1), S(1, 1, 7, 1), S(2, 1, 1, 1), R, I, P]
PAIRS = list(itertools.permutations(STATES, 2))
DTYPES = [torch.bool, torch.int64, torch.bfloat16, torch.float16, torch.complex64]
MOVED = [(S(0, 1, 4, 1), I), (S(1, 1, 7, 1), S(0, 1, 4, 1)), (S(1, 1, 7, 1), S(2, 1, 1, 1))]
SUMMED = [(P, I), (P, S(1, 1, 7, 1)), (P, S(2, 1, 1, 1))]

Report = dict[object, list[Tensor]]


def payload(dtype: torch.dtype = torch.float64, salt: int = 0) -> Tensor:
    """Every element differs, where the type can tell them apart."""
    x = torch.arange(28.0, dtype=torch.float64).reshape(SHAPE) + salt
    return x % 3 > 1 if dtype is torch.bool else (x * (1 + 2j)).to(dtype) if dtype.is_complex else x.to(dtype)


def convert_all(rank: int, world: int) -> Report:
    """Every conversion, forward and backward, on this rank."""
    mesh = Mesh(("x",), (world,))
    (axis,) = runtime_axes(mesh, init_device_mesh("cpu", (world,), mesh_dim_names=("x",)), (rank,))
    report: Report = {}
    for src, dst in PAIRS:
        x = held(payload(), (src,), mesh)[rank].requires_grad_()
        y = moved(x, src, dst, mesh, axis)
        y.backward(held(payload(salt=1), (dual(dst),), mesh)[rank])
        assert x.grad is not None
        report[src, dst] = [y.detach(), x.grad]
    for dtype, (src, dst) in itertools.product(DTYPES, MOVED):
        report[dtype, src, dst] = [moved(local_slice(payload(dtype), (src,), mesh, (rank,)), src, dst, mesh, axis)]
    for dtype, (src, dst) in itertools.product(DTYPES[1:], SUMMED):
        term = payload(dtype) if rank == 0 else torch.ones(SHAPE, dtype=dtype)
        report[dtype, src, dst] = [moved(term, src, dst, mesh, axis)]
    return report


def moved(x: Tensor, src: State, dst: State, mesh: Mesh, axis: Axis) -> Tensor:
    (step,) = steps((Move((src,), 0, dst),), SHAPE, mesh, (axis.index,), (axis,))
    return convert(x, axis, step.src, step.dst)


@pytest.fixture(scope="module", params=[2, 3])
def reports(request: pytest.FixtureRequest) -> Iterator[list[Report]]:
    yield values(run_processes(convert_all, request.param, request.param))


@pytest.mark.parametrize(("src", "dst"), PAIRS, ids=str)
def test_value_and_gradient(reports: list[Report], src: State, dst: State) -> None:
    """Even, uneven and empty shards, strided ones, and pending sums, each into each other."""
    mesh = Mesh(("x",), (len(reports),))
    after, before = zip(*(r[src, dst] for r in reports), strict=True)
    torch.testing.assert_close(whole(list(after), (dst,), mesh, SHAPE), payload(), rtol=0, atol=1e-12)
    torch.testing.assert_close(whole(list(before), (dual(src),), mesh, SHAPE), payload(salt=1), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("src", "dst"), MOVED, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_moves_keep_every_bit_of_every_dtype(reports: list[Report], dtype: torch.dtype, src: State, dst: State) -> None:
    mesh = Mesh(("x",), (len(reports),))
    for rank, report in enumerate(reports):
        (y,) = report[dtype, src, dst]
        assert y.dtype is dtype and torch.equal(y, local_slice(payload(dtype), (dst,), mesh, (rank,)))


@pytest.mark.parametrize(("src", "dst"), SUMMED, ids=str)
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_sums_of_every_dtype(reports: list[Report], dtype: torch.dtype, src: State, dst: State) -> None:
    mesh = Mesh(("x",), (len(reports),))
    for rank, report in enumerate(reports):
        (y,) = report[dtype, src, dst]
        expected = local_slice(payload(dtype) + (len(reports) - 1), (dst,), mesh, (rank,))
        assert y.dtype is dtype and torch.equal(y, expected.to(dtype))
