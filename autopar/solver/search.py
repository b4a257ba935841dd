"""The search over shapes of the mesh, and what a user may say about it."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields

import msgspec

from autopar.errors import InfeasiblePlan, PlanError
from autopar.layout import Mesh
from autopar.plan import Plan, Solver
from autopar.rules.analysis import Operation, contract
from autopar.rules.derive import Choice
from autopar.solver.forms import SEQUENCE_SPLITS, TENSOR_MODES, as_names, shapes
from autopar.solver.model import lower_bound
from autopar.solver.report import why_not
from autopar.solver.space import KeepChoice, Space
from autopar.solver.stage import Task, figures, solve_stage

_NAMES = {1: ("d",), 2: ("dp", "tp"), 3: ("dp", "tp", "cp")}
_MAX_AXES = 3
_LARGEST = 60_000  # columns of a program of three axes that a search still solves
_STATES = 6  # of an axis, about


@dataclass(frozen=True, slots=True)
class Search:
    """What to search: one value pins it, several bound it, None leaves it to the solver.

    mesh: {"dp": 4, "tp": 2}, names free, slow link first; or several of them.  zero: 0 to 3, what becomes of weights on
    the axes on which they are used whole.

    tensor_modes: "1d", "2d", "2.5d", "3d", the last three also with " gathered" or " streamed" (either, if it is left
    out), or "none", for weights that are used whole everywhere.  sequence: "megatron" (with 1d), "ulysses", "ring",
    "ring+ulysses" (on two axes), or "none", which splits no sequence anywhere.  Of several, one is chosen.  Axes that
    are no part of them are left to the solver; beside a tensor mode weights are used whole there, as in data
    parallelism.  Every product with a weight runs in the mode as far as its sizes allow; where none can, or attention
    has fewer heads than ranks, the mode is refused with the numbers.  `autopar.modes` defines what the names mean.

    The other options are refused until they are implemented.
    """

    mesh: Mapping[str, int] | Sequence[Mapping[str, int]] | None = None
    pp: int | Sequence[int] | None = None
    microbatches: int | Sequence[int] | None = None
    schedule: str | Sequence[str] | None = None
    tensor_modes: str | Sequence[str] | None = None
    sequence: str | Sequence[str] | None = None
    zero: int | None = None
    recompute: str | Sequence[str] | None = None

    def check(self) -> None:
        """Raise PlanError for an option that is not implemented, or a value out of range."""
        for option in fields(self):
            value = getattr(self, option.name)
            if option.name in ("mesh", "zero", "tensor_modes", "sequence") or value is None:
                continue
            if option.name in ("pp", "microbatches") and value == 1:
                continue
            raise PlanError(f"Search({option.name}=) is not yet implemented", where="search", got=repr(value))
        if self.zero is not None and self.zero not in (0, 1, 2, 3):
            raise PlanError(
                "no such stage of ZeRO", where="Search(zero=)", expected="0, 1, 2 or 3", got=repr(self.zero)
            )
        self.modes()

    def modes(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Tensor modes and sequence splits that are asked for.  Raises PlanError for a name that is not known."""
        return (
            as_names(self.tensor_modes, TENSOR_MODES, "tensor_modes"),
            as_names(self.sequence, SEQUENCE_SPLITS, "sequence"),
        )

    def meshes(self, world_size: int) -> tuple[Mesh, ...]:
        """The meshes to consider.  Raises PlanError for one that does not fill the cluster."""
        if self.mesh is None:
            return tuple(factorisations(world_size))
        given = [self.mesh] if isinstance(self.mesh, Mapping) else list(self.mesh)
        for mesh in given:
            whole = all(isinstance(n, int) and n >= 1 for n in mesh.values())
            if not whole or math.prod(mesh.values()) != world_size:
                raise PlanError(
                    "the mesh does not fill the cluster",
                    where="Search(mesh=)",
                    expected=f"positive sizes whose product is {world_size}",
                    got=dict(mesh),
                )
        return tuple(Mesh.of(mesh) for mesh in given)


def factorisations(world_size: int, most: int = _MAX_AXES) -> Iterator[Mesh]:
    """Every mesh of one to ``most`` axes of at least two ranks, in every order; for one rank that without axes."""
    if world_size == 1:
        yield Mesh((), ())
        return

    for axes in range(1, most + 1):
        yield from (Mesh(_NAMES[axes], sizes) for sizes in shapes(world_size, axes))


Build = Callable[[Mesh, KeepChoice | None], Space]


def search_meshes(task: Task, meshes: Sequence[Mesh], build: Build, started: float) -> Plan:
    """The fastest plan on any of ``meshes``: best bound first, until no bound beats the incumbent.

    Meshes of three axes whose program would be too large are not solved: the best plan of two axes is carried over to
    them, one axis in two, and improved two axes at a time.  Then the result is called a heuristic, unless its time is
    so near to that of perfectly shared work that nothing can be much faster.

    Raises InfeasiblePlan, that of the mesh which is least short, where nothing fits on any.
    """
    state = _State(task, build, started)
    flat = [m for m in meshes if len(m.axes) < _MAX_AXES]
    deep = [m for m in meshes if len(m.axes) >= _MAX_AXES]
    floors = {mesh: lower_bound(build(mesh, None)) for mesh in flat}
    for mesh in sorted(flat, key=lambda m: (floors[m], m.sizes)):
        state.consider(mesh, floors[mesh])
    ideal = ideal_bound(task)
    for mesh in deep:
        if ideal >= state.limit(len(mesh.axes)):
            state.bounds.append(ideal)
        elif _columns(task, mesh) <= _LARGEST:
            state.consider(mesh, ideal)
        else:
            state.polish(mesh)
            state.bounds.append(ideal)
            state.proven = False
    return state.result()


@dataclass(slots=True)
class _State:
    """The incumbent of a search, and what is proven of the meshes that were left behind."""

    task: Task
    build: Build
    started: float
    best: Plan | None = None
    flat: Plan | None = None  # the best plan of two axes or fewer
    bounds: list[float] = field(default_factory=list)
    proven: bool = True
    failure: InfeasiblePlan | None = None
    others: list[Plan] = field(default_factory=list)

    @property
    def incumbent(self) -> float:
        return math.inf if self.best is None else self.best.solver.objective

    def limit(self, axes: int) -> float:
        """What a plan on a mesh of ``axes`` axes must stay below: of plans within the gap the simplest mesh is kept."""
        simpler = self.best is not None and axes < len(self.best.axes)
        return self.incumbent * (1 + self.task.gap if simpler else 1 - self.task.gap)

    def consider(self, mesh: Mesh, floor: float) -> None:
        """Solve one mesh, as far as it may beat the incumbent."""
        limit = self.limit(len(mesh.axes))
        if floor >= limit:
            self.bounds.append(floor)
            return
        if self.best is not None and time.perf_counter() > self.task.deadline:
            self.bounds.append(floor)
            self.proven = False
            return
        try:
            plan = solve_stage(self.task, self.build(mesh, None), self.started, limit)
        except InfeasiblePlan as error:
            if self.failure is None or error.short_bytes < self.failure.short_bytes:
                self.failure = error
            return
        if isinstance(plan, float):
            self.bounds.append(plan)
            return
        self.bounds.append(plan.solver.bound)
        self.proven &= plan.solver.status == "optimal"
        self.take(plan)

    def take(self, plan: Plan) -> None:
        same = self.best is not None and len(plan.axes) == len(self.best.axes)
        if plan.solver.objective < (self.incumbent if same else self.limit(len(plan.axes))):
            if self.best is not None:
                self.others.append(self.best)
            self.best = plan
            if len(plan.axes) < _MAX_AXES:
                self.flat = plan
        else:
            self.others.append(plan)

    def polish(self, mesh: Mesh) -> None:
        """Improve the best plan of two axes on ``mesh``, if that has one of its axes in two."""
        if self.flat is None or time.perf_counter() > self.task.deadline:
            return
        sizes = tuple(self.flat.mesh.values())
        for kept, n in enumerate(sizes):
            at = 0 if kept == 0 else len(mesh.sizes) - 1
            rest = mesh.sizes[1:] if at == 0 else mesh.sizes[:-1]
            if len(sizes) == 2 and mesh.sizes[at] == n and math.prod(rest) == sizes[1 - kept]:
                self._improve(mesh, at, {d.name: d.choices[kept] for d in self.flat.ops})

    def _improve(self, mesh: Mesh, axis: int, choices: dict[str, str]) -> None:
        """Solve ``mesh`` with the kinds of choice on one axis given, op by op."""

        def keep(op: Operation, choice: Choice, at: int) -> bool:
            return at != axis or op.name not in choices or _kind(str(choice)) == _kind(choices[op.name])

        with contextlib.suppress(InfeasiblePlan, PlanError):
            plan = solve_stage(self.task, self.build(mesh, keep), self.started, self.incumbent)
            if not isinstance(plan, float):
                self.take(plan)

    def result(self) -> Plan:
        if self.best is None:
            raise self.failure or InfeasiblePlan("no mesh has a plan", where=str(self.task.cluster))
        best = self.best
        bound = min([*self.bounds, best.solver.objective])
        gap = (best.solver.objective - bound) / best.solver.objective if best.solver.objective else 0.0
        late = time.perf_counter() > self.task.deadline
        status = "optimal" if self.proven and gap <= self.task.gap else "time_limit" if late else "heuristic"
        seconds = time.perf_counter() - self.started
        solver = Solver(status, best.solver.objective, bound, gap, seconds)
        notes = [why_not(f"mesh {other.device_mesh}", other, best, self.task.limit) for other in self.others]
        return msgspec.structs.replace(best, solver=solver, notes=(*best.notes, *notes))


def _kind(choice: str) -> str:
    """A choice without its cut, which depends on the axes outside."""
    return choice.partition(" at ")[0]


def _columns(task: Task, mesh: Mesh) -> int:
    """Roughly how many columns the program of ``mesh`` has."""
    ops = len(set(task.folding.ops.values()))
    return ops * (_STATES ** len(mesh.axes)) * len(mesh.axes) * _STATES


def ideal_bound(task: Task) -> float:
    """Seconds that no plan on this cluster can beat, on any mesh: all work shared evenly, no communication."""
    if task.profile is not None:
        return 0.0  # a measured op may be faster than the roofline
    ranks = task.cluster.world_size
    analysis = contract(task.bound, (ranks,))
    known = figures(task, (ranks,))
    total = 0.0
    for op in analysis.operations:
        if not op.rule.view:
            ins, outs = ([analysis.values[v] for v in names] for names in (op.inputs, op.outputs))
            total += known.ideal(op, ins, outs, ranks)
    return total * task.microbatches
