"""A plan: every decision about how a program runs on a mesh, as data that a person can read.

In memory and on disk it is the same thing: strict JSON of small structs.  Repeated blocks are written once, for their
first occurrence.  Loading never solves, and never runs anything that stands in the file: ops are looked up by name in
the program that the plan is applied to.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import msgspec

from autopar.errors import PlanError
from autopar.layout import Layout, Mesh, Move, Shape, format_layout, format_state, parse_layout, parse_state

VERSION = 1


class OpDecision(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How one op runs: a choice per mesh axis (`autopar.rules.derive.Choice`)."""

    name: str
    choices: tuple[str, ...]


class ValueDecision(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How one value moves from the layout that its op makes to those that others need: ``layout > axis:state``."""

    name: str
    moves: tuple[str, ...]


class ParameterDecision(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a weight and its gradient live.

    stored: weight, optimizer state and final gradient.  held: the weight during a step.  accumulated: the gradient
    during a step.  gather: stored -> held, once a step.  use: held -> each use.  reduce: the gradient of each use ->
    accumulated.  final: accumulated -> stored, once a step.
    """

    name: str
    stored: str
    held: str
    accumulated: str
    gather: tuple[str, ...] = ()
    use: tuple[str, ...] = ()
    reduce: tuple[str, ...] = ()
    final: tuple[str, ...] = ()


class Predicted(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the cost model says of a plan: seconds, and bytes on the fullest rank."""

    step_time: float = 0.0
    compute_time: float = 0.0
    exposed_comm_time: float = 0.0
    peak_memory: float = 0.0
    comm_bytes: float = 0.0
    breakdown: dict[str, float] = {}


class Solver(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the plan was found.  status: optimal, time_limit or heuristic.  objective and bound in seconds."""

    status: str = "heuristic"
    objective: float = 0.0
    bound: float = 0.0
    gap: float = 0.0
    seconds: float = 0.0


class Fingerprints(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the plan was made for."""

    graph: str
    cluster: str
    rules: str


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """See the module's documentation.  ``blocks``: how often each repeated block occurs, by its first op."""

    version: int
    model: str
    cluster: str
    axes: tuple[tuple[str, int], ...]
    fingerprints: Fingerprints
    ops: tuple[OpDecision, ...]
    values: tuple[ValueDecision, ...]
    parameters: tuple[ParameterDecision, ...]
    predicted: Predicted = Predicted()
    solver: Solver = Solver()
    blocks: dict[str, int] = {}
    notes: tuple[str, ...] = ()
    table: tuple[dict[str, str], ...] = ()  # rows of explain(), written by the solver

    @property
    def mesh(self) -> dict[str, int]:
        """Axis name -> size, slow link first."""
        return dict(self.axes)

    @property
    def device_mesh(self) -> Mesh:
        return Mesh.of(self.mesh)

    @property
    def world_size(self) -> int:
        return self.device_mesh.size

    @property
    def decisions(self) -> tuple[OpDecision, ...]:
        return self.ops

    @property
    def id(self) -> str:
        """Six hex digits over everything that decides what runs."""
        what = (self.axes, self.fingerprints, self.ops, self.values, self.parameters)
        return hashlib.sha256(msgspec.json.encode(what)).hexdigest()[:6]

    def explain(self) -> str:
        """The plan as text: what runs where, what it costs, and why not otherwise."""
        from autopar.explain.text import explain

        return explain(self)

    def to_json(self) -> str:
        """Sorted keys, one-space indents: the same plan gives the same bytes, so how long the search took stays out."""
        data = msgspec.to_builtins(self)
        del data["solver"]["seconds"]
        return json.dumps(data, sort_keys=True, indent=1, allow_nan=False) + "\n"

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read a plan.  Raises PlanError that says where the file is bad."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except OSError as error:
            raise PlanError("the plan file cannot be read", where=str(path), got=str(error)) from error
        return Plan.from_json(text, where=str(path))

    @staticmethod
    def from_json(text: str, where: str = "plan") -> Plan:
        try:
            data = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)
            plan = msgspec.convert(data, Plan, strict=True)
        except (ValueError, RecursionError) as error:
            raise PlanError(
                "the plan file is damaged",
                where=where,
                expected=f"a plan of version {VERSION}",
                got=str(error),
                hint="make the plan again, or restore the file",
            ) from error
        if plan.version != VERSION:
            raise PlanError("unknown plan version", where=where, expected=str(VERSION), got=str(plan.version))
        return plan


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in pairs:
        if key in out:
            raise ValueError(f"key {key!r} stands twice in one object")
        out[key] = value
    return out


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is no finite number")


# ------------------------------------------------------------------------------------------------ moves as text


def format_move(move: Move, axes: tuple[str, ...]) -> str:
    return f"{format_layout(move.layout, axes)} > {axes[move.axis]}:{format_state(move.target)}"


def parse_move(text: str, axes: tuple[str, ...], shape: Shape) -> Move:
    """Inverse of `format_move`.  Raises ValueError."""
    layout, arrow, step = text.partition(" > ")
    axis, colon, state = step.partition(":")
    if not arrow or not colon or axis not in axes:
        raise ValueError(f"{text!r} is no move: expected 'layout > axis:state'")
    return Move(parse_layout(layout, axes, shape), axes.index(axis), parse_state(state, shape))


def find_path(start: Layout, goal: Layout, moves: tuple[Move, ...]) -> tuple[Move, ...] | None:
    """The shortest way from ``start`` to ``goal`` along ``moves``, the first named first; None if there is none."""
    if start == goal:
        return ()
    came: dict[Layout, Move] = {}
    frontier = [start]
    while frontier and goal not in came:
        following = []
        for layout in frontier:
            for move in moves:
                if move.layout == layout and move.result not in came and move.result != start:
                    came[move.result] = move
                    following.append(move.result)
        frontier = following
    if goal not in came:
        return None
    path = []
    while goal != start:
        path.append(came[goal])
        goal = came[goal].layout
    return tuple(reversed(path))
