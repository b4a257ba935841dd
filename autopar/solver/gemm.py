"""Ops whose arithmetic matmul units do, as one product of matrices."""

from __future__ import annotations

import math
from collections.abc import Sequence

from autopar.layout import local_shape
from autopar.program import target_name
from autopar.rules.analysis import Operation
from autopar.rules.derive import Strategy
from autopar.rules.notation import Rule
from autopar.rules.work import factor_size, local_sum

_SHORT_NAMES = {
    "layer_norm": "native_layer_norm",
    "dropout": "native_dropout",
    "cross_entropy_sum": "log_softmax",
    "_softmax": "softmax",
    "_log_softmax": "log_softmax",
}


def is_gemm(op: Operation) -> bool:
    """Whether matmul units do the arithmetic: a contraction, or attention."""
    rule = op.rule
    return bool(rule.flops) and (
        (bool(rule.sums) and any(len(t) > 1 for t in rule.form))
        or "attention" in short_name(op)
        or short_name(op) == "experts"
    )


def short_name(op: Operation) -> str:
    name = target_name(op.node).split(".")[1]
    return _SHORT_NAMES.get(name, name)


def gemm_shape(op: Operation, strategy: Strategy, sizes: Sequence[int], steps: int = 1) -> tuple[int, ...]:
    """Local (M, N, K) of a contraction: factors of the first operand alone, of the second alone, and of both alone.

    Of experts: the rows of one, and its first matrix.  What is walked is so in ``steps`` products.
    """
    first, rule = (0,) * len(sizes), op.rule
    if short_name(op) == "experts":
        count, *matrix = local_shape(op.type.in_shapes[2], strategy.ins[2], sizes, first)
        rows = local_sum([(1 / op.type.in_shapes[2][0], ("s", "e"))], rule, strategy, sizes)
        return max(1, round(rows / max(count, 1))), *matrix
    a, b = ({f for dims in rule.ins[i] for f in dims} for i in _operands(rule))
    out = {f for dims in rule.outs[0] for f in dims}
    walked = {c.partner[0] for c in strategy.choices if c.partner is not None}

    def size(factor: str) -> int:
        whole = factor_size(rule, strategy, factor, sizes, first)
        return -(-whole // steps) if factor in walked else whole

    return tuple(
        max(1, math.prod(size(f) for f in sorted(group)))
        for group in ((a & out) - b, (b & out) - a or b - a, (a & b) - out)
    )


def _operands(rule: Rule) -> tuple[int, int]:
    return next(((t[0], t[1]) for t in rule.form if len(t) > 1), (0, 1))
