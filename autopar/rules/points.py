"""Candidate cuts: where dimensions of a program's values are worth cutting, carried along the graph by the rules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from autopar.layout import S, Shape
from autopar.rules.factors import Cut, dimension_cut, factor_cut
from autopar.rules.notation import Dims, Rule

Points = Mapping[str, tuple[frozenset[Cut], ...]]  # candidate cuts of every dimension of every value


def cut_points(
    ops: Sequence[tuple[Rule, Sequence[str], Sequence[str]]], shapes: Mapping[str, Shape], limit: int = 12
) -> Points:
    """Candidate cuts of every dimension of every value, carried through the rules to a fixpoint.

    ops: (rule, names of inputs, names of outputs), views among them.  A rule alone cannot see that a fused QKV weight
    should be cut in three groups: the view that follows it can, and its cuts travel back along the graph.  ``limit``
    bounds the candidates of one dimension; plain ones and those with few groups are kept first.
    """
    points = {v: [{Cut(1, n, 1)} for n in s] for v, s in shapes.items()}
    return _carried(ops, points, range(len(ops)), limit)


def more_cut_points(
    ops: Sequence[tuple[Rule, Sequence[str], Sequence[str]]],
    points: Points,
    more: Mapping[tuple[str, int], Iterable[Cut]],
    limit: int = 12,
) -> Points:
    """``points``, a fixpoint, with ``more`` candidates of some (value, dimension), carried on as in `cut_points`.

    limit: of what comes to one dimension.
    """
    grown = {v: [set(p) for p in dims] for v, dims in points.items()}
    for (v, d), cuts in more.items():
        grown[v][d].update(cuts)
    touched = {v for v, _ in more}
    first = [k for k, (_, ins, outs) in enumerate(ops) if touched & {*ins, *outs}]
    return _carried(ops, grown, first, limit + max((len(p) for dims in points.values() for p in dims), default=0))


def _carried(
    ops: Sequence[tuple[Rule, Sequence[str], Sequence[str]]],
    points: dict[str, list[set[Cut]]],
    first: Iterable[int],
    limit: int,
) -> Points:
    users: dict[str, list[int]] = {}
    for k, (_, ins, outs) in enumerate(ops):
        for v in (*ins, *outs):
            users.setdefault(v, []).append(k)
    pending = dict.fromkeys(first)
    while pending:
        k = next(iter(pending))
        del pending[k]
        rule, ins, outs = ops[k]
        tensors = [*zip(rule.ins, ins, strict=True), *zip(rule.outs, outs, strict=True)]
        found = factor_points(rule, [(dims, points[v]) for dims, v in tensors])
        for t, (dims, v) in enumerate(tensors):
            for d, names in enumerate(dims):
                for factor in (f for f in names if (t, f) not in rule.quiet):
                    for cut in found[factor]:
                        image = dimension_cut(dims, factor, cut, rule.sizes)
                        if image is not None:
                            new = Cut(*image[1:])
                            if new not in points[v][d] and len(points[v][d]) < limit:
                                points[v][d].add(new)
                                pending.update(dict.fromkeys(users[v]))
    return {v: tuple(frozenset(p) for p in dims) for v, dims in points.items()}


def factor_points(rule: Rule, tensors: Iterable[tuple[Dims, Sequence[Iterable[Cut]]]]) -> dict[str, tuple[Cut, ...]]:
    """Candidate cuts of each factor of a rule, from those of its tensors' dimensions; in a fixed order."""
    found: dict[str, set[Cut]] = {f: {Cut(1, rule.sizes[f], 1)} for f in rule.factors}
    for dims, per_dim in tensors:
        for d, names in enumerate(dims):
            if names:
                for cut in per_dim[d]:
                    # an axis of N ranks is the finest that this cut serves: it is even there
                    hit = factor_cut(dims, S(d, *cut), cut.N, rule.sizes) if cut.N > 1 else None
                    if hit is not None:
                        factor, even = hit
                        inner = even.N // cut.N
                        found[factor].add(Cut(even.m, cut.N, inner))
    return {f: tuple(sorted(c)) for f, c in found.items()}
