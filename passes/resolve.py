"""A plan's text applied to a program: every name looked up, every layout checked, nothing left implicit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.errors import PlanError
from autopar.layout import I, Layout, Mesh, Move, format_layout, is_valid, parse_layout
from autopar.plan import ParameterDecision, Plan, find_path, parse_move
from autopar.program import place
from autopar.rules.analysis import Analysis, Bound, Operation, contract
from autopar.rules.derive import Choice, Strategy, apply, parse_choice


@dataclass(frozen=True, slots=True)
class Stored:
    """`autopar.plan.ParameterDecision`, read."""

    stored: Layout
    held: Layout
    accumulated: Layout
    gather: tuple[Move, ...]
    use: tuple[Move, ...]
    reduce: tuple[Move, ...]
    final: tuple[Move, ...]


@dataclass(frozen=True, slots=True)
class Resolved:
    """strategies by op, moves by root value, storage by parameter node."""

    analysis: Analysis
    mesh: Mesh
    strategies: dict[str, Strategy]
    moves: dict[str, tuple[Move, ...]]
    parameters: dict[str, Stored]


def resolve(
    plan: Plan,
    bound: Bound,
    choices: Mapping[str, tuple[str, ...]],
    moves: Mapping[str, tuple[str, ...]],
    stored: Mapping[str, ParameterDecision],
) -> Resolved:
    """Read decisions (of every op, not only of representatives).  Raises PlanError naming the one that is wrong."""
    _refuse_strangers(plan, bound)
    mesh = plan.device_mesh
    analysis = contract(bound, mesh.sizes, balanced=True)  # whatever the search was free to choose
    strategies: dict[str, Strategy] = {}
    for op in analysis.operations:
        if op.name not in choices:
            raise PlanError("the plan does not decide this op", where=f"{op.name}, {place(op.node)}")
        strategies[op.name] = _strategy(op, choices[op.name], mesh)
    resolved = {}
    for name, texts in moves.items():
        value = bound.values.get(name)
        if value is None:
            raise PlanError("the plan moves a value that the program does not have", where=name)
        resolved[name] = _moves(name, texts, mesh, value.shape)
    parameters = {}
    for node, parameter in bound.program.parameters.items():
        decision = stored.get(parameter.name)
        shape = parameter.shape
        if decision is None:  # no op uses it: it stays as it is
            whole = (I,) * len(mesh.sizes)
            parameters[node] = Stored(whole, whole, whole, (), (), (), ())
            continue
        try:
            layouts = [
                parse_layout(t, mesh.axes, shape) for t in (decision.stored, decision.held, decision.accumulated)
            ]
        except ValueError as error:
            raise PlanError("a layout cannot be read", where=parameter.name, got=str(error)) from error
        kept, held, accumulated = layouts
        gather, use, reduce, final = (
            _moves(parameter.name, t, mesh, shape)
            for t in (decision.gather, decision.use, decision.reduce, decision.final)
        )
        gather = _chain(parameter.name, kept, held, gather, mesh)
        if bound.values[node].differentiable:
            final = _chain(parameter.name, accumulated, kept, final, mesh)
        parameters[node] = Stored(kept, held, accumulated, gather, use, reduce, final)
    return Resolved(analysis, mesh, strategies, resolved, parameters)


def follow(resolved: Resolved, bound: Bound) -> Resolved:
    """The decisions of a training program for the program of evaluation of the same model.

    Ops that both have run alike and weights stay where they are; any other op runs whole.  There are no moves: values
    go the default way.
    """
    mesh = resolved.mesh
    analysis = contract(bound, mesh.sizes)
    strategies = {}
    for op in analysis.operations:
        known = resolved.strategies.get(op.name)
        strategies[op.name] = (known and _alike(op, known, analysis)) or _whole(op, mesh)
    names = {resolved.analysis.program.parameters[n].name: s for n, s in resolved.parameters.items()}
    whole = (I,) * len(mesh.sizes)
    unknown = Stored(whole, whole, whole, (), (), (), ())
    parameters = {n: names.get(p.name, unknown) for n, p in bound.program.parameters.items()}
    return Resolved(analysis, mesh, strategies, {}, parameters)


def _alike(op: Operation, known: Strategy, analysis: Analysis) -> Strategy | None:
    """The strategy with the choices of ``known``; None where this op does not have them, or an input not so."""
    try:
        strategy = apply(op.type, [parse_choice(str(c), op.rule) for c in known.choices], analysis.axis_sizes)
    except ValueError:
        return None
    if strategy is None:
        return None
    for name, layout in zip(op.inputs, strategy.ins, strict=True):
        source = analysis.to_root(name, layout)
        if source is None or not is_valid(analysis.values[analysis.root(name)].shape, source, analysis.axis_sizes):
            return None
    return strategy


def _whole(op: Operation, mesh: Mesh) -> Strategy:
    strategy = apply(op.type, [Choice(I)] * len(mesh.sizes), mesh.sizes)
    assert strategy is not None  # invariant values are always legal
    return strategy


def _refuse_strangers(plan: Plan, bound: Bound) -> None:
    """Every decision is about something that the program has, and the only one about it."""
    for what, decisions, known in (
        ("an op", plan.ops, {o.name for o in bound.operations}),
        ("a value", plan.values, set(bound.values)),
        ("a parameter", plan.parameters, {p.name for p in bound.program.parameters.values()}),
    ):
        seen: set[str] = set()
        for decision in decisions:
            if decision.name not in known:
                raise PlanError(f"the plan decides {what} that the program does not have", where=decision.name)
            if decision.name in seen:
                raise PlanError(f"the plan decides {what} twice", where=decision.name)
            seen.add(decision.name)


def _chain(name: str, start: Layout, goal: Layout, moves: tuple[Move, ...], mesh: Mesh) -> tuple[Move, ...]:
    """The moves in the order in which they lead from ``start`` to ``goal``."""
    path = find_path(start, goal, moves)
    if path is None:
        raise PlanError(
            "the plan does not say how a weight or its gradient gets where it is kept",
            where=name,
            expected=f"moves from {format_layout(start, mesh.axes)} to {format_layout(goal, mesh.axes)}",
            got=f"{len(moves)} moves",
        )
    return path


def _strategy(op: Operation, texts: tuple[str, ...], mesh: Mesh) -> Strategy:
    where = f"{op.name}, {place(op.node)}"
    if len(texts) != len(mesh.sizes):
        raise PlanError("one choice per mesh axis", where=where, expected=str(len(mesh.sizes)), got=str(len(texts)))
    try:
        choices = [parse_choice(t, op.rule) for t in texts]
    except ValueError as error:
        raise PlanError("a choice cannot be read", where=where, got=str(error)) from error
    strategy = apply(op.type, choices, mesh.sizes)
    if strategy is None:
        raise PlanError("these choices do not go together", where=where, got=", ".join(texts))
    return strategy


def _moves(name: str, texts: tuple[str, ...], mesh: Mesh, shape: tuple[int, ...]) -> tuple[Move, ...]:
    out = []
    for text in texts:
        try:
            move = parse_move(text, mesh.axes, shape)
        except ValueError as error:
            raise PlanError("a move cannot be read", where=name, got=str(error)) from error
        if not is_valid(shape, move.layout, mesh.sizes) or not is_valid(shape, move.result, mesh.sizes):
            raise PlanError("a move leaves or enters a layout that does not exist", where=name, got=text)
        out.append(move)
    return tuple(out)
