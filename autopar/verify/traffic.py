"""Collectives: what an emitted graph sends against what the plan says, and against the closed forms.

The plan's list follows from its decisions: every value moves from the layout that its op makes to those that others
need, once to each layout on the way; every layout in which a weight is used takes it there and its gradient back.  The
graph's list is read off its conversions, with the layouts that `types` derived.  Bytes of the plan are those of the
table of conversions (`autopar.layout.conversion`), those of the graph the closed forms of `autopar.cost_model`.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from torch import fx

from autopar.cost_model.collectives import Kind, sent_bytes
from autopar.layout import (
    I,
    Layout,
    Move,
    S,
    Split,
    State,
    conversion,
    default_path,
    dual,
    forward_layout,
    fraction,
    local_shape,
    middle,
)
from autopar.passes.emit import emitted_operations, own_traffic
from autopar.passes.resolve import Resolved
from autopar.plan import find_path
from autopar.program import OutputName, args_of, place
from autopar.rules.analysis import Operation
from autopar.rules.derive import algorithm_of
from autopar.runtime.collectives import LocalState, Step, convert
from autopar.runtime.parameters import use
from autopar.verify.report import Finding
from autopar.verify.subject import RankGraph, mesh_text
from autopar.verify.types import Types

FORWARD, BACKWARD = "forward", "backward"


@dataclass(frozen=True, slots=True, order=True)
class Transfer:
    """A collective.  nbytes: sent by this rank.  value: the program's name of what moves; a weight's own name."""

    value: str
    direction: str
    kind: str
    axis: str
    nbytes: float

    def __str__(self) -> str:
        return f"{self.kind} over {self.axis}, {self.direction}, {self.nbytes:,.0f} bytes"


# ------------------------------------------------------------------------------------------------ the plan's


class PlannedMove(NamedTuple):
    """A conversion that a step makes.  back: the one between the duals, which autograd makes of it."""

    value: str
    move: Move
    direction: str
    back: bool = False

    @property
    def ends(self) -> tuple[State, State]:
        """What it leaves and what it enters, on its axis."""
        src, dst = self.move.layout[self.move.axis], self.move.target
        return (dual(dst), dual(src)) if self.back else (src, dst)


def planned(resolved: Resolved, at: tuple[int, ...], outputs: bool) -> Counter[Transfer]:
    """What the rank at ``at`` sends by the plan's decisions."""
    out: Counter[Transfer] = Counter()
    mesh = resolved.mesh
    for name, move, direction, back in planned_moves(resolved, outputs):
        nbytes = undone_bytes(resolved, at, name, move)
        cost = conversion(move.layout[move.axis], move.target, mesh.sizes[move.axis], nbytes)
        kind, sent = (cost.backward, cost.backward_bytes) if back else (cost.forward, cost.forward_bytes)
        if sent:
            out[Transfer(name, direction, kind, mesh.axes[move.axis], sent)] += 1
    return out


def planned_moves(resolved: Resolved, outputs: bool) -> list[PlannedMove]:
    """Every conversion of a step by the plan's decisions.  outputs: also what makes the model's outputs whole."""
    analysis, sizes, program = resolved.analysis, resolved.mesh.sizes, resolved.analysis.program
    whole = (I,) * len(sizes)
    made: dict[str, Layout] = {n: whole for n, v in analysis.values.items() if v.kind not in ("op", "parameter")}
    needed: dict[str, dict[Layout, None]] = {}
    for op in emitted_operations(resolved, outputs):
        strategy = resolved.strategies[op.name]
        made.update(zip(op.outputs, strategy.outs, strict=True))
        for name, layout in zip(op.inputs, strategy.ins, strict=True):
            _need(resolved, needed, name, layout)
    results: list[str | None] = [program.loss, *program.mutations.values()]
    results += [o for o in program.outputs if outputs and isinstance(o, OutputName)]
    for result in results:
        if result is not None:
            _need(resolved, needed, result, whole)
    out: list[PlannedMove] = []
    for name, layouts in needed.items():
        value = analysis.values[name]
        if value.kind == "parameter":
            stored = resolved.parameters[name]
            for layout in layouts:
                full, gradient = forward_layout(layout), tuple(dual(s) for s in layout)
                way = _way(find_path(stored.held, full, stored.use), value.shape, stored.held, full, sizes)
                out += [PlannedMove(name, m, FORWARD) for m in way]
                if value.differentiable:
                    back = find_path(gradient, stored.accumulated, stored.reduce)
                    way = _way(back, value.shape, gradient, stored.accumulated, sizes)
                    out += [PlannedMove(name, m, BACKWARD) for m in way]
            continue
        moves: dict[Layout, Move] = {}
        for layout in layouts:
            path = find_path(made[name], layout, resolved.moves.get(name, ()))
            for move in _way(path, value.shape, made[name], layout, sizes):
                moves.setdefault(move.result, move)
        out += [PlannedMove(name, m, FORWARD) for m in moves.values()]
        if value.differentiable:
            out += [PlannedMove(name, m, BACKWARD, back=True) for m in moves.values()]
    for name, stored in resolved.parameters.items():
        out += [PlannedMove(name, m, FORWARD) for m in stored.gather]
        if analysis.values[name].differentiable:
            out += [PlannedMove(name, m, BACKWARD) for m in stored.final]
    return out


def _need(resolved: Resolved, needed: dict[str, dict[Layout, None]], name: str, layout: Layout) -> None:
    root, inside = resolved.analysis.root(name), resolved.analysis.to_root(name, layout)
    if inside is not None:
        needed.setdefault(root, {})[inside] = None


def _way(
    way: tuple[Move, ...] | None, shape: tuple[int, ...], start: Layout, goal: Layout, sizes: tuple[int, ...]
) -> tuple[Move, ...]:
    """The planned way; outputs, which no op takes, may have none and go by the shortest."""
    return default_path(shape, start, goal, sizes) if way is None else way


def undone_bytes(resolved: Resolved, at: tuple[int, ...], name: str, move: Move) -> float:
    """Bytes of the value on the rank at ``at`` with the move's axis undone."""
    value = resolved.analysis.values[name]
    layout = (*move.layout[: move.axis], I, *move.layout[move.axis + 1 :])
    return float(value.dtype.itemsize * math.prod(local_shape(value.shape, layout, resolved.mesh.sizes, at)))


def own_transfers(resolved: Resolved, at: tuple[int, ...], outputs: bool) -> list[Transfer]:
    """What algorithms say that they send of their own."""
    out = []
    for op in emitted_operations(resolved, outputs):
        for axis, t, nbytes in own_traffic(resolved, op, at):
            sent = sent_bytes(t.kind, nbytes, resolved.mesh.sizes[axis])
            for direction, times in ((FORWARD, t.forward), (BACKWARD, t.backward)):
                if sent * times:
                    out.append(Transfer(op.name, direction, t.kind, resolved.mesh.axes[axis], sent * times))
    return out


def sent_by_plan(resolved: Resolved, at: tuple[int, ...], outputs: bool) -> tuple[dict[str, float], bool]:
    """(bytes by axis that a step sends, whether that is all): algorithms send more of their own, of which some do not
    say how much, and none how much of unequal shards.

    Unequal shards are padded to the largest, and from one cut of a dimension to another goes through the whole value.
    """
    out: dict[str, float] = {}
    mesh = resolved.mesh
    for planned_move in planned_moves(resolved, outputs):
        axis = planned_move.move.axis
        nbytes = undone_bytes(resolved, at, planned_move.value, planned_move.move)
        sent = wire_bytes(*planned_move.ends, mesh.sizes[axis], at[axis], nbytes)
        out[mesh.axes[axis]] = out.get(mesh.axes[axis], 0.0) + sent
    if not all(_says_all(resolved, op) for op in emitted_operations(resolved, outputs)):
        return out, False
    for t in own_transfers(resolved, at, outputs):
        out[t.axis] = out.get(t.axis, 0.0) + t.nbytes
    return out, True


def _says_all(resolved: Resolved, op: Operation) -> bool:
    """Whether it is known what the op sends of its own: nothing, or what its algorithm says of equal shards."""
    strategy = resolved.strategies[op.name]
    for axis, choice in enumerate(strategy.choices):
        algorithm, n = algorithm_of(op.rule, choice), resolved.mesh.sizes[axis]
        states = [layout[axis] for layout in (*strategy.ins, *strategy.outs)]
        even = all(s.N % n == 0 for s in states if isinstance(s, S))
        if algorithm is not None and (algorithm.traffic is None or not even):
            return False
    return True


def wire_bytes(src: State, dst: State, n: int, index: int, nbytes: float) -> float:
    """Bytes that rank ``index`` of ``n`` sends; ``nbytes`` of the value with this axis undone."""
    kind = collective(src, dst)
    if isinstance(src, S) and isinstance(dst, S):
        if src.dim == dst.dim:
            return (n - 1) * _row(src, n, nbytes)
        held, whole = fraction(src, n, index)
        kept, of = fraction(dst, n, index)
        return nbytes * held / whole * (of - kept) / of
    cut = src if isinstance(src, S) else dst
    if isinstance(cut, S) and kind != "local":
        return (n - 1) * _row(cut, n, nbytes)
    return sent_bytes(kind, nbytes, n)


def _row(cut: S, n: int, nbytes: float) -> float:
    """Bytes of the largest part."""
    units = middle(cut, n)
    return nbytes * -(-units // n) / units


# ------------------------------------------------------------------------------------------------ the graph's


def in_graph(resolved: Resolved, rank: RankGraph, types: Types) -> Counter[Transfer]:
    """What the conversions of a typed graph send."""
    out: Counter[Transfer] = Counter()
    mesh = resolved.mesh
    for moved in types.moved:
        move, n = moved.move, mesh.sizes[moved.move.axis]
        nbytes = undone_bytes(resolved, rank.at, moved.value, move)
        parameter = resolved.analysis.values[moved.value].kind == "parameter"
        src, dst = move.layout[move.axis], move.target
        for direction, wanted in ((FORWARD, moved.forward), (BACKWARD, moved.backward)):
            if not wanted:
                continue
            # a gradient moves between the duals; a weight's has its own way, which is written as it goes
            ends = (dual(dst), dual(src)) if direction == BACKWARD and not parameter else (src, dst)
            kind = collective(*ends)
            sent = sent_bytes(kind, nbytes, n)
            if sent:
                out[Transfer(moved.value, direction, kind, mesh.axes[move.axis], sent)] += 1
    return out


def collective(src: object, dst: object) -> Kind:
    """The collective of a conversion, from what its ends are."""
    cut = (S, Split)
    if isinstance(src, cut):
        if isinstance(dst, cut):
            return "all-to-all"
        return "local" if dst == "P" else "all-gather"
    if src == "P":
        return "reduce-scatter" if isinstance(dst, cut) else "all-reduce"
    return "local"


def kinds_in_graph(resolved: Resolved, rank: RankGraph) -> Counter[tuple[str, str, str]]:
    """(pass, kind, axis) of every conversion of a graph, typed or not; a weight's both ways, of others the forward."""
    out: Counter[tuple[str, str, str]] = Counter()

    def add(direction: str, axis: object, src: LocalState, dst: LocalState) -> None:
        kind = collective(src, dst)
        if kind != "local" and src != dst:
            out[direction, kind, getattr(axis, "name", str(axis))] += 1

    for node in rank.graph.nodes:
        for direction, (axis, src, dst) in steps_of(node):
            add(direction, axis, src, dst)
    for ways in rank.ways.values():
        for direction, way in ((FORWARD, ways.gather), (BACKWARD, ways.final)):
            for step in way:
                add(direction, *step)
    return out


def steps_of(node: fx.Node) -> list[tuple[str, Step]]:
    """The conversions that a node makes, each with its pass; of a `convert` node the forward one."""
    if node.target is convert:
        return [(FORWARD, Step(*args_of(node)[1:]))]
    if node.target is use:
        *_, forward, backward = args_of(node)
        return [(d, s) for d, way in ((FORWARD, forward), (BACKWARD, backward)) for s in way]
    return []


# ------------------------------------------------------------------------------------------------ both


def check_traffic(resolved: Resolved, rank: RankGraph, types: Types, outputs: bool) -> list[Finding]:
    """Where the graph's collectives are not the plan's.

    A graph that does not type has no sizes from its first fault on: of it kinds and axes alone are compared.
    """
    wanted = planned(resolved, rank.at, outputs)
    where = mesh_text(resolved.mesh, rank.at)
    if types.findings:
        counted: Counter[tuple[str, str, str]] = Counter()
        for t, times in wanted.items():
            if t.direction == FORWARD or resolved.analysis.values[t.value].kind == "parameter":
                counted[t.direction, t.kind, t.axis] += times
        got = kinds_in_graph(resolved, rank)
        return [
            Finding(
                "collectives",
                f"the graph has another number of collectives than the plan: {kind} over {axis}, {direction}",
                where,
                str(counted[direction, kind, axis]),
                str(got[direction, kind, axis]),
            )
            for direction, kind, axis in sorted({*counted, *got})
            if counted[direction, kind, axis] != got[direction, kind, axis]
        ]
    found = in_graph(resolved, rank, types)
    if _nameless(wanted) == _nameless(found):
        return []
    out = []
    for name in dict.fromkeys(t.value for t in sorted((wanted - found) + (found - wanted))):
        mine, theirs = (sorted(t for t in c.elements() if t.value == name) for c in (wanted - found, found - wanted))
        out.append(
            Finding(
                "collectives",
                "the graph's collectives are not those of the plan",
                f"{place_of(resolved, name)} ({where})",
                "; ".join(map(str, mine)) or "none",
                "; ".join(map(str, theirs)) or "none",
            )
        )
    return out


def _nameless(transfers: Counter[Transfer]) -> Counter[tuple[str, str, str, float]]:
    """Without names: on a rank that holds nothing of them, pieces of one value look alike."""
    out: Counter[tuple[str, str, str, float]] = Counter()
    for t, times in transfers.items():
        out[t.direction, t.kind, t.axis, t.nbytes] += times
    return out


def place_of(resolved: Resolved, name: str) -> str:
    """Where a value of the program comes from."""
    program = resolved.analysis.program
    if name in program.parameters:
        return program.parameters[name].name
    maker = next((o for o in resolved.analysis.operations if name in o.outputs), None)
    return name if maker is None else f"{name}, {place(maker.node)}"
