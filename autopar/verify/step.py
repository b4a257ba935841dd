"""One step on every rank against the program as one process runs it, in float64.

    ranks, each with its part:   loss, outputs, new buffers, every gradient gathered under its original name
    one process, unsplit:        the program's graph, op by op, differentiated by autograd

Where they part, both run again and keep every value: the first node whose gathered value is another one is named, or,
where all values agree, the last node whose gradient is another one.
"""

from __future__ import annotations

from torch import Tensor

from autopar.verify.parting import parts_at
from autopar.verify.report import Finding
from autopar.verify.trial import FAILURES, Outcome, Trial, on_rank, run_unsplit, same
from autopar.verify.wire import counted


def check_step(
    trial: Trial, expected: Outcome | None = None, locate: bool = True
) -> tuple[list[Finding], list[Outcome], Outcome]:
    """(findings, what every rank did, what one process did).

    expected: the latter, where it is known.  locate: run again to name the node where they part.
    """
    expected = expected or run_unsplit(trial)
    try:
        with counted() as sent_by:
            outcomes = trial.on_ranks(lambda rank: on_rank(trial, rank, sent_by))
    except FAILURES as error:
        text = str(error).splitlines() or [""]
        return (
            [
                Finding(
                    "step",
                    "the step fails",
                    parts_at(trial) if locate else "",
                    "a step",
                    f"{type(error).__name__}: {text[0]}",
                )
            ],
            [],
            expected,
        )
    for rank, outcome in enumerate(outcomes):
        for name, wanted in expected.results.items():
            got = outcome.results.get(name)
            if got is None or not same(got, wanted):
                finding = Finding(
                    "step",
                    f"{name} is another one on rank {rank} than on one process",
                    parts_at(trial) if locate else "",
                    _numbers(wanted),
                    "nothing" if got is None else _difference(got, wanted),
                )
                return [finding], outcomes, expected
    return [], outcomes, expected


def _numbers(x: Tensor) -> str:
    return f"{list(x.shape)} {x.dtype}"


def _difference(got: Tensor, wanted: Tensor) -> str:
    if got.shape != wanted.shape:
        return _numbers(got)
    off, largest = (got.double() - wanted.double()).abs().max(), wanted.double().abs().max()
    return f"off by up to {float(off):.3g} of {float(largest):.3g}"
