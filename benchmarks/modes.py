"""Step time of one transformer block in each mode, measured beside predicted, and whether both put them in one order.

    python benchmarks/modes.py [--rounds 9] [--hidden 512] [--sequence 256] [--batch 4]

Four gloo ranks with one thread each, on one machine.  Every mode is forced with `autopar.Search`, planned for this
machine, and trains the same block on the same batch; a round times one step of each.  The table gives the median of the
rounds, the plan's prediction, and what a rank sends in a step; the last line says how many pairs of modes the
prediction puts in the measured order (pairs that differ by less than 5 % in time are left out).
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import subprocess
import sys
import time
import warnings
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from gpt import Block, Shape
from torch import Tensor, nn

import autopar

RANKS = 4
CLOSE = 0.05  # modes nearer than this are not told apart


@dataclass(frozen=True, slots=True)
class Mode:
    name: str
    search: dict[str, Any]


MODES = (
    Mode("data parallel", {"mesh": {"x": 4}, "tensor_modes": "none", "sequence": "none"}),
    Mode("1D", {"mesh": {"x": 4}, "tensor_modes": "1d", "sequence": "none"}),
    Mode("1D x data parallel", {"mesh": {"x": 2, "y": 2}, "tensor_modes": "1d", "sequence": "none"}),
    Mode("2D gathered", {"mesh": {"x": 2, "y": 2}, "tensor_modes": "2d gathered"}),
    Mode("2D streamed", {"mesh": {"x": 2, "y": 2}, "tensor_modes": "2d streamed"}),
    Mode("Megatron", {"mesh": {"x": 4}, "sequence": "megatron"}),
    Mode("Ulysses", {"mesh": {"x": 4}, "tensor_modes": "none", "sequence": "ulysses"}),
    Mode("ring", {"mesh": {"x": 4}, "tensor_modes": "none", "sequence": "ring"}),
    Mode("ring x Ulysses", {"mesh": {"x": 2, "y": 2}, "tensor_modes": "none", "sequence": "ring+ulysses"}),
    Mode("the solver's own", {}),
)


def build(mode: Mode, shape: Shape) -> tuple[autopar.Engine, autopar.Plan, dict[str, Tensor]]:
    """The block, parallel in ``mode``, with its plan and the batch, which is the same on every rank."""
    torch.manual_seed(0)
    block: nn.Module = Block(shape)
    batch = {"x": torch.randn(shape.batch, shape.seq, shape.hidden)}
    cluster = autopar.ClusterSpec.detect()
    search = autopar.Search(**mode.search)
    module = autopar.parallelize(block, cluster, batch, loss_fn=lambda out, _: out.square().mean(), search=search)
    return autopar.Engine(module, lambda ps: torch.optim.AdamW(ps, lr=1e-4)), module.plan, batch


def measure(shape: Shape, rounds: int) -> None:
    built = {mode.name: build(mode, shape) for mode in MODES}
    times: dict[str, list[float]] = {name: [] for name in built}
    losses: dict[str, float] = {}
    for k in range(rounds + 2):
        for name, (engine, _, batch) in built.items():
            dist.barrier()
            start = time.perf_counter()
            loss = float(engine.step(batch))
            dist.barrier()
            losses.setdefault(name, loss)
            if k >= 2:  # the first two warm up
                times[name].append(time.perf_counter() - start)
    if dist.get_rank() == 0:
        report({n: statistics.median(t) for n, t in times.items()}, {n: p for n, (_, p, _) in built.items()}, losses)


def report(measured: dict[str, float], plans: dict[str, autopar.Plan], losses: dict[str, float]) -> None:
    predicted = {n: p.predicted.step_time for n, p in plans.items()}
    ranks = {
        kind: {n: k + 1 for k, n in enumerate(sorted(of, key=lambda n: of[n]))}
        for kind, of in (("measured", measured), ("predicted", predicted))
    }
    heading = f"{'mode':20}{'measured':>10} {'predicted':>11} {'ratio':>7} {'order':>9}"
    print(f"{heading} {'sent MiB':>10} {'first loss':>12}")
    for name, seconds in sorted(measured.items(), key=lambda item: item[1]):
        order = f"{ranks['measured'][name]} / {ranks['predicted'][name]}"
        sent = plans[name].predicted.comm_bytes / 2**20
        print(
            f"{name:20}{seconds * 1e3:8.1f} ms {predicted[name] * 1e3:8.1f} ms {predicted[name] / seconds:7.2f}"
            f" {order:>9} {sent:10.2f} {losses[name]:12.6f}"
        )
    pairs = [
        (a, b)
        for a, b in itertools.combinations(measured, 2)
        if abs(measured[a] - measured[b]) > CLOSE * min(measured[a], measured[b])
    ]
    right = sum((measured[a] < measured[b]) == (predicted[a] < predicted[b]) for a, b in pairs)
    print(f"{right} of {len(pairs)} pairs that differ by more than {CLOSE:.0%} are in the measured order", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--batch", type=int, default=4)
    options = parser.parse_args()
    if "RANK" not in os.environ:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
        raise SystemExit(subprocess.call([*launch, *sys.argv], env=environment))
    warnings.filterwarnings("ignore")
    dist.init_process_group("gloo")
    h = options.hidden
    measure(Shape("block", 1, h, 8, 4 * h, 0, options.sequence, options.batch), options.rounds)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
