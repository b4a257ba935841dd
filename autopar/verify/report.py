"""What a verification found, as data and as text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autopar.errors import RuntimeMismatch


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is not as it must be.

    check: types, spmd_types, collectives or step.  where: module path and source line.  Expected and got are text.
    """

    check: str
    what: str
    where: str = ""
    expected: str = ""
    got: str = ""

    def __str__(self) -> str:
        parts = (("where", self.where), ("expected", self.expected), ("got", self.got))
        return "\n".join(
            [f"{self.check}: {self.what}", *(f"  {label + ':':<9} {text}" for label, text in parts if text)]
        )


@dataclass(frozen=True, slots=True)
class Report:
    """counts: what was looked at, by name.  untyped: ops that spmd_types cannot type, with how often they occur; they
    run inside its local_map with the plan's layouts.  left_out: checks that were not made, with the reason."""

    subject: str
    findings: tuple[Finding, ...] = ()
    counts: Mapping[str, float] = field(default_factory=dict)
    untyped: Mapping[str, int] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return not self.findings

    def raise_if_failed(self) -> None:
        """Raise RuntimeMismatch with the first finding, where there is one."""
        if self.findings:
            first = self.findings[0]
            raise RuntimeMismatch(
                f"{self.subject} does not do what it was planned to do: {first.what}",
                where=first.where,
                expected=first.expected,
                got=first.got,
                hint=f"{len(self.findings)} findings in all; print(report) shows them",
            )

    def __str__(self) -> str:
        head = "verified" if self.ok else f"{len(self.findings)} finding{'s' * (len(self.findings) > 1)}"
        lines = [f"{self.subject}: {head}"]
        lines += [f"  {name:<34} {amount:>16,.10g}" for name, amount in self.counts.items()]
        if self.untyped:
            lines.append("  run inside spmd_types' local_map, for it cannot type them:")
            lines += [f"    {name:<32} {times:>16,}" for name, times in sorted(self.untyped.items())]
        lines += [f"  left out: {check}: {why}" for check, why in self.left_out.items()]
        return "\n".join([*lines, *map(str, self.findings)])
