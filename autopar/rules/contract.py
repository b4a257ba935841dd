"""Contractions."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from autopar.errors import RuleError
from autopar.layout import Shape
from autopar.program import place, shape_of, tensor_inputs
from autopar.rules.notation import Dims, Rule, define
from autopar.rules.registry import algorithms_of, computed, from_text, rule

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

_BILINEAR = define(
    "aten.bilinear.default",
    "... i, ... j, o i j, o -> ... o",
    args="x y w b",
    form="x*y*w + b",
    sum="i j",
    saves="x y w",
    flops="2 ... o i j",
)


@computed("aten.bilinear.default")
def _bilinear(node: fx.Node) -> Rule:
    """``... i, ... j, o i j, o -> ... o``; torch's takes no empty operand."""
    return replace(from_text(node, _BILINEAR), filled=True)


@computed("aten.matmul.default")
def _matmul(node: fx.Node) -> Rule:
    """``... m k, ... k n -> ... m n``, the leading dimensions broadcast."""
    a, b = (shape_of(v) for v in tensor_inputs(node))
    if len(a) < 2 or len(b) < 2:
        raise RuleError("matmul with a vector has no rule", where=place(node), hint="write it as a product and a sum")
    lead = torch.broadcast_shapes(a[:-2], b[:-2])
    sizes = {f"b{i}": n for i, n in enumerate(lead)} | {"m": a[-2], "k": a[-1], "n": b[-1]}

    def dims(shape: Shape, *last: str) -> Dims:
        offset = len(lead) - (len(shape) - 2)
        names = [(f"b{i + offset}",) for i in range(len(shape) - 2)] + [(f,) for f in last]
        return tuple(d if n > 1 else () for d, n in zip(names, shape, strict=True))

    out = (*lead, a[-2], b[-1])
    return Rule(
        (dims(a, "m", "k"), dims(b, "k", "n")),
        (dims(out, "m", "n"),),
        sizes,
        ((0, 1),),
        sums=frozenset({"k"} if a[-1] > 1 else ()),
        saves=(("in", 0), ("in", 1)),
        flops=((2.0, (*(f"b{i}" for i in range(len(lead))), "m", "k", "n")),),
        algorithms=algorithms_of(node),
    )
