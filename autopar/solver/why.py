"""Why a plan's mode: what the commonest other one would cost."""

from __future__ import annotations

import time
from collections.abc import Callable

from autopar.errors import PlanError
from autopar.layout import Mesh
from autopar.modes import MIXED, REPLICATED, SEQUENCE_SPLIT, TENSOR_1D, groups
from autopar.plan import Plan
from autopar.rules.meaning import Meanings
from autopar.solver import milp
from autopar.solver.decisions import read
from autopar.solver.forms import Form, forms
from autopar.solver.model import formulate
from autopar.solver.space import Space
from autopar.solver.stage import Task, candidate

_FELT = 0.005  # of the step: less is not worth a word


def why(task: Task, plan: Plan, build: Callable[[Form], Space], known: Meanings) -> str | None:
    """``why tensor 2D (gathered)?  tensor 1D over all 8 ranks takes 1.9 times as long, 412 against 217 ms, ...``.

    A plan with 1D is compared with weights whole on every rank, any other with 1D or another split of the sequence,
    over one axis of all ranks: the rounded relaxation of that one program, which takes little beside the search.  None
    where nothing else is possible, or there is no mode to speak of.
    """
    found = [of for _, of in groups(plan, task.bound, known)]
    said = list(dict.fromkeys(", ".join(of) for of in found if of[0] not in (REPLICATED, MIXED)))
    main = {of[0] for of in found}
    order = [("none", ""), ("1d", "")] if TENSOR_1D in main else [("1d", ""), ("none", "")]
    if SEQUENCE_SPLIT in main:
        order = [("1d", ""), ("none", "ulysses"), ("none", "ring"), ("none", "none")]
    for mode, sequence in order if said else ():
        other = _relaxed(task, mode, sequence, build)
        if other is not None and not _same(found, other, task, known):
            return _sentence(task, plan, " and ".join(said), other, known)
    return None


def _same(found: list[tuple[str, ...]], other: Plan, task: Task, known: Meanings) -> bool:
    """Whether a plan on one axis is no other than one with these names of its axes."""
    return len(found) == 1 and found == [of for _, of in groups(other, task.bound, known)]


def _relaxed(task: Task, mode: str, sequence: str, build: Callable[[Form], Space]) -> Plan | None:
    if time.perf_counter() > task.deadline:
        return None
    mesh = Mesh(("all",), (task.cluster.world_size,))
    (form,) = forms((mode,), (sequence,) if sequence else (), (mesh,), task.cluster)
    try:
        space = build(form)
    except PlanError:
        return None
    problem, columns = formulate(space, zero=task.zero)
    found = milp.solve(problem, time_limit=max(task.deadline - time.perf_counter(), 0.1), relaxed=True)
    if found.values is None:
        return None
    return candidate(task, space, mode, read(space, columns, found.values)).plan


def _sentence(task: Task, plan: Plan, said: str, other: Plan, known: Meanings) -> str:
    a, b = other.predicted, plan.predicted
    kinds = ", ".join(n for _, of in groups(other, task.bound, known) for n in of)
    ranks, over = task.cluster.world_size, a.peak_memory - task.limit
    fastest = "on this mesh nothing is faster; " if a.step_time < b.step_time and over <= 0 else ""
    text = f"why {said}?  {fastest}{kinds} over all {ranks} ranks"
    text += f" does not fit by {over / 2**30:.3g} GiB, and" if over > 0 else ""
    text += f" takes {a.step_time / b.step_time:.3g} times as long, {_against(a.step_time, b.step_time, 1e3)} ms"
    text += f": it sends {_against(a.comm_bytes, b.comm_bytes, 1 / 2**20)} MiB per rank"
    parts = [
        f"{key} {_against(a.breakdown.get(key, 0.0), b.breakdown.get(key, 0.0), 1e3)} ms"
        for key in ("activations", "weights", "inside ops")
        if max(a.breakdown.get(key, 0.0), b.breakdown.get(key, 0.0)) > _FELT * b.step_time
    ]
    return text + (f" ({', '.join(parts)})" if parts else "")


def _against(a: float, b: float, unit: float) -> str:
    small = 1e-3 * max(a, b)  # rounding
    return " against ".join("0" if x < small else _digits(x * unit) for x in (a, b))


def _digits(x: float) -> str:
    return f"{x:.0f}" if x >= 100 else f"{x:.3g}"
