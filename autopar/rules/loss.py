"""Losses, as sums and counts, or one by one."""

from __future__ import annotations

from torch import fx

from autopar.errors import RuleError
from autopar.program import call_arguments, place, tensor_inputs
from autopar.rules.notation import Rule, define
from autopar.rules.pointwise import pointwise_rule
from autopar.rules.registry import algorithm, computed, from_text, rule
from autopar.runtime.kernels.loss import cross_entropy_parts, cross_entropy_sum_parts

rule(
    "autopar.cross_entropy_sum",
    "b c ..., b ..., c -> ",
    args="x t w",
    sum="b ...",
    whole="c",
    saves="x",
    flops="6 b c ...",
)
algorithm("autopar.cross_entropy_sum", "vocabulary", splits="c", run=cross_entropy_sum_parts)
rule("autopar.cross_entropy_count", "..., c -> ", args="t w", sum="...", whole="c")

_BY_CLASS = {
    "aten.cross_entropy_loss.default": define(
        "aten.cross_entropy_loss.default",
        "b c ..., b ..., c -> b ...",
        args="x t w",
        whole="c",
        saves="x",
        flops="6 b c ...",
    ),
    # -w[t] * x[t]
    "aten.nll_loss_nd.default": define(
        "aten.nll_loss_nd.default", "b c ..., b ..., c -> b ...", args="x t w", form="x", whole="c", saves="t w"
    ),
    "aten.multi_margin_loss.default": define(
        "aten.multi_margin_loss.default", "b c, b, c -> b", args="x t w", whole="c", saves="x t w"
    ),
    "aten.multilabel_margin_loss.default": define(
        "aten.multilabel_margin_loss.default", "b c, b c -> b", args="x t", whole="c", saves="x t"
    ),
}


def _refuse_reduction(node: fx.Node) -> None:
    """A mean of parts is not the mean: normalisation takes sums and means out of losses before rules are asked."""
    if call_arguments(node).get("reduction", 1) != 0:
        raise RuleError("a loss with a reduction has no rule", where=place(node), expected="reduction='none', then sum")


@computed(*_BY_CLASS)
def _by_class(node: fx.Node) -> Rule:
    """One loss per target, from the scores of all classes."""
    _refuse_reduction(node)
    return from_text(node, _BY_CLASS[str(node.target)])


algorithm("aten.cross_entropy_loss.default", "vocabulary", splits="c", run=cross_entropy_parts)

ELEMENTWISE = (
    "aten.l1_loss.default",
    "aten.smooth_l1_loss.default",
    "aten.huber_loss.default",
    "aten.binary_cross_entropy.default",
    "aten.binary_cross_entropy_with_logits.default",
    "aten.kl_div.default",
    "aten.soft_margin_loss.default",
)


@computed(*ELEMENTWISE)
def _elementwise(node: fx.Node) -> Rule:
    """One loss per element of the broadcast inputs."""
    _refuse_reduction(node)
    return pointwise_rule(node, (), tuple(("in", i) for i in range(len(tensor_inputs(node)))))
