"""What a plan says of itself: a row per op for the table of `explain`, and why not otherwise."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from autopar.layout import Layout, S, conversion, format_layout, format_state, parse_layout
from autopar.passes.fold import Folding, edges
from autopar.plan import Plan, parse_move
from autopar.program import module_path
from autopar.rules.analysis import Analysis, Operation
from autopar.rules.derive import Strategy, algorithm_of, apply, parse_choice
from autopar.solver.prices import Prices


def table(plan: Plan, analysis: Analysis, folding: Folding, prices: Prices) -> tuple[dict[str, str], ...]:
    """A row per representative op: module, op, in, out, time (s), communication, bytes (of its weights), count.

    Figures are of one occurrence.  Communication is what happens to the values that the op makes, and to its weights.
    """
    axes = tuple(plan.mesh)
    choices = {d.name: d.choices for d in plan.ops}
    sent = _communication(plan, analysis, folding, prices, axes)
    weights = _weights(plan, analysis, folding, prices, axes)
    rows = []
    for op in analysis.operations:
        if op.name not in choices:
            continue
        strategy = apply(op.type, [parse_choice(t, op.rule) for t in choices[op.name]], prices.sizes)
        assert strategy is not None  # it was priced
        ins, outs = ([analysis.values[v] for v in names] for names in (op.inputs, op.outputs))
        cost = prices.op(op, strategy, ins, outs)
        moved = dict.fromkeys((*sent.get(op.name, ()), *_inside(op, strategy, prices.sizes)))
        row = {
            "module": module_path(op.node),
            "op": op.name,
            "out": _short(strategy.outs[0], axes),
            "time": repr(cost.seconds),
            "communication": ", ".join(moved) or "-",
            "bytes": str(round(weights.get(op.name, 0.0))),
            "count": str(folding.counts.get(op.name, 1)),
        }
        main = _main_input(op, analysis)
        if main is not None:
            row["in"] = _short(strategy.ins[main], axes)
        rows.append(row)
    return tuple(rows)


def _short(layout: Layout, axes: tuple[str, ...]) -> str:
    """``dp:S0 tp:S2``, without where a cut lies."""
    parts = []
    for axis, state in zip(axes, layout, strict=True):
        if state != "I":
            parts.append(f"{axis}:{f'S{state.dim}' if isinstance(state, S) else format_state(state)}")
    return " ".join(parts) or format_layout(layout, axes)


def _main_input(op: Operation, analysis: Analysis) -> int | None:
    """The first input that is no weight."""
    kinds = [analysis.values[analysis.root(v)].kind for v in op.inputs]
    return next((i for i, kind in enumerate(kinds) if kind != "parameter"), None)


def _inside(op: Operation, strategy: Strategy, sizes: Sequence[int]) -> list[str]:
    """Collectives of the op's own algorithm."""
    out = []
    for choice, n in zip(strategy.choices, sizes, strict=True):
        algorithm = algorithm_of(op.rule, choice)
        if algorithm is not None and algorithm.traffic is not None:
            out += [f"{t.kind} inside" for t in algorithm.traffic(op.type, choice, n) if t.forward]
    return out


def _communication(
    plan: Plan, analysis: Analysis, folding: Folding, prices: Prices, axes: tuple[str, ...]
) -> dict[str, list[str]]:
    """Collectives by op: of its values forward, or backward where forward is free, and of its weights."""
    makers = {v: op.name for op in analysis.operations for v in op.outputs}
    found: dict[str, dict[str, None]] = defaultdict(dict)
    for decision in plan.values:
        value = analysis.values[decision.name]
        maker = makers.get(folding.values.get(decision.name, decision.name))
        if maker is None:
            continue
        for text in decision.moves:
            move = parse_move(text, axes, value.shape)
            made = conversion(move.layout[move.axis], move.target, prices.sizes[move.axis], 1.0)
            if made.forward != "local":
                found[maker][made.forward] = None
            elif made.backward != "local" and value.differentiable:
                found[maker][f"{made.backward} back"] = None
    return {op: list(kinds) for op, kinds in found.items()}


def _weights(
    plan: Plan, analysis: Analysis, folding: Folding, prices: Prices, axes: tuple[str, ...]
) -> dict[str, float]:
    """Bytes of weights, gradients and optimizer state by the op that uses the weight first."""
    nodes = {p.name: node for node, p in analysis.program.parameters.items()}
    first = {edge.name: edge.uses[0].op for edge in edges(analysis, folding) if edge.uses}
    out: dict[str, float] = defaultdict(float)
    for decision in plan.parameters:
        node = nodes[decision.name]
        value = analysis.values[node]
        stored, held, accumulated = (
            parse_layout(t, axes, value.shape) for t in (decision.stored, decision.held, decision.accumulated)
        )
        if node in first:
            out[first[node]] += prices.weight_memory(value, stored, held, accumulated)
    return out


def why_not(name: str, other: Plan, best: Plan, limit: float) -> str:
    """``why not data parallel?  +41 ms: compute +2.1, communication +39; does not fit by 1.2 GiB``."""
    a, b = other.predicted, best.predicted
    if a.step_time < b.step_time and len(other.axes) > len(best.axes):
        return f"why not {name}?  {_ms(a.step_time - b.step_time)} ms, within the gap: the simpler mesh is kept"
    text = f"why not {name}?  {_ms(a.step_time - b.step_time)} ms: compute {_ms(a.compute_time - b.compute_time)}"
    text += f", communication {_ms(a.exposed_comm_time - b.exposed_comm_time)}"
    over = a.peak_memory - limit
    return text + (f"; does not fit by {over / 2**30:.3g} GiB" if over > 0 else "")


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:+.3g}"
