"""Which models autopar runs: architectures of transformers and timm, planned, emitted and compared with eager PyTorch.

    python benchmarks/coverage [NAME ...] [--results FILE] [--jobs 1] [--again]

Each model is tried in a process of its own, with limits of time and memory.  Results are kept in FILE, and models that
have one are not tried again, unless they are named or ``--again`` is given.  ``--table`` only prints.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any


def show(results: dict[str, dict[str, Any]]) -> None:
    from catalogue import CATALOGUE
    from rich.console import Console
    from rich.table import Table

    table = Table("model", "kind", "outcome", "reason", "s")
    colours = {"equal": "green", "refused": "yellow", "wrong": "bold red", "error": "red"}
    for name, entry in CATALOGUE.items():
        if name in results:
            r = results[name]
            colour = colours.get(r["status"], "dim")
            causes = "; ".join(r.get("causes") or [r["reason"]])
            where = f" ({r['where']})" if "where" in r else ""
            table.add_row(
                name, entry.kind, f"[{colour}]{r['status']}", causes.replace("[", r"\[") + where, str(r["total"])
            )
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(table)
    status = Counter(r["status"] for r in results.values())
    exported = [r for r in results.values() if r.get("exported")]
    equal = sum(r["status"] == "equal" for r in exported)
    console.print(
        f"{len(results)} models: {len(exported)} exported by torch, of these {equal} equal "
        f"({100 * equal / max(1, len(exported)):.0f} %); " + ", ".join(f"{n} {s}" for s, n in sorted(status.items()))
    )
    causes = Counter(c for r in results.values() if r["status"] == "refused" for c in r["causes"])
    for text, count in causes.most_common():
        console.print(f"  {count:3d} refused: {text}", markup=False, highlight=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--results", type=Path, default=Path("build/coverage.json"))
    parser.add_argument("--again", action="store_true", help="try every model anew")
    parser.add_argument("--table", action="store_true", help="only print the results so far")
    options = parser.parse_args()
    from catalogue import CATALOGUE

    results = json.loads(options.results.read_text()) if options.results.exists() else {}
    if not options.table:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        from process import Attempts

        attempts = Attempts()
        options.results.parent.mkdir(parents=True, exist_ok=True)
        for name in options.names or [n for n in CATALOGUE if options.again or n not in results]:
            results[name] = attempts(name)
            print(
                f"{name}: {results[name]['status']} {results[name]['reason'][:110]} ({results[name]['total']} s)",
                flush=True,
            )
            partial = options.results.with_suffix(".part")
            partial.write_text(json.dumps(results, indent=1, sort_keys=True))
            partial.replace(options.results)
    show(results)


if __name__ == "__main__":
    main()
