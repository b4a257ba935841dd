"""Contractions."""

from autopar.rules.registry import rule

rule("aten.mm.default", "m k, k n -> m n", args="a b", form="a*b", sum="k", saves="a b", flops="2 m k n")
rule("aten.bmm.default", "b m k, b k n -> b m n", args="a b", form="a*b", sum="k", saves="a b", flops="2 b m k n")
rule("aten.addmm.default", "n, m k, k n -> m n", args="c a b", form="a*b + c", sum="k", saves="a b", flops="2 m k n")
rule(
    "aten.linear.default",
    "... k, n k, n -> ... n",
    args="x w b",
    form="x*w + b",
    sum="k",
    saves="x w",
    flops="2 ... k n",
)
