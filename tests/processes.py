"""Ranks as real processes over gloo, each of which ends by itself or is reported."""

from __future__ import annotations

import os
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one rank ended: its value, or the text of its error; neither where it had to be killed."""

    value: Any = None
    error: str = ""
    hung: bool = False


def run_processes(job: Callable[..., Any], world: int, *args: Any, timeout: float = 120.0) -> list[Outcome]:
    """``job(rank, *args)`` of every rank; ``job`` must be a function of a module.  Nobody is ended by us in time."""
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=_main, args=(r, world, folder, job, args), daemon=True) for r in range(world)]
        for rank in ranks:
            rank.start()
        deadline = time.monotonic() + timeout
        for rank in ranks:
            rank.join(max(0.0, deadline - time.monotonic()))
        hung = [rank.is_alive() for rank in ranks]
        for rank in ranks:
            if rank.is_alive():
                rank.kill()
                rank.join()
        return [_outcome(Path(folder), r, hung[r]) for r in range(world)]


def values(outcomes: list[Outcome]) -> list[Any]:
    """The values of all ranks.  Fails with the first error."""
    for rank, outcome in enumerate(outcomes):
        assert not outcome.hung, f"rank {rank} hangs"
        assert not outcome.error, f"rank {rank}: {outcome.error}"
    return [o.value for o in outcomes]


def _outcome(folder: Path, rank: int, hung: bool) -> Outcome:
    error, value = folder / f"{rank}.error", folder / f"{rank}.value"
    if hung:
        return Outcome(hung=True)
    if error.exists():
        return Outcome(error=error.read_text())
    return Outcome(torch.load(value, weights_only=False)) if value.exists() else Outcome(error="ended without a word")


def _main(rank: int, world: int, folder: str, job: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    try:
        store = f"file://{folder}/store"
        dist.init_process_group("gloo", store, timeout=timedelta(seconds=60), rank=rank, world_size=world)
        torch.save(job(rank, *args), Path(folder, f"{rank}.value"))
        dist.destroy_process_group()
    except BaseException:
        Path(folder, f"{rank}.error").write_text(traceback.format_exc())
        os._exit(1)  # as a crash: no orderly shutdown tells the others
