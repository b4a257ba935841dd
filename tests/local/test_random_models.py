"""Random models by random plans: any composition of layers, any sizes, any legal decision equals one process.

python -m pytest -m slow tests/local/test_random_models.py       counts: 2,000 plans and more
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from equality import assert_equals_one_process, prepare, sample
from generator import Genome, Layer, build, generate, shrink

from autopar.errors import AutoparError

MESHES = ((2,), (3,), (4,), (2, 2), (3, 2), (2, 2, 2))
PLANS = 8  # of each model
EPS = 1e-3  # of AdamW: a gradient that is zero but for rounding, as before a batch norm, stays nearly so


def failure(genome: Genome, sizes: tuple[int, ...], seeds: list[int]) -> BaseException | None:
    """What goes wrong with the first of these plans that does."""
    prepared = prepare(build(genome), eps=EPS)
    for seed in seeds:
        try:
            assert_equals_one_process(prepared, sample(prepared.bound, sizes, seed), f"seed {seed}", eps=EPS)
        except Exception as error:
            return error
    return None


def fails(genome: Genome, sizes: tuple[int, ...], seeds: list[int]) -> bool:
    """Whether a plan of a smaller model fails too; one that is refused, as batch norm of a single row, does not."""
    try:
        return failure(genome, sizes, seeds) is not None
    except AutoparError:
        return False


def check(seed: int) -> int:
    """Plans of the model of ``seed`` that equal one process.  Fails with the smallest model that does not."""
    rng = random.Random(seed)
    genome = generate(rng)
    sizes = rng.choice(MESHES)
    seeds = [rng.randint(0, 10**6) for _ in range(PLANS)]
    error = failure(genome, sizes, seeds)
    if error is not None:
        least = shrink(genome, lambda g: fails(g, sizes, seeds))
        raise AssertionError(f"{least} on {sizes}, seeds {seeds}: {failure(least, sizes, seeds)}") from error
    return len(seeds)


@pytest.mark.parametrize("seed", range(4))
def test_a_random_model_by_random_plans(seed: int) -> None:
    assert check(seed)


@pytest.mark.slow
def test_two_thousand_random_plans(figure: Callable[[str], None]) -> None:
    plans = models = 0
    for seed in range(1000, 1260):
        plans += check(seed)
        models += 1
    figure(f"{plans} random plans of {models} random models, 0 wrong")
    assert plans >= 2000


def test_a_failure_is_shrunk_to_its_cause() -> None:
    """What a report is worth: of all that a model has only what is needed for the failure is left."""
    genome = Genome(5, 7, 10, (Layer("norm"), Layer("linear", 3, True, True), Layer("attention", 2)), tied=True)
    least = shrink(genome, lambda g: any(layer.kind == "linear" and layer.flag for layer in g.layers))
    assert least == Genome(1, 1, 1, (Layer("linear", 1, True),), tokens=False)
