"""Random legal plans: for testing that no plan changes the mathematics."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence

from autopar.layout import (
    I,
    Layout,
    Mesh,
    Move,
    P,
    R,
    S,
    Shape,
    State,
    canonical,
    dual,
    format_layout,
    forward_layout,
    is_valid,
)
from autopar.plan import Fingerprints, OpDecision, ParameterDecision, Plan, ValueDecision, format_move
from autopar.rules.analysis import Analysis, Bound, Operation, contract
from autopar.rules.derive import Strategy, random_strategy
from autopar.rules.factors import Cut
from autopar.solver.storage import storable


def random_decisions(
    bound: Bound, mesh: Mesh, fingerprints: Fingerprints, seed: int = 0, model: str = "", cluster: str = ""
) -> Plan:
    """Any legal plan of a program on ``mesh``; the same seed gives the same plan."""
    rng = random.Random(seed)
    analysis = contract(bound, mesh.sizes, balanced=True)
    layouts: dict[str, Layout] = {}
    strategies: dict[str, Strategy] = {}
    for op in analysis.operations:
        strategies[op.name] = _reachable_strategy(analysis, op, rng)
        layouts.update(zip(op.outputs, strategies[op.name].outs, strict=True))
    needs: dict[str, list[Layout]] = {}

    def need(name: str, layout: Layout) -> None:
        reached = analysis.to_root(name, layout)
        assert reached is not None
        wanted = needs.setdefault(analysis.root(name), [])
        if reached not in wanted:
            wanted.append(reached)

    for op in analysis.operations:
        for name, layout in zip(op.inputs, strategies[op.name].ins, strict=True):
            need(name, layout)
    whole = (I,) * len(mesh.sizes)
    program = bound.program
    for name in [*([program.loss] if program.loss else []), *program.mutations.values()]:
        need(name, whole)
    values, parameters = [], []
    for name, wanted in needs.items():
        value = bound.values[name]
        if value.kind == "parameter":
            decision = _random_parameter(
                program.parameters[name].name, value.shape, analysis, name, wanted, mesh, rng, value.differentiable
            )
            parameters.append(decision)
            continue
        start = layouts.get(name, whole)
        moves: dict[Move, None] = {}
        for goal in wanted:
            moves.update(dict.fromkeys(random_path(value.shape, start, goal, mesh.sizes, rng, value.differentiable)))
        if moves:
            values.append(ValueDecision(name, tuple(format_move(m, mesh.axes) for m in moves)))
    ops = tuple(OpDecision(op.name, tuple(str(c) for c in strategies[op.name].choices)) for op in analysis.operations)
    axes = tuple(zip(mesh.axes, mesh.sizes, strict=True))
    return Plan(1, model, cluster, axes, fingerprints, ops, tuple(values), tuple(parameters))


def _reachable_strategy(analysis: Analysis, op: Operation, rng: random.Random) -> Strategy:
    """A random strategy whose inputs can be had through the contracted views."""
    for _ in range(200):
        strategy = random_strategy(op.type, analysis.factor_points(op), analysis.axis_sizes, rng)
        if all(analysis.to_root(v, lay) is not None for v, lay in zip(op.inputs, strategy.ins, strict=True)):
            return strategy
    raise AssertionError(f"no strategy of {op.name} can be reached")


def random_path(
    shape: Shape, src: Layout, dst: Layout, sizes: Sequence[int], rng: random.Random, differentiable: bool
) -> list[Move]:
    """One-axis conversions in random order; through a whole state where cuts clash."""
    current, moves = src, []
    todo = [a for a in range(len(src)) if src[a] != dst[a]]
    rng.shuffle(todo)
    while todo:
        axis = todo.pop(0)
        move = Move(current, axis, dst[axis])
        if not is_valid(shape, move.result, sizes):
            todo.append(axis)
            whole = rng.choice([R, I]) if differentiable else I
            if current[axis] == whole or not (isinstance(current[axis], S) or current[axis] == P):
                continue
            move = Move(current, axis, whole)
        moves.append(move)
        current = move.result
    return moves


def _random_cut(rng: random.Random, dim: int, cuts: Iterable[Cut], n: int) -> State:
    cut = rng.choice(sorted(cuts))
    return canonical(S(dim, *cut), n)


def _random_layout(
    shape: Shape,
    name: str,
    analysis: Analysis,
    mesh: Mesh,
    rng: random.Random,
    states: Sequence[State],
    as_stored: bool,
) -> Layout:
    for _ in range(100):
        layout: list[State] = []
        for n in mesh.sizes:
            if shape and rng.random() < 0.6:
                dim = rng.randrange(len(shape))
                nested = math.prod(
                    m for s, m in zip(layout, mesh.sizes, strict=False) if isinstance(s, S) and s.dim == dim
                )
                if nested > 1 and shape[dim] % nested == 0:
                    layout.append(canonical(S(dim, nested, shape[dim] // nested, 1), n))
                elif shape[dim] > 1:
                    layout.append(_random_cut(rng, dim, analysis.points[name][dim], n))
                else:
                    layout.append(rng.choice(list(states)))
            else:
                layout.append(rng.choice(list(states)))
        done = tuple(layout)
        if is_valid(shape, done, mesh.sizes) and (not as_stored or storable(shape, done, mesh.sizes)):
            return done
    return (I,) * len(mesh.sizes)


def _random_parameter(
    name: str,
    shape: Shape,
    analysis: Analysis,
    node: str,
    wanted: Sequence[Layout],
    mesh: Mesh,
    rng: random.Random,
    trained: bool,
) -> ParameterDecision:
    stored = _random_layout(shape, node, analysis, mesh, rng, [I], as_stored=True)
    held = stored if rng.random() < 0.4 else _random_layout(shape, node, analysis, mesh, rng, [I], as_stored=False)
    accumulated = _random_layout(shape, node, analysis, mesh, rng, [I, P], as_stored=False)
    sizes = mesh.sizes
    text = mesh.axes
    use: dict[Move, None] = {}
    reduce: dict[Move, None] = {}
    for layout in wanted:
        use.update(dict.fromkeys(random_path(shape, held, forward_layout(layout), sizes, rng, False)))
        if trained:
            produced = tuple(dual(s) for s in layout)
            reduce.update(dict.fromkeys(random_path(shape, produced, accumulated, sizes, rng, False)))
    gather = random_path(shape, stored, held, sizes, rng, False)
    final = random_path(shape, accumulated, stored, sizes, rng, False) if trained else []
    return ParameterDecision(
        name,
        format_layout(stored, text),
        format_layout(held, text),
        format_layout(accumulated, text) if trained else I,
        *(tuple(format_move(m, text) for m in ms) for ms in (gather, use, reduce, final)),
    )
