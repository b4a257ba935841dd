"""No plan changes the mathematics: random plans, and the solver's, equal one process in every number."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from equality import Prepared, assert_equals_one_process, prepare, sample
from models import DROPOUT, MODELS

MESHES = [(2,), (4,), (2, 2), (3, 2), (2, 2, 2)]
SEEDS = 5  # plans per model and mesh: 9 x 5 x 5 = 225


@pytest.fixture(scope="module", params=MODELS)
def prepared(request: pytest.FixtureRequest) -> Iterator[Prepared]:
    """Each model once, captured in float64 throughout, with the run of one process."""
    yield prepare(MODELS[request.param](), exact=request.param not in DROPOUT)


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_random_plans_equal_one_process(prepared: Prepared, sizes: tuple[int, ...]) -> None:
    for seed in range(SEEDS):
        assert_equals_one_process(prepared, sample(prepared.bound, sizes, seed), f"seed {seed}")
