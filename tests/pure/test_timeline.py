"""Event simulation of a step."""

from __future__ import annotations

import pytest

from autopar.cost_model.timeline import Task, simulate

STEP = (  # two layers backward, each with a gradient to reduce, and the optimizer that waits for both
    Task("b", "compute", 4.0),
    Task("b grad", "background", 3.0, (0,)),
    Task("a", "compute", 4.0, (0,)),
    Task("a grad", "background", 3.0, (2,)),
    Task("optimizer", "compute", 1.0, (2, 3)),
)


@pytest.mark.parametrize(
    "overlap, seconds",
    [
        (0.0, 15.0),  # 8 + 6 + 1: all of it waits
        (0.5, 13.0),  # 2 of the first 3 hide behind a
        (0.75, 12.0),  # just 3 hide
        (1.0, 12.0),  # the last gradient never hides
    ],
)
def test_the_background_advances_by_its_share_of_compute(overlap: float, seconds: float) -> None:
    line = simulate(STEP, overlap)
    assert line.seconds == pytest.approx(seconds)
    assert line.busy("compute") == 9.0
    assert line.exposed == pytest.approx(seconds - 9.0)
    for k, task in enumerate(line.tasks):
        assert all(line.ends[j] <= line.begins[k] for j in task.after)


def test_communication_that_is_waited_for_goes_first() -> None:
    tasks = (
        Task("b", "compute", 1.0),
        Task("grad", "background", 2.0, (0,)),
        Task("gather", "communication", 5.0, (0,)),
        Task("a", "compute", 1.0, (2,)),
        Task("optimizer", "compute", 1.0, (1, 3)),
    )
    line = simulate(tasks, 1.0)
    assert line.ends[2] == 6.0  # not held up by the gradient before it
    assert line.ends[1] == pytest.approx(8.0)  # one second behind a, one alone
    assert line.seconds == pytest.approx(9.0)


def test_independent_streams_run_side_by_side() -> None:
    line = simulate((Task("x", "compute", 2.0), Task("y", "communication", 3.0)), 0.0)
    assert line.seconds == 3.0
    assert line.exposed == 1.0


def test_nothing_takes_no_time() -> None:
    assert simulate((), 0.5).seconds == 0.0
    assert simulate((Task("x", "compute", 0.0),), 0.5).seconds == 0.0


def test_what_cannot_run_is_refused() -> None:
    with pytest.raises(ValueError, match="'y' waits"):
        simulate((Task("y", "compute", 1.0, (1,)), Task("x", "compute", 1.0)), 0.0)
    with pytest.raises(ValueError, match="from 0 to 1"):
        simulate((), 1.5)
