"""Bytes that ranks really send in a step, counted where torch's collectives are called."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor

from autopar.runtime import collectives
from autopar.runtime.module import ParallelModule
from autopar.runtime.parameters import Gradients

REGATHERED = "regathered"  # gathers of weights that the backward pass repeats


@dataclass(slots=True)
class _Counting:
    """Who counts now.  Torch's functions are replaced while anyone does: ranks may be threads that all count."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    calls: list[dict[int, list[tuple[Any, float, bool]]]] = field(default_factory=list)
    replaced: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    repeated: threading.local = field(default_factory=threading.local)

    def add(self, group: Any, nbytes: float) -> None:
        call = (group, nbytes, getattr(self.repeated, "now", False))
        with self.lock:
            for calls in self.calls:
                calls.setdefault(dist.get_rank(), []).append(call)


_counting = _Counting()


@contextlib.contextmanager
def counted() -> Iterator[Callable[[ParallelModule], Counter[str]]]:
    """Inside, collectives of all threads are counted; what it yields gives a module's bytes by axis so far.

    Bytes are those that a ring sends, padding of unequal shards included; to a broadcast its source's (n-1) times the
    value, to a reduction the value of all others.
    """
    calls: dict[int, list[tuple[Any, float, bool]]] = {}

    def of(module: ParallelModule) -> Counter[str]:
        names = {id(a.group): a.name for a in module.axes()}
        out: Counter[str] = Counter()
        for group, nbytes, repeated in calls.get(dist.get_rank() if dist.is_initialized() else 0, ()):
            if id(group) in names:
                out[REGATHERED if repeated else names[id(group)]] += nbytes  # type: ignore[assignment]
        return out

    with _counting.lock:
        if not _counting.calls:
            _replace(_counting.replaced)
        _counting.calls.append(calls)
    try:
        yield of
    finally:
        with _counting.lock:
            _counting.calls[:] = [c for c in _counting.calls if c is not calls]
            if not _counting.calls:
                _counting.replaced.close()


def _size(x: Tensor) -> int:
    return x.numel() * x.element_size()


def _replace(stack: contextlib.ExitStack) -> None:
    """Put in place of torch's functions, and of ours that call them by another name, ones that count."""
    add = _counting.add
    real = {name: getattr(dist, name) for name in ("all_reduce", "all_to_all_single", "broadcast", "reduce")}
    real |= {name: getattr(collectives, name) for name in ("_all_gather", "_reduce_scatter")}
    real_unpack = Gradients.unpack

    def all_reduce(x: Tensor, *args: Any, group: Any = None, **kwargs: Any) -> Any:
        n = dist.get_world_size(group)
        add(group, 2 * (n - 1) / n * _size(x))
        return real["all_reduce"](x, *args, group=group, **kwargs)

    def all_to_all(out: Tensor, x: Tensor, *args: Any, group: Any = None, **kwargs: Any) -> Any:
        n, me = dist.get_world_size(group), dist.get_rank(group)
        own = args[1][me] if len(args) > 1 and args[1] else x.numel() // n
        add(group, (x.numel() - own) * x.element_size())
        return real["all_to_all_single"](out, x, *args, group=group, **kwargs)

    def broadcast(x: Tensor, *args: Any, group: Any = None, group_src: int = 0, **kwargs: Any) -> Any:
        if dist.get_rank(group) == group_src:
            add(group, (dist.get_world_size(group) - 1) * _size(x))
        return real["broadcast"](x, *args, group=group, group_src=group_src, **kwargs)

    def reduce(x: Tensor, *args: Any, group: Any = None, group_dst: int = 0, **kwargs: Any) -> Any:
        if dist.get_rank(group) != group_dst:
            add(group, _size(x))
        return real["reduce"](x, *args, group=group, group_dst=group_dst, **kwargs)

    def all_gather(out: Tensor, row: Tensor, *args: Any, group: Any = None, **kwargs: Any) -> Any:
        add(group, (dist.get_world_size(group) - 1) * _size(row))
        return real["_all_gather"](out, row, *args, group=group, **kwargs)

    def reduce_scatter(row: Tensor, rows: Tensor, *args: Any, group: Any = None, **kwargs: Any) -> Any:
        add(group, (dist.get_world_size(group) - 1) * _size(row))
        return real["_reduce_scatter"](row, rows, *args, group=group, **kwargs)

    def unpack(self: Gradients, kept: Any) -> Tensor:
        _counting.repeated.now = True
        try:
            return real_unpack(self, kept)
        finally:
            _counting.repeated.now = False

    for owner, name, new in (
        (dist, "all_reduce", all_reduce),
        (dist, "all_to_all_single", all_to_all),
        (dist, "broadcast", broadcast),
        (dist, "reduce", reduce),
        (collectives, "_all_gather", all_gather),
        (collectives, "_reduce_scatter", reduce_scatter),
        (Gradients, "unpack", unpack),
    ):
        stack.enter_context(mock.patch.object(owner, name, new))
