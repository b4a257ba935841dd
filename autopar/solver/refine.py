"""Meshes of more than three axes, too large to search: the best plan that one refines is carried over and improved."""

from __future__ import annotations

import contextlib
import itertools
import re
import time
from collections.abc import Sequence
from dataclasses import replace

from autopar.errors import InfeasiblePlan, PlanError
from autopar.layout import I, Mesh, R
from autopar.plan import Plan
from autopar.rules.analysis import Operation
from autopar.rules.derive import Choice
from autopar.solver.search import MAX_AXES, Build, ideal_bound, merged, search_meshes
from autopar.solver.stage import Task, settled, solve_stage

_FIRST = 0.5  # part of the time that the plan to be refined may take


def fastest(task: Task, meshes: Sequence[Mesh], build: Build, started: float) -> Plan:
    """The fastest plan on any mesh; those of many axes come last, and are only refined."""
    few = [m for m in meshes if len(m.axes) <= MAX_AXES]
    plans: list[Plan] = []
    failure: InfeasiblePlan | None = None
    for group in ([few] if few else []) + [[m] for m in meshes if len(m.axes) > MAX_AXES]:
        try:
            if group is not few:
                plans.append(refined(task, group[0], build, started))
            elif len(few) > 1:
                plans.append(search_meshes(task, few, build, started))
            else:
                plan = solve_stage(task, build(few[0], None), started)
                assert isinstance(plan, Plan)  # there is no cutoff
                plans.append(plan)
        except InfeasiblePlan as error:
            failure = failure or error
    if not plans:
        raise failure or InfeasiblePlan("no mesh has a plan", where=str(task.cluster))
    best = min(plans, key=lambda p: p.solver.objective)
    return best if len(plans) == 1 else settled(task, best, (p.solver.bound for p in plans), started)


def refined(task: Task, mesh: Mesh, build: Build, started: float) -> Plan:
    """A plan on a mesh of many axes: the best one of two or three axes, improved two axes at a time while time lasts.

    It is called a heuristic unless no plan can be much faster.  Raises InfeasiblePlan where nothing is found that fits.
    """
    begun = time.perf_counter()
    coarse = dict(pair for axes in range(2, MAX_AXES + 1) for pair in merged(mesh, axes))
    first = replace(task, deadline=begun + _FIRST * (task.deadline - begun))
    seed = search_meshes(first, tuple(coarse), build, started)
    source = coarse[seed.device_mesh]
    kinds = {d.name: tuple(kind(d.choices[k]) for k in source) for d in seed.ops}
    best = _carried(task, mesh, build, started, kinds)
    for free in itertools.combinations(range(len(mesh.axes)), 2):
        if time.perf_counter() > task.deadline:
            break
        with contextlib.suppress(InfeasiblePlan, PlanError):
            found = solve_stage(task, build(mesh, _keeper(kinds, free)), started, best.solver.objective)
            if not isinstance(found, float):
                best = found
                kinds = {d.name: tuple(map(kind, d.choices)) for d in best.ops}
    return settled(task, best, (ideal_bound(task),), started)


def _carried(task: Task, mesh: Mesh, build: Build, started: float, kinds: dict[str, tuple[str, ...]]) -> Plan:
    """The plan that ``kinds`` say, or near it where they do not fit: then axes may stay whole, then anything goes."""
    for whole in ((), (I, R)):
        with contextlib.suppress(InfeasiblePlan, PlanError):
            found = solve_stage(task, build(mesh, _keeper(kinds, (), whole)), started)
            assert isinstance(found, Plan)  # there is no cutoff
            return found
    found = solve_stage(task, build(mesh, None), started)
    assert isinstance(found, Plan)
    return found


def _keeper(kinds: dict[str, tuple[str, ...]], free: Sequence[int], whole: Sequence[str] = ()):  # type: ignore[no-untyped-def]
    """Keeps each op's kinds of choice on all but the free axes; ops without one are free."""

    def keep(op: Operation, choice: Choice, axis: int) -> bool:
        known = kinds.get(op.name)
        return known is None or axis in free or choice.kind in whole or kind(str(choice)) == known[axis]

    return keep


def kind(choice: str) -> str:
    """A choice without its cuts, which depend on the axes outside."""
    return re.sub(r" at \d+,\d+,\d+", "", choice)
