"""Lower bounds of a space without a linear program: of every plan, and of every plan that makes one given choice.

The program is seen as a graph.  Ops are its nodes with a cost per strategy; values are its factors, whose cost is that
of the cheapest tree of conversions from what the producer makes to what the users need.  Costs may be moved between an
op and its values as long as their sum stays: then the sum of everyone's own minimum is a bound, and what one strategy
exceeds its op's minimum by is what every plan with it exceeds the bound by.  Op after op takes all that its values can
give, and hands it on to those that lead further: sequential reweighted message passing (Kolmogorov 2015, "A new look at
reweighted message passing", doi 10.1109/TPAMI.2014.2363465), which never makes the bound worse.  A message over a
value is one spread over its lattice; the trees of several users are found over subsets of them (Dreyfus, Wagner 1971).

Memory is left free, and of a weight's uses at most two share its steps, so that the bound may be too low but never too
high.  Gradients that hide behind a block's backward pass are priced at a multiplier between 0 and 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from autopar.layout import Layout
from autopar.solver.model import hiding_block
from autopar.solver.prices import full_states, gradient_states
from autopar.solver.space import Flow, Space, Weight
from autopar.solver.spread import Field, Floats, spreading

Ints = NDArray[np.int64]

_MOST_USERS = 3  # trees to so many users are exact; more are seen in groups that share the cost of every arc
_SWEEPS = 20
_STEP, _LEAST_STEP, _TRIES = 0.25, 0.05, 2  # of the multiplier of hidden communication; sweeps to try one
_GAIN = 1e-4  # stop when a sweep lifts the bound by less than this part of it


@dataclass(slots=True)
class Conveyed:
    """A value as a factor, or some of its users.

    ops: whose choice each terminal is, the producer first.  places: nodes by strategy.  given: to each node, what the
    op has handed over, in units of ``scale`` seconds; infinite where it has no strategy.  fixed: where the value must
    also end.
    """

    flow: Flow
    field: Field
    scale: float
    ops: list[int]
    places: list[Ints]
    given: list[Floats]
    fixed: int | None

    def message(self, terminal: int) -> Floats:
        """For every node the least cost, with what the others were handed, of all trees with this terminal there."""
        inside = self._inside(self.given, terminal)
        if terminal == 0:
            return inside[self._everyone]
        return self._outside(self.given, inside, 1 << (terminal - 1))[1 << (terminal - 1)]

    def through(self, rest: Sequence[Floats]) -> Floats:
        """For every arc, how much all trees that have it exceed the bound by: seconds.  rest: of each terminal."""
        given = [g + r / self.scale for g, r in zip(self.given, rest, strict=True)]
        inside = self._inside(given)
        outside = self._outside(given, inside)
        tails, heads = self.field.tails, self.field.heads
        least = np.minimum.reduce([outside[m][tails] + inside[m][heads] for m in outside])
        return np.asarray((least + self.field.prices) * self.scale)

    @property
    def _everyone(self) -> int:
        return (1 << (len(self.ops) - 1 + (self.fixed is not None))) - 1

    def _inside(self, given: Sequence[Floats], without: int = 0) -> dict[int, Floats]:
        """By set of users (but one) the least cost of a tree from each node to all of them."""
        out: dict[int, Floats] = {}
        for mask in range(1, self._everyone + 1):
            if without and mask >> (without - 1) & 1:
                continue
            if mask & (mask - 1):
                parts, part = [], (mask - 1) & mask
                while part > mask ^ part:
                    parts.append(out[part] + out[mask ^ part])
                    part = (part - 1) & mask
                start = np.minimum.reduce(parts)
            elif mask.bit_length() < len(self.ops):
                start = given[mask.bit_length()]
            else:
                start = np.full(self.field.size, np.inf)
                start[self.fixed] = 0.0
            out[mask] = self.field.spread(start, back=True)
        return out

    def _outside(self, given: Sequence[Floats], inside: dict[int, Floats], wanted: int = 0) -> dict[int, Floats]:
        """By set of users (those with ``wanted``) the least cost of all but the tree from each node to them."""
        out = {self._everyone: self.field.spread(given[0])}
        for mask in sorted(range(1, self._everyone), key=lambda m: -m.bit_count()):
            if mask & wanted == wanted:
                parts = [out[m] + inside[m ^ mask] for m in out if m & mask == mask]
                out[mask] = self.field.spread(np.minimum.reduce(parts))
        return out


@dataclass(slots=True)
class Kept:
    """A weight as a factor of one use or two.

    ops, places, given: as of `Conveyed`, a place is one of ``needs``.  forward, backward: fields of the weight and its
    gradient.  gather, reduce: seconds from each stored layout (rows) to each need, and of the gradient back.  update:
    by stored layout.  block: whose backward pass hides the reduction.
    """

    weight: Weight
    scale: float
    ops: list[int]
    needs: list[list[Layout]]
    places: list[Ints]
    given: list[Floats]
    forward: Field
    backward: Field | None
    gather: list[Floats]
    reduce: list[Floats]
    update: Floats
    block: int | None
    table: Floats

    def price(self, share: float) -> None:
        """Fill the table of costs by needs, with ``share`` of the reduction paid for."""
        self.table = self.by_stored(share).min(axis=0)

    def by_stored(self, share: float) -> Floats:
        """Least cost by stored layout and need of each use: of the ways of two uses at least the longer is paid."""
        if len(self.ops) == 1:
            return self.update[:, None] + self.gather[0] + share * self.reduce[0]
        gather = np.maximum(self.gather[0][:, :, None], self.gather[1][:, None])
        reduce = np.maximum(self.reduce[0][:, :, None], self.reduce[1][:, None])
        return np.asarray(self.update[:, None, None] + gather + share * reduce)

    def message(self, terminal: int) -> Floats:
        if len(self.ops) == 1:
            return self.table
        other = self.given[1 - terminal]
        return np.asarray((self.table + (other[None] if terminal == 0 else other[:, None])).min(axis=1 - terminal))


Factor: TypeAlias = Conveyed | Kept
_Touching: TypeAlias = list[tuple[Factor, int]]


@dataclass(slots=True)
class Bounds:
    """total: seconds, of every plan.  strategies: by op, of every plan with each of them.

    share: of hidden communication that is paid for, by block.  costs: of strategies alone.  least: of each op.
    """

    space: Space
    factors: list[Factor]
    touching: list[_Touching]
    share: dict[int, float]
    strategies: list[Floats]
    total: float = 0.0
    costs: list[Floats] = field(default_factory=list)
    least: list[float] = field(default_factory=list)

    def shared(self, block: int | None) -> float:
        return 1.0 if block is None else self.share[block]

    def price(self) -> None:
        """Costs of strategies alone and of weights, at the present share."""
        space = self.space
        m, overlap = space.prices.microbatches, space.prices.overlap
        self.costs = []
        for op in space.ops:
            count, block = space.count(op.name) * m, space.folding.segments[op.name]
            hiding = self.share.get(block, 0.0) * overlap * m * space.folding.kinds.count(block)
            self.costs.append(np.array([p.seconds * count - p.backward * hiding for p in space.costs[op.name]]))
        for factor in self.factors:
            if isinstance(factor, Kept):
                factor.price(self.shared(factor.block))

    def rest(self, op: int) -> Floats:
        """Costs of an op's strategies less what it has handed over."""
        cost = self.costs[op].copy()
        for factor, terminal in self.touching[op]:
            cost -= factor.given[terminal][factor.places[terminal]] * factor.scale
        return cost

    def add_up(self) -> None:
        self.least = [float(self.rest(op).min()) for op in range(len(self.space.ops))]
        self.total = sum(self.least)

    def visit(self, op: int, *, forward: bool) -> None:
        """Take what values can give, then hand it on to those that lead further."""
        cost, taken = self.costs[op].copy(), []
        for factor, terminal in self.touching[op]:
            at = factor.places[terminal]
            message = factor.message(terminal)[at]
            factor.given[terminal][at] = -message
            cost += message * factor.scale
            taken.append(message)
        self.least[op] = float(cost.min())
        self.total = sum(self.least)
        rest = cost - self.least[op]
        np.maximum(self.strategies[op], self.total + rest, out=self.strategies[op])
        later = [max(f.ops) > op for f, _ in self.touching[op]]
        earlier = [min(f.ops) < op for f, _ in self.touching[op]]
        part = 1.0 / max(sum(later), sum(earlier), 1)
        for (factor, terminal), message, further in zip(
            self.touching[op], taken, later if forward else earlier, strict=True
        ):
            if further:
                at = factor.places[terminal]
                handed = least_by(at, rest * (part / factor.scale), len(factor.given[terminal]))
                factor.given[terminal][at] = handed[at] - message


def least_by(places: Ints, values: Floats, size: int) -> Floats:
    """The least value at each place, infinite elsewhere."""
    out = np.full(size, np.inf)
    np.minimum.at(out, places, values)
    return out


def bounds(space: Space, cutoff: float = math.inf) -> Bounds:
    """Bounds of a space; they are raised until they reach ``cutoff`` or hardly move."""
    number = {op.name: i for i, op in enumerate(space.ops)}
    factors: list[Factor] = [*_conveyed(space, number), *_kept(space, number)]
    touching: list[_Touching] = [[] for _ in space.ops]
    for factor in factors:
        for terminal, op in enumerate(factor.ops):
            touching[op].append((factor, terminal))
    share = {f.block: 0.0 for f in factors if isinstance(f, Kept) and f.block is not None}
    made = Bounds(
        space, factors, touching, share, [np.full(len(space.strategies[op.name]), -np.inf) for op in space.ops]
    )
    made.price()
    made.add_up()
    _sweep(made, _SWEEPS, cutoff)
    for block in share:
        _balance(made, block, cutoff)
    if any(share.values()):
        _sweep(made, _SWEEPS, cutoff)
    return made


def _sweep(made: Bounds, times: int, cutoff: float) -> None:
    """Visit every op in order and back again, until the bound reaches ``cutoff`` or hardly moves."""
    ops = range(len(made.space.ops))
    for _ in range(times):
        before = made.total
        for forward in (True, False):
            for op in ops if forward else reversed(ops):
                made.visit(op, forward=forward)
                if made.total >= cutoff:
                    return
        if made.total - before < _GAIN * made.total:
            return


def _balance(made: Bounds, block: int, cutoff: float) -> None:
    """Find the share of a block's hidden communication with which the bound is highest: it is concave in it."""
    step = _STEP
    while step >= _LEAST_STEP and made.total < cutoff:
        before, best, given = made.share[block], made.total, [[g.copy() for g in f.given] for f in made.factors]
        for share in (before + step, before - step):
            if not 0 <= share <= 1:
                continue
            made.share[block] = share
            made.price()
            made.add_up()
            _sweep(made, _TRIES, cutoff)
            if made.total > best:
                break
            made.share[block] = before
            for factor, kept in zip(made.factors, given, strict=True):
                factor.given[:] = [g.copy() for g in kept]
        else:
            made.price()
            made.add_up()
            step /= 2


def _conveyed(space: Space, number: dict[str, int]) -> Iterator[Conveyed]:
    fields: dict[int, Field] = {}
    for flow in space.flows:
        if flow.producer is None or flow.outs is None:
            continue
        if id(flow.grid) not in fields:
            fields[id(flow.grid)] = spreading(flow.grid)
        grid = fields[id(flow.grid)]
        users = list(zip(flow.edge.uses, flow.needs, strict=True))
        count = len(users) + flow.edge.whole
        for start in range(0, count, _MOST_USERS):
            group, here = users[start : start + _MOST_USERS], min(_MOST_USERS, count - start)
            places = [grid.places(flow.outs), *(grid.places(need) for _, need in group)]
            yield Conveyed(
                flow,
                grid,
                float(flow.edge.count * space.prices.microbatches) * here / count,
                [number[flow.producer], *(number[use.op] for use, _ in group)],
                places,
                [least_by(at, np.zeros(len(at)), grid.size) for at in places],
                grid.at(space.invariant) if here > len(group) else None,
            )


def _kept(space: Space, number: dict[str, int]) -> Iterator[Kept]:
    """With the least number of runs of each step, which is once a step."""
    known: dict[object, tuple[Field, Field | None, Floats, Floats]] = {}
    for weight in space.weights:
        value = weight.value
        block = hiding_block(space, weight) if space.prices.overlap > 0 and weight.backward is not None else None
        update = np.array([space.prices.update(value, layout) for layout in weight.stored])
        uses = list(zip(weight.edge.uses, weight.needs, strict=True))
        for start in range(0, len(uses), 2):
            group = uses[start : start + 2]
            needs = [list(dict.fromkeys(need)) for _, need in group]
            ways = []
            for columns in needs:
                key = (value.shape, value.dtype, value.differentiable, weight.stored, *columns)
                if key not in known:
                    known[key] = _ways(weight, columns)
                ways.append(known[key])
            numbers = [{layout: k for k, layout in enumerate(columns)} for columns in needs]
            places = [np.array([n[layout] for layout in need]) for n, (_, need) in zip(numbers, group, strict=True)]
            yield Kept(
                weight,
                weight.edge.count * len(group) / len(uses),
                [number[use.op] for use, _ in group],
                needs,
                places,
                [np.zeros(len(columns)) for columns in needs],
                ways[0][0],
                ways[0][1],
                [w[2] for w in ways],
                [w[3] for w in ways],
                update,
                block,
                np.zeros(0),
            )


def _ways(weight: Weight, needs: Sequence[Layout]) -> tuple[Field, Field | None, Floats, Floats]:
    """Seconds from where a weight is stored (rows) to where it is needed (columns), and of its gradient back."""
    forward = spreading(weight.forward)
    ends = forward.places([full_states(layout) for layout in needs])
    gather = forward.distances(forward.places(weight.stored))[:, ends]
    if weight.backward is None:
        return forward, None, gather, np.zeros_like(gather)
    backward = spreading(weight.backward)
    made = backward.places([gradient_states(layout) for layout in needs])
    return forward, backward, gather, backward.distances(backward.places(weight.stored), back=True)[:, made]
