"""How ops may be split: the notation, what follows from it, and one table per family of ops."""

from autopar.rules import (
    attention,
    complex,
    contract,
    conv,
    experts,
    grid,
    index,
    loss,
    norm,
    order,
    pointwise,
    random,
    recurrent,
    reduce,
    segments,
    view,
)
from autopar.rules.registry import algorithm, rule, rule_for, unregister

__all__ = [
    "algorithm",
    "attention",
    "complex",
    "contract",
    "conv",
    "experts",
    "grid",
    "index",
    "loss",
    "norm",
    "order",
    "pointwise",
    "random",
    "recurrent",
    "reduce",
    "rule",
    "rule_for",
    "segments",
    "unregister",
    "view",
]
