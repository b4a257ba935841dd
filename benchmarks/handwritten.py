"""Step time of autopar's own plan against parallelism written by hand, side by side in one run.

    python benchmarks/handwritten.py [--rounds 9] [--shapes wide,tall,vocab,deep]

Two gloo ranks with one thread each.  For each shape: DistributedDataParallel, FSDP2 (one group per block), and tensor
parallelism by DTensor (columns, rows, split vocabulary, parallel loss), each with AdamW, against `autopar.parallelize`.
A round times one step of each; the ratio of a round is the best of the three over autopar, and the table shows the
median.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
from gpt import GPT, SHAPES, Shape, loss_of, make
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import autopar

Step = Callable[[], float]


def _adamw(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)  # type: ignore[arg-type]


def _train(model: torch.nn.Module, batch: dict[str, Tensor], parallel_loss: bool = False) -> Step:
    sharded = [p for p in model.parameters() if isinstance(p, DTensor)]
    plain = [p for p in model.parameters() if not isinstance(p, DTensor)]
    optimizers = [_adamw(ps) for ps in (sharded, plain) if ps]  # fused AdamW refuses a mixture

    def step() -> float:
        logits = model(batch["ids"])
        if parallel_loss:
            with loss_parallel():
                loss = loss_of(logits, batch["labels"])
                loss.backward()
        else:
            loss = loss_of(logits, batch["labels"])
            loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return float(loss)

    return step


def _mine(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """This rank's rows, for the data-parallel baselines."""
    return {k: v.chunk(dist.get_world_size())[dist.get_rank()] for k, v in batch.items()}


def ddp(model: GPT, batch: dict[str, Tensor]) -> Step:
    return _train(DistributedDataParallel(model, gradient_as_bucket_view=True), _mine(batch))


def fsdp(model: GPT, batch: dict[str, Tensor]) -> Step:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return _train(fully_shard(model, mesh=mesh), _mine(batch))


def tensor_parallel(model: GPT, batch: dict[str, Tensor]) -> Step:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        columns = {n: ColwiseParallel() for n in ("q", "k", "v", "up")}
        parallelize_module(block, mesh, {**columns, "o": RowwiseParallel(), "down": RowwiseParallel()})  # type: ignore[arg-type]
    ends = {
        "tokens": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, mesh, ends)  # type: ignore[arg-type]
    return _train(model, batch, parallel_loss=True)


def ours(model: GPT, batch: dict[str, Tensor]) -> tuple[Step, autopar.ParallelModule]:
    cluster = autopar.ClusterSpec(nodes=1, devices_per_node=dist.get_world_size(), device="cpu")
    module = autopar.parallelize(
        model, cluster, example_inputs=batch, loss_fn=lambda logits, b: loss_of(logits, b["labels"])
    )
    engine = autopar.Engine(module, _adamw)
    return lambda: float(engine.step(batch)), module


def measure(shape: Shape, rounds: int) -> None:
    steps: dict[str, Step] = {}
    for name, build in (("DDP", ddp), ("FSDP2", fsdp), ("TP", tensor_parallel)):
        steps[name] = build(*make(shape))
    steps["autopar"], module = ours(*make(shape))
    times: dict[str, list[float]] = {n: [] for n in steps}
    losses: dict[str, list[float]] = {n: [] for n in steps}
    for k in range(rounds + 2):
        for name, step in steps.items():
            dist.barrier()
            start = time.perf_counter()
            loss = step()
            dist.barrier()
            if k >= 2:  # the first two warm up
                times[name].append(time.perf_counter() - start)
            losses[name].append(loss)
    ratios = [min(t[k] for n, t in times.items() if n != "autopar") / times["autopar"][k] for k in range(rounds)]
    if dist.get_rank() == 0:
        plan = module.plan
        cells = "  ".join(f"{n} {statistics.median(t):.3f}" for n, t in times.items())
        ratio, predicted = statistics.median(ratios), plan.predicted.step_time
        print(f"{shape.name:6s} {cells}   ratio {ratio:.2f}   predicted {predicted:.3f}")
        print(f"       first loss {losses['TP'][0]:.5f} (TP) {losses['autopar'][0]:.5f} (autopar)", flush=True)
        if os.environ.get("AUTOPAR_EXPLAIN"):
            print(plan.explain(), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--shapes", default=",".join(s.name for s in SHAPES))
    options = parser.parse_args()
    if "RANK" not in os.environ:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        raise SystemExit(subprocess.call([*launch, *sys.argv], env=environment))
    warnings.filterwarnings("ignore")
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        ratio = "ratio = best by hand / autopar, above 1 is faster than by hand"
        print(f"seconds per step, median of interleaved rounds; {ratio}")
    for shape in SHAPES:
        if shape.name in options.shapes.split(","):
            measure(shape, options.rounds)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
