"""The cross-overs of theory: where one tensor mode sends less than another, the solver prefers it, to the token.

A layer here is the four products of a GPT layer and nothing else that would send anything; links cost their bytes
alone, and compute nothing.  Sources of the bytes: Megatron (arXiv 1909.08053), Optimus (2104.05343), 3D (2105.14450).
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autopar import api
from autopar.cluster import ClusterSpec
from autopar.plan import Plan
from autopar.rules.analysis import Bound
from autopar.solver.search import Search


class Layer(nn.Module):
    def __init__(self, h: int) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(h, 3 * h, bias=False), nn.Linear(h, h, bias=False)
        self.up, self.down = nn.Linear(h, 4 * h, bias=False), nn.Linear(4 * h, h, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        x = torch.tanh(self.proj(q * k * v))
        return torch.tanh(self.down(torch.tanh(self.up(x))))


class Layers(nn.Module):
    """The gradient of the first layer's input is wanted too, for the sake of one number."""

    def __init__(self, h: int, count: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.layers = nn.ModuleList(Layer(h) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(x * self.scale)
        for layer in self.layers:
            x = layer(x)
        return x


def layers(tokens: int, h: int, count: int) -> Bound:
    with torch.device("meta"):
        model, batch = Layers(h, count), {"x": torch.empty(tokens, h)}
    return api.understand(model, batch, lambda out, batch: out.square().sum())


def plan(bound: Bound, mesh: dict[str, int], mode: str) -> Plan:
    ranks = torch.Size(mesh.values()).numel()
    free = {"peak_flops": 1e30, "memory_bandwidth": 1e30, "launch_overhead": 0.0, "intra_node_latency": 0.0}
    machines = ClusterSpec(nodes=1, devices_per_node=ranks, device="H100", intra_node_bandwidth=1e9, **free)
    return api.solve(bound, machines, search=Search(mesh=mesh, tensor_modes=mode), gap=0.0)


def of_a_layer(tokens: int, h: int, mesh: dict[str, int], mode: str) -> tuple[float, float]:
    """(elements sent per rank, seconds) of one layer: what three have more than two."""
    two, three = (plan(layers(tokens, h, count), mesh, mode) for count in (2, 3))
    sent = (three.predicted.comm_bytes - two.predicted.comm_bytes) / 4
    return sent, three.solver.objective - two.solver.objective


def megatron(t: int, h: int, p: int) -> float:
    return 8 * (p - 1) / p * t


def summa(t: int, h: int, p: int) -> float:
    q = round(p**0.5)
    return 3 * (q - 1) / q**2 * (7 * t + 12 * h**2)


def cube(t: int, h: int, p: int) -> float:
    side = round(p ** (1 / 3))
    return 2 * (side - 1) / side**3 * (16 * t + 12 * h**2)


@pytest.mark.parametrize(
    ("mesh", "mode", "theory", "h", "cross", "step"),
    [
        ({"x": 2, "y": 2}, "2d streamed", summa, 16, 12 * 16, 2),  # 36 h / (8 q - 13)
        ({"x": 3, "y": 3}, "2d streamed", summa, 99, 36 * 99 // 11, 9),
        ({"x": 2, "y": 2, "z": 2}, "3d gathered", cube, 16, 16, 4),  # 3 h / (l^2 + l - 3)
    ],
    ids=["2D, q=2", "2D, q=3", "3D, l=2"],
)
def test_the_solver_flips_where_theory_says(
    mesh: dict[str, int], mode: str, theory: Callable[[int, int, int], float], h: int, cross: int, step: int
) -> None:
    """Below the cross-over 1D is faster, above it is not."""
    ranks = torch.Size(mesh.values()).numel()
    for tokens, flat in ((cross - step, True), (cross + step, False)):
        one, other = of_a_layer(tokens, h, {"tp": ranks}, "1d"), of_a_layer(tokens, h, mesh, mode)
        assert one[0] == pytest.approx(megatron(tokens * h, h, ranks), rel=1e-9)
        assert other[0] == pytest.approx(theory(tokens * h, h, ranks), rel=1e-9)
        assert (one[1] < other[1]) == flat, f"{tokens} tokens: {one[1]:.6g} s in 1D, {other[1]:.6g} s in {mode}"
