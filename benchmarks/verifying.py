"""What `autopar.verify_plan` costs without running a step: seconds, its own capture included, and peak memory.

    python benchmarks/verifying.py

The model has the shape of Llama-3.1-405B, on meta tensors; the ranks are fake.  Planning is not counted.
"""

from __future__ import annotations

import resource
import time
from typing import Any

import torch

import autopar

BATCH, LENGTH, TARGET = 64, 1024, 60


def llama(layers: int = 126) -> Any:
    """Llama-3.1-405B of transformers, without weights."""
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=16384,
        intermediate_size=53248,
        num_hidden_layers=layers,
        num_attention_heads=128,
        num_key_value_heads=8,
        vocab_size=128256,
        rope_theta=500000.0,
        use_cache=False,
    )
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(config).train()


def main() -> None:
    model = llama()
    with torch.device("meta"):
        batch = {name: torch.zeros(BATCH, LENGTH, dtype=torch.long) for name in ("input_ids", "labels")}
    search = autopar.Search(mesh={"dp": 64, "tp": 8})
    plan = autopar.plan(model, "64x8xH100", batch, search=search, memory_limit=1e15, time_limit=120)
    wall, cpu = time.perf_counter(), time.process_time()
    report = autopar.verify_plan(plan, model, batch)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(report)
    print(f"{wall:.0f} s (target {TARGET} s), {cpu:.0f} CPU seconds, {peak / 1e9:.2f} GB")
    report.raise_if_failed()


if __name__ == "__main__":
    main()
