"""The search under a tensor mode or a sequence split: over the ways to give its roles to the axes of meshes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec

from autopar.errors import InfeasiblePlan, PlanError
from autopar.plan import Plan
from autopar.solver.forms import Form
from autopar.solver.report import why_not
from autopar.solver.space import Space
from autopar.solver.stage import Task, settled, solve_stage

_NOTES = 3  # other forms that a plan speaks of


def search_forms(task: Task, forms: Sequence[Form], build: Callable[[Form], Space], started: float) -> Plan:
    """The fastest plan of any of ``forms``, in their order; of plans within the gap the first is kept.

    Raises InfeasiblePlan where no form is possible: the first refusal, or the least lack of memory.
    """
    best: Plan | None = None
    bounds: list[float] = []
    others: list[tuple[Form, Plan]] = []
    chosen = forms[0]
    refusal: PlanError | None = None
    proven = True
    for form in forms:
        if best is not None and time.perf_counter() > task.deadline:
            proven = False
            break
        limit = float("inf") if best is None else best.solver.objective * (1 - task.gap)
        try:
            plan = solve_stage(task, build(form), started, limit)
        except PlanError as error:
            refusal = _nearer(refusal, error)
            continue
        if isinstance(plan, float):
            bounds.append(plan)
            continue
        bounds.append(plan.solver.bound)
        proven &= plan.solver.status == "optimal"
        if best is None or plan.solver.objective < limit:
            others += [] if best is None else [(chosen, best)]
            best, chosen = plan, form
        else:
            others.append((form, plan))
    if best is None:
        raise refusal or InfeasiblePlan("no mesh has a plan", where=str(task.cluster))
    notes = [why_not(_spoken(form), plan, best, task.limit) for form, plan in others[-_NOTES:]]
    return settled(task, msgspec.structs.replace(best, notes=tuple(notes)), bounds, started, proven)


def _nearer(known: PlanError | None, error: PlanError) -> PlanError:
    """Of two refusals one for want of memory, the least; else the first."""
    short = getattr(error, "short_bytes", 0)
    before = 0 if known is None else getattr(known, "short_bytes", 0)
    return error if known is None or (short and (not before or short < before)) else known


def _spoken(form: Form) -> str:
    roles = ", ".join(f"{role} on {form.name(a)}" for a, role in enumerate(form.roles))
    return f"{form.title} with {roles}"
