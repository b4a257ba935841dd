"""The cost of a finished plan, added up from what it says: over the whole program, not over representatives.

This is another way to the figure that the integer program minimises; a test holds that both agree.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from autopar.errors import PlanError
from autopar.layout import I, Layout, Move, R, dual, parse_layout
from autopar.passes.fold import Expanded, Folding, edges, expand, must_be_whole
from autopar.plan import ParameterDecision, Plan, Predicted, find_path, parse_move
from autopar.rules.analysis import Analysis, Bound, Operation, Value
from autopar.rules.derive import Strategy, apply, parse_choice
from autopar.solver.model import BACKWARD, FORWARD
from autopar.solver.prices import Prices, saved_inputs, saved_outputs


def price(plan: Plan, bound: Bound, analysis: Analysis, folding: Folding, prices: Prices) -> Predicted:
    """Seconds of a step, and bytes on the fullest rank.  Raises PlanError where the plan leaves a gap."""
    expanded = expand(plan, bound, analysis, folding)
    axes, m = tuple(plan.mesh), prices.microbatches
    strategies = {op.name: _strategy(op, expanded, prices) for op in analysis.operations}
    values = analysis.values
    compute: dict[tuple[int, str], float] = defaultdict(float)
    breakdown: dict[str, float] = defaultdict(float)
    sent = exposed = transient = 0.0
    for op in analysis.operations:
        cost = prices.op(op, strategies[op.name], [values[v] for v in op.inputs], [values[v] for v in op.outputs])
        segment = folding.segments[op.name]
        compute[segment, FORWARD] += cost.forward * m
        compute[segment, BACKWARD] += cost.backward * m
        breakdown["forward"] += cost.forward * m
        breakdown["backward"] += cost.backward * m
        breakdown["inside ops"] += cost.communication * m
        exposed += cost.communication * m
        sent += cost.sent * m
        transient = max(transient, cost.transient)
    activations, activation_bytes, saved = _activations(analysis, expanded, strategies, prices, axes)
    breakdown["activations"] = activations
    weights = _Weights(analysis, folding, expanded, strategies, prices, axes)
    for name in weights.uses:
        weights.add(name)
    hidden, open_ = weights.exposed(compute)
    breakdown["weights"] = open_
    breakdown["weights hidden"] = hidden
    breakdown["optimizer"] = weights.update
    work = breakdown["forward"] + breakdown["backward"] + weights.update
    exposed += activations + open_
    given = sum(v.nbytes for v in values.values() if v.kind in ("input", "buffer", "constant"))
    breakdown["memory: weights"] = weights.memory
    breakdown["memory: activations"] = saved
    breakdown["memory: transient"] = transient
    breakdown["memory: inputs"] = float(given)
    return Predicted(
        step_time=work + exposed,
        compute_time=work,
        exposed_comm_time=exposed,
        peak_memory=weights.memory + saved + transient + given,
        comm_bytes=sent + activation_bytes + weights.sent,
        breakdown=dict(breakdown),
    )


def _strategy(op: Operation, expanded: Expanded, prices: Prices) -> Strategy:
    texts = expanded.choices.get(op.name)
    if texts is None:
        raise PlanError("the plan does not say how an op runs", where=op.name)
    try:
        made = apply(op.type, [parse_choice(t, op.rule) for t in texts], prices.sizes)
    except ValueError as error:
        raise PlanError("the plan names a choice that the op does not have", where=op.name, got=str(error)) from error
    if made is None:
        raise PlanError("the plan's choices do not go together", where=op.name, got=", ".join(texts))
    return made


def _path(moves: tuple[Move, ...], start: Layout, goal: Layout, where: str) -> tuple[Move, ...]:
    found = find_path(start, goal, moves)
    if found is None:
        raise PlanError(
            "the plan has no way from one layout to another", where=where, expected=str(goal), got=str(start)
        )
    return found


def _moves(texts: Sequence[str], axes: tuple[str, ...], value: Value) -> tuple[Move, ...]:
    try:
        return tuple(parse_move(t, axes, value.shape) for t in texts)
    except ValueError as error:
        raise PlanError("a conversion cannot be read", where=value.name, got=str(error)) from error


def _activations(
    analysis: Analysis,
    expanded: Expanded,
    strategies: dict[str, Strategy],
    prices: Prices,
    axes: tuple[str, ...],
) -> tuple[float, float, float]:
    """Seconds and bytes of conversions, and bytes of what is saved for backward."""
    whole = (I,) * len(axes)
    start: dict[str, Layout] = {}
    kept: dict[str, dict[Layout, None]] = defaultdict(dict)
    needs: dict[str, dict[Layout, None]] = defaultdict(dict)
    for op in analysis.operations:
        strategy = strategies[op.name]
        for k, v in enumerate(op.outputs):
            start[v] = strategy.outs[k]
            if k in saved_outputs(op):
                kept[v][strategy.outs[k]] = None
        for i, v in enumerate(op.inputs):
            root, layout = analysis.root(v), analysis.to_root(v, strategy.ins[i])
            if layout is None:
                raise PlanError("a view cannot show the layout that its user needs", where=f"{op.name}, input {v}")
            needs[root][layout] = None
            if i in saved_inputs(op):
                kept[root][layout] = None
    for root in must_be_whole(analysis):
        needs[root][whole] = None
    seconds = sent = saved = 0.0
    for root, layouts in needs.items():
        value = analysis.values[root]
        if value.kind == "parameter":
            continue
        moves = _moves(expanded.moves.get(root, ()), axes, value)
        used = dict.fromkeys(m for goal in layouts for m in _path(moves, start.get(root, whole), goal, root))
        for move in used:
            cost = prices.move(value, move.layout, move.axis, move.target)
            seconds += cost.seconds * prices.microbatches
            sent += cost.sent * prices.microbatches
    for root, layouts in kept.items():
        if analysis.values[root].kind == "op":
            saved += sum(prices.nbytes(analysis.values[root], layout) for layout in layouts)
    return seconds, sent, saved


class _Weights:
    """Sums over weights: seconds by (segment, direction), bytes sent, bytes held, seconds of the optimizer."""

    def __init__(
        self,
        analysis: Analysis,
        folding: Folding,
        expanded: Expanded,
        strategies: dict[str, Strategy],
        prices: Prices,
        axes: tuple[str, ...],
    ):
        self.analysis, self.expanded, self.prices, self.axes = analysis, expanded, prices, axes
        self.memory = self.sent = self.update = self.open = 0.0
        self.hiding: dict[tuple[int, str], float] = defaultdict(float)
        self.uses: dict[str, list[tuple[str, Layout]]] = defaultdict(list)
        for op in analysis.operations:
            for v, layout in zip(op.inputs, strategies[op.name].ins, strict=True):
                root = analysis.root(v)
                if analysis.values[root].kind == "parameter":
                    shown = analysis.to_root(v, layout)
                    assert shown is not None  # checked with the activations
                    self.uses[root].append((op.name, shown))
        alike = {member: edge.count for edge in edges(analysis, folding) for member in edge.members}
        self.segment: dict[str, int | None] = {}
        for name, uses in self.uses.items():
            segment = folding.segments[uses[0][0]]
            shared = folding.kinds.count(folding.kinds[segment]) == alike[name]
            self.segment[name] = segment if shared else None

    def add(self, name: str) -> None:
        value, prices, m = self.analysis.values[name], self.prices, self.prices.microbatches
        original = self.analysis.program.parameters[name].name
        decision = self.expanded.parameters.get(original)
        if decision is None:
            raise PlanError("the plan does not say where a weight lives", where=original)
        stored, held, accumulated = (
            parse_layout(t, self.axes, value.shape) for t in (decision.stored, decision.held, decision.accumulated)
        )
        self._pay(name, FORWARD, self._moves("gather", decision, value), stored, held, 1.0, gradient=False)
        for _, layout in self.uses[name]:
            goal = tuple(I if s == R else s for s in layout)
            use, reduce = self._moves("use", decision, value), self._moves("reduce", decision, value)
            self._pay(name, FORWARD, use, held, goal, m, gradient=False)
            if value.differentiable:
                self._pay(name, BACKWARD, use, held, goal, m, gradient=False)
                self._pay(name, BACKWARD, reduce, tuple(dual(s) for s in layout), accumulated, m, gradient=True)
        if value.differentiable:
            self._pay(name, BACKWARD, self._moves("final", decision, value), accumulated, stored, 1.0, gradient=True)
        self.update += prices.update(value, stored)
        self.memory += prices.weight_memory(value, stored, held, accumulated)

    def _moves(self, field: str, decision: ParameterDecision, value: Value) -> tuple[Move, ...]:
        return _moves(getattr(decision, field), self.axes, value)

    def _pay(
        self,
        name: str,
        direction: str,
        moves: tuple[Move, ...],
        start: Layout,
        goal: Layout,
        times: float,
        *,
        gradient: bool,
    ) -> None:
        value, segment = self.analysis.values[name], self.segment[name]
        for move in _path(moves, start, goal, name):
            cost = self.prices.weight_move(value, move.layout, move.axis, move.target, gradient=gradient)
            self.sent += cost.sent * times
            if segment is None:
                self.open += cost.seconds * times
            else:
                self.hiding[segment, direction] += cost.seconds * times

    def exposed(self, compute: dict[tuple[int, str], float]) -> tuple[float, float]:
        """Seconds that hide behind the compute of their segment, and seconds that do not."""
        total = self.open + sum(self.hiding.values())
        cover = self.prices.overlap
        shown = self.open + sum(max(0.0, s - cover * compute[key]) for key, s in self.hiding.items())
        return total - shown, shown
