"""Solve: the fastest plan of a program on a cluster."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial

import msgspec

from autopar.cluster import ClusterSpec
from autopar.cost_model.hardware import device
from autopar.cost_model.profiler import Profile
from autopar.errors import PlanError
from autopar.layout import Mesh
from autopar.modes import describe
from autopar.passes.fold import Folding, fold
from autopar.plan import Plan
from autopar.rules.analysis import Bound, Operation, contract
from autopar.rules.derive import Strategy
from autopar.rules.meaning import Meanings, meanings
from autopar.solver.forced import search_forms
from autopar.solver.forms import RING, Form, forms
from autopar.solver.pins import Pinned, keeps, read_pins, restrict
from autopar.solver.refine import fastest
from autopar.solver.report import table
from autopar.solver.restrict import check_zero, restriction
from autopar.solver.search import Search
from autopar.solver.space import KeepChoice, Space, every_choice, every_strategy
from autopar.solver.stage import Task, figures, fingerprints, limit_of, prepare
from autopar.solver.why import why


def solve(
    bound: Bound,
    cluster: ClusterSpec,
    *,
    mesh: Mesh | None = None,
    search: Search | None = None,
    pins: Mapping[str, str] | None = None,
    optimizer: str = "adamw",
    precision: str = "fp32",
    memory_limit: float | None = None,
    time_limit: float = 60,
    gap: float = 0.01,
    profile: Profile | None = None,
    model_name: str = "",
    progress: Callable[[str], None] | None = None,
) -> Plan:
    """The fastest plan found; ``plan.solver`` says how near to the best it is proven to be.

    mesh, or search.mesh: the mesh; without either every shape of the cluster is considered.  memory_limit: bytes per
    rank.  gap: relative distance from the bound at which the search may stop.  profile: what was measured, which
    goes before the catalogue's figures.

    Raises PlanError for options that mean nothing, InfeasiblePlan where nothing fits.
    """
    started = time.perf_counter()
    if profile is not None:
        profile.check(device(cluster).name)
    search = search or Search()
    search.check()
    meshes = (mesh,) if mesh is not None else search.meshes(cluster.world_size)
    if mesh is not None and mesh.size != cluster.world_size:
        raise PlanError(
            "the mesh does not fill the cluster",
            where="mesh=",
            expected=str(cluster.world_size),
            got=f"{mesh.size} ({mesh})",
        )
    modes, splits = search.modes()
    wanted: tuple[Form, ...] = ()
    if modes or splits:
        wanted = forms(modes, splits, meshes if mesh or search.mesh else None, cluster)
        meshes = tuple(dict.fromkeys(form.mesh for form in wanted))
        for form in wanted:
            check_zero(form, search.zero)
    pinned = {m: read_pins(bound, m, pins or {}) for m in meshes}
    task = Task(
        bound,
        _folding(bound, pinned),
        cluster,
        fingerprints(bound, cluster),
        optimizer=optimizer,
        precision=precision,
        limit=limit_of(cluster, memory_limit),
        profile=profile,
        zero=search.zero,
        gap=gap,
        deadline=started + time_limit,
        model_name=model_name,
        progress=progress,
    )

    def build(mesh: Mesh, keep_choice: KeepChoice | None = None) -> Space:
        pins = pinned.get(mesh, {})  # pins name the axes of the meshes that were asked for
        analysis = contract(bound, mesh.sizes)
        keep = partial(keeps, analysis, pins) if pins else every_strategy
        return restrict(prepare(task, mesh, analysis, keep, keep_choice or every_choice), pins)

    known = meanings(bound)

    def build_form(form: Form) -> Space:
        balanced = True if RING in form.roles else None  # who asks for a ring wants its ranks to do the same
        pins, analysis = pinned.get(form.mesh, {}), contract(bound, form.mesh.sizes, balanced=balanced)
        made = restriction(form, analysis, task.folding, known)

        def keep(op: Operation, strategy: Strategy) -> bool:
            return made.keep(op, strategy) and keeps(analysis, pins, op, strategy)

        space = prepare(task, form.mesh, analysis, keep, made.keep_choice, inside=True)
        return restrict(made.store(space), pins)

    if wanted:
        return _annotated(search_forms(task, wanted, build_form, started), task, known)
    plan = fastest(task, meshes, build, started)
    reason = None if pins or not plan.axes else why(task, plan, build_form, known)
    return _annotated(plan, task, known, *([reason] if reason else []))


def _annotated(plan: Plan, task: Task, known: Meanings, *notes: str) -> Plan:
    """With the rows of `explain`'s table, the names of what the plan does, and ``notes``."""
    sizes = plan.device_mesh.sizes
    analysis = contract(task.bound, sizes)
    rows = table(plan, analysis, task.folding, figures(task, sizes))
    kinds = f"kinds: {describe(plan, task.bound, known)}"
    return msgspec.structs.replace(plan, table=rows, notes=(kinds, *notes, *plan.notes))


def _folding(bound: Bound, pinned: Mapping[Mesh, Pinned]) -> Folding:
    """Folded, unless pins tell weights apart that would share their decisions."""
    folding = fold(bound)
    for pins in pinned.values():
        for name in bound.program.parameters:
            if pins.get(name) != pins.get(folding.values.get(name, name)):
                return fold(bound, repeat=False)
    return folding
