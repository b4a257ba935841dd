"""Ring attention on real processes: uneven and empty shards, masks that travel, gradients that come home."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from processes import run_processes, values
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from autopar.layout import Mesh
from autopar.runtime.collectives import Axis
from autopar.runtime.dtensor import runtime_axes
from autopar.runtime.kernels.attention import attention
from autopar.runtime.kernels.parts import AxisCut, Part, positions
from autopar.runtime.kernels.ring import ring_attention

pytestmark = pytest.mark.gloo

RANKS, KEY = 4, 12345
# name -> rows, keys, cut of both, causal, mask, dropout; on 4 ranks 7 rows are 2, 2, 2, 1, and 5 are 2, 2, 1, 0
CASES: dict[str, tuple[int, int, tuple[int, int, int], bool, str, float]] = {
    "even": (8, 8, (1, 8, 1), True, "", 0.0),
    "dealt": (8, 8, (2, 4, 1), True, "", 0.0),
    "uneven": (7, 7, (1, 7, 1), True, "", 0.4),
    "empty": (5, 5, (1, 5, 1), True, "rows", 0.0),
    "cross": (7, 5, (0, 0, 0), False, "keys", 0.0),
}


def inputs(name: str) -> list[Tensor]:
    """q, k, v, the gradient of the output, the mask; four heads of queries on two of keys."""
    rows, keys, _, _, mask, _ = CASES[name]
    generator = torch.Generator().manual_seed(len(name))

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    marks = {"": (), "rows": (randn(2, 1, rows, keys) > 0,), "keys": (randn(2, 1, 1, keys),)}[mask]
    return [randn(2, 4, rows, 6), randn(2, 2, keys, 6), randn(2, 2, keys, 6), randn(2, 4, rows, 6), *marks]


def parts(name: str, axis: Axis) -> tuple[Part, Part]:
    rows, keys, cut, _, _, _ = CASES[name]
    return tuple(Part(n, (AxisCut(axis, *(cut if cut[0] else (1, n, 1))),)) for n in (rows, keys))  # type: ignore


def differentiated(out: Tensor, upstream: Tensor, *given: Tensor | None) -> list[Tensor]:
    wanted = [x for x in given if x is not None and x.requires_grad]
    return [out.detach(), *torch.autograd.grad(out, wanted, upstream)]


def all_cases(rank: int) -> dict[str, list[Tensor]]:
    mesh = Mesh(("x",), (RANKS,))
    (axis,) = runtime_axes(mesh, init_device_mesh("cpu", (RANKS,), mesh_dim_names=("x",)), (rank,))
    report = {}
    for name, (_, _, _, causal, _, p) in CASES.items():
        rows, keys = parts(name, axis)
        here, there = positions(rows), positions(keys)
        q, k, v, upstream, *mask = inputs(name)
        q, k, v = q[:, :, here], k[:, :, there], v[:, :, there]
        shown = None if not mask else mask[0][..., here, :] if mask[0].shape[-2] > 1 else mask[0][..., there]
        given = [x.requires_grad_() if x is not None and x.is_floating_point() else x for x in (q, k, v, shown)]
        dims = [Part(2), Part(4), rows, Part(keys.size)]
        out = ring_attention(*given, causal, None, p, KEY, 3, dims=dims, parts={"s": rows}, pairs={"s": keys})  # type: ignore
        report[name] = differentiated(out, upstream[:, :, here], *given)
    return report


@pytest.fixture(scope="module")
def reports() -> list[Any]:
    return values(run_processes(all_cases, RANKS))


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(reports: list[Any], name: str) -> None:
    rows, keys, _, causal, _, p = CASES[name]
    q, k, v, upstream, *mask = inputs(name)
    given = [x.requires_grad_() if x is not None and x.is_floating_point() else x for x in (q, k, v, *(mask or [None]))]
    dims = [Part(2), Part(4), Part(rows), Part(keys)]
    if causal and mask:  # torch's op takes one of both
        given[3], causal = given[3] & torch.ones(rows, keys, dtype=torch.bool).tril(), False
    expected = differentiated(attention(*given, causal, None, p, KEY, 3, dims=dims), upstream, *given)
    for rank, report in enumerate(reports):
        mine = [positions(part) for part in parts(name, Axis("x", RANKS, rank))]
        along = [(2, mine[0]), (2, mine[0]), (2, mine[1]), (2, mine[1]), (3, mine[1])]
        for found, wanted, (dim, index) in zip(report[name], expected, along, strict=False):
            torch.testing.assert_close(found, wanted.index_select(dim, index), rtol=1e-10, atol=1e-12)
        assert len(report[name]) == len(expected)
