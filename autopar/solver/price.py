"""The cost of a finished plan, added up from what it says: over the whole program, not over representatives.

This is another way to the figure that the integer program minimises; tests hold that both agree.  What the plan
predicts is the simulation of that step (`schedule`), which knows behind what each reduction of gradients can hide; the
integer program only knows the block.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.cost_model.timeline import Timeline, simulate
from autopar.errors import PlanError
from autopar.layout import I, Layout, Move, R, dual, parse_layout
from autopar.passes.fold import Expanded, Folding, edges, expand, must_be_whole
from autopar.plan import ParameterDecision, Plan, Predicted, find_path, parse_move
from autopar.rules.analysis import Analysis, Bound, Operation, Value
from autopar.rules.derive import Strategy, apply, parse_choice
from autopar.solver.prices import Prices, saved_inputs, saved_outputs
from autopar.solver.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Priced:
    """What a plan costs.  objective: seconds as the integer program counts them."""

    predicted: Predicted
    objective: float
    timeline: Timeline


def price(plan: Plan, bound: Bound, analysis: Analysis, folding: Folding, prices: Prices) -> Priced:
    """Seconds of a step, and bytes on the fullest rank.  Raises PlanError where the plan leaves a gap."""
    expanded = expand(plan, bound, analysis, folding)
    axes, m = tuple(plan.mesh), prices.microbatches
    strategies = {op.name: _strategy(op, expanded, prices) for op in analysis.operations}
    values = analysis.values
    backward: dict[int, float] = defaultdict(float)
    breakdown: dict[str, float] = defaultdict(float)
    sent = transient = inside = 0.0
    schedule, costs = Schedule(m), {}
    for op in analysis.operations:
        cost = prices.op(op, strategies[op.name], [values[v] for v in op.inputs], [values[v] for v in op.outputs])
        costs[op.name] = cost
        backward[folding.segments[op.name]] += cost.backward * m
        breakdown["forward"] += cost.forward * m
        breakdown["backward"] += cost.backward * m
        breakdown["inside ops"] += (cost.communication + cost.communication_back) * m
        breakdown["inside ops hidden"] += cost.hidden * m
        sent += cost.sent * m
        transient, inside = max(transient, cost.transient), inside + cost.inside
    activations, activation_bytes, saved = _activations(analysis, expanded, strategies, prices, axes, schedule)
    breakdown["activations"], saved = activations, saved + inside
    weights = _Weights(analysis, folding, expanded, strategies, prices, axes, schedule)
    for name in weights.uses:
        weights.add(name)
    breakdown["optimizer"] = schedule.update
    timeline = simulate(schedule.tasks([op.name for op in analysis.operations], costs), prices.overlap)
    work = breakdown["forward"] + breakdown["backward"] + schedule.update
    held_up = breakdown["inside ops"] + activations + weights.open
    hidden = work + held_up + weights.background - timeline.seconds
    hidden = hidden if hidden > 1e-9 * timeline.seconds else 0.0  # else rounding
    breakdown["weights"] = weights.open + weights.background - hidden
    breakdown["weights hidden"] = hidden
    given = sum(v.nbytes for v in values.values() if v.kind in ("input", "buffer", "constant"))
    breakdown["memory: weights"] = weights.memory
    breakdown["memory: activations"] = saved
    breakdown["memory: transient"] = transient
    breakdown["memory: inputs"] = float(given)
    predicted = Predicted(
        step_time=timeline.seconds,
        compute_time=work,
        exposed_comm_time=timeline.seconds - work,
        peak_memory=weights.memory + saved + transient + given,
        comm_bytes=sent + activation_bytes + weights.sent,
        breakdown=dict(breakdown),
    )
    return Priced(predicted, work + held_up + weights.exposed(backward), timeline)


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
    schedule: Schedule,
) -> tuple[float, float, float]:
    """Seconds and bytes of conversions, and bytes of what is saved for backward."""
    whole = (I,) * len(axes)
    start: dict[str, Layout] = {}
    kept: dict[str, dict[Layout, None]] = defaultdict(dict)
    needs: dict[str, dict[Layout, str]] = defaultdict(dict)  # by layout, the op that needs it first
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
            needs[root].setdefault(layout, op.name)
            if i in saved_inputs(op):
                kept[root][layout] = None
    last = analysis.operations[-1].name
    for root in must_be_whole(analysis):
        needs[root].setdefault(whole, last)
    seconds = sent = saved = 0.0
    for root, needed in needs.items():
        value = analysis.values[root]
        if value.kind == "parameter":
            continue
        moves = _moves(expanded.moves.get(root, ()), axes, value)
        used: dict[Move, str] = {}
        for goal, op_name in needed.items():
            for move in _path(moves, start.get(root, whole), goal, root):
                used.setdefault(move, op_name)
        for move, op_name in used.items():
            cost = prices.move(value, move.layout, move.axis, move.target)
            schedule.forward[op_name] += cost.forward
            schedule.backward[op_name] += cost.backward
            seconds += cost.seconds * prices.microbatches
            sent += cost.sent * prices.microbatches
    for root, layouts in kept.items():
        if analysis.values[root].kind == "op":
            saved += sum(prices.nbytes(analysis.values[root], layout) for layout in layouts)
    return seconds, sent, saved


class _Weights:
    """Sums over weights.

    open: seconds that ops wait for.  background: seconds of what is reduced once a step.  sent, memory: bytes.
    """

    def __init__(
        self,
        analysis: Analysis,
        folding: Folding,
        expanded: Expanded,
        strategies: dict[str, Strategy],
        prices: Prices,
        axes: tuple[str, ...],
        schedule: Schedule,
    ):
        self.analysis, self.expanded, self.prices, self.axes = analysis, expanded, prices, axes
        self.schedule = schedule
        self.memory = self.sent = self.open = self.background = 0.0
        self.hiding: dict[int | None, float] = defaultdict(float)  # of the background, by segment
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
        value, schedule = self.analysis.values[name], self.schedule
        original = self.analysis.program.parameters[name].name
        decision = self.expanded.parameters.get(original)
        if decision is None:
            raise PlanError("the plan does not say where a weight lives", where=original)
        stored, held, accumulated = (
            parse_layout(t, self.axes, value.shape) for t in (decision.stored, decision.held, decision.accumulated)
        )
        m = self.prices.microbatches
        gather = self._seconds(name, self._moves("gather", decision, value), stored, held, 1, gradient=False)
        schedule.gather += gather
        self.open += gather
        for op, layout in self.uses[name]:
            goal = tuple(I if s == R else s for s in layout)
            use, reduce = self._moves("use", decision, value), self._moves("reduce", decision, value)
            again = 2 if value.differentiable else 1  # gathered weights are dropped after forward
            gathered = self._seconds(name, use, held, goal, again * m, gradient=False)
            schedule.forward[op] += gathered
            self.open += again * m * gathered
            if value.differentiable:
                produced = tuple(dual(s) for s in layout)
                reduced = self._seconds(name, reduce, produced, accumulated, m, gradient=True)
                schedule.backward[op] += gathered + reduced
                self.open += m * reduced
        if value.differentiable:
            final = self._moves("final", decision, value)
            reduced = self._seconds(name, final, accumulated, stored, 1, gradient=True)
            self.hiding[self.segment[name]] += reduced
            self.background += reduced
            first = self.uses[name][0][0]  # in backward the last to hand over its gradient
            schedule.reductions.append((first, self.prices.nbytes(value, accumulated), reduced))
        schedule.update += self.prices.update(value, stored)
        self.memory += self.prices.weight_memory(value, stored, held, accumulated)

    def _moves(self, field: str, decision: ParameterDecision, value: Value) -> tuple[Move, ...]:
        return _moves(getattr(decision, field), self.axes, value)

    def _seconds(
        self, name: str, moves: tuple[Move, ...], start: Layout, goal: Layout, times: int, *, gradient: bool
    ) -> float:
        """Of one run of the moves; the bytes of ``times`` runs are counted."""
        value, seconds = self.analysis.values[name], 0.0
        for move in _path(moves, start, goal, name):
            cost = self.prices.weight_move(value, move.layout, move.axis, move.target, gradient=gradient)
            self.sent += cost.sent * times
            seconds += cost.seconds
        return seconds

    def exposed(self, backward: dict[int, float]) -> float:
        """Seconds of the background that do not hide behind the backward pass of their own segment."""
        cover = self.prices.overlap
        return sum(s if k is None else max(0.0, s - cover * backward[k]) for k, s in self.hiding.items())
