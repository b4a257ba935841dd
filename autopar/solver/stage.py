"""The best plan on one mesh: baselines, then the linear relaxation, then the integer program, each only if needed."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import msgspec

from autopar.cluster import ClusterSpec
from autopar.cost_model.hardware import device
from autopar.cost_model.memory import usable_memory
from autopar.cost_model.profiler import Profile
from autopar.errors import InfeasiblePlan
from autopar.layout import Mesh
from autopar.passes.fold import Folding
from autopar.plan import VERSION, Fingerprints, Plan, Solver
from autopar.program import fingerprint
from autopar.rules.analysis import Analysis, Bound
from autopar.rules.registry import rules_fingerprint
from autopar.solver import milp
from autopar.solver.baseline import baselines
from autopar.solver.bounds import bounds
from autopar.solver.decisions import Decisions, read, write
from autopar.solver.model import Columns, columns_of, formulate, lower_bound
from autopar.solver.narrow import narrow
from autopar.solver.price import price
from autopar.solver.prices import Prices, prices
from autopar.solver.report import why_not
from autopar.solver.space import Keep, KeepChoice, Space, build, every_choice, every_strategy

Progress = Callable[[str], None]

# baselines that a plan speaks of, and how: "plain", for a plan of mixed kinds can be called data parallel too
_COMPARED = {
    "data parallel": "plain data parallel",
    "data parallel, ZeRO-3": "plain data parallel, ZeRO-3",
    "everything on every rank": "everything on every rank",
}
_DIRECT = 60_000  # up to so many columns a program is solved as it is
_LARGEST = 400_000  # columns of a program that is still begun
# What a program may contain: plans that exceed the bound by this part of it, then by so many times more, then all.
_FROM_BOUND, _WIDER, _EVERYTHING = 0.002, 2.5, 1.0
_MIN_SECONDS = 0.02  # with less time than this left no program is begun
_SLACK = 1e-6  # of the memory limit, for the solver's own tolerance


@dataclass(frozen=True, slots=True)
class Task:
    """What to plan, whatever the mesh.

    limit: bytes per rank.  zero: a stage of ZeRO to keep to.
    deadline: a reading of ``time.perf_counter``.
    """

    bound: Bound
    folding: Folding
    cluster: ClusterSpec
    fingerprints: Fingerprints
    optimizer: str = "adamw"
    precision: str = "fp32"
    limit: float = math.inf
    profile: Profile | None = None
    microbatches: int = 1
    zero: int | None = None
    gap: float = 0.01
    deadline: float = math.inf
    node_limit: int | None = None
    model_name: str = ""
    progress: Progress | None = None


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan with its decisions; ``name`` says where it comes from.  objective: seconds, as the program counts them."""

    name: str
    plan: Plan
    decisions: Decisions
    objective: float


def figures(task: Task, sizes: Sequence[int]) -> Prices:
    return prices(
        task.cluster,
        sizes,
        optimizer=task.optimizer if task.bound.program.loss is not None else "none",
        precision=task.precision,
        microbatches=task.microbatches,
        profile=task.profile,
    )


def prepare(
    task: Task,
    mesh: Mesh,
    analysis: Analysis,
    keep: Keep = every_strategy,
    keep_choice: KeepChoice = every_choice,
    *,
    inside: bool = False,
) -> Space:
    """Enumerate and price what can be chosen on ``mesh``; ``inside`` as `build` has it."""
    known, every = figures(task, mesh.sizes), task.zero is not None
    return build(analysis, task.folding, mesh, known, keep, keep_choice, all_storage=every, inside=inside)


def candidate(task: Task, space: Space, name: str, decisions: Decisions) -> Candidate:
    """Write decisions as a plan and price it."""
    ops, values, weights = write(space, decisions)
    axes = tuple(zip(space.mesh.axes, space.mesh.sizes, strict=True))
    plan = Plan(
        VERSION,
        task.model_name,
        str(task.cluster),
        axes,
        task.fingerprints,
        ops,
        values,
        weights,
        blocks=task.folding.blocks,
    )
    priced = price(plan, task.bound, space.analysis, task.folding, space.prices)
    return Candidate(name, msgspec.structs.replace(plan, predicted=priced.predicted), decisions, priced.objective)


def _solved(task: Task, space: Space, columns: Columns, outcome: milp.Outcome) -> Candidate:
    """The plan that an outcome of the program says."""
    assert outcome.values is not None
    return candidate(task, space, "solver", read(space, columns, outcome.values))


def best_baseline(task: Task, space: Space) -> tuple[Candidate | None, dict[str, Candidate]]:
    """The fastest baseline that fits, and all of them by name."""
    found = {name: candidate(task, space, name, d) for name, d in baselines(space, task.zero)}
    fitting = [c for c in found.values() if c.plan.predicted.peak_memory <= task.limit]
    return min(fitting, key=lambda c: c.objective, default=None), found


def solve_stage(task: Task, space: Space, started: float, cutoff: float = math.inf) -> Plan | float:
    """The fastest plan that fits.

    cutoff: seconds; a bound is returned instead once it is clear that no plan here is faster, or none was found that
    is.  Raises InfeasiblePlan.
    """
    report = task.progress or (lambda text: None)
    floor = lower_bound(space)
    if floor >= cutoff:
        return floor
    best: Candidate | None = None
    known: dict[str, Candidate] = {}
    if cutoff == math.inf:
        best, known = best_baseline(task, space)
        if best is not None:
            report(f"{space.mesh}: {best.name} {best.objective * 1e3:.4g} ms, bound {floor * 1e3:.4g}")
    if task.deadline - time.perf_counter() < _MIN_SECONDS:
        return _finish(task, space, best, known, "time_limit", floor, started)
    if columns_of(space) <= _DIRECT:
        found = _program(task, space, best, cutoff, floor)
    else:
        found = _narrowed(task, space, best, cutoff)
    if found.status == "nothing":
        raise InfeasiblePlan("no plan satisfies the pins and the search options", where=str(space.mesh))
    if found.status == "infeasible":
        raise _infeasible(task, space)
    if found.bound >= cutoff or (found.best is None and cutoff < math.inf):
        return found.bound
    return _finish(task, space, found.best, known, found.status, found.bound, started)


@dataclass(frozen=True, slots=True)
class _Found:
    """status: optimal, time_limit, heuristic; infeasible for want of memory, or nothing to choose from."""

    best: Candidate | None
    bound: float
    status: str


def _program(task: Task, space: Space, best: Candidate | None, cutoff: float, floor: float) -> _Found:
    """Solve the linear relaxation, and the integer program where that is not enough."""
    report = task.progress or (lambda text: None)
    problem, columns = formulate(space, zero=task.zero)
    relaxed = milp.solve(problem, time_limit=task.deadline - time.perf_counter(), relaxed=True)
    if relaxed.status == "infeasible":
        return _Found(best, math.inf, "nothing")
    if relaxed.status != "optimal" or relaxed.values is None:
        return _Found(best, floor, "time_limit")
    bound = max(floor, relaxed.objective / columns.second)
    report(f"{space.mesh}: bound {bound * 1e3:.4g} ms")
    if bound >= cutoff:
        return _Found(best, bound, "optimal")
    rounded = _solved(task, space, columns, relaxed)
    integral = milp.is_integral(problem, relaxed.values)
    if rounded.plan.predicted.peak_memory <= task.limit and (integral or task.zero is None):
        best = _faster(best, rounded)
    if integral and best is not None and best.objective * (1 - task.gap) <= bound:
        return _Found(best, bound, "optimal")
    problem, columns = formulate(space, limit=task.limit, zero=task.zero)
    outcome = milp.solve(
        problem,
        time_limit=max(task.deadline - time.perf_counter(), _MIN_SECONDS),
        gap=task.gap,
        node_limit=task.node_limit,
    )
    if outcome.status == "infeasible":
        return _Found(best, math.inf, "infeasible")
    bound = max(bound, outcome.bound / columns.second)
    if outcome.values is not None:
        found = _solved(task, space, columns, outcome)
        if found.plan.predicted.peak_memory <= task.limit * (1 + _SLACK):
            best = _faster(best, found)
    return _Found(best, bound, "optimal" if outcome.status == "optimal" else "time_limit")


def _narrowed(task: Task, space: Space, best: Candidate | None, cutoff: float) -> _Found:
    """Solve what may be part of a plan near the bound, then of plans further from it, until one is near enough.

    What is left out of a program is proven to cost more than its limit, so that the lower of both bounds every plan.
    """
    report = task.progress or (lambda text: None)
    made = bounds(space, cutoff)
    bound, slack = made.total, _FROM_BOUND
    report(f"{space.mesh}: bound {bound * 1e3:.4g} ms")

    def near(best: Candidate | None) -> bool:
        return best is not None and best.objective * (1 - task.gap) <= bound

    while bound < cutoff and not near(best):
        if task.deadline - time.perf_counter() < _MIN_SECONDS:
            return _Found(best, bound, "time_limit")
        most = min(cutoff, math.inf if best is None else best.objective)
        limit = min(most, made.total * (1 + slack)) if slack < _EVERYTHING else most
        part = narrow(made, limit)
        if part is not None and columns_of(part) > _LARGEST:
            return _Found(best, bound, "heuristic")
        found = _Found(best, math.inf, "nothing") if part is None else _program(task, part, best, limit, bound)
        best, bound = found.best, max(bound, min(limit, found.bound))
        if found.status == "time_limit":
            return _Found(best, bound, "time_limit")
        if limit == math.inf:  # nothing was left out
            return _Found(best, bound, found.status)
        slack *= _WIDER
    return _Found(best, bound, "optimal" if near(best) else "heuristic")


def _faster(a: Candidate | None, b: Candidate) -> Candidate:
    return b if a is None or b.objective <= a.objective else a


def _finish(
    task: Task,
    space: Space,
    best: Candidate | None,
    known: dict[str, Candidate],
    status: str,
    bound: float,
    started: float,
) -> Plan:
    if best is None:
        best = _smallest(task, space)
    objective = best.objective
    bound = min(bound, objective)
    gap = (objective - bound) / objective if objective else 0.0
    seconds = time.perf_counter() - started
    notes = tuple(
        why_not(spoken, known[name].plan, best.plan, task.limit)
        for name, spoken in _COMPARED.items()
        if name in known and known[name].plan.id != best.plan.id
    )
    plan = msgspec.structs.replace(best.plan, solver=Solver(status, objective, bound, gap, seconds), notes=notes)
    if task.progress:
        task.progress(f"{space.mesh}: {objective * 1e3:.4g} ms, bound {bound * 1e3:.4g}, gap {gap:.2%}, {status}")
    return plan


def settled(task: Task, plan: Plan, bounds: Iterable[float], started: float, proven: bool = True) -> Plan:
    """``plan`` as the result of a search in which nothing is faster than the least of ``bounds``.

    proven: whether all of them are of what was looked at to the end.
    """
    objective = plan.solver.objective
    bound = min([*bounds, objective])
    gap = (objective - bound) / objective if objective else 0.0
    late = time.perf_counter() > task.deadline
    status = "optimal" if proven and gap <= task.gap else "time_limit" if late else "heuristic"
    solver = Solver(status, objective, bound, gap, time.perf_counter() - started)
    return msgspec.structs.replace(plan, solver=solver)


def smallest(task: Task, space: Space) -> Candidate | None:
    """The plan that takes the fewest bytes; None where even that is not found in time."""
    problem, columns = formulate(space, zero=task.zero, smallest=True)
    outcome = milp.solve(problem, time_limit=max(task.deadline - time.perf_counter(), 5.0), gap=1e-3)
    if outcome.values is None:
        return None
    return candidate(task, space, "smallest", read(space, columns, outcome.values))


def _smallest(task: Task, space: Space) -> Candidate:
    found = smallest(task, space)
    if found is None or found.plan.predicted.peak_memory > task.limit:
        raise _infeasible(task, space, found)
    return replace(found, name="smallest")


def _infeasible(task: Task, space: Space, found: Candidate | None = None) -> InfeasiblePlan:
    found = found or smallest(task, space)
    if found is None:
        return InfeasiblePlan("no plan was found that fits the memory", where=str(space.mesh))
    need = found.plan.predicted.peak_memory
    short = math.ceil(need - task.limit)
    ideas = [f"a memory limit of {need / 2**30:.2f} GiB"]
    devices = 2 ** math.ceil(math.log2(max(task.cluster.world_size * need / max(task.limit, 1.0), 1.0)))
    if devices <= 64 * task.cluster.world_size:
        ideas.append(f"about {max(devices, 2 * task.cluster.world_size)} devices")
    if task.precision in ("fp32", "fp64"):
        ideas.append("precision='bf16'")
    return InfeasiblePlan(
        "no plan fits the memory of a device",
        where=str(space.mesh),
        expected=f"at most {task.limit / 2**30:.2f} GiB per rank",
        got=f"{need / 2**30:.2f} GiB for the smallest plan",
        short_bytes=max(short, 1),
        would_fit=", or ".join(ideas),
        hint="raise memory_limit=, use more devices, or less precision",
    )


def limit_of(cluster: ClusterSpec, given: float | None) -> float:
    """Bytes per rank: what was asked for, or the device's memory less a reserve."""
    return float(given) if given is not None else float(usable_memory(device(cluster)))


def fingerprints(bound: Bound, cluster: ClusterSpec) -> Fingerprints:
    """What a plan is made for: the graph, the cluster, and the rules."""
    return Fingerprints(fingerprint(bound.program), cluster.fingerprint, rules_fingerprint())
