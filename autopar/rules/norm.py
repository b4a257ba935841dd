"""Normalisation."""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from autopar.program import args_of, call_arguments, shape_of
from autopar.rules.notation import Rule, define
from autopar.rules.registry import algorithm, computed, from_text, rule
from autopar.runtime.kernels.norm import (
    batch_norm_parts,
    batch_norm_stateless_parts,
    group_norm_parts,
    instance_norm_parts,
    layer_norm_parts,
    rms_norm_parts,
)


@computed("aten.layer_norm.default", "aten.rms_norm.default")
def _over_last(node: fx.Node) -> Rule:
    """``... n, n, n -> ... n``, whole n; over several dimensions ``n0 n1 ...``, which no algorithm splits."""
    count = len(call_arguments(node)["normalized_shape"])
    n = "n" if count == 1 else " ".join(f"n{i}" for i in range(count))
    args = "x w b" if "layer" in str(node.target) else "x w"
    text = ", ".join([f"... {n}"] + [n] * (len(args.split()) - 1)) + f" -> ... {n}"
    return from_text(node, define(str(node.target), text, args=args, whole=n, saves="x", flops=f"8 ... {n}"))


algorithm("aten.layer_norm.default", "parts", splits="n", run=layer_norm_parts)
algorithm("aten.rms_norm.default", "parts", splits="n", run=rms_norm_parts)

_GROUP_NORM = define(
    "autopar.group_norm",
    "n (g c) ..., (g c), (g c) -> n (g c) ...",
    args="x w b",
    whole="c ...",
    saves="x",
    flops="8 n g c ...",
)


@computed("autopar.group_norm")
def _group_norm(node: fx.Node) -> Rule:
    """``n (g c) ...``: statistics belong to a group of an example, so examples and groups may be split."""
    groups = args_of(node)[1]
    given = {"g": groups, "c": shape_of(args_of(node)[0])[1] // groups}
    return replace(from_text(node, _GROUP_NORM, given), size_args={"groups": ("g",)})


algorithm("autopar.group_norm", "parts", splits="c b0 b1 b2", run=group_norm_parts)

for _op, _run in (("autopar.batch_norm", batch_norm_parts), ("autopar.instance_norm", instance_norm_parts)):
    rule(
        _op,
        "n c ..., c, c, c, c -> n c ..., c, c",
        args="x w b mean var",
        whole="n ...",
        saves="x",
        flops="8 n c ...",
    )
    algorithm(_op, "parts", splits="n b0 b1 b2", run=_run)

rule(
    "autopar.batch_norm_stateless",
    "n c ..., c, c -> n c ...",
    args="x w b",
    whole="n ...",
    saves="x",
    flops="8 n c ...",
)
algorithm("autopar.batch_norm_stateless", "parts", splits="n b0 b1 b2", run=batch_norm_stateless_parts)

# (x - mean) * w / sqrt(var) + b: linear in x, mean and b together, so a pending sum must be one in all three
rule(
    "autopar.batch_norm_fixed",
    "n c ..., c, c, c, c -> n c ...",
    args="x w b mean var",
    form="x + mean + b",
    saves="x",
    flops="4 n c ...",
)
