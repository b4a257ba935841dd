"""``module.code`` is a file that runs alone under torchrun and gives the same losses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import models
import pytest
import torch
from equality import forced

import autopar
from autopar.plan import Plan
from autopar.program import target_name
from autopar.rules.analysis import Bound
from autopar.testing import run_local


@pytest.mark.parametrize(
    ("make", "sizes"), [(models.gpt2, {"x": 2}), (models.llama, {"x": 2, "y": 2}), (models.resnet, {"x": 3})]
)
def test_code_runs_alone(make: object, sizes: dict[str, int], tmp_path: Path) -> None:
    case: models.Case = make()  # type: ignore[operator]
    world = 1
    for n in sizes.values():
        world *= n
    cluster = autopar.ClusterSpec(nodes=1, devices_per_node=world, device="cpu")
    search = autopar.Search(mesh=sizes)
    plan = autopar.random_plan(case.model, cluster, case.batch, 7, loss_fn=case.loss_fn, search=search)
    bound = autopar.api.understand(case.model, case.batch, case.loss_fn)
    run_alone(case, bound, plan, tmp_path)


def test_code_of_streamed_products_runs_alone(tmp_path: Path) -> None:
    case = models.mlp()
    bound = autopar.api.understand(case.model, case.batch, case.loss_fn)
    linears = [op.name for op in bound.operations if target_name(op.node) == "aten.linear.default"]
    plan = forced(bound, (2, 2), dict.fromkeys(linears, ("stream b0 with k", "stream n with k")))
    code = run_alone(case, bound, plan, tmp_path)
    assert code.count("= linear_stream(") >= 2


def run_alone(case: models.Case, bound: Bound, plan: Plan, tmp_path: Path) -> str:
    """The plan's code, once it has given the losses of the module that printed it."""

    def rank_main(rank: int) -> tuple[str, dict[str, torch.Tensor], list[float]]:
        module = autopar.api.build(case.model, bound, plan)
        code, state = module.code, module.full_state_dict(persistent_only=False)
        engine = autopar.Engine(module, lambda ps: torch.optim.AdamW(ps, lr=1e-3))
        return code, state, [float(engine.step(case.batch)) for _ in range(3)]

    code, state, losses = run_local(rank_main, plan.world_size)[0]
    (tmp_path / "program.py").write_text(code)
    torch.save(state, tmp_path / "weights.pt")
    torch.save(case.batch, tmp_path / "batch.pt")
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(plan.world_size)]
    options = ["--weights", str(tmp_path / "weights.pt"), "--batch", str(tmp_path / "batch.pt"), "--steps", "3"]
    done = subprocess.run(
        [sys.executable, *launch, str(tmp_path / "program.py"), *options],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    printed = [float(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("loss ")]
    torch.testing.assert_close(torch.tensor(printed), torch.tensor(losses), rtol=1e-9, atol=1e-12)
    return code
