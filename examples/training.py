"""What the examples share besides their data: command line, recipe, the one-process reference, the loop, the output."""

import argparse
import atexit
import json
import math
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn

import autopar
from text_data import Batch

RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))  # as torchrun sets them


def arguments(description: str, **defaults: object) -> argparse.Namespace:
    """One option per default; `--check` and `--plan` are the same for all examples."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"default {default}")
    parser.add_argument("--check", type=int, default=20, help="steps whose loss must equal one process's, default 20")
    parser.add_argument("--plan", help="run this plan file instead of solving")
    return parser.parse_args()


def say(text: str = "") -> None:
    if RANK == 0:
        print(text, flush=True)


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to train, for one process and for many alike."""

    steps: int
    lr: float
    weight_decay: float = 0.1
    beta2: float = 0.999
    warmup: int = 40
    max_grad_norm: float = 1.0

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, self.lr, betas=(0.9, self.beta2), weight_decay=self.weight_decay)

    def scheduler(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        """A linear warm-up, then a cosine down to a twentieth."""
        return torch.optim.lr_scheduler.LambdaLR(optimizer, self._factor)

    def _factor(self, step: int) -> float:
        cosine = (1 + math.cos(math.pi * min(step / self.steps, 1))) / 2
        return min(1, (step + 1) / self.warmup) * (0.05 + 0.95 * cosine)


def eager_losses(model: nn.Module, batches: Iterable[Batch], recipe: Recipe) -> list[float]:
    """The losses of ordinary training in this one process: what any plan must reproduce."""
    optimizer = recipe.optimizer(model.parameters())
    scheduler = recipe.scheduler(optimizer)
    losses = []
    for batch in batches:
        loss = model(**batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), recipe.max_grad_norm)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def parallel(model: nn.Module, example: Batch, plan_file: str | None, out: Path) -> autopar.ParallelModule:
    """The model on every rank that this program runs on. The plan and each rank's code go to a folder, for a reader."""
    if WORLD > 1:
        torch.distributed.init_process_group("gloo")
        # A process that ends with the group's threads still running is now and then aborted instead.
        atexit.register(torch.distributed.destroy_process_group)
    cluster = autopar.ClusterSpec.detect(device="cpu")
    plan = autopar.Plan.load(plan_file) if plan_file else None
    module = autopar.parallelize(model, cluster, example_inputs=example, plan=plan)
    say(module.plan.explain())
    out.mkdir(parents=True, exist_ok=True)
    (out / f"model_rank{RANK}.py").write_text(module.code)
    if RANK == 0:
        module.plan.save(out / "plan.json")
    return module


def fit(engine: autopar.Engine, batches: Iterable[Batch], recipe: Recipe, expected: list[float]) -> dict[str, float]:
    """Trains; stops at the first loss that differs from the expected one by more than float32 rounding explains."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    furthest, seconds = 0.0, []
    with Progress(*columns, disable=RANK != 0) as progress:
        task = progress.add_task("training", total=recipe.steps)
        for step, batch in enumerate(batches, start=1):
            start = time.perf_counter()
            loss = float(engine.step(batch))
            seconds.append(time.perf_counter() - start)
            if step <= len(expected):
                reference = expected[step - 1]
                furthest = max(furthest, abs(loss / reference - 1))
                if not furthest <= 1e-5:  # also true for NaN
                    raise SystemExit(f"step {step}: loss {loss:.7f}, but one process has {reference:.7f}")
            progress.update(task, advance=1, description=f"loss {loss:.3f}")
            if RANK == 0 and step % max(1, recipe.steps // 10) == 0:
                progress.console.print(f"step {step:5d}   loss {loss:.3f}   {1e3 * median(seconds):.0f} ms a step")
    say(f"The first {len(expected)} losses equal one process's: largest relative difference {furthest:.1e}.")
    return {"largest_difference": furthest, "step_seconds": median(seconds)}


def report(out: Path, **numbers: float) -> None:
    """The run's figures as a file, for a program."""
    if RANK == 0:
        (out / "results.json").write_text(json.dumps(numbers, indent=2) + "\n")
        say(f"The plan, the code of each rank and these figures are in {out}/.")
