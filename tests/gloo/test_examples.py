"""The examples on real processes, and the demo as `make demo` runs it."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SMALL = ["--steps", "4", "--check", "4", "--batch", "8", "--layers", "1", "--hidden", "32", "--length", "16"]


def run(example: str, ranks: int, out: Path, options: list[str]) -> tuple[str, dict[str, float]]:
    """What the example prints, and its figures."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [*launch, str(ROOT / "examples" / example), *options, "--out", str(out)],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout, json.loads((out / "results.json").read_text())


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("example", ["train_gpt.py", "finetune_bert.py"])
def test_example_equals_one_process(example: str, ranks: int, tmp_path: Path) -> None:
    """The example itself compares each loss with one eager process; it leaves a plan and every rank's program."""
    printed, figures = run(example, ranks, tmp_path, SMALL)
    assert "Plan " in printed and "kinds" in printed
    assert figures["largest_difference"] <= 1e-5
    assert json.loads((tmp_path / "plan.json").read_text())["version"] == 1
    for rank in range(ranks):
        ast.parse((tmp_path / f"model_rank{rank}.py").read_text())


def test_an_op_of_ones_own_from_refusal_to_equal_gradients() -> None:
    program = ROOT / "examples" / "add_your_own_parallelism.py"
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    refused, _, planned = done.stdout.partition("With the rule")
    assert "no rule for mylib.rms_norm.default" in refused and "add_your_own_parallelism.py" in refused
    assert "split over tp as it is used\n    scale" in planned
    assert "every gradient equal one process's" in planned


def test_demo_learns_english(tmp_path: Path) -> None:
    """740 steps on 4 ranks: far below what counting pairs of characters reaches."""
    printed, figures = run("train_gpt.py", 4, tmp_path, [])
    assert figures["largest_difference"] <= 1e-5
    assert figures["nats_per_character"] <= 1.4 < 2.3 < figures["bigram_nats_per_character"]
    assert "  > The" in printed  # it wrote
