"""What `autopar doctor` looks at: whether this machine has what planning and training need."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import math
import os
import platform
import re
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

from autopar.cluster import ClusterSpec
from autopar.errors import PlanError


class Check(NamedTuple):
    """level: ok; warn, where something works less well; missing, where autopar cannot work."""

    level: str
    name: str
    found: str
    advice: str = ""


def examine() -> list[Check]:
    """Everything that `autopar doctor` looks at, in its order."""
    checks = [_python(), _torch(), *_backends(), *_solvers(), *_devices(), _cores(), _memory(), _threads()]
    return [*checks, _world(), _transformers()]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _at_least(version: str, wanted: tuple[int, int]) -> bool:
    numbers = tuple(int(n) for n in re.findall(r"\d+", version)[:2])
    return numbers >= wanted


def _python() -> Check:
    version = platform.python_version()
    if _at_least(version, (3, 11)):
        return Check("ok", "python", version)
    return Check("missing", "python", version, "use Python 3.11 or newer")


def _torch() -> Check:
    version = _version("torch")
    if version is None:
        return Check("missing", "torch", "not installed", "pip install 'torch>=2.11'")
    if not _at_least(version, (2, 11)):
        return Check("missing", "torch", version, "pip install --upgrade 'torch>=2.11'")
    return Check("ok", "torch", version)


def _backends() -> list[Check]:
    import torch
    import torch.distributed as dist

    if not dist.is_available():
        return [Check("missing", "distributed", "torch has none", "install a torch that is built with distributed")]
    checks = (
        [_gloo()]
        if dist.is_gloo_available()
        else [Check("missing", "gloo", "torch has none", "install a torch that is built with gloo; CPU ranks need it")]
    )
    if dist.is_nccl_available():
        return [*checks, Check("ok", "nccl", ".".join(map(str, torch.cuda.nccl.version())))]
    if torch.cuda.is_available():
        return [*checks, Check("missing", "nccl", "torch has none", "install a torch that is built with NCCL")]
    return [*checks, Check("ok", "nccl", "none, and no GPU that needs it")]


def _gloo() -> Check:
    """Start a group of one rank: where this host's own name leads nowhere, that fails, as torchrun's ranks would."""
    import torch.distributed as dist

    try:
        dist.ProcessGroupGloo(dist.PrefixStore("autopar-doctor", dist.HashStore()), 0, 1, timedelta(seconds=30))
    except RuntimeError as error:
        return Check(
            "missing", "gloo", f"does not start: {error}", "set GLOO_SOCKET_IFNAME to a network interface, such as lo"
        )
    return Check("ok", "gloo", "starts")


def _solvers() -> list[Check]:
    highs, pulp = _imported("highspy"), _imported("pulp")
    if highs is None and pulp is None:
        return [Check("missing", "solver", "neither highspy nor pulp", "pip install highspy pulp")]
    checks = [Check("ok", name, version) for name, version in (("highspy", highs), ("pulp", pulp)) if version]
    if highs is None:
        checks.append(Check("warn", "highspy", "not there", "pip install highspy: without it some plans have no bound"))
    if pulp is None:
        checks.append(Check("warn", "pulp", "not there", "pip install pulp, the second solver"))
    return checks


def _imported(package: str) -> str | None:
    """The version of a package that can be imported."""
    try:
        importlib.import_module(package)
    except ImportError:
        return None
    return _version(package)


def _devices() -> list[Check]:
    import torch

    count = torch.cuda.device_count()
    if not count:
        return [Check("ok", "devices", "no GPU: ranks run on the CPU")]
    kinds: dict[str, int] = {}
    for k in range(count):
        seen = torch.cuda.get_device_properties(k)
        name = f"{seen.name} with {seen.total_memory / 2**30:.0f} GiB"
        kinds[name] = kinds.get(name, 0) + 1
    found = ", ".join(f"{n}x {name}" for name, n in kinds.items())
    if len(kinds) > 1:
        return [
            Check("warn", "devices", found, "a plan takes all devices as equal: set CUDA_VISIBLE_DEVICES to one kind")
        ]
    return [_known_kind(found)]


def _known_kind(found: str) -> Check:
    from autopar.cost_model.hardware import device

    try:
        device(ClusterSpec.detect())
    except PlanError as error:
        return Check("warn", "devices", found, f"{error.what}: {error.hint or error.expected}")
    return Check("ok", "devices", found)


def usable_cores() -> int:
    """Cores that this process may use: the scheduler's set, and the quota of its control group."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="utf-8").split()
        cores = min(cores, max(1, math.ceil(int(quota) / int(period))))
    return cores


def _cores() -> Check:
    return Check("ok", "cores", str(usable_cores()))


def _memory() -> Check:
    from autopar.explain.quantities import format_bytes

    available = _meminfo("MemAvailable")
    if available is None:
        return Check("ok", "memory", "unknown on this system")
    with contextlib.suppress(OSError, ValueError):
        available = min(available, int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="utf-8")))
    if available < 2 * 2**30:
        return Check(
            "warn", "memory", f"{format_bytes(available)} available", "planning a large model takes up to 2 GiB"
        )
    return Check("ok", "memory", f"{format_bytes(available)} available")


def _meminfo(key: str) -> int | None:
    try:
        text = Path("/proc/meminfo").read_text(encoding="utf-8")
    except OSError:
        return None
    match = re.search(rf"^{key}:\s+(\d+) kB", text, re.MULTILINE)
    return int(match[1]) * 1024 if match else None


def _threads() -> Check:
    name, cores = "OMP_NUM_THREADS", usable_cores()
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    ranks = int(local) if local.isdecimal() and int(local) else 1
    text = os.environ.get(name, "")
    good = f"export {name}={max(1, cores // ranks)}, which is cores / ranks of this node"
    if not text:
        advice = (
            good if ranks > 1 else f"export {name}= cores / ranks of this node, at least 1; torchrun sets 1 by itself"
        )
        return Check("warn", name, f"not set: every rank would use all {cores} cores", advice)
    if not text.isdecimal() or not int(text):
        return Check("warn", name, repr(text), good)
    if int(text) * ranks > max(cores, ranks):
        return Check("warn", name, f"{text}, for {ranks} ranks on {cores} cores", good)
    return Check("ok", name, text)


def _world() -> Check:
    world = os.environ.get("WORLD_SIZE")
    if world is None:
        return Check("ok", "WORLD_SIZE", "not set: one process; torchrun --nproc-per-node N script.py starts N ranks")
    lacking = [n for n in ("RANK", "MASTER_ADDR", "MASTER_PORT") if n not in os.environ]
    if lacking:
        return Check(
            "warn", "WORLD_SIZE", f"{world}, without {', '.join(lacking)}", "launch by torchrun, which sets them all"
        )
    return Check("ok", "WORLD_SIZE", f"{world}, this is rank {os.environ['RANK']}")


def _transformers() -> Check:
    version = _version("transformers")
    if version is None:
        return Check(
            "warn", "transformers", "not installed", "pip install transformers, for hf: models and the examples"
        )
    return Check("ok", "transformers", version)
