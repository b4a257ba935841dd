"""Fold: repeated blocks of a program are found, so that a choice is made once per kind of block.

    embed -> [norm linear gelu linear add] -> [norm linear gelu linear add] -> [norm linear gelu linear add] -> loss
    -->
    embed -> [norm linear gelu linear add] x 3 -> loss

Two blocks are alike when their ops, rules, shapes, types and inner wiring are.  What a block takes from outside (the
value of the block before it, a mask, its own weights) is not compared: the edges between representatives are kept one
by one (`edges`), so that the first block, which follows an embedding, and the last, before the loss, are priced as
what they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from autopar.plan import ParameterDecision, Plan
from autopar.program import target_name
from autopar.rules.analysis import Analysis, Bound, Operation, contract

SMALL = 40  # programs of fewer ops are planned as they are: nothing is gained by folding
_PERIODS = 16  # how many candidate periods are tried
_ROUNDS = 4  # how many kinds of repeated region are looked for


@dataclass(frozen=True, slots=True)
class Folding:
    """ops, values: name -> representative, which is the first that is alike; parameters are among values.

    counts: representative op -> number of ops it stands for.  segments: op -> index of its segment, a block or what
    lies between blocks; alike segments have equal ``kinds``.  blocks: first op of each repeated block -> how often.
    """

    ops: dict[str, str]
    values: dict[str, str]
    counts: dict[str, int]
    segments: dict[str, int]
    kinds: tuple[int, ...]
    blocks: dict[str, int]


def fold(bound: Bound, *, repeat: bool = True) -> Folding:
    """Find repeated blocks.  Linear in the number of ops, and without recursion.

    repeat: False takes the whole program as one block, so that every op represents itself alone.
    """
    ops = bound.operations
    intern: dict[Hashable, int] = {}
    signatures = [intern.setdefault(_signature(op, bound), len(intern)) for op in ops]
    weights = [sum(_is_matrix(v, bound) for v in op.inputs) for op in ops]
    spans = _segments(signatures, weights) if repeat and len(ops) >= SMALL else [(0, len(ops))]
    producer = {v: i for i, op in enumerate(ops) for v in op.outputs}
    first: dict[Hashable, int] = {}
    kinds: list[int] = []
    mapping: dict[str, str] = {}
    segments: dict[str, int] = {}
    for k, (start, end) in enumerate(spans):
        key = _structure(start, end, ops, signatures, producer, bound)
        kind = first.setdefault(key, k) if sum(weights[start:end]) else k
        kinds.append(kind)
        origin = spans[kind][0]
        for i in range(start, end):
            mapping[ops[i].name] = ops[origin + i - start].name
            segments[ops[i].name] = k
    members = Counter(kinds)
    blocks = {ops[spans[k][0]].name: n for k, n in members.items() if n > 1}
    counts = dict(Counter(mapping.values()))
    return Folding(mapping, _values(bound, mapping), counts, segments, tuple(kinds), blocks)


def _signature(op: Operation, bound: Bound) -> Hashable:
    """All that decides how an op may run and what that costs; of a view also its cuts, by which it is contracted."""
    rule = op.rule
    points = tuple(bound.points[v] for v in (*op.inputs, *op.outputs)) if rule.view else ()
    return (
        target_name(op.node),
        rule.ins,
        rule.outs,
        tuple(sorted(rule.sizes.items())),
        rule.form,
        rule.sums,
        rule.whole,
        rule.saves,
        rule.flops,
        tuple(a.name for a in rule.algorithms),
        op.type.in_shapes,
        op.type.out_shapes,
        op.type.differentiable_ins,
        op.type.differentiable_outs,
        tuple(bound.values[v].dtype for v in (*op.inputs, *op.outputs)),
        points,
    )


def _is_matrix(name: str, bound: Bound) -> bool:
    value = bound.values[name]
    return value.kind == "parameter" and len(value.shape) > 1


def _segments(signatures: Sequence[int], weights: Sequence[int]) -> list[tuple[int, int]]:
    """Cut the sequence into blocks that repeat and what lies between, as (start, end)."""
    free = [(0, len(signatures))]
    taken: list[tuple[int, int]] = []
    for _ in range(_ROUNDS):
        best = max((_runs(signatures, weights, free, p) for p in _candidates(signatures, free)), key=_gain, default=[])
        if not best:
            break
        rest: list[tuple[int, int]] = []
        for start, end in free:
            at = start
            for a, period, count in (r for r in best if start <= r[0] < end):
                if a > at:
                    rest.append((at, a))
                taken += [(a + k * period, a + (k + 1) * period) for k in range(count)]
                at = a + period * count
            if at < end:
                rest.append((at, end))
        free = rest
    return sorted(taken + free)


def _gain(runs: list[tuple[int, int, int]]) -> int:
    return sum(period * (count - 1) for _, period, count in runs)


def _candidates(signatures: Sequence[int], free: Iterable[tuple[int, int]]) -> list[int]:
    """Distances at which ops recur, the most frequent ones, small before large."""
    found: Counter[int] = Counter()
    for start, end in free:
        last: dict[int, int] = {}
        for i in range(start, end):
            s = signatures[i]
            if s in last:
                found[i - last[s]] += 1
            last[s] = i
    return sorted(sorted(found, key=lambda d: (-found[d], d))[:_PERIODS])


def _runs(
    signatures: Sequence[int], weights: Sequence[int], free: Iterable[tuple[int, int]], period: int
) -> list[tuple[int, int, int]]:
    """(start, period, count) of every stretch that repeats itself after ``period`` ops.

    A block has two weight matrices at least, else several periods make one block: a chain of equal linears is best
    split by column and by row in turn, which one choice for all of them would forbid.
    """
    out = []
    for start, end in free:
        i = start
        while i + period < end:
            if signatures[i] != signatures[i + period]:
                i += 1
                continue
            a = i
            while i + period < end and signatures[i] == signatures[i + period]:
                i += 1
            matrices = sum(weights[a : a + period])
            if matrices:
                block = period * -(-2 // matrices)
                count = (i - a + period) // block
                if count > 1:
                    out.append((a, block, count))
                    i = max(i, a + block * count)
    return out


def _structure(
    start: int,
    end: int,
    ops: Sequence[Operation],
    signatures: Sequence[int],
    producer: dict[str, int],
    bound: Bound,
) -> Hashable:
    """Ops and inner wiring of a segment; values from outside are numbered in the order in which they are met."""
    outside: dict[str, int] = {}
    out: list[Hashable] = []
    for i in range(start, end):
        wires: list[tuple[int, int]] = []
        for v in ops[i].inputs:
            j = producer.get(v, -1)
            if start <= j:
                wires.append((j - start, ops[j].outputs.index(v)))
            else:
                wires.append((-1 - outside.setdefault(v, len(outside)), _KINDS.index(bound.values[v].kind)))
        out.append((signatures[i], *wires))
    return tuple(out)


_KINDS = ("op", "parameter", "buffer", "constant", "input")


def _values(bound: Bound, mapping: dict[str, str]) -> dict[str, str]:
    """Representatives of values: of an op's output that of its op; of others the first with alike uses."""
    by_name = {op.name: op for op in bound.operations}
    out: dict[str, str] = {}
    uses: dict[str, list[tuple[str, int]]] = {}
    for op in bound.operations:
        out.update(zip(op.outputs, by_name[mapping[op.name]].outputs, strict=True))
        for i, v in enumerate(op.inputs):
            uses.setdefault(v, []).append((mapping[op.name], i))
    first: dict[Hashable, str] = {}
    for name, value in bound.values.items():
        if name not in out:
            key = (value.kind, value.shape, value.dtype, value.differentiable, tuple(sorted(uses.get(name, ()))))
            out[name] = first.setdefault(key, name) if name in uses else name
    return out


# ------------------------------------------------------------------------------------------------ edges


@dataclass(frozen=True, slots=True)
class Use:
    """A value's use: representative op, position among its inputs, and the name under which a member takes it."""

    op: str
    position: int
    name: str
    count: int = 1


@dataclass(frozen=True, slots=True)
class Edge:
    """A root value and all who take it, for every value with alike producer and uses.

    name: the first of them.  members: how many.  whole: it must end invariant on every axis (the loss, a new value
    of a buffer, an output of inference).  Of a parameter ``uses`` count how often they occur.
    """

    name: str
    representative: str
    uses: tuple[Use, ...]
    whole: bool
    members: tuple[str, ...]

    @property
    def count(self) -> int:
        return len(self.members)


def must_be_whole(analysis: Analysis) -> frozenset[str]:
    """Roots of the values that every rank must end with: the loss, or all outputs of inference; new buffers."""
    program = analysis.program
    wanted = program.roots() if program.loss is None else [program.loss, *program.mutations.values()]
    return frozenset(analysis.root(v) for v in wanted if v in analysis.values)


def edges(analysis: Analysis, folding: Folding) -> tuple[Edge, ...]:
    """Every value with its uses, alike ones as one, in the order of the program."""
    uses: dict[str, dict[tuple[str, int, tuple[str, ...]], Use]] = {}
    for op in analysis.operations:
        for i, name in enumerate(op.inputs):
            chain, root = [], name
            while root in analysis.views:
                chain.append(folding.ops[analysis.views[root].node.name])
                root = analysis.views[root].source
            key = (folding.ops[op.name], i, tuple(chain))
            known = uses.setdefault(root, {}).get(key)
            uses[root][key] = Use(key[0], i, known.name, known.count + 1) if known else Use(key[0], i, name)
    whole = must_be_whole(analysis)
    found: dict[Hashable, list[str]] = {}
    for name in analysis.values:
        if name not in analysis.views and (name in uses or name in whole):
            parameter = analysis.values[name].kind == "parameter"
            keys = tuple(sorted((k, u.count if parameter else 1) for k, u in uses.get(name, {}).items()))
            found.setdefault((folding.values[name], keys, name in whole), []).append(name)
    return tuple(
        Edge(
            names[0], folding.values[names[0]], tuple(uses.get(names[0], {}).values()), names[0] in whole, tuple(names)
        )
        for names in found.values()
    )


class Expanded(NamedTuple):
    """A plan's decisions for everything in the program.

    choices: by op.  moves: by root value, where it is converted.  parameters: by original name.
    """

    choices: dict[str, tuple[str, ...]]
    moves: dict[str, tuple[str, ...]]
    parameters: dict[str, ParameterDecision]


def expand(plan: Plan, bound: Bound, analysis: Analysis | None = None, folding: Folding | None = None) -> Expanded:
    """Give every member of a repeated block the decisions of its representative.

    A plan without blocks decides every op by its own name.  Ops and values that it does not name are left out.
    """
    folding = folding or fold(bound, repeat=bool(plan.blocks))
    analysis = analysis or contract(bound, plan.device_mesh.sizes)
    choices = {d.name: d.choices for d in plan.ops}
    moves = {d.name: d.moves for d in plan.values}
    decided = {d.name: d for d in plan.parameters}
    names = bound.program.parameters
    value_moves: dict[str, tuple[str, ...]] = {}
    parameters: dict[str, ParameterDecision] = {}
    for edge in edges(analysis, folding):
        for member in edge.members:
            if edge.name in names and names[edge.name].name in decided:
                parameters[names[member].name] = decided[names[edge.name].name]
            elif edge.name in moves:
                value_moves[member] = moves[edge.name]
    ops = {op.name: choices[folding.ops[op.name]] for op in analysis.operations if folding.ops[op.name] in choices}
    return Expanded(ops, value_moves, parameters)
