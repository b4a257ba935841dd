"""Every tensor mode and sequence split, forced: the plan has its name, and trains as one process does."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from equality import Prepared, assert_equals_one_process, prepare
from models import VOCABULARY, Case, bert, gpt2, llama
from torch import Tensor, nn

from autopar import api
from autopar.cluster import ClusterSpec
from autopar.modes import describe
from autopar.solver.search import Search

MODELS: dict[str, Callable[[], Case]] = {
    "gpt2": gpt2,
    "gpt2 of 3 heads": lambda: gpt2(heads=3, layers=1),
    "bert": bert,
    "llama": llama,
}

# search, ranks, what the plan is called
MODES: dict[str, tuple[dict[str, Any], int, str]] = {
    "1d on 2": ({"mesh": {"tp": 2}, "tensor_modes": "1d", "sequence": "none"}, 2, "tp: tensor 1D"),
    "1d on 4": ({"mesh": {"tp": 4}, "tensor_modes": "1d", "sequence": "none"}, 4, "tp: tensor 1D"),
    "megatron on 2": ({"mesh": {"tp": 2}, "sequence": "megatron"}, 2, "tp: tensor 1D, sequence split"),
    "megatron on 4": ({"mesh": {"tp": 4}, "sequence": "megatron"}, 4, "tp: tensor 1D, sequence split"),
    "ulysses on 2": ({"mesh": {"sp": 2}, "sequence": "ulysses"}, 2, "sp: sequence split, Ulysses"),
    "ulysses on 4": ({"mesh": {"sp": 4}, "sequence": "ulysses"}, 4, "sp: sequence split, Ulysses"),
    "ring on 2": ({"mesh": {"cp": 2}, "sequence": "ring"}, 2, "cp: sequence split, ring attention"),
    "ring on 4": ({"mesh": {"cp": 4}, "sequence": "ring"}, 4, "cp: sequence split, ring attention"),
    "ring x ulysses": (
        {"mesh": {"cp": 2, "sp": 2}, "sequence": "ring+ulysses"},
        4,
        "cp: sequence split, ring attention; sp: sequence split, Ulysses",
    ),
    "1d x data parallel": (
        {"mesh": {"dp": 2, "tp": 2}, "tensor_modes": "1d", "sequence": "none"},
        4,
        "dp: data parallel; tp: tensor 1D",
    ),
    "2d": ({"mesh": {"x": 2, "y": 2}, "tensor_modes": "2d gathered"}, 4, "x, y: tensor 2D (gathered)"),
    "2d x data parallel": (
        {"mesh": {"dp": 2, "x": 2, "y": 2}, "tensor_modes": "2d gathered", "sequence": "none", "zero": 1},
        8,
        "dp: data parallel, ZeRO-1; x, y: tensor 2D (gathered)",
    ),
    "2d streamed": ({"mesh": {"x": 2, "y": 2}, "tensor_modes": "2d streamed"}, 4, "x, y: tensor 2D (streamed)"),
    "2.5d": ({"mesh": {"d": 2, "x": 2, "y": 2}, "tensor_modes": "2.5d gathered"}, 8, "d, x, y: tensor 2.5D (gathered)"),
    "2.5d streamed": (
        {"mesh": {"d": 2, "x": 2, "y": 2}, "tensor_modes": "2.5d streamed"},
        8,
        "d, x, y: tensor 2.5D (streamed)",
    ),
    "3d": ({"mesh": {"x": 2, "y": 2, "z": 2}, "tensor_modes": "3d gathered"}, 8, "x, y, z: tensor 3D (gathered)"),
    "3d streamed": (
        {"mesh": {"x": 2, "y": 2, "z": 2}, "tensor_modes": "3d streamed"},
        8,
        "x, y, z: tensor 3D (streamed)",
    ),
}
# rows, tokens: 6 on 2 x 2 is 2 + 1 twice; 7 on 4 is 2 + 2 + 2 + 1, and on 2 x 2 cannot be
SIZES = {"even": (8, 8), "odd": (6, 7), "turned": (7, 6)}
# every day: each mode on GPT-2 but those that a smaller model runs below, and each model in some modes, with sizes that
# do not divide
DAILY = {("gpt2", mode) for mode in MODES if mode not in ("2.5d", "3d")} | {
    ("gpt2 of 3 heads", "2d"),
    ("bert", "2d streamed"),
    ("bert", "ring on 4"),
    ("llama", "megatron on 2"),
    ("llama", "ring x ulysses"),
}
IMPOSSIBLE = {"1d on 4", "megatron on 4", "ulysses on 4"}  # of 3 heads


@cache
def prepared(name: str, sizes: str) -> Prepared:
    """A model on a batch with labels that do not count; BERT's with padding on either side too."""
    case = MODELS[name]()
    torch.manual_seed(1)
    ids = torch.randint(0, VOCABULARY, SIZES[sizes])
    labels = ids.clone()
    labels[0, 3:] = -100
    batch = {"input_ids": ids, "labels": labels}
    if name == "bert":
        batch["attention_mask"] = torch.ones_like(ids)
        batch["attention_mask"][1, -3:] = 0
        batch["attention_mask"][0, :2] = 0
    return prepare(Case(case.model, batch))


def machines(ranks: int) -> ClusterSpec:
    """Slow devices and links without latency: what can be split is worth it."""
    return ClusterSpec(nodes=1, devices_per_node=ranks, device="cpu", intra_node_latency=0.0, peak_flops=1e8)


@pytest.mark.parametrize(
    ("name", "mode", "sizes"),
    [
        pytest.param(*case, marks=[] if case[:2] in DAILY and case[2] != "even" else [pytest.mark.slow])
        for case in itertools.product(MODELS, MODES, SIZES)
        if (case[0] != "gpt2 of 3 heads" or case[1] not in IMPOSSIBLE)
        and case[2] != ("odd" if case[1] == "ring x ulysses" else "turned")
    ],
)
def test_a_forced_mode_has_its_name_and_equals_one_process(name: str, mode: str, sizes: str) -> None:
    case = prepared(name, sizes)
    search, ranks, said = MODES[mode]
    plan = api.solve(case.bound, machines(ranks), search=Search(**search), gap=0.05)
    found = describe(plan, case.bound)
    assert found.replace(", vocabulary split", "").replace(", balanced order", "") == said
    assert_equals_one_process(case, plan, f"{mode}: {found}")


# ------------------------------------------------------------------------------------------------ a quarter block


class Classifier(nn.Module):
    """Under a grid every rank has a quarter of the scores, and the loss is the user's."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.n, self.b = nn.Linear(12, 24), nn.LayerNorm(24), nn.Linear(24, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.n(F.gelu(self.a(x))))


@cache
def classifier(rows: int) -> Prepared:
    torch.manual_seed(0)
    batch = {"x": torch.randn(rows, 12).double(), "y": torch.arange(rows) % 10}
    return prepare(Case(Classifier().double(), batch, lambda out, batch: F.cross_entropy(out, batch["y"])))


@pytest.mark.parametrize("rows", [pytest.param(8, marks=pytest.mark.slow), 6])
@pytest.mark.parametrize("mode", ["2d", "2.5d", "3d"])
def test_whole_scores_and_the_users_own_loss_on_a_grid(mode: str, rows: int) -> None:
    """Scores, loss and every gradient, those of the norm too, equal one process's, with no change to user code."""
    ranks = 4 if mode == "2d" else 8
    case = classifier(rows)
    plan = api.solve(case.bound, machines(ranks), search=Search(tensor_modes=f"{mode} gathered"))
    assert f"tensor {mode.upper()} (gathered)" in describe(plan, case.bound)
    norm = next(d for d in plan.ops if d.name == "layer_norm")
    assert "parts n" in norm.choices
    assert_equals_one_process(case, plan, mode)
