"""Networks of pictures: training by plans that split examples, channels, groups and positions; random numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from equality import assert_equals_one_process, forced, prepare, run_plan, sample
from models import Case
from refused import refused
from torch import Tensor, nn

from autopar import api
from autopar.errors import AutoparError, CaptureError, RuleError, RuntimeMismatch
from autopar.runtime.kernels.dropout import random_normal, random_uniform, step_key
from autopar.runtime.kernels.parts import Part
from autopar.runtime.module import ParallelModule


class Everything(nn.Module):
    """Every kind of norm, windows of every kind, a layer that runs twice, a frozen norm in training."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.instance = nn.InstanceNorm2d(4, affine=True, track_running_stats=True)
        self.second = nn.Conv2d(4, 4, 3, padding="same", bias=False)
        self.group, self.frozen = nn.GroupNorm(2, 4), nn.BatchNorm2d(4)
        self.up = nn.ConvTranspose2d(4, 4, 2, 2, groups=2, bias=False)
        self.depthwise = nn.Conv2d(4, 4, 3, 2, 1, groups=4, bias=False)
        self.batch, self.rms = nn.BatchNorm2d(4, track_running_stats=False), nn.RMSNorm(6)
        nn.init.normal_(self.frozen.running_mean)  # type: ignore[arg-type]
        nn.init.uniform_(self.frozen.running_var, 0.5, 2)  # type: ignore[arg-type]

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.frozen.eval()
        h = F.max_pool2d(self.instance(self.instance(self.first(x)).relu()), 3, 2, 1)
        h = F.interpolate(self.group(self.second(h)), size=(5, 6), mode="bilinear")
        h = self.frozen(h) + F.avg_pool2d(h, 3, 1, 1)
        h = self.depthwise(self.up(F.mish(h)))
        return self.rms(F.glu(self.batch(h), 1)).std(1)


def everything() -> Case:
    torch.manual_seed(0)
    batch = {"x": torch.randn(5, 3, 5, 6).double(), "y": torch.randint(0, 5, (5, 6))}
    weights = torch.arange(1.0, 6.0).double()
    return Case(
        Everything().double().train(),
        batch,
        lambda out, b: F.cross_entropy(out, b["y"], weights, label_smoothing=0.1, ignore_index=2),
    )


def stem() -> Case:
    """A stem of 7 x 7 with stride 2 and without a bias."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(3, 8, 7, stride=2, padding=3, bias=False), nn.ReLU(), nn.Conv2d(8, 6, 3, padding=1)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 5)),
    )
    return Case(model.double(), {"input": torch.randn(4, 3, 15, 15).double()}, lambda out, batch: out.square().mean())


def test_everything_equals_one_process() -> None:
    prepared = prepare(everything())
    for sizes in [(2,), (3,), (4,), (2, 2)]:
        assert_equals_one_process(prepared, sample(prepared.bound, sizes, 0), "seed 0")


@pytest.mark.slow
def test_everything_equals_one_process_by_many_plans() -> None:
    prepared = prepare(everything())
    for sizes in [(2,), (3,), (4,), (2, 2), (2, 2, 2)]:
        for seed in range(1, 9):
            assert_equals_one_process(prepared, sample(prepared.bound, sizes, seed), f"seed {seed}")


STEM = [
    {"conv2d": ("split n",), "conv2d_1": ("split n",)},
    {"conv2d": ("split o",), "conv2d_1": ("split c",)},
    {"conv2d": ("halo y0",), "conv2d_1": ("halo y0",)},
    {"conv2d": ("halo y1",), "conv2d_1": ("split n",)},
]


@pytest.mark.parametrize("choices", STEM, ids=str)
def test_a_stem_split_by_rows_channels_and_positions(choices: dict[str, tuple[str, ...]]) -> None:
    """15 rows become 8: on four ranks 4, 4, 4 and 3 rows make two each."""
    prepared = prepare(stem())
    for sizes in ((2,), (4,)):
        assert_equals_one_process(prepared, forced(prepared.bound, sizes, choices), "forced")
    both = {"conv2d": ("halo y0", "halo y1"), "conv2d_1": ("halo y1", "split c")}
    if choices is STEM[0]:
        assert_equals_one_process(prepared, forced(prepared.bound, (2, 2), both), "both dimensions")


# ------------------------------------------------------------------------------------------------ random numbers


class Random(nn.Module):
    """Dropouts of channels, with and without a functional graph, stochastic depth, noise."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.conv, self.linear = nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.Linear(6, 6)
        self.norm = nn.BatchNorm2d(4) if norm else nn.Identity()
        self.channels, self.alpha, self.both = nn.Dropout2d(0.3), nn.AlphaDropout(0.3), nn.FeatureAlphaDropout(0.4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x))
        y = self.channels(y) + self.alpha(y) + self.both(y)
        if self.training:
            y = y * y.new_empty(y.shape[0], 1, 1, 1).bernoulli_(0.7)
            y = y + torch.rand(5, 1, 1, 1, dtype=y.dtype) + torch.randn_like(y) * 0.1 + torch.bernoulli(y.sigmoid())
            y = y + torch.empty_like(y).uniform_(1, 2) + torch.randint(0, 3, (5, 4, 1, 6)) + F.gumbel_softmax(y, dim=1)
        out: Tensor = self.linear(y)
        return out


def random_case(norm: bool) -> Case:
    torch.manual_seed(0)
    return Case(
        Random(norm).double().train(), {"x": torch.randn(5, 3, 5, 6).double()}, lambda out, batch: out.square().mean()
    )


@pytest.mark.parametrize("norm", [False, True])
def test_random_numbers_do_not_depend_on_the_plan(norm: bool) -> None:
    prepared = prepare(random_case(norm), exact=False)
    for sizes, seed in [((3,), 1), ((2, 2), 2)]:
        assert_equals_one_process(prepared, sample(prepared.bound, sizes, seed), f"seed {seed}")


def test_numbers_drawn_in_training_are_refused_in_evaluation() -> None:
    """Dropout is the identity there; what else the model would do without them its training graph does not say."""
    prepared = prepare(random_case(False), exact=False)

    def job(module: ParallelModule, batch: dict[str, Tensor]) -> None:
        with refused(RuntimeMismatch, "draws random numbers", "plan the model in evaluation mode"):
            module.eval()(**batch)

    run_plan(prepared, sample(prepared.bound, ()), job)


def test_dropouts_of_channels_are_the_identity_in_evaluation() -> None:
    model = nn.Sequential(
        nn.Linear(6, 6), nn.Dropout1d(0.5), nn.AlphaDropout(0.5), nn.FeatureAlphaDropout(0.5)
    ).double()
    case = Case(model, {"input": torch.randn(5, 4, 6).double()}, lambda out, batch: out.square().mean())
    prepared = prepare(case, exact=False)

    def job(module: ParallelModule, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return module(**batch).detach(), module.eval()(**batch).detach()

    for dropped, kept in run_plan(prepared, sample(prepared.bound, (2,)), job):
        torch.testing.assert_close(kept, model.eval()(**case.batch).detach())
        assert not torch.allclose(dropped, kept)


def test_alpha_dropout_keeps_mean_and_variance() -> None:
    model = nn.Sequential(nn.AlphaDropout(0.3), nn.FeatureAlphaDropout(0.2)).double().train()
    case = Case(model, {"input": torch.randn(200, 200, 2).double()})
    bound = api.understand(case.model, case.batch, lambda out, batch: out.sum())
    out = api.build(case.model, bound, sample(bound, ()))(**case.batch)
    assert abs(float(out.mean())) < 0.02 and abs(float(out.var()) - 1) < 0.03
    assert len(set(out[:, :, 0].flatten().tolist())) > 20_000


def test_distributions_are_what_they_are_called() -> None:
    dims, device = [Part(300), Part(1000)], torch.device("cpu")
    uniform, normal = (
        f([300, 1000], torch.float64, device, step_key(1, 2), k, dims=dims)
        for k, f in enumerate((random_uniform, random_normal))
    )
    assert abs(float(uniform.mean()) - 1 / 2) < 2e-3 and abs(float(uniform.var()) - 1 / 12) < 1e-3
    assert abs(float(normal.mean())) < 5e-3 and abs(float(normal.var()) - 1) < 1e-2
    assert abs(float((normal**4).mean()) - 3) < 0.1
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        drawn = random_uniform([300, 1000], dtype, device, step_key(1, 2), 0, dims=dims)
        assert drawn.dtype is dtype and float(drawn.min()) >= 0 and float(drawn.max()) < 1


# ------------------------------------------------------------------------------------------------ refusals

Refused = tuple[Callable[..., Any], type[AutoparError], str]

REFUSED: dict[str, Refused] = {
    "random slopes": (lambda layer, x: F.rrelu(x, training=True), RuleError, "aten.rrelu.default"),
    "permutation": (lambda layer, x: x[torch.randperm(5)], RuleError, "aten.randperm.default"),
    "dropout between layers": (lambda layer, x: layer(x)[0], RuleError, "dropout between recurrent layers has no rule"),
    "ctc": (
        lambda layer, x: F.ctc_loss(x, torch.ones(4, 2).long(), torch.full((4,), 5), torch.full((4,), 2)),
        CaptureError,
        "torch.export cannot capture",
    ),
    "noise in evaluation": (
        lambda layer, x: x + torch.rand_like(x),
        CaptureError,
        "a random number in evaluation has no rule",
    ),
}


class Calls(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.linear, self.layer, self.function = nn.Linear(6, 6), nn.LSTM(6, 3, 2, dropout=0.5), function

    def forward(self, x: Tensor) -> Any:
        return self.function(self.layer, self.linear(x))


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_rule_is_refused(name: str) -> None:
    function, kind, says = REFUSED[name]
    model = Calls(function).double().train("evaluation" not in name)
    with refused(kind, says):
        api.understand(model, {"x": torch.randn(5, 4, 6).double()}, lambda out, batch: out.sum())
