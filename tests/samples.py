"""Calls that rules are proven on: written ones and those of torch's own OpInfo, by op of the table."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence

import torch
from calls import Call, captured
from torch import Tensor
from torch.utils import _pytree as pytree
from written import Sample, all_written

from autopar.errors import AutoparError
from autopar.rules.registry import _COMPUTED, _DEFINITIONS

DTYPES = (torch.float64, torch.complex128, torch.int64, torch.bool)
LARGEST = 3000  # elements of one tensor


def opinfo(names: Sequence[str] = (), limit: int = 10) -> Iterator[tuple[str, Sample]]:
    """(name, sample) of torch's OpInfo for each type of `DTYPES`: the first ``limit`` of each, small ones."""
    from torch.testing._internal.common_methods_invocations import op_db

    for op in op_db if limit else ():
        if names and op.name not in names:
            continue
        for dtype in DTYPES:
            if dtype not in op.dtypes:
                continue
            torch.manual_seed(0)
            samples = op.sample_inputs("cpu", dtype)
            for _ in range(limit):
                try:
                    sample = next(samples)
                except StopIteration:
                    break
                except Exception:  # torch's own sample needs what this machine lacks
                    break
                given = Sample(op.op, (sample.input, *sample.args), sample.kwargs)
                if all(x.numel() <= LARGEST for x in pytree.tree_leaves(given[1:]) if isinstance(x, Tensor)):
                    yield op.name, given


def table() -> list[str]:
    """Every op with a rule of its own; that of pointwise ops is for all with torch's tag; libraries may be absent."""
    rules = {*_DEFINITIONS, *_COMPUTED} - {"pointwise"}
    return sorted(r for r in rules if r.startswith(("aten.", "autopar.")))


@functools.cache
def written_calls() -> dict[str, list[Call]]:
    found: dict[str, dict[str, Call]] = {}
    for sample in all_written():
        with contextlib.suppress(AutoparError):  # of an op without a rule: nothing to prove
            for call in captured(*sample).calls:
                found.setdefault(call.name, {})[call.key] = call
    return {op: list(calls.values()) for op, calls in found.items()}


def calls_of(op: str, limit: int = 3) -> list[Call]:
    """Calls of an op of the table: the written ones and ``limit`` of each type of OpInfo's of that name.

    Without written ones there is one of OpInfo's at least, if there is any that can be captured.
    """
    calls = list(written_calls().get(op, ()))
    for _, sample in opinfo(_names(op.split(".")[1].strip("_")), limit if calls else max(limit, 1)):
        with contextlib.suppress(Exception):  # what cannot be captured is reported where all of OpInfo is run
            calls += [c for c in captured(*sample).calls if c.name == op]
    return calls


@functools.cache
def _names(stem: str) -> tuple[str, ...]:
    """OpInfo's names of an ATen op."""
    from torch.testing._internal.common_methods_invocations import op_db

    found = {op.name for op in op_db if stem in (op.name.split(".")[-1], op.aten_name, *(a.name for a in op.aliases))}
    return tuple(sorted(found)) or ("none",)
