"""A streamed linear on real processes, where slices do travel while others are multiplied."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from layouts import held, whole
from processes import run_processes, values
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from autopar.layout import Layout, Mesh, P, R, S, dual
from autopar.runtime.dtensor import runtime_axes
from autopar.runtime.kernels.parts import AxisCut, Part
from autopar.runtime.kernels.summa import linear_stream

pytestmark = pytest.mark.gloo

MESH = Mesh(("x", "y"), (2, 2))


class Product(NamedTuple):
    """x [rows, k] and w [n, k]; how y cuts x along k, and x cuts w, as (m, N, u)."""

    rows: int
    k: int
    n: int
    of_x: tuple[int, int, int]
    of_w: tuple[int, int, int]

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """Of x, w, the bias and the result."""
        rows, columns = (1, self.rows, 1), (1, self.n, 1)
        x, w = (S(0, *rows), S(1, *self.of_x)), (S(1, *self.of_w), S(0, *columns))
        return x, w, (R, S(0, *columns)), (S(0, *rows), S(1, *columns))


PRODUCTS = [
    Product(4, 6, 8, (1, 6, 1), (1, 6, 1)),
    Product(5, 7, 3, (1, 7, 1), (1, 7, 1)),
    Product(1, 3, 3, (1, 3, 1), (1, 3, 1)),  # a rank without rows
    Product(6, 12, 5, (3, 4, 1), (1, 12, 1)),  # slices of several runs
    Product(6, 12, 5, (2, 3, 2), (3, 2, 2)),
]


def operands(product: Product) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    return tuple(torch.randn(s).double() for s in ((product.rows, product.k), (product.n, product.k), (product.n,)))


def multiply(rank: int) -> list[list[Tensor]]:
    """Result and gradients of x, w and the bias on this rank, of each product."""
    axes = runtime_axes(MESH, init_device_mesh("cpu", MESH.sizes, mesh_dim_names=MESH.axes), MESH.coordinates(rank))
    found = []
    for product in PRODUCTS:
        mine = [
            held(t, layout, MESH)[rank].requires_grad_()
            for t, layout in zip(operands(product), product.layouts, strict=False)
        ]
        parts = {"k": Part(product.k)}
        pairs = {
            factor: Part(product.k, (AxisCut(axis, *cut),))
            for factor, axis, cut in (("b0", axes[0], product.of_w), ("n", axes[1], product.of_x))
        }
        y = linear_stream(*mine, parts=parts, pairs=pairs)
        grads = torch.autograd.grad(y, mine, held(cotangent(product), product.layouts[3], MESH)[rank])
        found.append([y.detach(), *grads])
    return found


def cotangent(product: Product) -> Tensor:
    return torch.arange(product.rows * product.n).double().reshape(product.rows, product.n) + 1


def test_a_streamed_linear() -> None:
    ranks: list[Any] = values(run_processes(multiply, MESH.size))
    for k, product in enumerate(PRODUCTS):
        given = [t.requires_grad_() for t in operands(product)]
        y = F.linear(*given)
        expected = [y.detach(), *torch.autograd.grad(y, given, cotangent(product))]
        x, w, bias, out = product.layouts
        for i, (wanted, layout) in enumerate(zip(expected, (out, x, w, bias), strict=True)):
            state = layout if i == 0 else tuple(map(dual, layout))
            assert i != 3 or state[0] == P
            got = whole([r[k][i] for r in ranks], state, MESH, tuple(wanted.shape))
            torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)
