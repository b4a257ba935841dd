"""What planning costs: CPU seconds and peak memory, capture included, for fixed meshes and for the search over meshes.

    python benchmarks/planning.py            every row, each in a process of its own
    python benchmarks/planning.py ROW        one row

The models are on meta tensors: nothing is allocated.  Targets stand beside the figures; the last column is how far the
plan is from its bound.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

# row -> (model, cluster, mesh or None for the search, target CPU seconds or None, target GB or None)
ROWS: dict[str, tuple[str, str, Mapping[str, int] | None, float | None, float | None]] = {
    "gpt2-8": ("gpt2", "8xH100", {"d": 8}, 8, None),
    "gpt2-8x8": ("gpt2", "8x8xH100", {"dp": 8, "tp": 8}, 8, None),
    "llama8b-8x8": ("llama8b", "8x8xH100", {"dp": 8, "tp": 8}, 15, 1.5),
    "llama8b-32x8": ("llama8b", "32x8xH100", {"dp": 32, "tp": 8}, 15, None),
    "gpt2-8-search": ("gpt2", "8xH100", None, None, None),
    "llama8b-8x8-search": ("llama8b", "8x8xH100", None, None, None),
    "llama8b-256-search": ("llama8b", "32x8xH100", None, 180, None),  # 90 s on two cores
}
BATCH, LENGTH = 16, 128


def model(name: str) -> Any:
    """GPT-2 (12 layers) or Llama-8B (32 layers) of transformers, on meta tensors."""
    import torch
    import transformers

    with torch.device("meta"):
        if name == "gpt2":
            made: Any = transformers.GPT2LMHeadModel(transformers.GPT2Config(use_cache=False))
        else:
            config = transformers.LlamaConfig(
                hidden_size=4096,
                intermediate_size=14336,
                num_hidden_layers=32,
                num_attention_heads=32,
                num_key_value_heads=8,
                vocab_size=128256,
                rope_theta=500000.0,
                use_cache=False,
            )
            made = transformers.LlamaForCausalLM(config)
    return made.train()


def measure(row: str) -> dict[str, Any]:
    """CPU seconds and peak bytes of planning one row in this process."""
    import torch

    import autopar

    name, cluster, mesh, _, _ = ROWS[row]
    built = model(name)
    with torch.device("meta"):
        ids, labels = (torch.zeros(BATCH, LENGTH, dtype=torch.long) for _ in range(2))
    cpu, wall = time.process_time(), time.perf_counter()
    plan = autopar.plan(
        built,
        autopar.ClusterSpec(cluster),
        {"input_ids": ids, "labels": labels},
        search=autopar.Search(mesh=mesh),
        time_limit=90,
    )
    return {
        "cpu": time.process_time() - cpu,
        "wall": time.perf_counter() - wall,
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "mesh": str(plan.device_mesh),
        "step": plan.predicted.step_time,
        "status": plan.solver.status,
        "gap": plan.solver.gap,
        "file": len(plan.to_json()),
    }


def main() -> None:
    if len(sys.argv) > 1:
        print(json.dumps(measure(sys.argv[1])))
        return
    head = ("row", "CPU s", "target", "wall s", "peak GB", "target", "mesh", "step ms", "status", "gap", "file kB")
    widths = (18, 6, 6, 6, 7, 6, 20, 7, 10, 6, 7)
    print("  ".join(h.ljust(w) for h, w in zip(head, widths, strict=True)))
    for row, (_, _, _, cpu, peak) in ROWS.items():
        run = subprocess.run([sys.executable, __file__, row], capture_output=True, text=True, check=False)
        if run.returncode:
            print(f"{row}: failed\n{run.stderr}")
            raise SystemExit(1)
        found = json.loads(run.stdout.splitlines()[-1])
        cells = (
            row,
            f"{found['cpu']:.1f}",
            "-" if cpu is None else f"{cpu:g}",
            f"{found['wall']:.1f}",
            f"{found['peak'] / 1e9:.2f}",
            "-" if peak is None else f"{peak:g}",
            found["mesh"],
            f"{found['step'] * 1e3:.1f}",
            found["status"],
            f"{found['gap']:.1%}",
            f"{found['file'] / 1e3:.0f}",
        )
        print("  ".join(c.ljust(w) for c, w in zip(cells, widths, strict=True)), flush=True)


if __name__ == "__main__":
    main()
