"""What a graph of ops does not show by itself: gradients equal eager ones, or the model is refused with its line."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from equality import mesh_of
from refused import refused
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autopar import api, rules
from autopar.errors import CaptureError, RuleError
from autopar.plan import Fingerprints
from autopar.runtime.module import ParallelModule
from autopar.solver.sample import random_decisions
from autopar.testing import run_local

Forward = Callable[[Any, Tensor], Tensor]


class Two(nn.Module):
    """Two linear layers, and a forward that the case gives."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.run = forward
        self.calls, self.longest, self.seen = 0, 0, [0]
        self.last, self.mean, self.states = None, torch.ones(6).double(), [torch.ones(6).double()]
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


torch.manual_seed(1)
BATCH = {"x": torch.randn(5, 6).double(), "y": torch.randn(5, 6).double()}


def loss_of(out: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(out, batch["y"])


def assert_equals_eager(model: nn.Module) -> None:
    """Loss and gradients of random plans against plain torch."""
    reference = copy.deepcopy(model)
    loss = loss_of(reference(BATCH["x"]), BATCH)
    loss.backward()
    expected = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in reference.named_parameters()}
    bound = api.understand(model, BATCH, loss_of)

    def job(module: ParallelModule) -> tuple[Tensor, dict[str, Tensor]]:
        return module.forward_backward(BATCH), module.full_gradients()

    for sizes, seed in [((1,), 0), ((2,), 1), ((2, 2), 2)]:
        mesh = mesh_of(sizes)
        plan = random_decisions(bound, mesh, Fingerprints("", "", ""), seed)
        for found in run_local(lambda rank: job(api.build(model, bound, plan)), mesh.size):  # noqa: B023
            trained = {n: g for n, g in expected.items() if n in found[1] or bool(g.any())}
            torch.testing.assert_close(found, (loss.detach(), trained), rtol=1e-10, atol=1e-12)


# ------------------------------------------------------------------------------------------------ equal


def data(self: Any, x: Tensor) -> Tensor:
    return F.linear(self.a(x).tanh().data, self.b.weight.data) + self.a(x)


def stopped_in_place(self: Any, x: Tensor) -> Tensor:
    h = self.a(x).tanh()
    before = self.b(h)
    h = h.clone()
    h.detach_()
    return self.b(h) + before + self.a(x)


def inference(self: Any, x: Tensor) -> Tensor:
    with torch.inference_mode():
        h = self.a(x).tanh().clone()
    return self.b(x) + h.clone()


def nested_modes(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        h = self.a(x).tanh()
        with torch.enable_grad():
            k = self.b(x).tanh()
    return self.b(h) + k


def mode_as_a_switch(self: Any, x: Tensor) -> Tensor:
    torch.set_grad_enabled(False)
    h = self.a(x).tanh()
    torch.set_grad_enabled(True)
    return self.b(h) + self.a(x)


def slices_in_place(self: Any, x: Tensor) -> Tensor:
    h = self.a(x).clone()
    h[:, 1:3] = h[:, 1:3] * 2
    h[:, 0].mul_(3.0)
    return self.b(h)


def written_without_gradient(self: Any, x: Tensor) -> Tensor:
    scale = torch.ones(6, dtype=x.dtype)
    with torch.no_grad():
        scale[1:3] = self.a(x).mean(0)[1:3]
    return self.b(x * scale) + self.a(x)


def straight_through(self: Any, x: Tensor) -> Tensor:
    h = self.a(x)
    return self.b(h + ((3 * h).round() / 3 - h).detach())


def comes_to_rest(self: Any, x: Tensor) -> Tensor:
    self.longest = max(self.longest, x.shape[1])
    return self.b(self.a(x)) * self.longest


@torch.library.custom_op("autopar_tests::triple", mutates_args=())
def triple(x: Tensor) -> Tensor:
    return 3 * x


triple.register_fake(torch.empty_like)
triple.register_autograd(lambda ctx, g: 5 * g)  # of its own, to see that it runs


def own_op(self: Any, x: Tensor) -> Tensor:
    return self.b(triple(self.a(x)))


EQUAL = [
    data,
    stopped_in_place,
    inference,
    nested_modes,
    mode_as_a_switch,
    slices_in_place,
    written_without_gradient,
    straight_through,
    comes_to_rest,
    own_op,
]


@pytest.mark.parametrize("forward", EQUAL, ids=lambda f: f.__name__)
def test_gradients_equal_eager(forward: Forward) -> None:
    op = "autopar_tests.triple.default"
    rules.rule(op, "... -> ...", args="x")
    try:
        assert_equals_eager(Two(forward))
    finally:
        rules.unregister(op)


# ------------------------------------------------------------------------------------------------ refused


def hooked(self: Any, x: Tensor) -> Tensor:
    h = self.a(x)
    h.register_hook(lambda g: 2 * g)
    return self.b(h)


def backward_inside(self: Any, x: Tensor) -> Tensor:
    y = self.a(x)
    y.sum().backward(retain_graph=True)
    return self.b(y)


def penalty(self: Any, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    y = self.b(self.a(x).tanh())
    (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return y + g.square()


def written_in_no_grad(self: Any, x: Tensor) -> Tensor:
    h = self.a(x)
    with torch.no_grad():
        h[:, 1:].mul_(2.0)
    return self.b(h)


def written_through_detach(self: Any, x: Tensor) -> Tensor:
    h = self.a(x)
    h.detach().mul_(2.0)
    return h + self.b(x)


def written_through_data(self: Any, x: Tensor) -> Tensor:
    h = self.a(x)
    h.data.mul_(2.0)
    return self.b(h.tanh())


def weight_clamped(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        self.a.weight.clamp_(-0.1, 0.1)
    return self.b(self.a(x))


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return -g


def reversed_gradient(self: Any, x: Tensor) -> Tensor:
    return self.b(Reversed.apply(self.a(x)))


def checkpointed(self: Any, x: Tensor) -> Tensor:
    return self.b(checkpoint(self.a, x, use_reentrant=False))


def counts(self: Any, x: Tensor) -> Tensor:
    self.calls += 1
    return self.b(self.a(x)) * self.calls


def remembers(self: Any, x: Tensor) -> Tensor:
    self.seen.append(x.shape[0])
    return self.b(self.a(x)) * len(self.seen)


def rolls_dice(self: Any, x: Tensor) -> Tensor:
    return self.b(self.a(x)) * (1 if random.random() < 0.5 else 2)


def rolls_numpys_dice(self: Any, x: Tensor) -> Tensor:
    return self.b(self.a(x)) * float(np.random.rand())


def averages(self: Any, x: Tensor) -> Tensor:
    h = self.a(x)
    self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
    return self.b(h - self.mean)


def recalls(self: Any, x: Tensor) -> Tensor:
    h = self.a(x) if self.last is None else self.a(x) + self.last
    self.last = h.detach()
    return self.b(h)


def keeps_in_a_list(self: Any, x: Tensor) -> Tensor:
    self.states[0] = self.states[0].cos()
    return self.b(self.a(x)) * self.states[0]


def writes_into_an_attribute(self: Any, x: Tensor) -> Tensor:
    self.mean.add_(x.mean(0))
    return self.b(self.a(x)) * self.mean


def starts_up(self: Any, x: Tensor) -> Tensor:
    h = self.a(x)
    if not self.calls:
        self.calls, self.mean = 1, h.detach().mean(0)
    return self.b(h - self.mean)


WRITE = "a write that autograd does not see"
REFUSED: list[tuple[Forward, tuple[str, ...]]] = [
    (hooked, ("a hook on a gradient in forward is lost", "test_unseen.py", "in hooked")),
    (backward_inside, ("a backward pass in forward is lost", "in backward_inside")),
    (penalty, ("a backward pass in forward is lost", "in penalty")),
    (written_in_no_grad, (WRITE, "aten.mul_.Tensor")),
    (written_through_detach, (WRITE, "aten.mul_.Tensor")),
    (written_through_data, (WRITE, "aten.mul_.Tensor")),
    (weight_clamped, (WRITE, "aten.clamp_.default")),
    (reversed_gradient, ("a custom autograd.Function loses its backward", "Reversed", "in reversed_gradient")),
    (checkpointed, ("a checkpoint() region vanishes", "in checkpointed")),
    (counts, ("forward counts in an attribute", "where: calls")),
    (remembers, ("forward counts in an attribute", "len(seen)")),
    (averages, ("forward reads a tensor that its last call left", "in averages", "got: mean", "register_buffer")),
    (recalls, ("forward reads a tensor that its last call left", "in recalls", "got: last")),
    (keeps_in_a_list, ("forward reads a tensor that its last call left", "in keeps_in_a_list", "states[0]")),
    (starts_up, ("forward computes something else in its first call", "where: calls, mean")),
    (writes_into_an_attribute, ("torch.export cannot capture Two", "Pls register it as buffer")),
    (rolls_dice, ("forward draws random numbers outside of torch",)),
    (rolls_numpys_dice, ("forward draws random numbers outside of torch",)),
]


@pytest.mark.parametrize(("forward", "parts"), REFUSED, ids=lambda v: getattr(v, "__name__", ""))
def test_what_a_graph_would_lose_is_refused(forward: Forward, parts: tuple[str, ...]) -> None:
    with refused(CaptureError, *parts):
        api.understand(Two(forward), BATCH, loss_of)


def plain(self: Any, x: Tensor) -> Tensor:
    return self.b(self.a(x).tanh())


def leaves_for_readers(self: Any, x: Tensor) -> Tensor:
    if self.last is None:
        self.last = torch.arange(6.0).double().cos()  # a table, made once
    h = self.a(x)
    self.mean, self.states[0] = h.mean(0), h.detach()
    return self.b(h) + self.mean * self.last


def test_attributes_that_one_call_writes_and_reads_are_fine_and_stay_as_they_were() -> None:
    model = Two(leaves_for_readers)
    before = model.mean, model.states[0]
    assert_equals_eager(model)
    assert model.last is None
    assert model.mean is before[0] and model.states[0] is before[1]


def test_a_view_of_a_weight_made_before_forward_is_refused() -> None:
    model = Two(lambda self, x: self.b(self.a(x)) @ self.last)
    model.last = model.a.weight.detach().t()
    with refused(CaptureError, "a view of a weight or a buffer", "where: last", "memory of a.weight"):
        api.understand(model, BATCH, loss_of)
    model.last = model.a.weight.detach().t().clone()
    assert_equals_eager(model)


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_on_a_weight_is_refused(kind: str) -> None:
    model = Two(plain)
    getattr(model.a.weight, kind)(lambda _: None)
    with refused(CaptureError, "a hook on a weight's gradient", "where: a.weight", kind):
        api.understand(model, BATCH, loss_of)


@pytest.mark.parametrize("wrap", [torch.compile, torch.jit.script, nn.DataParallel])
def test_a_wrapped_module_is_refused(wrap: Callable[[nn.Module], nn.Module]) -> None:
    model = nn.Sequential(nn.Linear(6, 6), wrap(nn.Sequential(nn.Tanh(), nn.Linear(6, 6)))).double()
    with refused(CaptureError, "compiled or made parallel already", "where: 1", "pass what it wraps"):
        api.understand(model, {"input": BATCH["x"], "y": BATCH["y"]}, loss_of)


def test_weights_that_share_memory_are_refused() -> None:
    model = Two(plain)
    model.b.weight.data = model.a.weight.data
    with refused(CaptureError, "share memory", "where: a.weight, b.weight", "the same nn.Parameter"):
        api.understand(model, BATCH, loss_of)
    model.b.weight = model.a.weight
    assert_equals_eager(model)
    whole = torch.randn(12, 6).double()
    model.a.weight, model.b.weight = nn.Parameter(whole[:6]), nn.Parameter(whole[6:])  # side by side in one storage
    assert_equals_eager(model)


def inverts(self: Any, x: Tensor) -> Tensor:
    return self.b(x) @ torch.linalg.inv(x.mT @ x + torch.eye(6).double())


def test_an_op_that_checks_values_is_refused() -> None:
    with refused(RuleError, "no rule for aten.linalg_inv.default"):
        api.understand(Two(inverts), BATCH, loss_of)


def test_a_modules_backward_hook_is_refused() -> None:
    model = Two(plain)
    model.a.register_full_backward_hook(lambda module, inside, outside: None)
    with refused(CaptureError, "a module's backward hook is lost"):
        api.understand(model, BATCH, loss_of)
