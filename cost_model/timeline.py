"""A step as an event simulation: what runs when on one rank, and so how long the step takes.

Tasks run on three streams, each in the order in which it is given its tasks:

| stream        | what runs on it                                            | how fast                              |
|---------------|------------------------------------------------------------|---------------------------------------|
| compute       | ops and the optimizer                                      | always at full speed                  |
| communication | collectives that the next op waits for                     | always at full speed                  |
| background    | collectives that nothing waits for yet: buckets of         | ``overlap`` while compute runs, not   |
|               | gradients, reduced while the backward pass goes on         | at all while communication runs, else |
|               |                                                            | at full speed                         |

``overlap`` is the device's: the part of compute behind which communication hides.  The background yields to other
communication, for both use the same links.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Stream = Literal["compute", "communication", "background"]
STREAMS: tuple[Stream, ...] = ("compute", "communication", "background")


@dataclass(frozen=True, slots=True)
class Task:
    """``seconds`` of work on a stream at full speed, begun when the tasks ``after`` (by position) have ended."""

    name: str
    stream: Stream
    seconds: float
    after: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Timeline:
    """When each task began and ended, in seconds from the start of the step."""

    tasks: tuple[Task, ...]
    begins: tuple[float, ...]
    ends: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """Of the whole step."""
        return max(self.ends, default=0.0)

    def busy(self, stream: Stream) -> float:
        """Seconds of work on a stream, at full speed."""
        return sum(t.seconds for t in self.tasks if t.stream == stream)

    @property
    def exposed(self) -> float:
        """Seconds in which nothing is computed."""
        return self.seconds - self.busy("compute")


def simulate(tasks: Sequence[Task], overlap: float) -> Timeline:
    """Run ``tasks``.

    Raises ValueError for an overlap that is not between 0 and 1, and for tasks that wait for one another for ever: on
    one stream those given first run first, so that a task may wait only for earlier ones of its own stream.
    """
    if not 0 <= overlap <= 1:
        raise ValueError(f"overlap is a part of compute, from 0 to 1: got {overlap}")
    queues = {s: [k for k, t in enumerate(tasks) if t.stream == s] for s in STREAMS}
    heads = dict.fromkeys(STREAMS, 0)  # position in the queue of what runs, or waits to
    left = [t.seconds for t in tasks]
    begins, ends = [0.0] * len(tasks), [-1.0] * len(tasks)
    now = 0.0
    active: dict[Stream, int] = {}
    while True:
        for stream in STREAMS:
            at = heads[stream]
            if stream not in active and at < len(queues[stream]):
                task = queues[stream][at]
                if all(ends[k] >= 0 for k in tasks[task].after):
                    active[stream] = task
                    begins[task] = now
        if not active:
            break
        speeds = {s: _speed(s, active, overlap) for s in active}
        step = min(left[k] / speeds[s] for s, k in active.items() if speeds[s] > 0)
        now += step
        for stream, task in list(active.items()):
            left[task] -= step * speeds[stream]
            if speeds[stream] > 0 and left[task] <= 1e-12 * tasks[task].seconds:
                ends[task] = now
                heads[stream] += 1
                del active[stream]
    if any(heads[s] < len(queues[s]) for s in STREAMS):
        stuck = next(tasks[queues[s][heads[s]]].name for s in STREAMS if heads[s] < len(queues[s]))
        raise ValueError(f"{stuck!r} waits for a task that waits for it")
    return Timeline(tuple(tasks), tuple(begins), tuple(ends))


def _speed(stream: Stream, active: dict[Stream, int], overlap: float) -> float:
    if stream != "background":
        return 1.0
    if "communication" in active:
        return 0.0
    return overlap if "compute" in active else 1.0
