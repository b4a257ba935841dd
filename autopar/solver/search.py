"""The search over shapes of the mesh, and what a user may say about it."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields

import msgspec

from autopar.errors import InfeasiblePlan, PlanError
from autopar.layout import Mesh
from autopar.plan import Plan
from autopar.rules.analysis import contract
from autopar.solver.forms import SEQUENCE_SPLITS, TENSOR_MODES, as_names, shapes
from autopar.solver.model import lower_bound
from autopar.solver.report import why_not
from autopar.solver.space import KeepChoice, Space
from autopar.solver.stage import Task, figures, settled, solve_stage

_NAMES = {1: ("d",), 2: ("dp", "tp"), 3: ("dp", "tp", "cp")}
MAX_AXES = 3


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


def factorisations(world_size: int, most: int = MAX_AXES) -> Iterator[Mesh]:
    """Every mesh of one to ``most`` axes of at least two ranks, in every order; for one rank that without axes."""
    if world_size == 1:
        yield Mesh((), ())
        return

    for axes in range(1, most + 1):
        yield from (Mesh(_NAMES[axes], sizes) for sizes in shapes(world_size, axes))


def merged(mesh: Mesh, axes: int) -> Iterator[tuple[Mesh, tuple[int, ...]]]:
    """The meshes of so many axes that ``mesh`` refines, neighbours as one, and of each of its axes which that is."""
    for ends in itertools.combinations(range(1, len(mesh.axes)), axes - 1):
        parts = [range(a, b) for a, b in itertools.pairwise((0, *ends, len(mesh.axes)))]
        sizes = tuple(Mesh(("",) * len(p), mesh.sizes[p.start : p.stop]).size for p in parts)
        names = tuple("_".join(mesh.axes[a] for a in p) for p in parts)
        yield Mesh(names, sizes), tuple(k for k, p in enumerate(parts) for _ in p)


Build = Callable[[Mesh, KeepChoice | None], Space]


def search_meshes(task: Task, meshes: Sequence[Mesh], build: Build, started: float) -> Plan:
    """The fastest plan on any of ``meshes``: best bound first, until no bound beats the incumbent.

    Meshes of three axes come after those that they refine, the best of those first; most are left behind by their
    bound, which is found without a program (`bounds`).

    Raises InfeasiblePlan, that of the mesh which is least short, where nothing fits on any.
    """
    state = _State(task, build, started)
    small = [m for m in meshes if len(m.axes) < MAX_AXES]
    spaces = {mesh: build(mesh, None) for mesh in small}
    floors = {mesh: lower_bound(space) for mesh, space in spaces.items()}
    for mesh in sorted(small, key=lambda m: (floors[m], m.sizes)):
        state.consider(mesh, floors[mesh], spaces.pop(mesh))
    ideal = ideal_bound(task)

    def promise(mesh: Mesh) -> tuple[float, tuple[int, ...]]:
        return min((state.known.get(m.sizes, math.inf) for m, _ in merged(mesh, 2)), default=math.inf), mesh.sizes

    for mesh in sorted((m for m in meshes if len(m.axes) == MAX_AXES), key=promise):
        state.consider(mesh, ideal)
    return state.result()


@dataclass(slots=True)
class _State:
    """The incumbent of a search, and what is proven of the meshes that were left behind."""

    task: Task
    build: Build
    started: float
    best: Plan | None = None
    known: dict[tuple[int, ...], float] = field(default_factory=dict)  # bounds by sizes
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

    def consider(self, mesh: Mesh, floor: float, space: Space | None = None) -> None:
        """Solve one mesh, as far as it may beat the incumbent; ``space``: what there is to choose, if it is known."""
        limit = self.limit(len(mesh.axes))
        if floor >= limit:
            self.note(mesh, floor)
            return
        if self.best is not None and time.perf_counter() > self.task.deadline:
            self.note(mesh, floor)
            self.proven = False
            return
        try:
            plan = solve_stage(self.task, space or self.build(mesh, None), self.started, limit)
        except InfeasiblePlan as error:
            if self.failure is None or error.short_bytes < self.failure.short_bytes:
                self.failure = error
            return
        if isinstance(plan, float):
            self.note(mesh, plan)
            return
        self.note(mesh, plan.solver.bound)
        self.proven &= plan.solver.status == "optimal"
        self.take(plan)

    def note(self, mesh: Mesh, bound: float) -> None:
        self.known[mesh.sizes] = bound
        self.bounds.append(bound)

    def take(self, plan: Plan) -> None:
        same = self.best is not None and len(plan.axes) == len(self.best.axes)
        if plan.solver.objective < (self.incumbent if same else self.limit(len(plan.axes))):
            if self.best is not None:
                self.others.append(self.best)
            self.best = plan
        else:
            self.others.append(plan)

    def result(self) -> Plan:
        if self.best is None:
            raise self.failure or InfeasiblePlan("no mesh has a plan", where=str(self.task.cluster))
        best = self.best
        notes = [why_not(f"mesh {other.device_mesh}", other, best, self.task.limit) for other in self.others]
        best = msgspec.structs.replace(best, notes=(*best.notes, *notes))
        return settled(self.task, best, self.bounds, self.started, self.proven)


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
