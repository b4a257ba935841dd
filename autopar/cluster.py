"""The machines that a plan is for: how many nodes, how many devices in each, of which kind.

    ClusterSpec("2x8xH100")                                        nodes x devices per node x kind
    ClusterSpec("8xA100-80GB")                                     one node
    ClusterSpec("2x8xH100 inter_node_bandwidth=2.5e10")            with an override
    ClusterSpec(nodes=1, devices_per_node=4, device="cpu")
    ClusterSpec.detect()                                           the devices of this machine, the ranks of torchrun
    ClusterSpec.load("cluster.toml")

What a kind of device can do is in ``autopar.cost_model.hardware``, which is also where an unknown kind is refused.
Overrides are figures as attained: they replace a datasheet's figure and the fraction of it that is usually reached.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from autopar.errors import PlanError

_NOTATION = re.compile(r"(?:(?P<nodes>-?\d+)x)?(?P<devices>-?\d+)x(?P<device>[A-Za-z]\S*)")
_OVERRIDES = (
    "memory",
    "memory_bandwidth",
    "peak_flops",
    "launch_overhead",
    "intra_node_bandwidth",
    "intra_node_latency",
    "inter_node_bandwidth",
    "inter_node_latency",
    "cores",
    "overlap",
)
_MAY_BE_ZERO = ("overlap", "launch_overhead", "intra_node_latency", "inter_node_latency")
# What torch calls a device -> our name for its kind; the first match counts.
_DEVICE_NAMES = (
    (r"H100.*PCIe", "H100-PCIe"),
    (r"H100", "H100"),
    (r"H200", "H200"),
    (r"B200", "B200"),
    (r"A100.*PCIE", "A100-PCIe"),
    (r"A100.*40GB", "A100-40GB"),
    (r"A100", "A100-80GB"),
    (r"V100", "V100"),
    (r"L40S", "L40S"),
    (r"L4\b", "L4"),
    (r"RTX 4090", "RTX4090"),
    (r"MI250X", "MI250X"),
    (r"MI300X", "MI300X"),
)


@dataclass(frozen=True, slots=True, init=False)
class ClusterSpec:
    """A cluster of ``nodes`` equal nodes with ``devices_per_node`` devices of one kind; one rank drives one device.

    Overrides, None where the catalogue's figure for the kind holds:
      memory               bytes per device
      memory_bandwidth     bytes per second and device
      peak_flops           dense FLOP/s of a device, for every dtype
      launch_overhead      seconds per op
      intra_node_bandwidth, inter_node_bandwidth    bytes per second, device and direction
      intra_node_latency, inter_node_latency        seconds per step of a collective
      cores                CPU cores that the ranks of a node share, where they are fewer than the ranks
      overlap              part of compute behind which communication hides, 0 to 1

    ``str(cluster)`` is the notation of the first line of this module, and reads back as an equal cluster.

    Raises PlanError for a string that is not in that notation, an unknown field, and a count or figure that is not
    positive (latencies and overheads may be zero).
    """

    nodes: int
    devices_per_node: int
    device: str
    memory: int | None
    memory_bandwidth: float | None
    peak_flops: float | None
    launch_overhead: float | None
    intra_node_bandwidth: float | None
    intra_node_latency: float | None
    inter_node_bandwidth: float | None
    inter_node_latency: float | None
    cores: int | None
    overlap: float | None

    def __init__(
        self,
        spec: str | None = None,
        *,
        nodes: int | None = None,
        devices_per_node: int | None = None,
        device: str | None = None,
        memory: int | None = None,
        memory_bandwidth: float | None = None,
        peak_flops: float | None = None,
        launch_overhead: float | None = None,
        intra_node_bandwidth: float | None = None,
        intra_node_latency: float | None = None,
        inter_node_bandwidth: float | None = None,
        inter_node_latency: float | None = None,
        cores: int | None = None,
        overlap: float | None = None,
    ) -> None:
        given: dict[str, object] = {
            "nodes": nodes,
            "devices_per_node": devices_per_node,
            "device": device,
            "memory": memory,
            "memory_bandwidth": memory_bandwidth,
            "peak_flops": peak_flops,
            "launch_overhead": launch_overhead,
            "intra_node_bandwidth": intra_node_bandwidth,
            "intra_node_latency": intra_node_latency,
            "inter_node_bandwidth": inter_node_bandwidth,
            "inter_node_latency": inter_node_latency,
            "cores": cores,
            "overlap": overlap,
        }
        values: dict[str, object] = (
            {"nodes": 1, "devices_per_node": 1, "device": "cpu"} if spec is None else _parse(spec)
        )
        for name, value in given.items():
            if value is None:
                continue
            if spec is not None and name in values:
                raise PlanError(
                    f"{name} is given twice", where="ClusterSpec", expected=repr(spec), got=f"{name}={value!r}"
                )
            values[name] = value
        for name in given:
            object.__setattr__(self, name, _checked(name, values.get(name), "ClusterSpec"))

    @property
    def world_size(self) -> int:
        """Devices in all, which is the number of ranks."""
        return self.nodes * self.devices_per_node

    @property
    def fingerprint(self) -> str:
        """12 hex digits that are equal for equal clusters, on every machine and in every process."""
        return hashlib.sha256(str(self).encode()).hexdigest()[:12]

    def overrides(self) -> dict[str, int | float]:
        """The overrides that are set, by name, in the order of the fields."""
        return {name: value for name in _OVERRIDES if (value := getattr(self, name)) is not None}

    def __str__(self) -> str:
        words = [f"{self.nodes}x{self.devices_per_node}x{self.device}"]
        return " ".join(words + [f"{name}={value!r}" for name, value in self.overrides().items()])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the cluster as a TOML file that ``load`` reads back as an equal cluster."""
        lines = [
            f"nodes = {self.nodes}",
            f"devices_per_node = {self.devices_per_node}",
            f"device = {json.dumps(self.device)}",
        ]
        lines += [f"{name} = {value!r}" for name, value in self.overrides().items()]
        Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> ClusterSpec:
        """Read a TOML file with the fields of this class as its keys.

        Raises PlanError when the file is missing, is not TOML, or holds an unknown key or a value of the wrong kind.
        """
        try:
            values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise PlanError("the cluster file cannot be read", where=path, got=error.strerror or error) from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise PlanError("the cluster file is not valid TOML", where=path, got=error) from error
        known = [field.name for field in fields(cls)]
        for name in values:
            if name not in known:
                raise PlanError("the cluster file has an unknown key", where=path, expected=", ".join(known), got=name)
        for name in ("nodes", "devices_per_node", "device"):
            if name not in values:
                raise PlanError("the cluster file lacks a key", where=path, expected=name, got=", ".join(values))
        checked: dict[str, Any] = {name: _checked(name, value, path) for name, value in values.items()}
        return cls(**checked)

    @classmethod
    def detect(cls, device: str | None = None) -> ClusterSpec:
        """The cluster that this process runs on; ``device="cpu"`` leaves CUDA devices out.

        Under torchrun, WORLD_SIZE and LOCAL_WORLD_SIZE say how many ranks and how many of them per node. Otherwise it
        is this node alone: all its CUDA devices, or one CPU rank. CPU ranks that outnumber the cores share them. Kinds
        that the catalogue has no entry for keep the name that torch gives them, and are refused where their figures are
        needed.

        Raises PlanError when the two variables disagree, or a node has fewer CUDA devices than ranks.
        """
        import torch  # here, so that a cluster can be described without loading torch

        cuda_devices = 0 if device == "cpu" else torch.cuda.device_count()
        local = _environment("LOCAL_WORLD_SIZE") or _environment("WORLD_SIZE") or max(cuda_devices, 1)
        world = _environment("WORLD_SIZE") or local
        if world % local:
            raise PlanError(
                "the ranks are not the same number on every node",
                where="WORLD_SIZE and LOCAL_WORLD_SIZE",
                expected="WORLD_SIZE a multiple of LOCAL_WORLD_SIZE",
                got=f"{world} and {local}",
                hint="launch the same number of ranks on every node",
            )
        if not cuda_devices:
            cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
            shared = cores if cores < local else None
            return cls(nodes=world // local, devices_per_node=local, device="cpu", cores=shared)
        if cuda_devices < local:
            raise PlanError(
                "more ranks on this node than CUDA devices",
                where="LOCAL_WORLD_SIZE",
                expected=f"at most {cuda_devices}",
                got=local,
                hint="launch one rank per device, or set CUDA_VISIBLE_DEVICES= to run on the CPU",
            )
        name = torch.cuda.get_device_properties(0).name
        return cls(nodes=world // local, devices_per_node=local, device=_kind(name), memory=_other_memory(name))


def _parse(spec: str) -> dict[str, object]:
    """The fields that a string such as "2x8xH100 memory=40000000000" gives."""
    words = spec.split() if isinstance(spec, str) else []
    match = _NOTATION.fullmatch(words[0]) if words else None
    if match is None:
        raise PlanError(
            "the cluster cannot be read",
            where="ClusterSpec",
            expected="nodes x devices per node x kind, such as '2x8xH100' or '8xH100'",
            got=repr(spec),
        )
    values: dict[str, object] = {
        "nodes": int(match["nodes"] or 1),
        "devices_per_node": int(match["devices"]),
        "device": match["device"],
    }
    for word in words[1:]:
        name, equals, text = word.partition("=")
        if not equals or name not in _OVERRIDES or name in values:
            raise PlanError(
                "the cluster cannot be read",
                where=f"ClusterSpec({spec!r})",
                expected=f"<name>=<number>, each name once, of {', '.join(_OVERRIDES)}",
                got=word,
            )
        try:
            values[name] = int(text) if re.fullmatch(r"-?\d+", text) else float(text)
        except ValueError:
            raise PlanError(
                "the cluster cannot be read", where=f"ClusterSpec({spec!r})", expected="a number", got=word
            ) from None
    return values


def _checked(name: str, value: object, where: object) -> object:
    """The value in the field's own type; PlanError when it is of another kind or not positive."""
    if value is None:
        return None
    if name == "device":
        if not isinstance(value, str) or not re.fullmatch(r"[A-Za-z]\S*", value):
            raise PlanError(
                "device is no name of a kind", where=where, expected="a word such as 'H100'", got=repr(value)
            )
        return value
    whole = name in ("nodes", "devices_per_node", "memory", "cores")
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not number or (whole and value != int(value)):  # type: ignore[call-overload]
        raise PlanError(
            f"{name} is no number", where=where, expected="an integer" if whole else "a number", got=repr(value)
        )
    if value < 0 or (value == 0 and name not in _MAY_BE_ZERO):  # type: ignore[operator]
        raise PlanError(f"{name} must be positive", where=where, expected="> 0", got=value)
    if name == "overlap" and value > 1:  # type: ignore[operator]
        raise PlanError("overlap is a part of compute", where=where, expected="from 0 to 1", got=value)
    return int(value) if whole else float(value)  # type: ignore[call-overload, arg-type]


def _environment(name: str) -> int | None:
    """A positive integer from the environment, None when it is not set."""
    text = os.environ.get(name, "")
    if not text:
        return None
    if not text.isdecimal() or int(text) == 0:
        raise PlanError(f"{name} is no count", where="environment", expected="a positive integer", got=repr(text))
    return int(text)


def _kind(torch_name: str) -> str:
    """Our name for the device that torch calls ``torch_name``."""
    for pattern, kind in _DEVICE_NAMES:
        if re.search(pattern, torch_name, re.IGNORECASE):
            return kind
    return "-".join(torch_name.split())


def _other_memory(torch_name: str) -> int | None:
    """Bytes of memory of the variants that differ from their kind's entry in nothing else."""
    if re.search(r"V100.*16GB", torch_name):
        return 16 * 2**30
    if re.search(r"A100.*PCIE.*40GB", torch_name, re.IGNORECASE):
        return 40 * 2**30
    return None
