"""How ops may be split: the notation, what follows from it, and one table per family of ops."""

from autopar.rules import attention, contract, conv, grid, index, loss, norm, pointwise, random, recurrent, reduce, view
from autopar.rules.registry import algorithm, rule, rule_for, unregister

__all__ = [
    "algorithm",
    "attention",
    "contract",
    "conv",
    "grid",
    "index",
    "loss",
    "norm",
    "pointwise",
    "random",
    "recurrent",
    "reduce",
    "rule",
    "rule_for",
    "unregister",
    "view",
]
