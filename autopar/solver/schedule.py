"""The order in which a step runs, as tasks of a timeline: what the runtime does, one after the other.

    gather weights, forward (op after op), backward (in reverse), wait for gradients, optimizer

Conversions and uses of weights stand where the first op needs them, and hold it up.  Gradients that are reduced once a
step go in buckets, while the backward pass goes on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autopar.cost_model.timeline import Stream, Task
from autopar.solver.prices import BUCKET, OpPrice


@dataclass(slots=True)
class Schedule:
    """Seconds of communication by where it stands, in a step of ``microbatches``.

    gather, update: once a step.  forward, backward: by op, each microbatch.  reductions: (op whose backward pass makes
    the gradient, bytes, seconds), once a step.
    """

    microbatches: int
    gather: float = 0.0
    update: float = 0.0
    forward: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    backward: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    reductions: list[tuple[str, float, float]] = field(default_factory=list)

    def tasks(self, order: Sequence[str], costs: Mapping[str, OpPrice]) -> list[Task]:
        """Ops in their forward order, with their prices."""
        out: list[Task] = []

        def then(name: str, stream: Stream, seconds: float, wait: bool = False) -> None:
            """After the last task that anything waited for; with ``wait`` after those in the background too."""
            if seconds:
                awaited = [k for k, t in enumerate(out) if t.stream == "background"][-1:] if wait else []
                out.append(Task(name, stream, seconds, (*last, *awaited)))
                if stream != "background":
                    last[:] = [len(out) - 1]

        last: list[int] = []
        made: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for op, nbytes, seconds in self.reductions:
            made[op].append((nbytes, seconds))
        then("gather weights", "communication", self.gather)
        for microbatch in range(self.microbatches):
            bucket, waiting = 0.0, 0.0
            for op in order:
                then(op, "communication", self.forward[op] + costs[op].communication)
                then(op, "compute", costs[op].forward)
            for op in reversed(order):
                then(f"{op} back", "compute", costs[op].backward)
                then(f"{op} back", "communication", costs[op].communication_back + self.backward[op])
                for nbytes, seconds in made[op] if microbatch == self.microbatches - 1 else ():
                    bucket, waiting = bucket + nbytes, waiting + seconds
                    if bucket >= BUCKET:
                        then("gradients", "background", waiting)
                        bucket = waiting = 0.0
            then("gradients", "background", waiting)
        then("optimizer", "compute", self.update, wait=True)
        return out
