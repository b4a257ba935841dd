"""Prove every rule on the written samples and on torch's OpInfo, break every rule, and print what came of it.

python tests/prove_rules.py [samples of each type of an OpInfo op, 3 by default]
"""

from __future__ import annotations

import logging
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from calls import Call, captured
from mutants import RIGHT_BUT_NOT_OFFERED, Verdict, telling_calls, verdicts
from proving import prove_call
from samples import opinfo, table
from written import all_written

from autopar.errors import AutoparError

MESHES = ((2,), (3,), (4,), (2, 2))
MUTATED = 24  # calls of an op on which its broken rules are tried


@dataclass(slots=True)
class Proofs:
    """calls: by op, by key.  proven: strategies.  refused: ops without a rule.  not_captured: samples, by cause."""

    samples: int = 0
    calls: dict[str, dict[str, Call]] = field(default_factory=dict)
    proven: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)
    not_captured: Counter[str] = field(default_factory=Counter)
    mutants: list[Verdict] = field(default_factory=list)

    def prove(self, name: str, call: Call) -> None:
        """Prove a call of the sample ``name``, unless one like it has been."""
        known = self.calls.setdefault(call.name, {})
        if call.key not in known:
            known[call.key] = call
            report = prove_call(call, MESHES)
            self.proven.update(report.checked)
            self.wrong += [f"{name}: {w}" for w in report.wrong]

    def unproven(self) -> list[str]:
        """Rules that no sample reached."""
        return [op for op in table() if not self.proven[op]]

    def unexplained(self) -> list[Verdict]:
        """Mutants that were not caught, for no known reason."""
        return [
            v
            for v in self.mutants
            if v.verdict in ("idle", "renamed")
            or (v.verdict == "survived" and (v.rule, v.mutant) not in RIGHT_BUT_NOT_OFFERED)
        ]

    def stale(self) -> list[str]:
        """Entries of what is right but not offered that no mutant answers to any more."""
        right = {(v.rule, v.mutant) for v in self.mutants if v.verdict == "survived"}
        return [f"{rule}: {mutant}" for rule, mutant in RIGHT_BUT_NOT_OFFERED if (rule, mutant) not in right]


def prove_all(limit: int) -> Proofs:
    """Everything: ``limit`` samples of each type of each op of OpInfo, and the written ones."""
    found = Proofs()
    for name, call in _calls(found, limit):
        found.prove(name, call)
    known: dict[tuple[str, str], Verdict] = {}
    for calls in found.calls.values():
        tried = list(calls.values())[:MUTATED]
        verdicts(tried, known)
        others = telling_calls(tried, known)
        for call in others:
            found.prove("equal sizes", call)
        verdicts(others, known)
    found.mutants = list(known.values())
    return found


def _calls(found: Proofs, limit: int) -> Iterator[tuple[str, Call]]:
    for name, sample in [*(("written", s) for s in all_written()), *opinfo(limit=limit)]:
        found.samples += 1
        try:
            made = captured(*sample)
        except Exception as error:
            if _is_ours(error):
                found.wrong.append(f"{name}: {error!r} in {traceback.extract_tb(error.__traceback__)[-1]}")
            else:
                found.not_captured[f"{type(error).__name__}: {str(error).partition(chr(10))[0][:60]}"] += 1
            continue
        found.refused.update(made.refused)
        if made.differs:
            found.wrong.append(f"{name}: {made.differs}")
        for call in made.calls:
            yield name, call


def _is_ours(error: Exception) -> bool:
    """Whether our code failed without a word of its own."""
    last = traceback.extract_tb(error.__traceback__)[-1].filename
    return not isinstance(error, AutoparError) and ("/autopar/" in last or "/passes/" in last)


def main() -> None:
    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)
    start = time.time()
    found = prove_all(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
    kinds = Counter(v.verdict for v in found.mutants)
    reasons = Counter(v.detail for v in found.mutants if v.verdict == "equivalent")
    rules = len(table())
    rows = [
        ("rules in the table", rules),
        ("of them reached by samples and proven", rules - len(found.unproven())),
        ("pointwise ops by torch's tag, proven", sum(op not in table() for op in found.proven)),
        ("samples", found.samples),
        ("calls of ops with a rule, each of its own shapes and types", sum(map(len, found.calls.values()))),
        ("strategies proven, values and gradients", sum(found.proven.values())),
        ("strategies wrong", len(found.wrong)),
        ("ops refused for want of a rule", len(found.refused)),
        ("samples that torch.export cannot capture or torch cannot differentiate", sum(found.not_captured.values())),
        ("broken rules", len(found.mutants)),
        ("caught", kinds["caught"]),
        ("equivalent, with the reason", kinds["equivalent"]),
        ("right but not offered", kinds["survived"]),
        ("neither caught nor explained", len(found.unexplained())),
    ]
    for what, n in rows:
        print(f"| {what} | {n:,} |")
    for title, lines in (
        ("wrong", found.wrong),
        ("not proven", found.unproven()),
        ("unexplained", [f"{v.rule}: {v.mutant} ({v.verdict}) {v.detail}" for v in found.unexplained()]),
        ("equivalent", [f"{n:4d} {why}" for why, n in reasons.most_common()]),
        ("no longer right but not offered", found.stale()),
        ("right but not offered", [f"{op}: {m}: {why}" for (op, m), why in RIGHT_BUT_NOT_OFFERED.items()]),
        ("refused", [f"{n:4d} {text}" for text, n in found.refused.most_common()]),
        ("not captured", [f"{n:4d} {text}" for text, n in found.not_captured.most_common()]),
    ):
        print(f"\n{title}: {len(lines)}")
        print("\n".join(f"    {line}" for line in lines))
    print(f"\n{time.time() - start:.0f} s")


if __name__ == "__main__":
    main()
