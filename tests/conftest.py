"""What every test shares; the helpers beside this file become importable.

Every plan that a test lets the solver find is priced twice: by the integer program, and from its decisions.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from autopar.solver import milp, stage
from autopar.solver.model import Columns
from autopar.solver.space import Space

os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)

_FIGURE = "figure"
_ROUNDING = 1e-4  # the solver's own tolerances, and what ties are broken with


@pytest.fixture(autouse=True, scope="session")
def the_cost_of_the_decisions_is_the_objective() -> Iterator[None]:
    """A plan may cost less than its objective, by the gap at which the solver may stop; never more."""
    solved = stage._solved

    def checked(task: stage.Task, space: Space, columns: Columns, outcome: milp.Outcome) -> stage.Candidate:
        found = solved(task, space, columns, outcome)
        assert outcome.values is not None
        decided = [c for of in columns.strategy.values() for c in of]
        decided += [
            c
            for kind in (columns.stored, columns.held, columns.accumulated)
            for of in kind.values()
            for c in of.values()
        ]
        values = outcome.values[decided]
        if np.allclose(values, values.round(), atol=1e-6):
            objective = outcome.objective / columns.second
            if outcome.status == "optimal":
                assert objective * (1 - task.gap - _ROUNDING) <= found.objective
            assert found.objective <= objective * (1 + _ROUNDING), (found.objective, objective)
        return found

    patch = pytest.MonkeyPatch()
    patch.setattr(stage, "_solved", checked)
    yield
    patch.undo()


@pytest.fixture
def figure(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Takes what a test counted, for the summary at the end of the run."""
    return lambda text: record_property(_FIGURE, text)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """What was counted, by test; also where tests run in several processes."""
    passed = terminalreporter.stats.get("passed", [])
    counted = [
        (r.nodeid.rpartition("/")[2], text) for r in passed for name, text in r.user_properties if name == _FIGURE
    ]
    if counted:
        terminalreporter.section("counted")
        for test, text in sorted(counted):
            terminalreporter.write_line(f"{test}: {text}")
