"""Ops that are written in other ops, so that what is known of those says how they may be split.

    std(x, 1) --> root(sum((x - mean(x, 1)) ** 2, 1) / (N - 1))

The definitions are torch's own, without its in-place steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from autopar.passes.rewrite import argument, calls, splice, tensors_of
from autopar.program import Program, args_of, shape_of

aten = torch.ops.aten


def inline(program: Program, node: fx.Node, function: Callable[..., Any]) -> None:
    """Replace the call ``node`` by the ops of ``function``, which takes its arguments and gives what it gives."""
    inputs = tensors_of(node)

    def traced(*values: Tensor) -> Any:
        known = dict(zip(inputs, values, strict=True))
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: known[n])
        return function(*args, **kwargs)

    splice(program, node, make_fx(traced, pre_dispatch=True)(*(n.meta["val"] for n in inputs)).graph)


def expand_ops(program: Program) -> None:
    """Expand the ops of the table below."""
    for node in calls(program.graph, *_EXPANSIONS):
        inline(program, node, _EXPANSIONS[node.target])
    for node in calls(program.graph, aten.scaled_dot_product_attention.default):
        if len(shape_of(args_of(node)[0])) < 4:
            inline(program, node, _attention)
    for node in calls(program.graph, aten.rrelu.default):
        if not argument(node, "training"):
            inline(program, node, _rrelu)


# ------------------------------------------------------------------------------------------------ the table


def _root(x: Tensor) -> Tensor:
    """Square root whose gradient at zero is zero, as that of torch's norms and standard deviations."""
    zero = x == 0
    return x.masked_fill(zero, 1.0).sqrt().masked_fill(zero, 0.0)


def _squares(x: Tensor) -> Tensor:
    """Of a complex number the square of its modulus."""
    return x.real.square() + x.imag.square() if x.is_complex() else x.square()


def _vector_norm(
    x: Tensor, ord: float = 2, dim: Sequence[int] | None = None, keepdim: bool = False, *, dtype: Any = None
) -> Tensor:
    """The 2-norm is the root of a sum; the 1-norm a sum; others look at a whole row."""
    x = x if dtype is None else x.to(dtype)
    dims = list(range(x.dim())) if dim is None else list(dim)
    if ord == 2:
        return _root(_squares(x).sum(dims, keepdim))
    if ord == 1:
        return x.abs().sum(dims, keepdim)
    return aten.linalg_vector_norm.default(x, ord, dims, keepdim)


def _variance(x: Tensor, dim: Sequence[int] | None, correction: float, keepdim: bool) -> tuple[Tensor, Tensor]:
    """(variance, mean)."""
    dims = [d % x.dim() for d in dim] if dim else list(range(x.dim()))
    mean = x.mean(dims, keepdim=True)
    count = math.prod(x.shape[d] for d in dims)
    # count - correction may be 0: the variance of one number is 0 / 0, as in torch
    variance = _squares(x - mean).sum(dims, keepdim) / max(count - correction, 0.0)
    return variance, mean if keepdim else mean.squeeze(dims)


def _statistics(kind: str, overload: str) -> Callable[..., Any]:
    """The expansion of ``std``, ``var``, ``std_mean``, ``var_mean`` with one of their signatures."""

    def expansion(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        schema = getattr(getattr(aten, kind), overload)._schema
        names = [a.name for a in schema.arguments if not a.kwarg_only][1:]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        correction = given.get("correction")
        if correction is None:
            correction = 1.0 if given.get("unbiased", True) else 0.0
        variance, mean = _variance(x, given.get("dim"), float(correction), bool(given.get("keepdim", False)))
        first = _root(variance) if kind.startswith("std") else variance
        return (first, mean) if kind.endswith("mean") else first

    return expansion


def _rrelu(
    x: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, generator: Any = None
) -> Tensor:
    return F.leaky_relu(x, (lower + upper) / 2)


def _prelu(x: Tensor, weight: Tensor) -> Tensor:
    """One slope for all, or one per channel, which is dimension 1."""
    if weight.numel() > 1 and x.dim() > 1:
        weight = weight.reshape(1, -1, *[1] * (x.dim() - 2))
    return aten._prelu_kernel.default(x, weight)


def _attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *args: Any, **kwargs: Any) -> Tensor:
    """Attention of 2 or 3 dimensions as of four."""
    missing = 4 - q.dim()
    for _ in range(missing):
        q, k, v = q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
    out: Tensor = aten.scaled_dot_product_attention.default(q, k, v, mask, *args, **kwargs)
    for _ in range(missing):
        out = out.squeeze(0)
    return out


def _reduced(losses: Tensor, reduction: int) -> Tensor:
    return losses.mean() if reduction == 1 else losses.sum() if reduction == 2 else losses


def _mse(x: Tensor, target: Tensor, reduction: int = 1) -> Tensor:
    return _reduced((x - target).square(), reduction)


def _hinge_embedding(x: Tensor, target: Tensor, margin: float = 1.0, reduction: int = 1) -> Tensor:
    losses = (margin - x).clamp_min(0).masked_fill(target == 1, 0) + x.masked_fill(target == -1, 0)
    return _reduced(losses, reduction)


def _margin_ranking(a: Tensor, b: Tensor, target: Tensor, margin: float = 0.0, reduction: int = 1) -> Tensor:
    return _reduced((-target * (a - b) + margin).clamp_min(0), reduction)


def _cosine_embedding(a: Tensor, b: Tensor, target: Tensor, margin: float = 0.0, reduction: int = 1) -> Tensor:
    eps = 1e-12
    squares = (a.square().sum(target.dim()) + eps) * (b.square().sum(target.dim()) + eps)
    cosine = (a * b).sum(target.dim()) / squares.sqrt()
    near, far = 1 - cosine, (cosine - margin).clamp_min(0)
    return _reduced(near.masked_fill(target != 1, 0) + far.masked_fill(target != -1, 0), reduction)


def _cosine_similarity(a: Tensor, b: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
    """The norms are held above ``eps``, which their gradient does not see."""

    def normal(x: Tensor) -> Tensor:
        norm = _vector_norm(x, 2, [dim], True)
        return x / (norm + (norm.clamp_min(eps) - norm).detach())

    a, b = torch.broadcast_tensors(a, b)
    return (normal(a) * normal(b)).sum(dim)


def _pairwise_distance(a: Tensor, b: Tensor, p: float = 2, eps: float = 1e-6, keepdim: bool = False) -> Tensor:
    return _vector_norm(a - b + eps, p, [-1], keepdim)


def _triplet_margin(
    anchor: Tensor,
    positive: Tensor,
    negative: Tensor,
    margin: float = 1.0,
    p: float = 2,
    eps: float = 1e-6,
    swap: bool = False,
    reduction: int = 1,
) -> Tensor:
    far = _pairwise_distance(anchor, negative, p, eps)
    if swap:
        far = torch.minimum(far, _pairwise_distance(positive, negative, p, eps))
    return _reduced((margin + _pairwise_distance(anchor, positive, p, eps) - far).clamp_min(0), reduction)


def _poisson_nll(x: Tensor, target: Tensor, log_input: bool, full: bool, eps: float, reduction: int) -> Tensor:
    losses = x.exp() - target * x if log_input else x - target * (x + eps).log()
    if full:
        stirling = target * target.log() - target + 0.5 * (2 * math.pi * target).log()
        losses = losses + stirling.masked_fill(target <= 1, 0)
    return _reduced(losses, reduction)


def _lstm_cell(
    x: Tensor, state: Sequence[Tensor], w: Tensor, u: Tensor, b: Tensor | None = None, c: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    h, cell = state
    i, f, g, o = (F.linear(x, w, b) + F.linear(h, u, c)).chunk(4, 1)
    cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
    return o.sigmoid() * cell.tanh(), cell


def _gru_cell(x: Tensor, h: Tensor, w: Tensor, u: Tensor, b: Tensor | None = None, c: Tensor | None = None) -> Tensor:
    r, z, n = F.linear(x, w, b).chunk(3, 1)
    hr, hz, hn = F.linear(h, u, c).chunk(3, 1)
    new = (n + hn * (r + hr).sigmoid()).tanh()
    return (h - new) * (z + hz).sigmoid() + new


def _rnn_cell(activation: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    def cell(x: Tensor, h: Tensor, w: Tensor, u: Tensor, b: Tensor | None = None, c: Tensor | None = None) -> Tensor:
        return activation(F.linear(x, w, b) + F.linear(h, u, c))

    return cell


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """A direction and a length, of each row along ``dim``; of the whole weight where it is -1."""
    others = [d for d in range(v.dim()) if dim == -1 or d != dim % v.dim()]
    return v * (g / _root(v.square().sum(others, keepdim=True)))


def _pixel_shuffle(x: Tensor, r: int) -> Tensor:
    """``(c r s) y x -> c (y r) (x s)``: views, which cost nothing and split by what the eye sees."""
    *lead, c, h, w = x.shape
    n = len(lead)
    parts = x.reshape(*lead, c // r**2, r, r, h, w)
    order = [*range(n), n, n + 3, n + 1, n + 4, n + 2]
    return parts.permute(order).reshape(*lead, c // r**2, h * r, w * r)


def _pixel_unshuffle(x: Tensor, r: int) -> Tensor:
    *lead, c, h, w = x.shape
    n = len(lead)
    parts = x.reshape(*lead, c, h // r, r, w // r, r)
    order = [*range(n), n, n + 2, n + 4, n + 1, n + 3]
    return parts.permute(order).reshape(*lead, c * r**2, h // r, w // r)


def _channel_shuffle(x: Tensor, groups: int) -> Tensor:
    n, c, *rest = x.shape
    return x.reshape(n, groups, c // groups, *rest).transpose(1, 2).reshape(n, c, *rest)


_EXPANSIONS: dict[Any, Callable[..., Any]] = {
    aten.linalg_vector_norm.default: _vector_norm,
    **{
        getattr(getattr(aten, kind), overload): _statistics(kind, overload)
        for kind in ("std", "var", "std_mean", "var_mean")
        for overload in ("default", "dim", "correction")
    },
    aten._weight_norm.default: _weight_norm,
    aten.prelu.default: _prelu,
    aten.pixel_shuffle.default: _pixel_shuffle,
    aten.pixel_unshuffle.default: _pixel_unshuffle,
    aten.channel_shuffle.default: _channel_shuffle,
    aten.mse_loss.default: _mse,
    aten.hinge_embedding_loss.default: _hinge_embedding,
    aten.margin_ranking_loss.default: _margin_ranking,
    aten.cosine_embedding_loss.default: _cosine_embedding,
    aten.cosine_similarity.default: _cosine_similarity,
    aten.pairwise_distance.default: _pairwise_distance,
    aten.triplet_margin_loss.default: _triplet_margin,
    aten.poisson_nll_loss.default: _poisson_nll,
    aten.lstm_cell.default: _lstm_cell,
    aten.gru_cell.default: _gru_cell,
    aten.rnn_tanh_cell.default: _rnn_cell(torch.tanh),
    aten.rnn_relu_cell.default: _rnn_cell(torch.relu),
}
