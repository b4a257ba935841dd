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

COLOURS = {"equal": "green", "refused": "yellow", "unexportable": "dim", "wrong": "bold red", "error": "red"}


def show(results: dict[str, dict[str, Any]]) -> None:
    from catalogue import CATALOGUE
    from rich.console import Console
    from rich.table import Table

    tried = {name: results[name] for name in CATALOGUE if name in results}
    models = Table("model", "kind", "outcome", "by the solver on 2 x 2, or the reason", "s")
    for name, r in tried.items():
        causes = "; ".join(r.get("causes") or [r["reason"]]) or r.get("plan 2x2", "")
        where = f" ({r['where']})" if "where" in r else ""
        outcome = f"[{COLOURS[r['status']]}]{r['status']}"
        models.add_row(name, CATALOGUE[name].kind, outcome, (causes + where).replace("[", r"\["), str(r["total"]))
    kinds = Table("kind", *COLOURS)
    for kind in dict.fromkeys(CATALOGUE[name].kind for name in tried):
        count = Counter(r["status"] for name, r in tried.items() if CATALOGUE[name].kind == kind)
        kinds.add_row(kind, *(str(count[s] or "") for s in COLOURS))
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(models)
    console.print(kinds)
    causes_of = Counter(c for r in tried.values() if r["status"] == "refused" for c in r["causes"])
    for text, count in causes_of.most_common():
        console.print(f"{count:3d} refused: {text}", markup=False, highlight=False)
    exported = [r["status"] for r in tried.values() if r.get("exported")]
    status = Counter(r["status"] for r in tried.values())
    equal = exported.count("equal")
    console.print(
        f"{len(tried)} models, {len(exported)} exported by torch, of these {equal} equal to eager PyTorch "
        f"({100 * equal / max(1, len(exported)):.1f} %); "
        + ", ".join(f"{status[s]} {s}" for s in COLOURS if s != "equal")
    )


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
