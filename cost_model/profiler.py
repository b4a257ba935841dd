"""Measures this machine: ops at their local shapes, collectives by kind, size and group, and what of them overlaps.

What was measured is kept in a file, with the kind of device and torch's version, for which alone it is true.  Where it
has no figure the catalogue and the roofline hold.  The file is JSON:

    {"device": "cpu", "torch": "2.13.0",
     "ops": {"aten.relu.default float32[64,8] -> float32[64,8]": [1.1e-05, 2.3e-05], ...},     forward, backward s
     "collectives": {"all-reduce": {"2": {"4096": 0.0002, ...}}},                              kind, ranks, bytes -> s
     "overlap": 0.4}                                                                           null: not measured
"""

from __future__ import annotations

import bisect
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from autopar.errors import PlanError


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """See the module's documentation."""

    device: str
    torch: str
    ops: dict[str, tuple[float, float]] = {}
    collectives: dict[str, dict[int, dict[int, float]]] = {}
    overlap: float | None = None

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Profile:
        """Raises PlanError when the file is missing or is no profile."""
        try:
            return msgspec.json.decode(Path(path).read_bytes(), type=cls)
        except OSError as error:
            raise PlanError("the profile cannot be read", where=path, got=error.strerror or error) from error
        except msgspec.MsgspecError as error:
            raise PlanError(
                "the file is no profile", where=path, got=error, hint="autopar profile writes one"
            ) from error

    def save(self, path: str | os.PathLike[str]) -> None:
        known = {kind: {n: dict(sorted(of[n].items())) for n in sorted(of)} for kind, of in self.collectives.items()}
        told = msgspec.structs.replace(
            self, ops=dict(sorted(self.ops.items())), collectives=dict(sorted(known.items()))
        )
        Path(path).write_bytes(msgspec.json.format(msgspec.json.encode(told), indent=1) + b"\n")

    def check(self, device: str) -> None:
        """Raise PlanError where the profile is of another kind of device or of another torch."""
        for what, ours, theirs in (("device", device, self.device), ("torch", _version(), self.torch)):
            if ours != theirs:
                raise PlanError(
                    f"the profile is of another {what}",
                    where="profile",
                    expected=ours,
                    got=theirs,
                    hint="profile again on a machine of the cluster",
                )

    def collective(self, kind: str, nbytes: float, n: int) -> float | None:
        """Seconds of a collective among ``n`` ranks, ``nbytes`` as in `collectives.sent_bytes`; None without figures.

        Between two measured sizes linear; below the smallest that one's; above the largest in proportion.
        """
        known = self.collectives.get(kind, {}).get(n)
        if not known:
            return None
        sizes = sorted(known)
        if nbytes <= sizes[0]:
            return known[sizes[0]]
        if nbytes >= sizes[-1]:
            return known[sizes[-1]] * nbytes / sizes[-1]
        at = bisect.bisect_left(sizes, nbytes)
        low, high = sizes[at - 1], sizes[at]
        return known[low] + (known[high] - known[low]) * (nbytes - low) / (high - low)


def empty_profile(device: str) -> Profile:
    return Profile(device, _version())


def _version() -> str:
    return torch.__version__.partition("+")[0]


Tensors = Sequence[tuple[Sequence[int], torch.dtype]]


def op_key(op: str, ins: Tensors, outs: Tensors) -> str:
    """An op's name, and the local shapes and types of its inputs and outputs; what else it is told costs nothing."""

    def shown(tensors: Tensors) -> list[str]:
        return [f"{str(dtype).removeprefix('torch.')}[{','.join(map(str, shape))}]" for shape, dtype in tensors]

    return " ".join([op, *shown(ins), "->", *shown(outs)])


# ------------------------------------------------------------------------------------------------ measuring


def seconds_of(run: Callable[[], object], *, budget: float = 0.05, least: int = 3) -> float:
    """Median seconds of ``run``, after one run that is not counted; at least ``least`` runs, then until ``budget``."""
    run()
    taken: list[float] = []
    begun = time.perf_counter()
    while len(taken) < least or (time.perf_counter() - begun < budget and len(taken) < 100):
        start = time.perf_counter()
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def op_seconds(call: Callable[..., Any], inputs: Sequence[Tensor]) -> tuple[float, float]:
    """(forward, backward) seconds of ``call(*inputs)``; backward is 0 where no output has a gradient."""
    outs = [o for o in pytree.tree_leaves(call(*inputs)) if isinstance(o, Tensor) and o.requires_grad]
    with torch.no_grad():
        forward = seconds_of(lambda: call(*inputs))
    if not outs:
        return forward, 0.0
    wanted = [x for x in inputs if x.requires_grad]
    grads = [torch.ones_like(o) for o in outs]
    backward = seconds_of(lambda: torch.autograd.grad(outs, wanted, grads, retain_graph=True, allow_unused=True))
    return forward, backward


def overlap_of(compute: Callable[[], object], start: Callable[[], Callable[[], object]], runs: int = 9) -> float:
    """Part of compute behind which communication hides: 0 where both one after the other take as long as together.

    start() begins a collective and returns what waits for it.  Both should take about as long.  ``runs`` is fixed, so
    that every rank runs as many collectives.
    """

    def together() -> None:
        wait = start()
        compute()
        wait()

    alone, sent, both = (seconds_of(f, budget=0.0, least=runs) for f in (compute, lambda: start()(), together))
    hideable = min(alone, sent)
    return min(1.0, max(0.0, (alone + sent - both) / hideable)) if hideable else 0.0
