"""A process for each model, with limits of time and memory."""

from __future__ import annotations

import multiprocessing
import resource
import time
from multiprocessing.connection import Connection
from typing import Any

SECONDS, BYTES = 600, 10 << 30


def work(name: str, pipe: Connection) -> None:
    """Check the model ``name`` and send the result."""
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    from catalogue import CATALOGUE
    from check import check

    pipe.send(check(CATALOGUE[name].make))


class Attempts:
    """Checks models by name, each in a process that starts with torch and transformers imported."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["transformers.models.auto.modeling_auto", "autopar.api"])

    def __call__(self, name: str) -> dict[str, Any]:
        receiver, sender = self._context.Pipe(duplex=False)
        process = self._context.Process(target=work, args=(name, sender))
        start = time.perf_counter()
        process.start()
        sender.close()
        try:
            result = receiver.recv() if receiver.poll(SECONDS) else {"status": "error", "reason": f"over {SECONDS} s"}
        except EOFError:
            result = {"status": "error", "reason": "the process ended (memory?)"}
        process.kill()
        process.join()
        return result | {"total": round(time.perf_counter() - start, 1)}
