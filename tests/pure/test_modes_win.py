"""Every mode is the fastest plan somewhere: the solver, free to choose, finds it, and says why.

Chains of products separate the tensor modes.  Widths that grow make columns the cheaper choice in every product (what
goes in is smaller than what comes out), where 1D would alternate; with equal widths all three axes pay in 3D.  The
number of heads separates the splits of a sequence.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from test_solver import gpt2
from torch import Tensor, nn

from autopar.api import solve, understand
from autopar.cluster import ClusterSpec
from autopar.modes import describe
from autopar.rules.analysis import Bound
from autopar.solver.search import Search

GROWING, SLOWLY, EQUAL = (512, 1024, 2048, 4096, 8192), (4096, 4352, 4608, 4864, 5120), (4096,) * 7
AXES_OF_8 = Search(mesh=[{"x": 2, "y": 2, "z": 2}, {"x": 4, "y": 2}, {"x": 2, "y": 4}, {"x": 8}])


class Chain(nn.Module):
    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.links = nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in itertools.pairwise(widths))

    def forward(self, x: Tensor) -> Tensor:
        for link in self.links:
            x = torch.tanh(link(x))
        return x


def chain(rows: int, widths: tuple[int, ...]) -> Bound:
    with torch.device("meta"):
        model, batch = Chain(widths), {"x": torch.empty(rows, widths[0])}
    return understand(model, batch, lambda out, batch: out.square().sum())


def machines(ranks: int, nodes: int = 1, **figures: Any) -> ClusterSpec:
    """Slow compute over links without latency, so that bytes decide."""
    plain = {"peak_flops": 1e13, "memory_bandwidth": 2e12, "launch_overhead": 0.0, "intra_node_bandwidth": 1e11}
    still = {"intra_node_latency": 0.0, "inter_node_latency": 0.0}
    return ClusterSpec(nodes=nodes, devices_per_node=ranks // nodes, device="H100", **{**plain, **still, **figures})


def h100(ranks: int) -> ClusterSpec:
    return ClusterSpec(nodes=1, devices_per_node=ranks, device="H100")


class Win(NamedTuple):
    """Where a mode wins.  tight: with the memory of the best plan in this mode, and no more."""

    mode: str
    model: Callable[[], Bound]
    cluster: ClusterSpec
    options: Mapping[str, Any] = MappingProxyType({})
    tight: str = ""


WINS = {
    "many rows": Win("data parallel", lambda: chain(65536, (1024,) * 5), machines(4)),
    "large weights": Win("tensor 1D", lambda: chain(256, (1024, 4096) * 3 + (1024,)), machines(4)),
    "growing widths": Win("tensor 2D", lambda: chain(6144, GROWING), machines(4)),
    "communication that hides, little memory": Win(
        "tensor 2D (streamed)",
        lambda: chain(4096, SLOWLY),
        machines(4, overlap=1.0, intra_node_bandwidth=1e10),
        tight="2d streamed",
    ),
    "growing widths on two nodes": Win(
        "tensor 2.5D",
        lambda: chain(12288, GROWING),
        machines(8, nodes=2, inter_node_bandwidth=1e10),
        {"optimizer": "sgd", "search": AXES_OF_8},  # AdamW's own time is worth sharing over depth too: ZeRO-1
    ),
    "equal widths": Win("tensor 3D", lambda: chain(4096, EQUAL), machines(8), {"search": AXES_OF_8}),
    "norms between large weights": Win("tensor 1D, sequence split", lambda: gpt2(1, 512, 2048, heads=16), h100(4)),
    "a long sequence, 16 heads": Win("sequence split, Ulysses", lambda: gpt2(1, 16384, 1024, heads=16), h100(4)),
    "a long sequence, one head": Win(
        "sequence split, ring attention, balanced order", lambda: gpt2(1, 16384, 1024, heads=1), h100(4)
    ),
}


@pytest.mark.parametrize("where", WINS)
def test_every_mode_wins_somewhere(where: str) -> None:
    mode, model, cluster, options, tight = WINS[where]
    bound = model()
    if tight:
        least = solve(bound, cluster, search=Search(tensor_modes=tight), gap=0.0).predicted.peak_memory
        options = {**options, "memory_limit": least}
    plan = solve(bound, cluster, gap=0.0, **options)
    assert plan.solver.status == "optimal"
    assert mode in describe(plan, bound)
    (reason,) = (note for note in plan.notes if note.startswith(f"why {mode.partition(',')[0].partition(' (')[0]}"))
    assert float(re.search(r"takes ([\d.]+) times", reason)[1]) > 1
