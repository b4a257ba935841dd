"""Random ops: their masks are functions of global positions, so any split of them is exact."""

from __future__ import annotations

from torch import fx

from autopar.program import shape_of
from autopar.rules.notation import Rule
from autopar.rules.pointwise import broadcast_dims, pointwise_rule
from autopar.rules.registry import computed


@computed("autopar.dropout")
def _dropout(node: fx.Node) -> Rule:
    """Linear in x; told the part of each dimension that the rank holds."""
    shape = shape_of(node)
    dims = tuple(d or (f"u{i}",) for i, d in enumerate(broadcast_dims(shape, shape)))
    rule = pointwise_rule(node, ((0,),), (("out", 0),), part_args={"dims": dims})
    return rule


@computed("autopar.random_uniform", "autopar.random_normal")
def _source(node: fx.Node) -> Rule:
    """Made from nothing but positions; told the part of each dimension that the rank holds."""
    shape = shape_of(node)
    dims = broadcast_dims(shape, shape)
    sizes = {f"d{i}": n for i, n in enumerate(shape) if n != 1}
    return Rule((), (dims,), sizes, size_args={"size": dims}, part_args={"dims": dims})
