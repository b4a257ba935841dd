"""Every error that a user can meet, in four parts: what is wrong, where, expected against got, and what to do."""

from __future__ import annotations


class AutoparError(Exception):
    """Base of all errors that autopar raises for a user's mistake or an unmet need.

    ``str(error)`` shows one labelled line per part, and only the parts that were given::

        the batch has another structure than the example inputs
          where:    Engine.step
          expected: a dict with keys input_ids, labels
          got:      a tuple of 2
          do:       pass the batch as the model's keyword arguments

    ``expected`` and ``got`` may be any values; they are shown by ``str``.
    """

    def __init__(
        self, what: str, *, where: object = "", expected: object = "", got: object = "", hint: str = ""
    ) -> None:
        super().__init__(what)
        self.what = what
        self.where = str(where)
        self.expected = str(expected)
        self.got = str(got)
        self.hint = hint

    def __str__(self) -> str:
        parts = (("where", self.where), ("expected", self.expected), ("got", self.got), ("do", self.hint))
        return "\n".join([self.what, *(f"  {label + ':':<9} {text}" for label, text in parts if text)])


class CaptureError(AutoparError):
    """The model cannot be captured as a graph that means the same."""


class RuleError(AutoparError):
    """An op has no rule, or a rule contradicts itself."""


class PlanError(AutoparError):
    """A plan, a cluster or a search option is malformed, or is for something else than it is used on."""


class InfeasiblePlan(PlanError):
    """No plan satisfies the limits.

    ``short_bytes``: bytes per rank by which the smallest plan exceeds the memory limit; 0 when memory is not the cause.
    ``would_fit``: what would make it fit, in words, such as "precision='bf16'" or "16 devices".
    """

    def __init__(
        self,
        what: str,
        *,
        short_bytes: int = 0,
        would_fit: str = "",
        where: object = "",
        expected: object = "",
        got: object = "",
        hint: str = "",
    ) -> None:
        super().__init__(what, where=where, expected=expected, got=got, hint=hint)
        self.short_bytes = short_bytes
        self.would_fit = would_fit

    def __str__(self) -> str:
        lines = [super().__str__()]
        if self.short_bytes:
            lines.append(f"  short by: {self.short_bytes} bytes per rank")
        if self.would_fit:
            lines.append(f"  fits:     {self.would_fit}")
        return "\n".join(lines)


class EmitError(AutoparError):
    """A pass cannot write the plan into the graph, or an emitted graph failed its check."""


class RuntimeMismatch(AutoparError):
    """What runs is not what was planned: world size, ranks with other plans, inputs, weights."""
