"""What the roles of a form allow each op to do: the filters of a search for one tensor mode or sequence split.

    role            products                                other ops
    rows, depth     batch, else sequence                    batch, else sequence
    columns         columns                                 features; attention: heads
    tensor          columns or contraction                  features, sequence or whole; attention: heads
    turn (y, z)     columns on one, contraction on other    rows, as above, on one; features, or heads, on the other
    ulysses         sequence                                sequence; attention: heads
    ring            sequence                                sequence; attention: its ring algorithm
    other           weights whole                           anything

An op that has nothing of what its role wants, such as a scalar of the loss, runs whole or on what has no meaning.  The
weights of products are stored as the mode says: split over rows, columns and turns, whole over depth.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopar.errors import InfeasiblePlan, PlanError
from autopar.layout import I, P, R, S
from autopar.modes import COLUMNS as BY_COLUMNS
from autopar.modes import (
    CONTRACTION,
    MOST,
    PER_EXPERT,
    RING_KIND,
    STREAM,
    WHOLE,
    is_heads,
    matrix_input,
    role,
    weight_input,
)
from autopar.passes.fold import Folding
from autopar.program import place
from autopar.rules.analysis import Analysis, Operation
from autopar.rules.derive import Choice, Strategy, axis_choices, strategies
from autopar.rules.meaning import BATCH, FEATURES, SEQUENCE, UNKNOWN, Meanings
from autopar.solver.forms import COLUMNS, DEPTH, OTHER, RING, ROWS, TENSOR, TURN, ULYSSES, Form
from autopar.solver.space import Space

_WANTED, _ELSE, _TOLERATED, _REFUSED = range(4)
_Levels = tuple[list[Choice], ...]  # of one axis: choices that are wanted, that do as well, that are tolerated


@dataclass(frozen=True, slots=True)
class Restriction:
    """allowed: the choices of each representative op, by axis.  full: the products that follow every role.

    turning: ops that must turn (`_turns`), and whether exactly.
    """

    form: Form
    analysis: Analysis
    known: Meanings
    allowed: dict[str, tuple[frozenset[Choice], ...]]
    full: frozenset[str]
    turning: dict[str, bool]

    def keep_choice(self, op: Operation, choice: Choice, axis: int) -> bool:
        return choice in self.allowed[op.name][axis]

    def keep(self, op: Operation, strategy: Strategy) -> bool:
        exactly = self.turning.get(op.name)
        return exactly is None or _turns(self.form, op, strategy, self.analysis, self.known, exactly=exactly)

    def store(self, space: Space) -> Space:
        """Keep the layouts in which the mode stores the weights of products, where there are such."""
        as_used, whole = self.form.axes(COLUMNS, TURN, TENSOR), self.form.axes(DEPTH)
        split = [*self.form.axes(ROWS), *as_used]
        weights = []
        for weight in space.weights:
            if any(use.op in self.full and use.position in _matrices(self, use.op) for use in weight.edge.uses):
                stored = weight.stored
                for axis in (*split, *whole):
                    alike = tuple(s for s in stored if isinstance(s[axis], S) == (axis in split)) or stored
                    used = {layout[axis] for need in weight.needs for layout in need}
                    stored = tuple(s for s in alike if axis in as_used and s[axis] in used) or alike
                weight = replace(weight, stored=stored)
            weights.append(weight)
        return replace(space, weights=tuple(weights))


def _matrices(restriction: Restriction, name: str) -> tuple[int, ...]:
    op = next(o for o in restriction.analysis.operations if o.name == name)
    found = weight_input(op, restriction.analysis)
    return () if found is None else (found,)


def restriction(form: Form, analysis: Analysis, folding: Folding, known: Meanings) -> Restriction:
    """What every representative op may do under ``form``.

    Raises InfeasiblePlan, which says where and why in numbers, where attention cannot be split as the form wants it, or
    where products with less than half of the arithmetic can take its roles: the plan would not be what was asked for.
    """
    ops = [op for op in analysis.operations if folding.ops[op.name] == op.name]
    products = [op for op in ops if matrix_input(op, analysis) is not None]
    allowed: dict[str, tuple[frozenset[Choice], ...]] = {}
    full: set[str] = set()
    turning: dict[str, bool] = {}
    for op in ops:
        judged = [_judged(form, axis, op, analysis, known) for axis in range(len(form.roles))]
        found = _strictest(form, op, judged, analysis, known)
        if _is_attention(op, analysis, known):
            fitting = [frozenset(levels[_WANTED] + levels[_ELSE]) for levels in judged]
            alone = [a for a in form.axes(RING, *_BY_HEADS) if not fitting[a]]
            joint = [a for a in form.axes(RING, *_BY_HEADS) if found is not None and found[0][a] > fitting[a]]
            _check_attention(form, op, alone or joint, known, jointly=not alone)
        if found is None:  # not even whole: build says so
            allowed[op.name] = tuple(frozenset(_options(op, a, analysis)) for a in range(len(form.roles)))
            continue
        allowed[op.name], tolerated, exactly = found
        if exactly is not None:
            turning[op.name] = exactly
        if not tolerated and weight_input(op, analysis) is not None:
            full.add(op.name)
    followed = sum(_work(op, folding) for op in products if op.name in full)
    if not full or followed < MOST * sum(_work(op, folding) for op in products):
        raise _no_product(form, [op for op in products if op.name not in full], analysis)
    made = Restriction(form, analysis, known, allowed, frozenset(full), turning)
    _check_sequence(made, ops)
    return made


def _options(op: Operation, axis: int, analysis: Analysis) -> list[Choice]:
    return axis_choices(op.type, analysis.factor_points(op), analysis.axis_sizes[axis], quiet=False)


def _judged(form: Form, axis: int, op: Operation, analysis: Analysis, known: Meanings) -> _Levels:
    """The choices of an op on one axis, by how they suit it; those that are refused left out."""
    out: _Levels = ([], [], [], [])
    weight = weight_input(op, analysis)
    for choice in _options(op, axis, analysis):
        if form.sequence == "none" and known.of(op, choice) == SEQUENCE:
            continue
        if weight is not None:
            out[_of_product(form, form.roles[axis], role(op, weight, choice, known), choice)].append(choice)
        else:
            out[_of_other(form, form.roles[axis], op, choice, known, analysis)].append(choice)
    return out[:_REFUSED]


def _strictest(
    form: Form, op: Operation, judged: Sequence[_Levels], analysis: Analysis, known: Meanings
) -> tuple[tuple[frozenset[Choice], ...], bool, bool | None] | None:
    """(allowed, whether a choice is only tolerated, whether it turns exactly): the strictest that leaves a strategy."""
    turning = set(form.axes(TURN))
    for levels in sorted(
        itertools.product(range(_REFUSED), repeat=len(judged)), key=lambda ls: (ls.count(_TOLERATED), sum(ls), ls)
    ):
        allowed = tuple(frozenset(itertools.chain(*of[: k + 1])) for of, k in zip(judged, levels, strict=True))
        if not all(allowed) or any(k and not of[k] for of, k in zip(judged, levels, strict=True)):
            continue
        turns: list[bool | None] = [None]
        if turning and all(levels[a] < _TOLERATED for a in turning):
            turns = [False] if form.operands == "streamed" else [True, False]  # streamed operands split features twice
        legal = [
            s
            for s in strategies(
                op.type,
                analysis.factor_points(op),
                analysis.axis_sizes,
                keep=lambda c, a, kept=allowed: c in kept[a],  # type: ignore[misc]
            )
            if all(analysis.to_root(v, to) is not None for v, to in zip(op.inputs, s.ins, strict=True))
        ]
        for exactly in turns:
            if any(exactly is None or _turns(form, op, s, analysis, known, exactly=exactly) for s in legal):
                return allowed, _TOLERATED in levels, exactly
    return None


# ------------------------------------------------------------------------------------------------ what is wanted


def _of_product(form: Form, wanted: str, taken: str, choice: Choice) -> int:
    """How a product's choice, which takes the role ``taken``, suits an axis."""
    streamed = choice.kind == STREAM
    asked = not form.operands or streamed == (form.operands == "streamed")
    if wanted in (ROWS, DEPTH):
        near = taken in (BATCH, SEQUENCE) and not (streamed and wanted == DEPTH)
        fits = near and (asked or wanted == DEPTH)
        if fits and taken == SEQUENCE:
            return _ELSE
    elif wanted == COLUMNS:
        fits, near = taken == BY_COLUMNS and asked, taken == BY_COLUMNS
    elif wanted == TENSOR:
        fits, near = taken in (BY_COLUMNS, CONTRACTION) and not streamed, False
    elif wanted == TURN:
        fits = (taken == BY_COLUMNS and asked) or taken == CONTRACTION
        near = taken == BY_COLUMNS
    elif wanted in (ULYSSES, RING):
        fits, near = taken == SEQUENCE and not streamed, False
    elif wanted == OTHER:
        fits, near = taken not in (BY_COLUMNS, CONTRACTION) and not streamed, False
    else:
        return _WANTED
    return _WANTED if fits else _TOLERATED if near or taken in (WHOLE, PER_EXPERT) else _REFUSED


def _of_other(form: Form, wanted: str, op: Operation, choice: Choice, known: Meanings, analysis: Analysis) -> int:
    """How another op's choice suits an axis."""
    if wanted not in (ROWS, DEPTH, COLUMNS, TENSOR, TURN, ULYSSES, RING):
        return _WANTED
    meaning, mixes = known.of(op, choice), known.mixes_sequence(op)
    whole = choice.kind in (I, R, P)
    rows = meaning in (BATCH, SEQUENCE)
    features = is_heads(op, choice, known) if mixes else meaning == FEATURES
    if meaning == SEQUENCE and wanted in (ROWS, DEPTH, TURN):
        return _ELSE
    if wanted in (ROWS, DEPTH):
        fits = rows
    elif wanted == COLUMNS:
        fits = features
    elif wanted == TURN:
        fits = rows or features
    elif wanted == TENSOR:
        fits = _beside_1d(form, op, choice, features, whole, known, analysis)
    elif mixes and wanted == ULYSSES:
        fits = features
    elif wanted == RING and _is_attention(op, analysis, known):
        fits = choice.kind == RING_KIND
    else:
        fits = meaning == SEQUENCE
    near = whole or meaning == UNKNOWN or (mixes and meaning == SEQUENCE and wanted == ULYSSES)
    return _WANTED if fits else _TOLERATED if near else _REFUSED


def _beside_1d(
    form: Form, op: Operation, choice: Choice, features: bool, whole: bool, known: Meanings, analysis: Analysis
) -> bool:
    """Whether a choice is wanted around products in 1D.

    Attention splits its heads.  What sums over features or needs all of them, as a norm does, runs whole or splits the
    sequence; under Megatron's sequence split nothing runs whole.
    """
    if known.mixes_sequence(op):
        return features or (whole and not _is_attention(op, analysis, known))
    if features:
        return choice.kind == "vocabulary" or not _reduces(op, known)
    return known.of(op, choice) == SEQUENCE or (whole and form.sequence != "megatron")


def _reduces(op: Operation, known: Meanings) -> bool:
    """Whether an op sums over features, or needs all of them: a dimension of them alone may not be split freely."""
    alone = {names[0] for dims in op.rule.ins for names in dims if len(names) == 1}
    return any(f in alone for f in known.has(op, FEATURES) if f in op.rule.whole | op.rule.sums)


def _turns(
    form: Form, op: Operation, strategy: Strategy, analysis: Analysis, known: Meanings, *, exactly: bool
) -> bool:
    """Whether the two axes that turn take different roles of a product; of another op only one splits rows.

    exactly: the other then splits features; else both may.
    """
    y, z = (strategy.choices[a] for a in form.axes(TURN))
    weight = weight_input(op, analysis)
    if weight is not None:
        return {role(op, weight, c, known) for c in (y, z)} == {BY_COLUMNS, CONTRACTION}
    rows = [known.of(op, c) in (BATCH, SEQUENCE) for c in (y, z)]
    return not known.has(op, FEATURES) or (sum(rows) == 1 if exactly else not all(rows))


def _is_attention(op: Operation, analysis: Analysis, known: Meanings) -> bool:
    return bool(op.rule.flops) and known.mixes_sequence(op) and weight_input(op, analysis) is None


# ------------------------------------------------------------------------------------------------ refusals


def _refused(form: Form, **parts: object) -> InfeasiblePlan:
    return InfeasiblePlan(f"{form.title} cannot be on a mesh of {form.mesh}", **parts)  # type: ignore[arg-type]


def _check_attention(form: Form, op: Operation, lacking: Sequence[int], known: Meanings, *, jointly: bool) -> None:
    """Refuse attention that is whole on an axis on which its heads, or its rows, are to be split.

    lacking: the axes on which it would be whole.  jointly: there is enough for each of them, but not for all.
    """
    rule = op.rule
    heads = [rule.sizes[f] for f in known.has(op, FEATURES) if is_heads(op, Choice("split", f), known)]
    rows = [rule.sizes[f] for f in ("s", "t") if f in rule.factors]
    for axis in lacking:
        wanted = form.roles[axis]
        if wanted == RING and not any(a.name == RING_KIND for a in rule.algorithms):
            raise _refused(
                form,
                where=place(op.node),
                expected="torch's scaled_dot_product_attention, which can run as a ring",
                got=f"{op.name}, which cannot",
                hint="use attn_implementation='sdpa', or another sequence split",
            )
        sizes, what = (rows, "rows") if wanted == RING else (heads, "heads")
        axes = [axis]
        if jointly:
            axes = form.axes(RING, *_ALSO_ROWS) if wanted == RING else form.axes(*_BY_HEADS)
        n = math.prod(form.mesh.sizes[a] for a in axes)
        got = " and ".join(f"{h} {what}, {h} = {_parts(h, n)}" for h in sizes) or f"1 {what.rstrip('s')}"
        pair = {"rows": " (of queries, and of keys)", "heads": " (of keys and values, and of queries for each)"}[what]
        raise _refused(
            form,
            where=place(op.node),
            expected=f"{what} for each of the {n} ranks of {' '.join(map(form.name, axes))}"
            + (", equally many on all axes but the last" if len(axes) > 1 else ""),
            got=got + ("" if len(sizes) < 2 else pair),
            hint=f"a mesh with fewer ranks on {form.mesh.axes[axis]}, or another mode",
        )


_BY_HEADS = (COLUMNS, TENSOR, TURN, ULYSSES)  # roles that attention takes with its heads
_ALSO_ROWS = (ROWS, DEPTH)  # and those that may split the rows that a ring does


def _parts(size: int, n: int) -> str:
    """``2+2+1+0``: how ``size`` falls on n ranks."""
    each = -(-size // n)
    sizes = [max(0, min(each, size - k * each)) for k in range(n)]
    return "+".join(map(str, sizes)) if n <= 8 else f"{each} each, the last with {sizes[-1]}"


def _work(op: Operation, folding: Folding) -> float:
    return folding.counts[op.name] * sum(c * math.prod(op.rule.sizes[f] for f in fs) for c, fs in op.rule.flops)


def _no_product(form: Form, others: Sequence[Operation], analysis: Analysis) -> InfeasiblePlan:
    """others: products that cannot take the roles."""
    if not others:
        return _refused(form, expected="a product of activations and a weight", got="none in this model")
    op = others[0]
    weight, sizes = matrix_input(op, analysis), op.rule.sizes
    assert weight is not None  # a product has one
    inside = {f for dims in op.rule.ins[weight] for f in dims}
    outside = [f for dims in op.rule.outs[0] for f in dims]
    rows = " x ".join(str(sizes[f]) for f in outside if f not in inside) or "1"
    columns = " x ".join(str(sizes[f]) for f in outside if f in inside) or "1"
    summed = " x ".join(str(sizes[f]) for f in sorted(inside - set(outside))) or "1"
    roles = ", ".join(f"{_WORDS[r]} over {form.name(a)}" for a, r in enumerate(form.roles) if r in _WORDS)
    return _refused(
        form,
        where=place(op.node),
        expected=f"{roles}, with some for every rank",
        got=f"{rows} rows, {columns} columns, {summed} contracted",
        hint="another mesh or mode; this product is the first of those that cannot, which are most of the arithmetic",
    )


_WORDS = {
    ROWS: "rows",
    DEPTH: "rows",
    COLUMNS: "columns",
    TENSOR: "columns or the contraction",
    TURN: "columns and in turn the contraction",
    ULYSSES: "the sequence",
    RING: "the sequence",
}


def _check_sequence(made: Restriction, ops: Sequence[Operation]) -> None:
    """Refuse a split of a sequence that the model does not have."""
    form, known = made.form, made.known
    for split in (RING, ULYSSES):
        if split in form.roles and not any(_is_attention(op, made.analysis, known) for op in ops):
            raise _refused(
                form, expected="attention over a sequence", got="a model without it", hint="Search(sequence=None)"
            )
    if form.sequence == "megatron":
        (axis,) = form.axes(TENSOR)
        if not any(known.of(op, c) == SEQUENCE for op in ops for c in made.allowed[op.name][axis]):
            raise _refused(
                form,
                expected=f"ops that split a sequence over {form.name(axis)}",
                got="a sequence in no op, or one that is too short",
                hint="Search(sequence=None)",
            )


def check_zero(form: Form, zero: int | None) -> None:
    """Raise PlanError where a stage of ZeRO contradicts how a mode stores weights."""
    if zero is None or form.mode not in ("2d", "2.5d", "3d"):
        return
    if form.mode == "2.5d" and zero:
        wanted = "zero=None: weights are whole over depth and split over rows"
    elif zero == 0 and form.operands != "streamed":
        wanted = "zero=1, 2, 3 or None: weights are stored split over the axis of rows"
    else:
        return
    raise PlanError(f"{form.title} stores weights otherwise", where="Search(zero=)", expected=wanted, got=str(zero))
