"""Losses, norms, reductions, windows, activations: every strategy of every op that they become, on simulated ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from proving import prove
from torch import Tensor, nn
from torch.nn import Buffer

Made = tuple[Callable[..., Any], tuple[Any, ...]]
CASES: dict[str, Callable[[], Made]] = {}


def case(name: str, function: Callable[..., Any], *args: Callable[[], Any]) -> None:
    """``function`` of what ``args`` make: nothing is drawn before a test runs."""
    CASES[name] = lambda: (function, tuple(a() for a in args))


def normal(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(*shape).double()


def share(*shape: int) -> Callable[[], Tensor]:
    """Numbers between 0 and 1 that are not trained."""
    return lambda: Buffer(torch.rand(*shape).double())


def trained_share(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.rand(*shape).double()


def sign(*shape: int) -> Callable[[], Tensor]:
    return lambda: Buffer(torch.randn(*shape).double().sign())


def label(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randint(0, 7, shape)


def two_rows_zero() -> Tensor:
    x = torch.randn(5, 6).double()
    x[1:3] = 0
    return x


# ------------------------------------------------------------------------------------------------ losses

for _how in ("mean", "sum", "none"):
    _options: dict[str, Any] = {"reduction": _how, "ignore_index": 2}
    case(
        f"cross entropy, weights, smoothing, {_how}",
        lambda x, t, w, o=_options: F.cross_entropy(x, t, w, label_smoothing=0.1, **o),
        *(normal(5, 7, 3), label(5, 3), share(7)),
    )
    case(
        f"cross entropy, {_how}",
        lambda x, t, o=_options: F.cross_entropy(x, t, **o),
        *(normal(5, 7), label(5)),
    )
    case(
        f"class probabilities, {_how}",
        lambda x, t, w, how=_how: F.cross_entropy(x, t, w, reduction=how, label_smoothing=0.1),
        *(normal(5, 7, 3), trained_share(5, 7, 3), share(7)),
    )
    case(
        f"nll, weights, {_how}",
        lambda x, t, w, o=_options: F.nll_loss(x, t, w, **o),
        *(normal(5, 7, 3), label(5, 3), share(7)),
    )
    case(
        f"bce with logits, {_how}",
        lambda x, t, w, p, how=_how: F.binary_cross_entropy_with_logits(x, t, w, pos_weight=p, reduction=how),
        *(normal(5, 7), share(5, 7), share(7), share(7)),
    )
case("cross entropy of one example", lambda x: F.cross_entropy(x, torch.tensor(3)), normal(7))
case(
    "cross entropy with few that count",
    lambda x, t: F.cross_entropy(x, t.clamp(max=1), ignore_index=1),
    normal(5, 7),
    label(5),
)
case("nll", lambda x, t: F.nll_loss(x, t, ignore_index=2), normal(5, 7), label(5))
case("bce", F.binary_cross_entropy, trained_share(5, 7), share(5, 7), share(5, 7))
case("mse", F.mse_loss, normal(5, 7), normal(5, 7))
case("l1", F.l1_loss, normal(5, 7), normal(5, 7))
case("smooth l1", lambda x, t: F.smooth_l1_loss(x, t, beta=0.5), normal(5, 7), normal(5, 7))
case("huber", lambda x, t: F.huber_loss(x, t, delta=0.5), normal(5, 7), normal(5, 7))
case("kl", lambda x, t: F.kl_div(x, t, reduction="batchmean"), normal(5, 7), trained_share(5, 7))
case("kl of logarithms", lambda x, t: F.kl_div(x, t, log_target=True), normal(5, 7), normal(5, 7))
case("soft margin", F.soft_margin_loss, normal(5, 7), sign(5, 7))
case("hinge", F.hinge_embedding_loss, normal(5, 7), sign(5, 7))
case("margin ranking", lambda a, b, t: F.margin_ranking_loss(a, b, t, 0.1), normal(5), normal(5), sign(5))
case("multi margin", lambda x, t, w: F.multi_margin_loss(x, t, 2, 0.5, w), normal(5, 7), label(5), share(7))
case("multilabel margin", lambda x: F.multilabel_margin_loss(x, torch.tensor([[1, 3, -1, 0, 0]] * 3)), normal(3, 5))
case("multilabel soft margin", F.multilabel_soft_margin_loss, normal(5, 7), share(5, 7))
case("cosine embedding", lambda a, b, t: F.cosine_embedding_loss(a, b, t, 0.1), normal(5, 7), normal(5, 7), sign(5))
case("cosine similarity", F.cosine_similarity, normal(5, 7), normal(5, 7))
case("triplet", lambda *x: F.triplet_margin_loss(*x, swap=True), normal(5, 7), normal(5, 7), normal(5, 7))
case("poisson", lambda x, t: F.poisson_nll_loss(x, 3 * t, full=True), normal(5, 7), share(5, 7))
case("poisson of rates", lambda x, t: F.poisson_nll_loss(x, t, log_input=False), trained_share(5, 7), share(5, 7))

# ------------------------------------------------------------------------------------------------ norms

case("group norm", lambda x, w, b: F.group_norm(x, 2, w, b), normal(5, 6, 3), normal(6), normal(6))
case("group norm without weights", lambda x: F.group_norm(x, 3), normal(3, 6, 2, 3))
case("rms norm", lambda x, w: F.rms_norm(x, (6,), w), normal(5, 3, 6), normal(6))
case("rms norm over two dimensions", lambda x: F.rms_norm(x, (3, 6), eps=0.1), normal(5, 3, 6))
case("instance norm", lambda x, w, b: F.instance_norm(x, weight=w, bias=b), normal(5, 3, 4), normal(3), normal(3))
case(
    "instance norm by fixed statistics",
    lambda x, w, m, v: F.instance_norm(x, m, v, weight=w, use_input_stats=False),
    *(normal(5, 3, 4), normal(3), share(3), share(3)),
)
case(
    "batch norm without statistics",
    lambda x, w, b: F.batch_norm(x, None, None, w, b, True),
    *(normal(5, 3, 4), normal(3), normal(3)),
)
case(
    "batch norm by fixed statistics",
    lambda x, w, b, m, v: F.batch_norm(x, m, v, w, b, False),
    *(normal(5, 3, 4), normal(3), normal(3), share(3), share(3)),
)
case("local response norm", lambda x: F.local_response_norm(x, 3), normal(3, 5, 4, 2))

# ------------------------------------------------------------------------------------------------ reductions

case("2-norm", lambda x: (x.norm(dim=1), x.norm()), two_rows_zero)
case(
    "other norms",
    lambda x: [
        torch.linalg.vector_norm(x, p, dim=d, keepdim=d == 0) for p, d in ((1, 0), (3, 1), (torch.inf, 1), (0.5, 0))
    ],
    normal(5, 6),
)
case(
    "standard deviation",
    lambda x: (x.std(1), x.std(), *torch.std_mean(x, dim=1, correction=0, keepdim=True)),
    two_rows_zero,
)
case("variance", lambda x: (x.var(0, unbiased=False), *torch.var_mean(x, 1), x.var((0, 1), correction=2)), normal(5, 6))
case("means", lambda x: (x.mean(), x.mean((0, 2), True), x.float().mean(1, dtype=torch.float64)), normal(5, 6, 3))
case("logsumexp", lambda x: (x.logsumexp(1), x.logsumexp((0, 2), True)), normal(5, 6, 3))
case("extremes", lambda x: (x.amax(1), x.max(), x.min(), x.amin((0, 1), keepdim=True)), normal(5, 6))
case("products", lambda x: (x.prod(1), x.prod()), normal(5, 6))
case(
    "any and all", lambda x: ((x > 1).any(1), (x > -1).all(), (x > 3).any(), (x > 0).all(0, keepdim=True)), normal(5, 6)
)
case("softmax", lambda x: (x.softmax(1), x.log_softmax(0), F.softmin(x, 1)), normal(5, 7))

# ------------------------------------------------------------------------------------------------ windows

case("conv1d", lambda x, w, b: F.conv1d(x, w, b, 1, 1), normal(3, 4, 7), normal(5, 4, 3), normal(5))
case("conv1d, strides and holes", lambda x, w: F.conv1d(x, w, None, 2, 3, 2), normal(3, 2, 11), normal(3, 2, 3))
case("conv1d that skips rows", lambda x, w: F.conv1d(x, w, None, 3), normal(2, 2, 17), normal(3, 2, 2))
case("conv1d that pads more than it sees", lambda x, w: F.conv1d(x, w, None, 1, 3), normal(2, 2, 5), normal(3, 2, 2))
case("conv1d, same", lambda x, w: F.conv1d(x, w, padding="same"), normal(2, 2, 7), normal(3, 2, 4))
case("conv1d, valid", lambda x, w: F.conv1d(x, w, padding="valid", dilation=2), normal(2, 2, 10), normal(3, 2, 3))
case("a stem", lambda x, w: F.conv2d(x, w, None, 2, 3), normal(2, 3, 9, 7), normal(4, 3, 7, 7))
case("groups", lambda x, w, b: F.conv2d(x, w, b, 1, 1, 1, 3), normal(3, 6, 5, 4), normal(9, 2, 3, 3), normal(9))
case("depthwise", lambda x, w, b: F.conv2d(x, w, b, 1, 1, 1, 6), normal(3, 6, 5, 4), normal(6, 1, 3, 3), normal(6))
case("pointwise", F.conv2d, normal(3, 4, 5, 3), normal(6, 4, 1, 1), normal(6))
case("patches", lambda x, w, b: F.conv2d(x, w, b, (2, 3)), normal(3, 2, 10, 9), normal(4, 2, 2, 3), normal(4))
case("conv3d", lambda x, w: F.conv3d(x, w, None, 1, 1), normal(2, 2, 3, 4, 3), normal(3, 2, 2, 3, 1))
case("transposed", lambda x, w, b: F.conv_transpose1d(x, w, b, 2, 1), normal(3, 4, 5), normal(4, 3, 3), normal(3))
case(
    "transposed in groups",
    lambda x, w, b: F.conv_transpose2d(x, w, b, 2, 1, 1, 2),
    *(normal(3, 4, 5, 3), normal(4, 3, 3, 3), normal(6)),
)
case("transposed, one position", F.conv_transpose2d, normal(3, 4, 5, 3), normal(4, 3, 1, 1), normal(3))
case("transposed 3d", F.conv_transpose3d, normal(3, 2, 2, 3, 2), normal(2, 3, 2, 2, 1))
case("max 1d", lambda x: (F.max_pool1d(x, 3, 2, 1), F.max_pool1d(x, 2)), normal(3, 2, 11))
case(
    "max 2d",
    lambda x: (F.max_pool2d(x, 3, 2, 1), F.max_pool2d(x, 2, ceil_mode=True), F.max_pool2d(x, (2, 3), 1, 0, 2)),
    normal(2, 3, 9, 7),
)
case("max 2d with indices", lambda x: F.max_pool2d(x, 2, return_indices=True), normal(4, 3, 4, 4))
case("max 3d", lambda x: F.max_pool3d(x, 2), normal(3, 2, 4, 5, 2))
case("average 1d", lambda x: (F.avg_pool1d(x, 3, 2, 1), F.avg_pool1d(x, 3, 2, 1, True, False)), normal(3, 2, 10))
case(
    "average 2d",
    lambda x: (
        F.avg_pool2d(x, 3, 2, 1),
        F.avg_pool2d(x, 2, ceil_mode=True),
        F.avg_pool2d(x, (2, 3), 1, 1, count_include_pad=False),
        F.avg_pool2d(x, 3, 2, 1, divisor_override=5),
    ),
    normal(2, 3, 9, 7),
)
case("average 3d", lambda x: F.avg_pool3d(x, 2, 1, 1), normal(2, 2, 3, 5, 2))
case(
    "adaptive 2d",
    lambda x: (*(F.adaptive_avg_pool2d(x, n) for n in ((2, 3), (4, 7), 1)), F.adaptive_max_pool2d(x, (2, 3))),
    normal(3, 2, 8, 7),
)
case(
    "adaptive 1d",
    lambda x: (*(F.adaptive_avg_pool1d(x, n) for n in (1, 4)), F.adaptive_max_pool1d(x, 2)),
    normal(3, 2, 8),
)
case("power average", lambda x: F.lp_pool2d(x, 2, 2), normal(3, 2, 6, 4))

# ------------------------------------------------------------------------------------------------ pictures

case(
    "nearest",
    lambda x: (
        F.interpolate(x, scale_factor=2),
        F.interpolate(x, size=(8, 6)),
        F.interpolate(x, size=(7, 2)),
        F.interpolate(x, size=(8, 6), mode="nearest-exact"),
    ),
    normal(3, 2, 4, 3),
)
case("nearest by a fraction", lambda x: F.interpolate(x, scale_factor=2.5), normal(3, 2, 4))
case(
    "smooth",
    lambda x: (
        F.interpolate(x, size=(9, 5), mode="bilinear"),
        F.interpolate(x, size=(8, 6), mode="bicubic"),
        F.interpolate(x, size=(3, 2), mode="bilinear", antialias=True),
        F.interpolate(x[0], size=9, mode="linear", align_corners=True),
    ),
    normal(3, 2, 4, 3),
)
case("shuffles", lambda x: (F.pixel_shuffle(x, 2), F.channel_shuffle(x, 3)), normal(3, 12, 3, 5))
case("unshuffle", lambda x: F.pixel_unshuffle(x, 2), normal(3, 3, 6, 10))
case("grid", lambda x, g: F.grid_sample(x, g / 2, align_corners=False), normal(3, 2, 4, 5), normal(3, 3, 2, 2))
case("affine grid", lambda t: F.affine_grid(t, [3, 2, 4, 5], align_corners=False), normal(3, 2, 3))

# ------------------------------------------------------------------------------------------------ the rest

case("gated", lambda x: (F.glu(x), F.glu(x, 0)), normal(6, 10))
case(
    "activations",
    lambda x, w, v: (
        F.prelu(x, w),
        F.prelu(x, v),
        *(f(x) for f in (F.hardswish, F.hardsigmoid, F.hardtanh, F.logsigmoid, F.softplus, F.elu, F.selu, F.celu)),
        *(F.mish(x), F.threshold(x, 0, 1), F.rrelu(x)),
    ),
    *(normal(5, 3, 2), normal(3), normal(1)),
)
case("bilinear", F.bilinear, normal(5, 3), normal(5, 4), normal(2, 3, 4), normal(2))
case("attention of three dimensions", F.scaled_dot_product_attention, normal(3, 4, 2), normal(3, 5, 2), normal(3, 5, 3))
case(
    "attention with groups of heads",
    lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
    *(normal(3, 4, 4, 2), normal(3, 2, 5, 2), normal(3, 2, 5, 3)),
)


def recurrent(name: str, make: Callable[[], nn.Module], *shape: int) -> None:
    """A layer as a function of its input and its weights."""

    def made() -> Made:
        layer = make().double()
        names = [n for n, _ in layer.named_parameters()]
        weights = [p.detach().clone() for p in layer.parameters()]

        def run(x: Tensor, *given: Tensor) -> Any:
            return torch.func.functional_call(layer, dict(zip(names, given, strict=True)), (x,))

        return run, (torch.randn(*shape).double(), *weights)

    CASES[name] = made


recurrent("lstm", lambda: nn.LSTM(3, 2, 2, bidirectional=True, batch_first=True), 5, 3, 3)
recurrent("gru", lambda: nn.GRU(3, 2), 3, 5, 3)
recurrent("rnn", lambda: nn.RNN(3, 2, nonlinearity="relu"), 3, 5, 3)
recurrent("lstm cell", lambda: nn.LSTMCell(3, 2), 5, 3)
recurrent("gru cell", lambda: nn.GRUCell(3, 2), 5, 3)
recurrent("rnn cell", lambda: nn.RNNCell(3, 2), 5, 3)


@pytest.mark.parametrize("name", CASES)
def test_every_strategy_is_exact(name: str) -> None:
    """On 2, 3 and 4 ranks and on 2 x 2: uneven and empty shards, partial sums; values and gradients."""
    torch.manual_seed(0)
    function, args = CASES[name]()
    prove(function, args).check()
