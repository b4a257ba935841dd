"""ClusterSpec: its notation, its file, what it refuses; and the four parts of an error."""

import os
import pickle
from dataclasses import FrozenInstanceError, replace

import pytest

from autopar.cluster import ClusterSpec
from autopar.errors import AutoparError, CaptureError, InfeasiblePlan, PlanError


@pytest.mark.parametrize(
    ("text", "nodes", "devices", "kind"),
    [
        ("2x8xH100", 2, 8, "H100"),
        ("8xH100", 1, 8, "H100"),
        ("1x1xcpu", 1, 1, "cpu"),
        ("128x8xA100-80GB", 128, 8, "A100-80GB"),
        # kinds with an x of their own
        ("4xRTX4090", 1, 4, "RTX4090"),
        ("2x8xMI250X", 2, 8, "MI250X"),
    ],
)
def test_notation(text: str, nodes: int, devices: int, kind: str) -> None:
    cluster = ClusterSpec(text)
    assert (cluster.nodes, cluster.devices_per_node, cluster.device) == (nodes, devices, kind)
    assert cluster.world_size == nodes * devices
    assert cluster == ClusterSpec(nodes=nodes, devices_per_node=devices, device=kind)
    assert ClusterSpec(str(cluster)) == cluster


OVERRIDDEN = ClusterSpec(
    "2x4xcpu",
    memory=3 * 2**30,
    peak_flops=1e12,
    inter_node_bandwidth=1e9,
    inter_node_latency=2.5e-05,
    intra_node_latency=0,
)


def test_overrides_round_trip_in_text_and_toml(tmp_path) -> None:
    assert ClusterSpec(str(OVERRIDDEN)) == OVERRIDDEN
    assert str(ClusterSpec("2x4xcpu memory=1024")) == "2x4xcpu memory=1024"
    OVERRIDDEN.save(tmp_path / "cluster.toml")
    loaded = ClusterSpec.load(tmp_path / "cluster.toml")
    assert loaded == OVERRIDDEN
    assert loaded.fingerprint == OVERRIDDEN.fingerprint
    assert loaded.overrides() == {
        "memory": 3 * 2**30,
        "peak_flops": 1e12,
        "intra_node_latency": 0.0,
        "inter_node_bandwidth": 1e9,
        "inter_node_latency": 2.5e-05,
    }
    assert pickle.loads(pickle.dumps(loaded)) == loaded


def test_file_is_plain_toml(tmp_path) -> None:
    ClusterSpec("2x8xH100", inter_node_bandwidth=2.5e10).save(tmp_path / "c.toml")
    assert (tmp_path / "c.toml").read_text() == (
        'nodes = 2\ndevices_per_node = 8\ndevice = "H100"\ninter_node_bandwidth = 25000000000.0\n'
    )


def test_is_a_value() -> None:
    cluster = ClusterSpec("2x8xH100")
    with pytest.raises(FrozenInstanceError):
        cluster.nodes = 3  # type: ignore[misc]
    assert replace(cluster, nodes=4) == ClusterSpec("4x8xH100")
    assert len({cluster, ClusterSpec("2x8xH100"), ClusterSpec("16xH100")}) == 2


def test_fingerprint_is_the_same_in_every_process_and_tells_clusters_apart() -> None:
    assert ClusterSpec("2x8xH100").fingerprint == "1825c9bf05d2"
    others = ["16xH100", "8x2xH100", "2x8xA100", "2x8xH100 memory=1"]
    assert len({ClusterSpec(text).fingerprint for text in (*others, "2x8xH100")}) == 5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "nodes x devices per node x kind"),
        ("H100", "nodes x devices per node x kind"),
        ("2x8", "nodes x devices per node x kind"),
        ("2x3x4xH100", "nodes x devices per node x kind"),
        ("0x8xH100", "nodes must be positive"),
        ("2x-8xH100", "devices_per_node must be positive"),
        ("8xH100 speed=3", "got:      speed=3"),
        ("8xH100 memory=much", "a number"),
        ("8xH100 memory=nan", "memory is no number"),
        ("8xH100 memory=1 memory=2", "each name once"),
        ("8xH100 peak_flops=0", "peak_flops must be positive"),
        ("8xH100 inter_node_latency=-1", "inter_node_latency must be positive"),
    ],
)
def test_refuses_bad_text(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        ClusterSpec(text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"nodes": 1.5}, "nodes is no number"),
        ({"nodes": True}, "nodes is no number"),
        ({"devices_per_node": "8"}, "devices_per_node is no number"),
        ({"device": ""}, "device is no name"),
        ({"device": "H 100"}, "device is no name"),
        ({"spec": "2x8xH100", "nodes": 4}, "nodes is given twice"),
    ],
)
def test_refuses_bad_fields(arguments: dict, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        ClusterSpec(**arguments)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("nodes = ", "not valid TOML"),
        ("nodes = 1\nnodes = 2\n", "not valid TOML"),
        ('nodes = 1\ndevices_per_node = 2\ndevice = "cpu"\nspeed = 3\n', "got:      speed"),
        ("nodes = 1\n", "lacks a key"),
        ('nodes = 1\ndevices_per_node = "2"\ndevice = "cpu"\n', "devices_per_node is no number"),
    ],
)
def test_refuses_bad_files_and_names_them(tmp_path, content: str, message: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(content)
    with pytest.raises(PlanError, match=message) as caught:
        ClusterSpec.load(path)
    assert caught.value.where == str(path)


def test_missing_file(tmp_path) -> None:
    with pytest.raises(PlanError, match="No such file"):
        ClusterSpec.load(tmp_path / "none.toml")


def test_detect(monkeypatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(4), raising=False)
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert ClusterSpec.detect() == ClusterSpec("1xcpu")

    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert ClusterSpec.detect() == ClusterSpec("2x4xcpu")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert ClusterSpec.detect() == ClusterSpec("1x8xcpu", cores=4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    with pytest.raises(PlanError, match="same number on every node"):
        ClusterSpec.detect()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "four")
    with pytest.raises(PlanError, match="LOCAL_WORLD_SIZE is no count"):
        ClusterSpec.detect()


@pytest.mark.parametrize(
    ("torch_name", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA A100-PCIE-40GB", "A100-PCIe memory=42949672960"),
        ("Tesla V100-SXM2-16GB", "V100 memory=17179869184"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA GeForce RTX 4090", "RTX4090"),
        ("AMD Instinct MI300X", "MI300X"),
        ("Some New Device", "Some-New-Device"),
    ],
)
def test_detect_names_devices(monkeypatch, torch_name: str, expected: str) -> None:
    torch = pytest.importorskip("torch")
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    properties = type("Properties", (), {"name": torch_name})
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    assert ClusterSpec.detect() == ClusterSpec(f"4x{expected}")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    with pytest.raises(PlanError, match="more ranks on this node than CUDA devices"):
        ClusterSpec.detect()


def test_error_shows_the_parts_that_were_given() -> None:
    error = CaptureError("no backward", where="layers.0 (model.py:7)", expected=2, got=(), hint="write it as ops")
    assert str(error) == (
        "no backward\n  where:    layers.0 (model.py:7)\n  expected: 2\n  got:      ()\n  do:       write it as ops"
    )
    assert str(AutoparError("short")) == "short"
    assert str(AutoparError("short", got=0)) == "short\n  got:      0"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_infeasible_plan_says_how_much_and_what_would_fit() -> None:
    error = InfeasiblePlan("nothing fits", short_bytes=512, would_fit="4 devices", expected="<= 1024 bytes")
    assert (error.short_bytes, error.would_fit) == (512, "4 devices")
    assert isinstance(error, AutoparError)
    assert str(error) == (
        "nothing fits\n  expected: <= 1024 bytes\n  short by: 512 bytes per rank\n  fits:     4 devices"
    )
    assert pickle.loads(pickle.dumps(error)).short_bytes == 512
