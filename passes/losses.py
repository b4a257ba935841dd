"""Losses as sums and counts: a mean of means is wrong where parts have unequal counts, a sum over a count is right."""

from __future__ import annotations

import math

import torch
from torch import fx

from autopar.passes.expand import inline
from autopar.passes.rewrite import argument, calls, cast_like, new_node, renamed, sum_over, wide
from autopar.program import Program, args_of, dtype_of, shape_of
from autopar.runtime.kernels.loss import cross_entropy_count, cross_entropy_sum

aten = torch.ops.aten

NONE, MEAN, SUM = 0, 1, 2  # of a loss's ``reduction`` argument

_ONE_BY_ONE = (
    aten.l1_loss.default,
    aten.smooth_l1_loss.default,
    aten.huber_loss.default,
    aten.binary_cross_entropy.default,
    aten.binary_cross_entropy_with_logits.default,
    aten.kl_div.default,
    aten.soft_margin_loss.default,
    aten.multi_margin_loss.default,
    aten.multilabel_margin_loss.default,
)


def losses_to_sums(program: Program) -> None:
    """``cross_entropy(x, t)`` --> ``cross_entropy_sum(x, t) / cross_entropy_count(t)``.

    ``nll_loss(x, t)`` --> ``sum(nll_loss(x, t, "none")) / cross_entropy_count(t)``.
    ``l1_loss(x, t)`` --> ``sum(l1_loss(x, t, "none")) / N``, and so every loss of one number per element or example.
    """
    for node in calls(program.graph, aten.cross_entropy_loss.default):
        with program.graph.inserting_before(node):
            if args_of(node)[1].meta["val"].is_floating_point():
                inline(program, node, _class_probabilities)
            elif len(shape_of(args_of(node)[0])) == 1:  # one example
                inline(program, node, _unbatched)
    for node in calls(program.graph, aten.cross_entropy_loss.default):
        if argument(node, "reduction") != NONE:
            _cross_entropy(program, node)
    for node in calls(program.graph, aten.nll_loss_nd.default):
        if argument(node, "reduction") != NONE:
            with program.graph.inserting_before(node):
                _reduce(program, node, _count(node))
    for node in calls(program.graph, *_ONE_BY_ONE):
        if argument(node, "reduction") != NONE:
            with program.graph.inserting_before(node):
                _reduce(program, node, None)


def _cross_entropy(program: Program, node: fx.Node) -> None:
    logits, target = args_of(node)[:2]
    weight = argument(node, "weight")
    with program.graph.inserting_before(node):
        args = (logits, target, argument(node, "ignore_index"), argument(node, "label_smoothing"))
        loss = new_node(program.graph, cross_entropy_sum, args if weight is None else (*args, weight), like=node)
        if argument(node, "reduction") == MEAN:
            loss = new_node(program.graph, aten.div.Tensor, (loss, _count(node)), like=node)
        renamed(program, node, cast_like(loss, node))


def _count(node: fx.Node) -> fx.Node:
    """How many targets count, or the sum of their classes' weights."""
    scores, target = args_of(node)[:2]
    weight = argument(node, "weight")
    args = (target, argument(node, "ignore_index"), wide(dtype_of(scores)))
    return new_node(node.graph, cross_entropy_count, args if weight is None else (*args, weight), like=node)


def _reduce(program: Program, node: fx.Node, count: fx.Node | None) -> None:
    """The loss without its reduction, summed, and for a mean divided by ``count`` or the number of losses."""
    reduction = argument(node, "reduction")
    assert isinstance(node.target, torch._ops.OpOverload)
    names = [a.name for a in node.target._schema.arguments]
    args = list(args_of(node))[: names.index("reduction")]
    rest = {n: v for n, v in zip(names, args_of(node), strict=False) if n not in names[: len(args)]}
    losses = new_node(program.graph, node.target, tuple(args), {**rest, **node.kwargs, "reduction": NONE}, like=node)
    shape = shape_of(losses)
    total = sum_over(losses, list(range(len(shape))))
    if reduction == MEAN:
        total = new_node(
            program.graph, aten.div.Tensor, (total, math.prod(shape) if count is None else count), like=node
        )
    renamed(program, node, cast_like(total, node))


def _class_probabilities(
    logits: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: int = MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Cross entropy with a share of every class as target: -sum(target * weight * log_softmax), a mean over targets."""
    classes = 0 if logits.dim() == 1 else 1
    if label_smoothing:
        target = target * (1 - label_smoothing) + label_smoothing / logits.shape[classes]
    terms = torch.log_softmax(logits, classes) * target
    if weight is not None:
        terms = terms * (weight if logits.dim() == 1 else weight.reshape(1, -1, *[1] * (logits.dim() - 2)))
    losses = -terms.sum(classes)
    return losses if reduction == NONE else losses.mean() if reduction == MEAN else losses.sum()


def _unbatched(logits: torch.Tensor, target: torch.Tensor, *more: object) -> torch.Tensor:
    """Cross entropy of one example, as of a batch of one."""
    losses: torch.Tensor = aten.cross_entropy_loss.default(logits.unsqueeze(0), target.unsqueeze(0), *more)
    return losses if losses.dim() == 0 else losses.squeeze(0)
