"""Borrowed rows on real processes: what passes on threads may fail, or be wrong, on gloo."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from processes import run_processes, values
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from autopar.layout import Mesh, chunk_bounds
from autopar.runtime.dtensor import runtime_axes
from autopar.runtime.kernels.halo import conv_halo
from autopar.runtime.kernels.parts import AxisCut, Part

pytestmark = pytest.mark.gloo

ROWS = (9, 7, 2)  # on three ranks 3,3,3 / 3,3,1 / 1,1,0 rows; a stride of two makes 5, 4 and 1 of them


def inputs(rows: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(2, 3, rows, 4).double(), torch.randn(5, 3, 3, 3).double()


def convolve(rank: int, world: int) -> list[list[Tensor]]:
    """Output and gradients of input and weight on this rank, for each number of rows."""
    (axis,) = runtime_axes(Mesh(("x",), (world,)), init_device_mesh("cpu", (world,), mesh_dim_names=("x",)), (rank,))
    found = []
    for rows in ROWS:
        x, weight = inputs(rows)
        after = (rows - 1) // 2 + 1
        low, high = chunk_bounds(rows, world, rank)
        x, weight = x[:, :, low:high].requires_grad_(), weight.requires_grad_()
        parts = {"y0": Part(rows, (AxisCut(axis, 1, rows, 1),)), "z0": Part(after, (AxisCut(axis, 1, after, 1),))}
        y = conv_halo(x, weight, None, 2, 1, parts=parts)
        first, _ = chunk_bounds(after, world, rank)
        scale = torch.arange(first, first + y.shape[2]).double().reshape(1, 1, -1, 1) + 1
        (y.square() * scale).sum().backward()
        assert x.grad is not None and weight.grad is not None
        found.append([y.detach(), x.grad, weight.grad])
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_convolution_with_positions_split(world: int) -> None:
    ranks = values(run_processes(convolve, world, world))
    for k, rows in enumerate(ROWS):
        x, weight = (v.requires_grad_() for v in inputs(rows))
        y = F.conv2d(x, weight, None, 2, 1)
        (y.square() * (torch.arange(y.shape[2]).double().reshape(1, 1, -1, 1) + 1)).sum().backward()
        outs, grads, terms = zip(*(rank[k] for rank in ranks), strict=True)
        torch.testing.assert_close(torch.cat(outs, 2), y.detach())
        torch.testing.assert_close(torch.cat(grads, 2), x.grad)
        torch.testing.assert_close(sum(terms), weight.grad)
