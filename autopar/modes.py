"""Names for what a plan does: data parallel, ZeRO-1 to 3, tensor 1D, sequence split.

The solver knows none of them; a pattern of choices on an axis is recognised afterwards, to explain a plan.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

from autopar.layout import S, parse_layout
from autopar.passes.fold import expand
from autopar.plan import ParameterDecision, Plan
from autopar.rules.analysis import Analysis, Bound, Operation, contract
from autopar.rules.derive import Choice, parse_choice
from autopar.rules.notation import Dims

DATA_PARALLEL = "data parallel"
TENSOR_1D = "tensor 1D"
SEQUENCE = "sequence split"
VOCABULARY = "vocabulary split"
REPLICATED = "replicated"
MIXED = "mixed"

_BATCH, _ROWS, _COLUMN, _ROW, _WHOLE = "batch", "rows", "column", "row", "whole"
_MOST = 0.5  # part of the arithmetic that must follow a pattern for it to give its name


def modes(plan: Plan, bound: Bound) -> dict[str, tuple[str, ...]]:
    """The names that fit each axis of the plan's mesh, the main one first."""
    analysis = contract(bound, plan.device_mesh.sizes)
    expanded = expand(plan, bound, analysis)
    return {
        axis: _axis(a, axis, plan, analysis, expanded.choices, expanded.parameters) for a, axis in enumerate(plan.mesh)
    }


def describe(plan: Plan, bound: Bound) -> str:
    """``dp: data parallel, ZeRO-1; tp: tensor 1D, sequence split``."""
    return "; ".join(f"{axis}: {', '.join(names)}" for axis, names in modes(plan, bound).items())


def _axis(
    a: int,
    axis: str,
    plan: Plan,
    analysis: Analysis,
    choices: Mapping[str, tuple[str, ...]],
    parameters: Mapping[str, ParameterDecision],
) -> tuple[str, ...]:
    work: Counter[str] = Counter()
    sequence = vocabulary = 0
    for op in analysis.operations:
        choice = parse_choice(choices[op.name][a], op.rule)
        weight = _weight_input(op, analysis)
        if choice.kind == "vocabulary":
            vocabulary += 1
        elif weight is None:
            sequence += _dimension(op.rule.outs[0], choice) == 1 and len(op.rule.outs[0]) == 3
        if weight is not None:
            flops = sum(c * math.prod(op.rule.sizes[f] for f in factors) for c, factors in op.rule.flops)
            work[_role(op, weight, choice)] += int(flops)
    total = sum(work.values()) or 1
    names: list[str] = []
    if work[_BATCH] > _MOST * total:
        names.append(DATA_PARALLEL)
        stage = _zero(a, plan, analysis, parameters)
        names += [f"ZeRO-{stage}"] if stage else []
    elif work[_COLUMN] + work[_ROW] > _MOST * total and work[_COLUMN] and work[_ROW]:
        names.append(TENSOR_1D)
        names += [SEQUENCE] if sequence else []
    elif work[_ROWS] > _MOST * total:
        names.append(SEQUENCE)
    elif work[_WHOLE] > _MOST * total:
        names.append(REPLICATED)
    else:
        names.append(MIXED)
    return (*names, VOCABULARY) if vocabulary else tuple(names)


def _weight_input(op: Operation, analysis: Analysis) -> int | None:
    """The position of the weight matrix of a contraction; None for other ops."""
    if not op.rule.flops or not op.rule.sums:
        return None
    for i, v in enumerate(op.inputs):
        value = analysis.values[analysis.root(v)]
        if value.kind == "parameter" and len(value.shape) > 1:
            return i
    return None


def _dimension(dims: Dims, choice: Choice) -> int | None:
    return next((d for d, names in enumerate(dims) if choice.factor in names), None)


def _role(op: Operation, weight: int, choice: Choice) -> str:
    if not choice.factor:
        return _WHOLE
    if _dimension(op.rule.ins[weight], choice) is not None:
        return _COLUMN if _dimension(op.rule.outs[0], choice) is not None else _ROW
    return _BATCH if _dimension(op.rule.outs[0], choice) == 0 else _ROWS


def _zero(a: int, plan: Plan, analysis: Analysis, parameters: Mapping[str, ParameterDecision]) -> int:
    """The stage of ZeRO of most of the elements of weight matrices on an axis on which they are used whole."""
    sizes: Counter[int] = Counter()
    axes = tuple(plan.mesh)
    for node, parameter in analysis.program.parameters.items():
        decision = parameters.get(parameter.name)
        if decision is None or len(parameter.shape) < 2:
            continue
        shape = analysis.values[node].shape
        stored, held, accumulated = (
            isinstance(parse_layout(text, axes, shape)[a], S)
            for text in (decision.stored, decision.held, decision.accumulated)
        )
        stage = 0 if not stored else 3 if held else 2 if accumulated else 1
        sizes[stage] += math.prod(shape)
    return max(sorted(sizes), key=lambda stage: sizes[stage], default=0)
