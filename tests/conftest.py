"""What every test shares; the helpers beside this file become importable.

Every plan that a test lets the solver find is priced twice: by the integer program, and from its decisions.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from autopar.solver import milp, stage
from autopar.solver.model import Columns
from autopar.solver.space import Space

os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)

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
