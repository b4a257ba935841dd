"""Normalisation."""

from autopar.rules.registry import algorithm, rule
from autopar.runtime.kernels.norm import batch_norm_parts, layer_norm_parts

rule("aten.layer_norm.default", "... n, n, n -> ... n", args="x w b", whole="n", saves="x", flops="8 ... n")
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
