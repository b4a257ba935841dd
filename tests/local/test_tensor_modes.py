"""Every tensor mode and sequence split, forced: the plan has its name, and trains as one process does."""

from __future__ import annotations

from typing import Any

import models
import pytest
from equality import Prepared, assert_equals_one_process, prepare

from autopar import api
from autopar.cluster import ClusterSpec
from autopar.modes import describe
from autopar.solver.search import Search

MODELS = {"gpt2": models.gpt2, "bert": models.bert, "llama": models.llama}
_PREPARED: dict[tuple[str, int, int], Prepared] = {}

# search, ranks, what the plan is called
MODES: dict[str, tuple[dict[str, Any], int, str]] = {
    "1d on 2": ({"mesh": {"tp": 2}, "tensor_modes": "1d", "sequence": "none"}, 2, "tp: tensor 1D"),
    "1d on 4": ({"mesh": {"tp": 4}, "tensor_modes": "1d", "sequence": "none"}, 4, "tp: tensor 1D"),
    "megatron on 2": ({"mesh": {"tp": 2}, "sequence": "megatron"}, 2, "tp: tensor 1D, sequence split"),
    "megatron on 4": ({"mesh": {"tp": 4}, "sequence": "megatron"}, 4, "tp: tensor 1D, sequence split"),
    "ulysses on 2": ({"mesh": {"sp": 2}, "sequence": "ulysses"}, 2, "sp: sequence split, Ulysses"),
    "ulysses on 4": ({"mesh": {"sp": 4}, "sequence": "ulysses"}, 4, "sp: sequence split, Ulysses"),
    "1d x data parallel": (
        {"mesh": {"dp": 2, "tp": 2}, "tensor_modes": "1d"},
        4,
        "dp: data parallel; tp: tensor 1D",
    ),
    "2d": ({"mesh": {"x": 2, "y": 2}, "tensor_modes": "2d gathered"}, 4, "x, y: tensor 2D (gathered)"),
    "2d x data parallel": (
        {"mesh": {"dp": 2, "x": 2, "y": 2}, "tensor_modes": "2d gathered", "zero": 1},
        8,
        "dp: data parallel, ZeRO-1; x, y: tensor 2D (gathered)",
    ),
    "2.5d": ({"mesh": {"d": 2, "x": 2, "y": 2}, "tensor_modes": "2.5d gathered"}, 8, "d, x, y: tensor 2.5D (gathered)"),
    "3d": ({"mesh": {"x": 2, "y": 2, "z": 2}, "tensor_modes": "3d gathered"}, 8, "x, y, z: tensor 3D (gathered)"),
}


def prepared(name: str, batch: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> Prepared:
    key = (name, batch, rows)
    if key not in _PREPARED:
        monkeypatch.setattr(models, "BATCH", batch)
        monkeypatch.setattr(models, "SEQUENCE", rows)
        _PREPARED[key] = prepare(MODELS[name]())
    return _PREPARED[key]


@pytest.mark.parametrize(("batch", "rows"), [(8, 8), (5, 7)], ids=["even", "odd"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", MODELS)
def test_a_forced_mode_has_its_name_and_equals_one_process(
    name: str, mode: str, batch: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = prepared(name, batch, rows, monkeypatch)
    search, ranks, said = MODES[mode]
    machines = ClusterSpec(nodes=1, devices_per_node=ranks, device="cpu", intra_node_latency=0.0, peak_flops=1e8)
    plan = api.solve(case.bound, machines, search=Search(**search), gap=0.05)
    found = describe(plan, case.bound)
    assert found.replace(", vocabulary split", "").startswith(said), found
    assert_equals_one_process(case, plan, f"{mode}: {found}")
