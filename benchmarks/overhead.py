"""CPU time of the emitted module on one rank against eager PyTorch, in interleaved pairs.

    python benchmarks/overhead.py [--pairs 15]

Forward and backward of one batch, one thread; the table shows the median of emitted / eager.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from gpt import SHAPES, loss_of, make

import autopar


def cpu_seconds(step: Callable[[], object]) -> float:
    start = time.process_time()
    step()
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("CPU seconds of forward and backward: eager, emitted, and the median of the pairs' ratios")
    for shape in SHAPES:
        model, batch = make(shape)
        module = autopar.parallelize(
            model,
            autopar.ClusterSpec(nodes=1, devices_per_node=1, device="cpu"),
            example_inputs=batch,
            loss_fn=lambda logits, b: loss_of(logits, b["labels"]),
        )

        def eager(model: torch.nn.Module = model, batch: dict[str, torch.Tensor] = batch) -> None:
            model.zero_grad()
            loss_of(model(batch["ids"]), batch["labels"]).backward()

        def emitted(module: autopar.ParallelModule = module, batch: dict[str, torch.Tensor] = batch) -> None:
            module.zero_grad()
            module.forward_backward(batch)

        for _ in range(2):
            eager(), emitted()
        pairs = [(cpu_seconds(eager), cpu_seconds(emitted)) for _ in range(options.pairs)]
        ratio = statistics.median(b / a for a, b in pairs)
        a, b = (statistics.median(p[i] for p in pairs) for i in (0, 1))
        print(f"{shape.name:6s} eager {a:.3f}   emitted {b:.3f}   ratio {ratio:.3f}", flush=True)


if __name__ == "__main__":
    main()
