"""Normalisation."""

from torch import fx

from autopar.program import call_arguments
from autopar.rules.notation import Rule, define
from autopar.rules.registry import algorithm, computed, from_text, rule
from autopar.runtime.kernels.norm import batch_norm_parts, layer_norm_parts


@computed("aten.layer_norm.default")
def _layer_norm(node: fx.Node) -> Rule:
    """``... n, n, n -> ... n``, whole n; over several dimensions ``n0 n1 ...``, which no algorithm splits."""
    count = len(call_arguments(node)["normalized_shape"])
    n = "n" if count == 1 else " ".join(f"n{i}" for i in range(count))
    text = f"... {n}, {n}, {n} -> ... {n}"
    return from_text(node, define(str(node.target), text, args="x w b", whole=n, saves="x", flops=f"8 ... {n}"))


algorithm("aten.layer_norm.default", "parts", splits="n", run=layer_norm_parts)

rule(
    "autopar.batch_norm",
    "n c ..., c, c, c, c -> n c ..., c, c",
    args="x w b mean var",
    whole="n ...",
    saves="x",
    flops="8 n c ...",
)
algorithm("autopar.batch_norm", "parts", splits="n", run=batch_norm_parts)
