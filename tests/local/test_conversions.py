"""Every conversion moves values and gradients as the algebra says: random layouts, ranks as threads."""

from __future__ import annotations

import random

import pytest
import torch
from layouts import held, local_slice, random_layout, whole
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from autopar.layout import I, Mesh, Move, P, R, S, State, dual, is_valid
from autopar.runtime.collectives import Split, convert
from autopar.runtime.dtensor import runtime_axes, steps
from autopar.testing import run_local

SHAPES = [(12, 5), (7, 8), (6, 10), (3, 13), (24, 2)]
MESHES = [(2,), (3,), (4,), (2, 2), (3, 2), (2, 2, 2)]


def convert_everywhere(mesh: Mesh, move: Move, value: Tensor, gradient: Tensor) -> list[tuple[Tensor, Tensor]]:
    """(value after, gradient before) on every rank, from this value before and this gradient after."""
    shape = tuple(value.shape)
    values, gradients = held(value, move.layout, mesh), held(gradient, tuple(map(dual, move.result)), mesh)

    def job(rank: int) -> tuple[Tensor, Tensor]:
        at = mesh.coordinates(rank)
        device_mesh = init_device_mesh("cpu", mesh.sizes, mesh_dim_names=mesh.axes)
        (step,) = steps((move,), shape, mesh, at, runtime_axes(mesh, device_mesh, at))
        x = values[rank].requires_grad_()
        y = convert(x, step.axis, step.src, step.dst)
        y.backward(gradients[rank])
        assert x.grad is not None
        return y.detach(), x.grad

    return run_local(job, mesh.size)


@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("seed", range(25))
def test_conversions_keep_value_and_gradient(sizes: tuple[int, ...], seed: int) -> None:
    """A random legal move on one axis; strided, uneven and empty cuts among them, and any layout of the others."""
    rng = random.Random(repr((sizes, seed)))
    mesh, shape = Mesh(("x", "y", "z")[: len(sizes)], sizes), rng.choice(SHAPES)
    while True:
        layout = random_layout(shape, mesh, rng)
        axis = rng.randrange(len(sizes))
        move = Move(layout, axis, random_layout(shape, mesh, rng)[axis])
        if move.target != layout[axis] and is_valid(shape, move.result, mesh.sizes):
            break
    torch.manual_seed(seed)
    value, gradient = torch.randn(shape).double(), torch.randn(shape).double()
    moved = convert_everywhere(mesh, move, value, gradient)
    before, after = tuple(map(dual, move.layout)), move.result
    torch.testing.assert_close(whole([y for y, _ in moved], after, mesh, shape), value, rtol=0, atol=1e-13)
    torch.testing.assert_close(whole([g for _, g in moved], before, mesh, shape), gradient, rtol=0, atol=1e-13)


CUTS: list[State] = [S(0, 1, 12, 1), S(0, 3, 4, 1), S(1, 1, 5, 1), S(0, 1, 3, 4)]
KINDS = [(a, b) for a in [*CUTS, R, I, P] for b in [*CUTS, R, I, P] if a != b]


@pytest.mark.parametrize(("src", "dst"), KINDS, ids=str)
def test_every_pair_of_states(src: State, dst: State) -> None:
    """On four ranks, where 5 columns and 3 units of 4 rows leave the last rank less or nothing."""
    mesh = Mesh(("x",), (4,))
    torch.manual_seed(0)
    value, gradient = torch.randn(12, 5).double(), torch.randn(12, 5).double()
    moved = convert_everywhere(mesh, Move((src,), 0, dst), value, gradient)
    torch.testing.assert_close(whole([y for y, _ in moved], (dst,), mesh, (12, 5)), value, rtol=0, atol=1e-13)
    torch.testing.assert_close(whole([g for _, g in moved], (dual(src),), mesh, (12, 5)), gradient, rtol=0, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.bfloat16, torch.float16, torch.complex64], ids=str)
def test_gathers_carry_every_dtype(dtype: torch.dtype) -> None:
    mesh, cut = Mesh(("x",), (3,)), S(0, 1, 7, 1)
    x = (torch.arange(14).reshape(7, 2) % 3).to(dtype)

    def job(rank: int) -> Tensor:
        device_mesh = init_device_mesh("cpu", mesh.sizes, mesh_dim_names=mesh.axes)
        (axis,) = runtime_axes(mesh, device_mesh, (rank,))
        return convert(local_slice(x, (cut,), mesh, (rank,)), axis, Split(0, 1, 7, 1), I)

    for y in run_local(job, 3):
        assert y.dtype is dtype and torch.equal(y, x)


def test_sums_of_bfloat16_terms_are_added_in_float32() -> None:
    """256 + 0.5 + 0.5 + 0.5 + 0.5 is 258; added in bfloat16, each half is lost."""
    mesh = Mesh(("x",), (5,))

    def job(rank: int) -> float:
        (axis,) = runtime_axes(mesh, init_device_mesh("cpu", (5,), mesh_dim_names=("x",)), (rank,))
        return float(convert(torch.tensor([256.0 if rank == 0 else 0.5], dtype=torch.bfloat16), axis, P, I))

    assert run_local(job, 5) == [258.0] * 5


def test_what_is_gathered_is_contiguous() -> None:
    """Parts of one row along the last dimension: as a view of what arrived torch's convolution would refuse it."""
    part = torch.randn(1, 7, 1).double()

    def job(rank: int) -> tuple[int, ...]:
        device_mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("x",))
        (axis,) = runtime_axes(Mesh(("x",), (3,)), device_mesh, (rank,))
        weight = convert(part, axis, Split(2, 1, 3, 1), "I").requires_grad_()
        torch.nn.functional.conv1d(torch.randn(1, 7, 1).double(), weight, padding=1).sum().backward()
        return weight.stride()

    assert run_local(job, 3) == [(21, 3, 1)] * 3
