"""Names for what a plan does, recognised from its choices.  The solver knows none of them.

Every product of activations and a weight, ``... k, n k -> ... n``, takes one role on each axis of the mesh:

    role              choice                          of n, k and the rows
    batch, sequence   split b0, stream b0 with k      a part of the rows; the weight whole, or S(k), streamed
    columns           split n, stream n with k        a part of n; the input whole, or S(k), streamed
    contraction       split k                         a part of k; the output is a pending sum
    experts           split e                         a part of what input, weight and output all have
    whole             I, R, P                         no part

and more than half of the arithmetic of products must follow a pattern for it to give its name:

    name              axes    pattern
    data parallel     d       batch; ZeRO-1 to 3: weights stored split over d, by when they are gathered
    tensor 1D         t       columns and contraction, not as below; with "sequence split" (Megatron): ops between
                              products split the sequence
    tensor 2D         x y     x: batch or sequence, weights stored split over x
                              y: columns, inputs stored split over y along their features, or streamed
    tensor 2.5D       d x y   2D, and d: batch or sequence again, weights stored whole over d; not where attention has
                              an algorithm for the sequence on d, which is 2D beside a sequence split
    tensor 3D         x y z   x: as of 2D; y and z: columns on one and contraction on the other
    sequence split    s       sequence; with "Ulysses": attention splits heads; with "ring attention": by its ring
    expert parallel   e       the experts of a mixture; with "token exchange": tokens travel to their experts
    vocabulary split  v       the algorithm of an embedding or a loss
    replicated        r       whole

2D, 2.5D and 3D say in brackets whether operands are gathered or streamed, and "Ulysses" or "ring attention" where one
of their axes splits attention so.  Data parallelism with weights stored split (ZeRO) over x and columns on y is 2D
exactly where activations too are stored split over y.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from autopar.layout import S, parse_layout
from autopar.passes.fold import expand
from autopar.plan import ParameterDecision, Plan
from autopar.program import target_name
from autopar.rules.analysis import Analysis, Bound, Operation, contract
from autopar.rules.derive import Choice, parse_choice
from autopar.rules.meaning import BATCH, FEATURES, SEQUENCE, Meanings, meanings
from autopar.rules.notation import Dims

DATA_PARALLEL = "data parallel"
TENSOR_1D = "tensor 1D"
TENSOR_2D = "tensor 2D"
TENSOR_25D = "tensor 2.5D"
TENSOR_3D = "tensor 3D"
SEQUENCE_SPLIT = "sequence split"
ULYSSES = "Ulysses"
RING = "ring attention"
STRIPED = "balanced order"
EXPERTS = "expert parallel"
EXCHANGE = "token exchange"
VOCABULARY = "vocabulary split"
REPLICATED = "replicated"
MIXED = "mixed"

COLUMNS, CONTRACTION, PER_EXPERT, WHOLE = (
    "columns",
    "contraction",
    "experts",
    "whole",
)  # BATCH and SEQUENCE are roles too
STREAM, RING_KIND, EXCHANGE_KIND = "stream", "ring", "exchange"  # kinds of choice
EXPERTS_OP = "autopar.experts"
MOST = 0.5  # part of the arithmetic that must follow a pattern for it to give its name

Group = tuple[tuple[str, ...], tuple[str, ...]]  # axes, names


def modes(plan: Plan, bound: Bound) -> dict[str, tuple[str, ...]]:
    """The names that fit each axis of the plan's mesh, the main one first; axes that act together have the same."""
    named = {axis: names for axes, names in groups(plan, bound) for axis in axes}
    return {axis: named[axis] for axis in plan.mesh}


def describe(plan: Plan, bound: Bound, known: Meanings | None = None) -> str:
    """``dp: data parallel; tp: tensor 1D, sequence split``, ``d: data parallel; x, y: tensor 2D (streamed)``."""
    return "; ".join(f"{', '.join(axes)}: {', '.join(names)}" for axes, names in groups(plan, bound, known))


def groups(plan: Plan, bound: Bound, known: Meanings | None = None) -> tuple[Group, ...]:
    """Axes that act together and their names, in the order of the mesh.  known: of the program, if they are at hand."""
    analysis = contract(bound, plan.device_mesh.sizes)
    expanded = expand(plan, bound, analysis)
    seen = _look(plan, analysis, expanded.choices, known or meanings(bound))
    matrices = {node for node in bound.program.parameters if len(bound.values[node].shape) > 1}
    products = [(op, matrix_input(op, analysis)) for op in analysis.operations]
    weights = {analysis.root(op.inputs[w]) for op, w in products if w is not None}
    stages, stored = (
        [_zero(a, plan, analysis, expanded.parameters, nodes) for a in range(len(plan.axes))]
        for nodes in (matrices, weights)
    )
    joint = _joint(seen, stored)
    names = {axes: [name, *_own_splits(seen.axes[a] for a in axes)] for axes, name in joint.items()}
    taken = set(itertools.chain(*joint))
    names |= {(a,): _alone(axis, stages[a]) for a, axis in enumerate(seen.axes) if a not in taken}
    for axes, said in names.items():
        of = [seen.axes[a] for a in axes]
        experts = sum((axis.experts for axis in of), Counter[str]())
        if sum(experts.values()):
            said += [EXPERTS, EXCHANGE] if experts[EXCHANGE_KIND] > MOST * sum(experts.values()) else [EXPERTS]
        if any(axis.vocabulary for axis in of):
            said.append(VOCABULARY)
    axis_names = tuple(plan.mesh)
    return tuple((tuple(axis_names[a] for a in axes), tuple(names[axes])) for axes in sorted(names))


# ------------------------------------------------------------------------------------------------ roles


def weight_input(op: Operation, analysis: Analysis) -> int | None:
    """The position of the weight matrix of a contraction; None for other ops."""
    if not op.rule.flops or not op.rule.sums:
        return None
    for i, v in enumerate(op.inputs):
        value = analysis.values[analysis.root(v)]
        if value.kind == "parameter" and len(value.shape) > 1:
            return i
    return None


def matrix_input(op: Operation, analysis: Analysis) -> int | None:
    """As `weight_input`, but for products of experts, which have a name of their own."""
    return None if target_name(op.node) == EXPERTS_OP else weight_input(op, analysis)


def role(op: Operation, weight: int, choice: Choice, known: Meanings) -> str:
    """The role that a product's choice takes on an axis; ``weight``: the weight's position."""
    if not choice.factor:
        return WHOLE
    in_weight, in_out = _has(op.rule.ins[weight], choice.factor), _has(op.rule.outs[0], choice.factor)
    in_other = any(_has(dims, choice.factor) for i, dims in enumerate(op.rule.ins) if i != weight and len(dims) > 1)
    if in_weight:
        return CONTRACTION if not in_out else PER_EXPERT if in_other else COLUMNS
    if known.of(op, choice) in (BATCH, SEQUENCE):
        return known.of(op, choice)
    return BATCH if op.rule.outs[0] and choice.factor in op.rule.outs[0][0] else SEQUENCE


def is_heads(op: Operation, choice: Choice, known: Meanings) -> bool:
    """Whether attention splits its heads: features that its first operand and its output have."""
    both = _has(op.rule.ins[0], choice.factor) and _has(op.rule.outs[0], choice.factor)
    return both and known.of(op, choice) == FEATURES


def _has(dims: Dims, factor: str) -> bool:
    return any(factor in names for names in dims)


# ------------------------------------------------------------------------------------------------ what a plan does


@dataclass(slots=True)
class _Axis:
    """What ops do on one axis, in units of arithmetic.

    work: of products by role.  streamed: of it by algorithms that stream.  spread: columns whose input is stored split
    along its features.  attention: of ops that mix positions.  sequence, vocabulary: numbers of ops.
    """

    work: Counter[str] = field(default_factory=Counter)
    streamed: int = 0
    spread: int = 0
    attention: Counter[str] = field(default_factory=Counter)
    experts: Counter[str] = field(default_factory=Counter)
    sequence: int = 0
    vocabulary: int = 0

    @property
    def rows(self) -> int:
        return self.work[BATCH] + self.work[SEQUENCE]

    @property
    def has_own_split(self) -> bool:
        """Whether it is known by how attention splits the sequence on it."""
        return self.work[SEQUENCE] > self.work[BATCH] and _most(self.attention) in _SPLITS


@dataclass(slots=True)
class _Seen:
    """axes: by position.  turns: work of products that split columns over one of two axes, and contract over the other.

    total: work of products.  given: of it by products of the batch itself, which every rank is given whole.
    """

    axes: list[_Axis]
    turns: Counter[tuple[int, int]] = field(default_factory=Counter)
    total: int = 0
    given: int = 0


def _look(plan: Plan, analysis: Analysis, choices: Mapping[str, tuple[str, ...]], known: Meanings) -> _Seen:
    seen = _Seen([_Axis() for _ in plan.axes])
    made: dict[str, tuple[str, ...]] = {}  # what the choices of a value's producer split, by value
    for op in analysis.operations:
        parsed = [parse_choice(text, op.rule) for text in choices[op.name]]
        made |= dict.fromkeys(op.outputs, tuple(known.of(op, c) for c in parsed))
        weight = matrix_input(op, analysis)
        flops = int(sum(c * math.prod(op.rule.sizes[f] for f in factors) for c, factors in op.rule.flops))
        roles = [WHOLE if weight is None else role(op, weight, c, known) for c in parsed]
        seen.total += flops if weight is not None and PER_EXPERT not in roles else 0
        for a, (axis, choice, taken) in enumerate(zip(seen.axes, parsed, roles, strict=True)):
            axis.vocabulary += choice.kind == "vocabulary"
            if target_name(op.node) == EXPERTS_OP:
                axis.experts[choice.kind] += flops if choice.factor == "e" or choice.kind == EXCHANGE_KIND else 0
            elif weight is None:
                axis.sequence += known.of(op, choice) == SEQUENCE and len(op.rule.outs[0]) == 3
                if known.mixes_sequence(op):
                    axis.attention[_attention(op, choice, known, plan.axes[a][1])] += flops
            elif taken == PER_EXPERT:
                axis.experts[choice.kind] += flops
            elif PER_EXPERT not in roles:
                axis.work[taken] += flops
                axis.streamed += flops * (choice.kind == STREAM)
        if weight is not None and PER_EXPERT not in roles:
            x = next(i for i in range(len(op.inputs)) if i != weight)
            source = analysis.root(op.inputs[x])
            seen.given += flops * (source not in made)
            stored = made.get(source, ("",) * len(parsed))
            for axis, choice, taken, split in zip(seen.axes, parsed, roles, stored, strict=True):
                axis.spread += flops * (taken == COLUMNS and (split == FEATURES or choice.kind == STREAM))
        for y, z in itertools.combinations(range(len(roles)), 2):
            seen.turns[y, z] += flops * ({roles[y], roles[z]} == {COLUMNS, CONTRACTION})
    return seen


def _most(kinds: Counter[str]) -> str:
    return max(sorted(kinds), key=lambda kind: kinds[kind], default="")


def _attention(op: Operation, choice: Choice, known: Meanings, ranks: int) -> str:
    if choice.kind == RING_KIND:
        return STRIPED if choice.cut.m > 1 and choice.cut.N * choice.cut.u == ranks else RING
    return ULYSSES if is_heads(op, choice, known) else ""


def _joint(seen: _Seen, stages: list[int]) -> dict[tuple[int, ...], str]:
    """Groups of axes that make one tensor mode, with its name; no axis is in two."""
    most = MOST * seen.total
    rows = [a for a, axis in enumerate(seen.axes) if axis.rows > most]
    own = {a for a in rows if seen.axes[a].has_own_split}
    split = sorted((a for a in rows if stages[a]), key=lambda a: (a in own, seen.axes[a].streamed <= most, -a))
    if not split or not seen.total:
        return {}
    x, whole = split[0], [a for a in rows if not stages[a] and a not in own]
    for (y, z), work in seen.turns.items():
        if work > most:
            return {tuple(sorted((x, y, z))): f"{TENSOR_3D} ({_operands(seen, x, y, z)})"}
    told = seen.total - seen.given  # how the batch would be stored is not the plan's to say
    for y, axis in enumerate(seen.axes):
        if axis.spread > MOST * told if told else axis.work[COLUMNS] > most:
            plain = f"({_operands(seen, x, y)})"
            if whole:
                return {tuple(sorted((whole[0], x, y))): f"{TENSOR_25D} {plain}"}
            return {tuple(sorted((x, y))): f"{TENSOR_2D} {plain}"}
    return {}


def _operands(seen: _Seen, x: int, *others: int) -> str:
    """How most operands come together: those used by rows on x, those used by columns on the other axes."""
    parts = (seen.axes[x].streamed, sum(seen.axes[a].streamed for a in others))
    streamed = [part > MOST * seen.total for part in parts]
    return "streamed" if all(streamed) else "partly streamed" if any(parts) else "gathered"


_SPLITS = {ULYSSES: [ULYSSES], RING: [RING], STRIPED: [RING, STRIPED]}  # by what attention does most


def _own_splits(axes: Iterable[_Axis]) -> list[str]:
    return list(dict.fromkeys(name for axis in axes if axis.has_own_split for name in _SPLITS[_most(axis.attention)]))


def _alone(axis: _Axis, stage: int) -> list[str]:
    """The names of an axis that acts on its own."""
    total = sum(axis.work.values()) or 1
    if axis.work[BATCH] > MOST * total:
        return [DATA_PARALLEL, *([f"ZeRO-{stage}"] if stage else [])]
    if axis.work[COLUMNS] + axis.work[CONTRACTION] > MOST * total:
        return [TENSOR_1D, *([SEQUENCE_SPLIT] if axis.sequence else [])]
    if axis.work[SEQUENCE] > MOST * total:
        found = _most(axis.attention)
        return [SEQUENCE_SPLIT, *_SPLITS.get(found, [])]
    return [REPLICATED if axis.work[WHOLE] > MOST * total else MIXED]


def _zero(
    a: int, plan: Plan, analysis: Analysis, parameters: Mapping[str, ParameterDecision], nodes: Collection[str]
) -> int:
    """The stage of ZeRO of most of the elements of ``nodes`` on an axis on which they are used whole."""
    sizes: Counter[int] = Counter()
    axes = tuple(plan.mesh)
    for node, parameter in analysis.program.parameters.items():
        decision = parameters.get(parameter.name)
        if decision is None or node not in nodes:
            continue
        shape = analysis.values[node].shape
        stored, held, accumulated = (
            isinstance(parse_layout(text, axes, shape)[a], S)
            for text in (decision.stored, decision.held, decision.accumulated)
        )
        stage = 0 if not stored else 3 if held else 2 if accumulated else 1
        sizes[stage] += math.prod(shape)
    return max(sorted(sizes), key=lambda stage: sizes[stage], default=0)
