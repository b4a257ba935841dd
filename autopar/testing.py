"""Ranks as threads of one process: for tests of anything that runs on several ranks."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


def run_local(fn: Callable[[int], T], world_size: int, timeout: float = 300.0) -> list[T]:
    """``[fn(rank) for every rank]``, each rank a thread with a process group of its own kind.

    When one rank raises, the others end too, and its error is raised here.  Needs torch's testing package
    (``expecttest``).  Raises TimeoutError when ranks wait for each other longer than ``timeout`` seconds.
    """
    from torch.testing._internal.distributed import multi_threaded_pg as threaded

    c10d: Any = torch._C._distributed_c10d  # its stub lacks the next call
    results: list[T | None] = [None] * world_size
    errors: list[tuple[int, BaseException]] = []
    c10d._set_thread_isolation_mode(True)
    threaded._install_threaded_pg()
    group: Any = threaded.ProcessLocalGroup
    group.reduce = _reduce
    store = dist.HashStore()

    def rank_main(rank: int) -> None:
        try:
            dist.init_process_group("threaded", rank=rank, world_size=world_size, store=store)
            results[rank] = fn(rank)
        except BaseException as error:  # handed to the caller
            errors.append((rank, error))
            _end_others(threaded.ProcessLocalGroup, error)
        finally:
            if dist.is_initialized() and not errors:
                dist.destroy_process_group()

    threads = torch.get_num_threads()
    workers = [threading.Thread(target=rank_main, args=(r,), daemon=True, name=f"rank{r}") for r in range(world_size)]
    try:
        torch.set_num_threads(1)
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(timeout)
        alive = [w.name for w in workers if w.is_alive()]
    finally:
        torch.set_num_threads(threads)
        threaded.ProcessLocalGroup.reset()
        threaded._uninstall_threaded_pg()
        c10d._set_thread_isolation_mode(False)
    if errors:
        rank, error = min(errors, key=lambda e: _is_consequence(e[1]))
        error.add_note(f"raised on rank {rank} of {world_size}")
        raise error
    if alive:
        raise TimeoutError(f"{', '.join(alive)} did not end within {timeout:.0f} s")
    return results  # type: ignore[return-value]


class _Reduce:
    """A reduction among ranks as threads, of which torch has none: an all-reduce of copies but for the target's."""

    def __init__(self, opts: Any) -> None:
        from torch.testing._internal.distributed.multi_threaded_pg import AllReduce

        self.target, self.all_reduce = opts.rootRank, AllReduce(opts.reduceOp)

    def work(self, data: list[list[torch.Tensor]]) -> None:
        self.all_reduce.work([ts if r == self.target else [t.clone() for t in ts] for r, ts in enumerate(data)])


def _reduce(group: Any, tensors: list[torch.Tensor], opts: Any) -> Any:
    collective = group._start_coll(_Reduce(opts), group)
    work = collective.join(group.rank(), tensors)
    group._end_coll(collective, group)
    return work


def _end_others(group: Any, error: BaseException) -> None:
    """Wake the ranks that wait for this one; torch walks a dict that they may change meanwhile."""
    for _ in range(100):
        with contextlib.suppress(RuntimeError):
            group.exception_handle(error)
            return
        time.sleep(0.01)


def _is_consequence(error: BaseException) -> bool:
    """Whether a rank was only ended because another one raised."""
    return isinstance(error, SystemExit)
