"""Measured figures: kept in a file, used where they are, refused where they are another machine's."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import pytest
import torch
from models import MODELS

import autopar
from autopar.cost_model.profiler import Profile, empty_profile, op_seconds, overlap_of
from autopar.errors import PlanError
from autopar.solver.search import Search

CLUSTER = autopar.ClusterSpec("2xcpu")
SEARCH = Search(mesh={"d": 2})


@pytest.fixture(scope="module")
def measured() -> Profile:
    case = MODELS["gpt2"]()
    return autopar.profile(case.model, CLUSTER, case.batch, loss_fn=case.loss_fn, search=SEARCH)


def test_every_op_is_measured_at_its_local_shapes(measured: Profile) -> None:
    assert measured.device == "cpu" and measured.torch == torch.__version__.partition("+")[0]
    batches = {key.partition("[")[2].partition(",")[0] for key in measured.ops if "layer_norm" in key}
    assert len(batches) > 1  # whole, and split
    assert all(forward > 0 and backward >= 0 for forward, backward in measured.ops.values())
    linear = next(seconds for key, seconds in measured.ops.items() if "linear" in key or "addmm" in key)
    assert linear[1] > 0


def test_figures_go_before_the_roofline(measured: Profile) -> None:
    case = MODELS["gpt2"]()
    slower = msgspec.structs.replace(measured, ops=dict.fromkeys(measured.ops, (10.0, 20.0)))
    plans = [
        autopar.plan(case.model, CLUSTER, case.batch, loss_fn=case.loss_fn, search=SEARCH, profile=p)
        for p in (None, measured, slower)
    ]
    catalogue, ours, slow = (p.predicted for p in plans)
    assert ours.compute_time != catalogue.compute_time
    assert slow.compute_time >= 30 * 10
    assert all(p.solver.status == "optimal" for p in plans)


def test_a_file_keeps_it(measured: Profile, tmp_path: Path) -> None:
    collectives = {"all-reduce": {4: {2**16: 2e-3, 2**12: 1e-3}}}
    whole = msgspec.structs.replace(measured, collectives=collectives, overlap=0.25)
    whole.save(tmp_path / "p.json")
    again = Profile.load(tmp_path / "p.json")
    assert again == whole
    again.save(tmp_path / "q.json")
    assert (tmp_path / "p.json").read_bytes() == (tmp_path / "q.json").read_bytes()


def test_what_is_known_is_not_measured_again(measured: Profile) -> None:
    case = MODELS["gpt2"]()
    marked = msgspec.structs.replace(measured, ops=dict.fromkeys(measured.ops, (1.0, 1.0)))
    again = autopar.profile(case.model, CLUSTER, case.batch, loss_fn=case.loss_fn, search=SEARCH, known=marked)
    assert again == marked


def test_collectives_between_measured_sizes() -> None:
    profile = msgspec.structs.replace(empty_profile("cpu"), collectives={"all-reduce": {2: {1000: 1.0, 2000: 3.0}}})
    assert profile.collective("all-reduce", 10, 2) == 1.0
    assert profile.collective("all-reduce", 1500, 2) == 2.0
    assert profile.collective("all-reduce", 4000, 2) == 6.0
    assert profile.collective("all-reduce", 1500, 4) is None
    assert profile.collective("all-gather", 1500, 2) is None


@pytest.mark.parametrize("field, value", [("device", "H100"), ("torch", "1.0.0")])
def test_figures_of_another_machine_are_refused(field: str, value: str) -> None:
    case = MODELS["gpt2"]()
    other = msgspec.structs.replace(empty_profile("cpu"), **{field: value})
    with pytest.raises(PlanError, match=f"another {field}") as caught:
        autopar.plan(case.model, CLUSTER, case.batch, loss_fn=case.loss_fn, profile=other)
    assert value in str(caught.value)


def test_a_damaged_file_says_where(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="cannot be read"):
        Profile.load(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text('{"device": "cpu", "torch": "2", "ops": {"x": [1]}}')
    with pytest.raises(PlanError, match=r"no profile.*|\$\.ops"):
        Profile.load(tmp_path / "bad.json")


def test_backward_is_timed_where_there_is_one() -> None:
    x = torch.randn(64, 64, requires_grad=True)
    forward, backward = op_seconds(lambda a: a @ a, [x])
    assert forward > 0 and backward > 0
    assert op_seconds(lambda a: a > 0, [torch.randn(8)])[1] == 0.0


@pytest.mark.parametrize("hides", [True, False])
def test_overlap_is_what_hides(hides: bool) -> None:
    """A clock stands in for a collective: it runs on beside compute, or only when it is waited for."""

    def compute() -> None:
        time.sleep(0.02)

    def start() -> object:
        begun = time.perf_counter()

        def wait() -> None:
            time.sleep(max(0.0, 0.02 - (time.perf_counter() - begun)) if hides else 0.02)

        return wait

    found = overlap_of(compute, start, runs=3)  # type: ignore[arg-type]
    assert found > 0.7 if hides else found < 0.3
