"""What a rank does of an op: sizes of its part, and arithmetic."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

from autopar.rules.derive import Strategy
from autopar.rules.factors import local_size, mean_position
from autopar.rules.notation import Rule


def factor_size(rule: Rule, strategy: Strategy, factor: str, axis_sizes: Sequence[int], at: Sequence[int]) -> int:
    """Rows of ``factor`` on the rank at coordinates ``at``."""
    return local_size(rule.sizes[factor], strategy.cuts(factor), axis_sizes, at)


def local_flops(rule: Rule, strategy: Strategy, axis_sizes: Sequence[int]) -> float:
    """Floating-point operations of the forward pass on the fullest rank."""
    return local_sum(rule.flops, rule, strategy, axis_sizes) * crowding(rule, strategy, axis_sizes)


def local_sum(
    terms: Iterable[tuple[float, tuple[str, ...]]], rule: Rule, strategy: Strategy, axis_sizes: Sequence[int]
) -> float:
    """Terms (coefficient, factors) on the fullest rank."""
    first = (0,) * len(axis_sizes)
    return sum(
        c * math.prod(factor_size(rule, strategy, f, axis_sizes, first) for f in factors) for c, factors in terms
    )


def crowding(rule: Rule, strategy: Strategy, axis_sizes: Sequence[int]) -> float:
    """What the rank with most to do does, over what as many average rows would be.

    1 but where rows differ (`Rule.causal`).  The op itself does some of the rows whole and hides half: 2.  An algorithm
    leaves out what a row does not take part in, so that the rows' positions count: of n ranks, each with one run of
    rows, the last does (2n - 1) / n of an equal share; with every n-th row all do nearly the same.
    """
    cuts = strategy.cuts(rule.causal) if rule.causal else ()
    if not cuts:
        return 1.0
    if all(strategy.choices[a].kind == "split" for a, _ in cuts):
        return 2.0
    size, places = rule.sizes[rule.causal], [range(n) for n in axis_sizes]
    for a in range(len(axis_sizes)):
        if a not in {axis for axis, _ in cuts}:
            places[a] = range(1)
    work = []
    for at in itertools.product(*places):
        rows = local_size(size, cuts, axis_sizes, at)
        work.append(rows * (mean_position(size, cuts, axis_sizes, at) + 1) if rows else 0.0)
    first = local_size(size, cuts, axis_sizes, (0,) * len(axis_sizes))
    return max(work) / (first * (size + 1) / 2)
