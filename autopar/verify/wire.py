"""Bytes that ranks really send in a step, counted where torch's collectives are called."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor

from autopar.runtime import collectives
from autopar.runtime.module import ParallelModule
from autopar.runtime.parameters import Gradients

REGATHERED = "regathered"  # gathers of weights that the backward pass repeats


@contextlib.contextmanager
def counted() -> Iterator[Callable[[ParallelModule], Counter[str]]]:
    """Inside, collectives of all threads are counted; what it yields gives a module's bytes by axis.

    Bytes are those that a ring sends, padding of unequal shards included.
    """
    calls: dict[int, list[tuple[Any, float, bool]]] = {}
    lock = threading.Lock()
    again = threading.local()

    def add(group: Any, nbytes: float) -> None:
        with lock:
            calls.setdefault(dist.get_rank(), []).append((group, nbytes, getattr(again, "on", False)))

    def size(x: Tensor) -> int:
        return x.numel() * x.element_size()

    def all_reduce(x: Tensor, *args: Any, group: Any = None, **kwargs: Any) -> Any:
        n = dist.get_world_size(group)
        add(group, 2 * (n - 1) / n * size(x))
        return real["all_reduce"](x, *args, group=group, **kwargs)

    def all_to_all(out: Tensor, x: Tensor, *args: Any, group: Any = None, **kwargs: Any) -> Any:
        n, me = dist.get_world_size(group), dist.get_rank(group)
        own = args[1][me] if len(args) > 1 and args[1] else x.numel() // n
        add(group, (x.numel() - own) * x.element_size())
        return real["all_to_all_single"](out, x, *args, group=group, **kwargs)

    def broadcast(x: Tensor, *args: Any, group: Any = None, group_src: int = 0, **kwargs: Any) -> Any:
        if dist.get_rank(group) == group_src:
            add(group, (dist.get_world_size(group) - 1) * size(x))
        return real["broadcast"](x, *args, group=group, group_src=group_src, **kwargs)

    def gather(out: Tensor, row: Tensor, *args: Any, group: Any = None, **kwargs: Any) -> Any:
        add(group, (dist.get_world_size(group) - 1) * size(row))
        return real["gather"](out, row, *args, group=group, **kwargs)

    def scatter(row: Tensor, rows: Tensor, *args: Any, group: Any = None, **kwargs: Any) -> Any:
        add(group, (dist.get_world_size(group) - 1) * size(row))
        return real["scatter"](row, rows, *args, group=group, **kwargs)

    def unpack(self: Gradients, kept: Any) -> Tensor:
        again.on = True
        try:
            return real_unpack(self, kept)
        finally:
            again.on = False

    def of(module: ParallelModule) -> Counter[str]:
        names = {id(a.group): a.name for a in module._axes.values()}
        out: Counter[str] = Counter()
        for group, nbytes, repeated in calls.get(dist.get_rank() if dist.is_initialized() else 0, ()):
            if id(group) in names:
                out[REGATHERED if repeated else names[id(group)]] += nbytes  # type: ignore[assignment]
        return out

    real = {name: getattr(dist, name) for name in ("all_reduce", "all_to_all_single", "broadcast")}
    real |= {"gather": collectives._all_gather, "scatter": collectives._reduce_scatter}
    real_unpack = Gradients.unpack
    with (
        mock.patch.object(dist, "all_reduce", all_reduce),
        mock.patch.object(dist, "all_to_all_single", all_to_all),
        mock.patch.object(dist, "broadcast", broadcast),
        mock.patch.object(collectives, "_all_gather", gather),
        mock.patch.object(collectives, "_reduce_scatter", scatter),
        mock.patch.object(Gradients, "unpack", unpack),
    ):
        yield of
