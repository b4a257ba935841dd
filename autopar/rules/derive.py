"""What follows from a rule: every legal way to run an op on a mesh, and the program that each rank then runs.

On one axis an op may run
    I               on whole, invariant values
    R               on whole, replicated values
    split f at cut  inputs and outputs that have factor f are S; the other inputs are R, the other outputs P
    linear          P in, P out: one input of each product in the rule's form carries the pending sum, the others are R
    parts f at cut  as split, by an algorithm that communicates itself
    ring f with g   so too, and what lacks f is split along its partner g
and on several axes it runs so on each, the cuts of one factor nested.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from autopar.layout import I, Layout, P, R, S, Shape, State, canonical, is_valid
from autopar.rules.factors import Cut, cuts_nest, dimension_cut
from autopar.rules.notation import Algorithm, Dims, Rule


class Choice(NamedTuple):
    """How one op runs on one axis.  ``kind`` is I, R, P (linear), split, or the name of an algorithm."""

    kind: str
    factor: str = ""
    cut: Cut = Cut(1, 1, 1)
    terms: tuple[int, ...] = ()  # of a linear choice: the input of each product that carries the sum
    image: tuple[str, Cut] | None = None  # what it cuts of the output's positions, by an algorithm
    partner: tuple[str, Cut] | None = None  # what it cuts of tensors without the factor, by an algorithm

    def __str__(self) -> str:
        if self.kind in (I, R):
            return self.kind
        if self.kind == P:
            return "P " + ",".join(map(str, self.terms))
        partner = "" if self.partner is None else f" with {_cut_text(*self.partner)}"
        return f"{self.kind} {_cut_text(self.factor, self.cut)}{partner}"


def _cut_text(factor: str, cut: Cut) -> str:
    return factor if cut.m == cut.u == 1 else f"{factor} at {cut.m},{cut.N},{cut.u}"


_CUT = r"(\S+)(?: at (\d+),(\d+),(\d+))?"
_SPLIT = re.compile(rf"(\w+) {_CUT}(?: with {_CUT})?")


def parse_choice(text: str, rule: Rule) -> Choice:
    """Inverse of ``str``.  Raises ValueError where the text is no choice of ``rule``."""
    if text in (I, R):
        return Choice(text)
    if re.fullmatch(r"P \d+(,\d+)*", text):
        terms = tuple(map(int, text[2:].split(",")))
        if terms not in itertools.product(*rule.form) or not rule.form:
            raise ValueError(f"{text!r} is no choice here: the op is linear in {rule.form or 'nothing'}")
        return Choice(P, terms=terms)
    match = _SPLIT.fullmatch(text)
    if match is None or (match[1], match[2]) not in splittable(rule):
        options = ", ".join(" ".join(s) for s in splittable(rule)) or "no split"
        raise ValueError(f"{text!r} is no choice here: expected I, R, or {options}")
    cuts = []
    for factor, numbers in ((match[2], match.groups()[2:5]), (match[6], match.groups()[6:9])):
        if factor is None:
            continue
        size = rule.sizes.get(factor, 1)
        cut = Cut(1, size, 1) if numbers[0] is None else Cut(*map(int, numbers))
        if cut.m * cut.N * cut.u != size:
            raise ValueError(f"{text!r}: {cut.m} * {cut.N} * {cut.u} is not {size}")
        cuts.append(cut)
    choice = Choice(match[1], match[2], cuts[0], partner=None if match[6] is None else (match[6], cuts[1]))
    if match[6] != partner_of(rule, choice):
        raise ValueError(f"{text!r}: expected 'with {partner_of(rule, choice)}'")
    return choice


class Strategy(NamedTuple):
    """One way to run an op on the whole mesh: a choice per axis and the layouts that follow."""

    choices: tuple[Choice, ...]
    ins: tuple[Layout, ...]
    outs: tuple[Layout, ...]

    def cuts(self, factor: str) -> tuple[tuple[int, Cut], ...]:
        """(axis, cut) of ``factor``, from the outside in."""
        found = [(a, c.cut) for a, c in enumerate(self.choices) if c.factor == factor]
        found += [(a, c.image[1]) for a, c in enumerate(self.choices) if c.image and c.image[0] == factor]
        return tuple(sorted(found, key=lambda t: t[1].m))

    def pairs(self) -> list[tuple[str, str, tuple[tuple[int, Cut], ...]]]:
        """(factor, partner, the partner's cuts in tensors without the factor) of every choice that has a partner."""
        return [
            (c.factor, c.partner[0], tuple(sorted([*self.cuts(c.partner[0]), (a, c.partner[1])], key=lambda t: t[1].m)))
            for a, c in enumerate(self.choices)
            if c.partner is not None
        ]

    @property
    def is_parallel(self) -> bool:
        return any(c.factor for c in self.choices)


@dataclass(frozen=True, slots=True)
class OpType:
    """What `strategies` must know of a node beside its rule."""

    rule: Rule
    in_shapes: tuple[Shape, ...]
    out_shapes: tuple[Shape, ...]
    differentiable_ins: tuple[bool, ...]  # inputs through which a gradient flows
    differentiable_outs: tuple[bool, ...]
    floating_ins: tuple[bool, ...]
    logical: tuple[bool, ...] = ()  # inputs and outputs of truth values, which do not add up; () for none


def algorithm_of(rule: Rule, choice: Choice) -> Algorithm | None:
    return next((a for a in rule.algorithms if a.name == choice.kind and choice.factor in a.splits), None)


def partner_of(rule: Rule, choice: Choice) -> str | None:
    """The factor that is split along with the choice's own, in tensors without that."""
    algorithm = algorithm_of(rule, choice)
    return None if algorithm is None else algorithm.pairs.get(choice.factor)


def _has(dims: Dims, factor: str) -> bool:
    return any(factor in names for names in dims)


def is_paired(dims: Dims, choice: Choice) -> bool:
    """Whether the choice splits a tensor of these dimensions along the partner."""
    return choice.partner is not None and _has(dims, choice.partner[0]) and not _has(dims, choice.factor)


def _axis_states(op: OpType, choice: Choice, n: int) -> tuple[list[State], list[State]]:
    """States of inputs and outputs on one axis."""
    rule = op.rule
    if choice.kind in (I, R):
        return [choice.kind] * len(rule.ins), [choice.kind] * len(rule.outs)
    if choice.kind == P:
        return [P if i in choice.terms else R for i in range(len(rule.ins))], [P] * len(rule.outs)
    algorithm = algorithm_of(rule, choice)
    lacking: State = P if algorithm is None else algorithm.lacking

    def state(dims: Dims, otherwise: State) -> State:
        cut = dimension_cut(dims, choice.factor, choice.cut, rule.sizes)
        for other in (choice.image, choice.partner):
            if cut is None and other is not None:
                cut = dimension_cut(dims, *other, rule.sizes)
        return otherwise if cut is None else canonical(S(*cut), n)

    ins = [state(t, R) for t in rule.ins]
    outs = [state(t, lacking) for t in rule.outs]
    if algorithm is None and P in outs:
        for term in rule.form:  # a product without the factor is added once, not once per rank
            if all(ins[i] == R for i in term):
                ins[term[0]] = P
    return ins, outs


@dataclass(frozen=True, slots=True)
class _Known:
    """What `apply` has found out of one op on one mesh: states by choice and ranks, and which layouts are valid."""

    states: dict[tuple[Choice, int], tuple[list[State], list[State]]] = field(default_factory=dict)
    valid: dict[tuple[Shape, Layout], bool] = field(default_factory=dict)


def apply(
    op: OpType, choices: Sequence[Choice], axis_sizes: Sequence[int], known: _Known | None = None
) -> Strategy | None:
    """The strategy that makes ``choices``; None where cuts do not nest or two algorithms would have to be joined.

    known: kept from one call to the next, of this op on this mesh.
    """
    rule, known = op.rule, known or _Known()
    algorithms = {c.kind for c in choices if c.kind not in (I, R, P, "split")}
    if len(algorithms) > 1:
        return None
    if rule.filled and any(
        c.kind == "split" and _leaves_empty(c.cut, n) for c, n in zip(choices, axis_sizes, strict=True)
    ):
        return None
    imaged = [c.factor for c in choices if c.factor in rule.images]
    if len(imaged) > len(set(imaged)):
        return None
    if any(sum(is_paired(dims, c) for c in choices) > 1 for dims in (*rule.ins, *rule.outs)):
        return None  # one ring in another
    choices = [_with_image(rule, c) if c.factor in rule.images else c for c in choices]
    if any(c.factor in rule.images and c.image is None for c in choices):
        return None
    for factor in {c.factor for c in choices if c.factor}:
        if not cuts_nest(
            rule.sizes[factor], [(a, c.cut) for a, c in enumerate(choices) if c.factor == factor], axis_sizes
        ):
            return None
    ins: list[list[State]] = [[] for _ in rule.ins]
    outs: list[list[State]] = [[] for _ in rule.outs]
    for choice, n in zip(choices, axis_sizes, strict=True):
        states = known.states.get((choice, n))
        if states is None:
            states = known.states[choice, n] = _axis_states(op, choice, n)
        for column, new, flows in (
            (ins, states[0], op.differentiable_ins),
            (outs, states[1], op.differentiable_outs),
        ):
            for tensor, state, gradient in zip(column, new, flows, strict=True):
                tensor.append(I if state == R and not gradient else state)  # without a gradient R and I are one
    strategy = Strategy(tuple(choices), tuple(map(tuple, ins)), tuple(map(tuple, outs)))
    for shape, layout in itertools.chain(
        zip(op.in_shapes, strategy.ins, strict=True), zip(op.out_shapes, strategy.outs, strict=True)
    ):
        valid = known.valid.get((shape, layout))
        if valid is None:
            valid = known.valid[shape, layout] = is_valid(shape, layout, axis_sizes)
        if not valid:
            return None
    if any(P in layout for layout in itertools.compress((*strategy.ins, *strategy.outs), op.logical)):
        return None
    return strategy


def _with_image(rule: Rule, choice: Choice) -> Choice:
    """``choice`` with the cut of the output's positions: in the same units where they divide, else as torch.chunk.

    Without an image if the rank would not hold one run of positions.
    """
    if choice.cut.m != 1:
        return choice
    factor = rule.images[choice.factor]
    size, units = rule.sizes[factor], choice.cut.N
    return choice._replace(image=(factor, Cut(1, units, size // units) if size % units == 0 else Cut(1, size, 1)))


def _leaves_empty(cut: Cut, n: int) -> bool:
    """Whether the last of ``n`` ranks gets nothing of ``cut``."""
    return -(-cut.N // n) * (n - 1) >= cut.N


def linear_choices(op: OpType) -> list[Choice]:
    """Every way to let a pending sum through: one floating input of each product, and nothing else, carries it."""
    if not op.rule.form:
        return []
    options = [[i for i in term if op.floating_ins[i]] for term in op.rule.form]
    if not all(options):
        return []
    return [Choice(P, terms=terms) for terms in itertools.product(*options)]


def splittable(rule: Rule) -> list[tuple[str, str]]:
    """(kind, factor) of every split, by the op itself and by its algorithms."""
    out = [("split", f) for f in rule.factors if f not in rule.whole]
    for a in rule.algorithms:
        out += [(a.name, f) for f in a.splits if f in rule.factors and a.pairs.get(f, f) in rule.factors]
    return out


def axis_choices(
    op: OpType,
    points: Mapping[str, Iterable[Cut]],
    n: int,
    *,
    uneven: bool = True,
    empty: bool = False,
    quiet: bool = True,
) -> list[Choice]:
    """Every choice of one axis of ``n`` ranks.

    points: candidate cuts of each factor.  uneven: also cuts that do not divide.  empty: also cuts that leave a rank
    without a row.  quiet: also factors whose cuts are no candidates everywhere.
    """
    out = [Choice(I)]
    if any(op.differentiable_ins):
        out.append(Choice(R))
    unlikely = set() if quiet else {f for _, f in op.rule.quiet}

    def cuts(factor: str) -> list[Cut]:
        size = op.rule.sizes[factor]
        seen: dict[Cut, None] = {}
        for cut in points.get(factor, (Cut(1, size, 1),)):
            if cut.N % n == 0:
                seen[Cut(cut.m, size // cut.m, 1)] = None
            elif uneven and cut.N > 1 and (empty or not _leaves_empty(cut, n)):
                seen[cut] = None
        return list(seen)

    for kind, factor in splittable(op.rule):
        if factor in unlikely:
            continue
        algorithm = algorithm_of(op.rule, Choice(kind, factor))
        partner = None if algorithm is None else algorithm.pairs.get(factor)
        if algorithm is None or partner is None:
            out += [Choice(kind, factor, cut) for cut in cuts(factor)]
            continue
        alike = algorithm.alike and op.rule.sizes[factor] == op.rule.sizes[partner]
        for cut in cuts(factor):
            others = [cut] if alike else cuts(partner)
            out += [Choice(kind, factor, cut, partner=(partner, other)) for other in others]
    return out + linear_choices(op)


def _inside(cut: Cut, outer: Iterable[tuple[Cut, int]]) -> Cut | None:
    """``cut`` inside the cuts (and their numbers of ranks) of the same factor; None where it does not fit."""
    for before, n in outer:
        if before.N % n:
            return None
        inside = before.m * n
        if cut.m < inside:  # the candidate starts outside that cut: start where it ends
            size = cut.m * cut.N * cut.u
            if inside % cut.m or cut.N * cut.m % inside:
                return None
            cut = Cut(inside, size // inside // cut.u, cut.u)
    return cut


def _nested(choice: Choice, earlier: Sequence[Choice], axis_sizes: Sequence[int]) -> Choice | None:
    """``choice`` inside the cuts that earlier axes already made of the same factor; None where it does not fit."""
    outer = [(c.cut, n) for c, n in zip(earlier, axis_sizes, strict=False) if c.factor == choice.factor]
    cut = _inside(choice.cut, outer)
    return None if cut is None else choice._replace(cut=cut)


def _with_partners(choices: Sequence[Choice], axis_sizes: Sequence[int]) -> list[Choice] | None:
    """``choices`` with every partner's cut inside those that any axis makes of that factor itself."""
    out = []
    for choice in choices:
        if choice.partner is not None:
            factor, cut = choice.partner
            outer = sorted((c.cut, n) for c, n in zip(choices, axis_sizes, strict=True) if c.factor == factor)
            fitted = _inside(cut, outer)
            if fitted is None:
                return None
            choice = choice._replace(partner=(factor, fitted))
        out.append(choice)
    return out


def strategies(
    op: OpType,
    points: Mapping[str, Iterable[Cut]],
    axis_sizes: Sequence[int],
    *,
    uneven: bool = True,
    keep: Callable[[Choice, int], bool] = lambda choice, axis: True,
) -> list[Strategy]:
    """Every strategy worth trying, once per distinct (ins, outs); of several axes on one factor the slow axis cuts
    outside.

    keep: a filter of choices by axis (a restricted search).
    """
    per_axis = [
        [c for c in axis_choices(op, points, n, uneven=uneven, quiet=False) if keep(c, a)]
        for a, n in enumerate(axis_sizes)
    ]
    found: dict[tuple[tuple[Layout, ...], tuple[Layout, ...]], Strategy] = {}
    known = _Known()
    for combination in itertools.product(*per_axis):
        choices: list[Choice] = []
        for a, choice in enumerate(combination):
            fitted = _nested(choice, choices, axis_sizes) if choice.factor else choice
            if fitted is None:
                break
            n = axis_sizes[a]
            if fitted.factor and fitted.cut.N % n and (not uneven or _leaves_empty(fitted.cut, n)):
                break
            choices.append(fitted)
        else:
            paired = _with_partners(choices, axis_sizes)
            if paired is None or not all(
                c.partner is None or c.partner[1].N % n == 0 or (uneven and not _leaves_empty(c.partner[1], n))
                for c, n in zip(paired, axis_sizes, strict=True)
            ):
                continue
            strategy = apply(op, paired, axis_sizes, known)
            if strategy is not None:
                key = (strategy.ins, strategy.outs)
                if key not in found or _rank(strategy) < _rank(found[key]):
                    found[key] = strategy
    return list(found.values())


def _rank(strategy: Strategy) -> tuple[int, str]:
    """Among strategies with equal layouts the op itself goes before an algorithm, then by name."""
    special = sum(c.kind not in (I, R, P, "split") for c in strategy.choices)
    return special, str(strategy.choices)


def random_strategy(
    op: OpType, points: Mapping[str, Iterable[Cut]], axis_sizes: Sequence[int], rng: random.Random
) -> Strategy:
    """Any legal strategy, splits first: for testing.  Axes cut a factor in any order; shards may be empty."""
    order = list(range(len(axis_sizes)))
    for _ in range(100):
        rng.shuffle(order)
        picked: dict[int, Choice] = {}
        for a in order:
            options = axis_choices(op, points, axis_sizes[a], empty=True)
            splits = [c for c in options if c.factor]
            choice = rng.choice(splits) if splits and rng.random() < 0.7 else rng.choice(options)
            if choice.factor:
                earlier = [picked[b] for b in order if b in picked]
                sizes = [axis_sizes[b] for b in order if b in picked]
                choice = _nested(choice, earlier, sizes) or Choice(I)
            picked[a] = choice
        paired = _with_partners([picked[a] for a in range(len(axis_sizes))], axis_sizes)
        strategy = None if paired is None else apply(op, paired, axis_sizes)
        if strategy is not None:
            return strategy
    whole = apply(op, [Choice(I)] * len(axis_sizes), axis_sizes)
    assert whole is not None  # invariant values are always legal
    return whole
