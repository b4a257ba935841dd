"""Losses, as sums and counts."""

from autopar.rules.registry import algorithm, rule
from autopar.runtime.kernels.loss import cross_entropy_sum_parts

rule(
    "autopar.cross_entropy_sum", "b c ..., b ... -> ", args="x t", sum="b ...", whole="c", saves="x", flops="6 b c ..."
)
algorithm("autopar.cross_entropy_sum", "vocabulary", splits="c", run=cross_entropy_sum_parts)
rule("autopar.cross_entropy_count", "... -> ", args="t", sum="...")
