"""What once gave wrong numbers in silence; each is compared with the model run by plain torch in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar import api
from autopar.layout import Mesh
from autopar.plan import Fingerprints
from autopar.rules.analysis import Bound
from autopar.runtime.module import ParallelModule
from autopar.solver.sample import random_decisions
from autopar.testing import run_local

WORLDS = [(1,), (2,), (2, 2)]


class Small(nn.Module):
    """A linear layer, whatever else is registered, and a forward that the case gives."""

    def __init__(self, forward: Callable[[Any, Tensor], Any], **more: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(6, 6)
        self.run = forward
        for name, value in more.items():
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)
        self.double()

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)


torch.manual_seed(1)
DATA = {"x": torch.randn(5, 6).double(), "y": torch.randn(5, 6).double()}
STATISTICS = {"mean": torch.randn(6).double(), "std": torch.rand(6).double() + 1}


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("scale", torch.arange(6.0) + 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale


def loss_of(out: Any, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(out[0] if isinstance(out, tuple) else out, batch["y"])


def tensors(out: Any) -> list[Tensor]:
    return [x.detach().clone() for x in (out if isinstance(out, tuple) else (out,))]


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def eager(model: nn.Module, optimizer: Any, max_norm: float) -> tuple[list[Any], list[Tensor], dict[str, Tensor]]:
    model = copy.deepcopy(model)
    made = optimizer(list(model.parameters()))
    with torch.no_grad():
        before = tensors(model(DATA["x"]))
    losses = []
    for _ in range(3):
        made.zero_grad()
        loss = loss_of(model(DATA["x"]), DATA)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        made.step()
        losses.append(loss.detach())
    return before, losses, model.state_dict()


def trained(module: ParallelModule, optimizer: Any, max_norm: float) -> tuple[list[Any], list[Tensor], Any]:
    with torch.no_grad():
        before = tensors(module(**DATA))
    engine = autopar.Engine(module, optimizer, max_grad_norm=max_norm)
    losses = [engine.step(DATA) for _ in range(3)]
    return before, losses, module.full_state_dict()


def on_mesh(bound: Bound, sizes: tuple[int, ...], seed: int, model: nn.Module, fn: Callable[..., Any]) -> list[Any]:
    """``fn(module)`` of every rank, by a random plan."""
    mesh = Mesh(("x", "y", "z")[: len(sizes)], sizes)
    plan = random_decisions(bound, mesh, Fingerprints("", "", ""), seed)
    return run_local(lambda rank: fn(api.build(model, bound, plan)), mesh.size)


def parameter(*shape: int) -> nn.Parameter:
    torch.manual_seed(2)
    return nn.Parameter(torch.randn(*shape))


def without_gradient(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        gate = self.linear(x).sigmoid()
        self.seen.mul_(0.9).add_(gate.mean(0))
    return self.linear(x) * gate + self.seen.clone()


def assigns(self: Any, x: Tensor) -> Tensor:
    out = self.linear(x) * self.seen
    self.seen = 0.9 * self.seen + 0.1 * out.mean(0).detach()
    return out


def updates_after_use(self: Any, x: Tensor) -> Tensor:
    out = self.linear(x) * self.seen.clone()
    self.seen.mul_(0.9).add_(0.1 * out.mean(0).detach())
    return out


def over_two_dims(self: Any, x: Tensor) -> Tensor:
    return F.layer_norm(self.linear(x).view(5, 2, 3), (2, 3)).reshape(5, 6)


def pads_with_a_number(self: Any, x: Tensor) -> Tensor:
    return torch.constant_pad_nd(self.linear(x), (1, 0), 3.0)[:, :-1]


def over_zero(self: Any, x: Tensor) -> Tensor:
    out = self.linear(x)
    return out + (out.detach() / self.mask).nan_to_num(0.0, 1.0, -1.0)


CASES: dict[str, Callable[[], Small]] = {
    # autograd hands both terms of a sum one tensor: clipping scaled it twice
    "two weights, one gradient": lambda: Small(
        lambda s, x: s.linear(x) + (s.a + s.b), a=parameter(5, 6), b=parameter(5, 6)
    ),
    # the gradient of a sum is one number, expanded: it could not be scaled in place
    "expanded gradient": lambda: Small(lambda s, x: s.linear(x) + s.a.sum(), a=parameter(7)),
    # making the buffer's update functional forgot torch.no_grad()
    "no_grad": lambda: Small(without_gradient, seen=torch.ones(6)),
    # torch.export drops it in a submodule
    "assigned buffer": lambda: Small(assigns, seen=torch.ones(6)),
    # what autograd had kept of the buffer changed before backward
    "updated buffer": lambda: Small(updates_after_use, seen=torch.ones(6)),
    # constants were returned without the dimensions along which they do not vary
    "constant output": lambda: Small(
        lambda s, x: (s.linear(x), torch.zeros(5, 3), s.one.expand(5, 6)), one=torch.ones(6)
    ),
    "weight as output": lambda: Small(lambda s, x: (s.linear(x), s.linear.weight, s.linear.weight.t())),
    # all dimensions but the last counted as rows
    "layer norm over two dimensions": lambda: Small(over_two_dims),
    # padding with a number was taken for linear
    "constant padding": lambda: Small(pads_with_a_number),
    # parts of a sum over zero are infinities of both signs, and add up to nan
    "over zero": lambda: Small(over_zero, mask=torch.eye(6)[:5]),
    # rolls as if flattened
    "roll without dimensions": lambda: Small(lambda s, x: s.linear(x).roll(1)),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_plain_torch(name: str) -> None:
    model = CASES[name]()
    expected = eager(model, sgd, 0.05)
    bound = api.understand(model, DATA, loss_of)
    for sizes in WORLDS:
        for seed in range(3):
            for run in on_mesh(bound, sizes, seed, model, lambda module: trained(module, sgd, 0.05)):
                torch.testing.assert_close(run, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(6), Scaled()], ids=["written", "read"])
def test_a_module_in_two_places(layer: nn.Module) -> None:
    """Its buffers have two names: functionalization did not take them, and the second was found nowhere."""
    model = Small(lambda s, x: s.layers(x), layers=nn.Sequential(layer, nn.Linear(6, 6), nn.Tanh(), layer))
    expected = eager(model, sgd, 1e3)
    bound = api.understand(model, DATA, loss_of)
    for seed in range(3):
        for run in on_mesh(bound, (2,), seed, model, lambda module: trained(module, sgd, 1e3)):
            torch.testing.assert_close(run, expected, rtol=1e-9, atol=1e-11)


class Moves(torch.optim.Optimizer):
    """Writes through ``p.data``, as many optimizers outside torch do: no version counter sees it."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.data.add_(p.grad.data, alpha=-0.5)


def test_an_optimizer_may_write_through_data() -> None:
    """Weights that are stored in parts and gathered once a step are gathered after every step."""
    model = Small(lambda s, x: s.linear(torch.tanh(s.linear(x))))
    expected = eager(model, Moves, 1e3)
    bound = api.understand(model, DATA, loss_of)
    for seed in range(6):
        for run in on_mesh(bound, (2,), seed, model, lambda module: trained(module, Moves, 1e3)):
            torch.testing.assert_close(run, expected, rtol=1e-9, atol=1e-11)


def test_load_state_dict_may_assign() -> None:
    model, other = Small(lambda s, x: s.linear(x)), Small(lambda s, x: s.linear(x))
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(1.7).add_(0.1)
    bound = api.understand(model, DATA, loss_of)

    def loaded(module: ParallelModule) -> Tensor:
        with torch.no_grad():
            module(**DATA)
            module.load_state_dict(api.build(other, bound, module.plan).state_dict(), assign=True)
            out: Tensor = module(**DATA)
        return out

    for seed in range(3):
        for out in on_mesh(bound, (2,), seed, model, loaded):
            torch.testing.assert_close(out, other(DATA["x"]), rtol=1e-9, atol=1e-11)


def test_a_whole_state_dict_can_be_loaded_between_steps() -> None:
    model, other = Small(lambda s, x: s.linear(x)), Small(lambda s, x: s.linear(x))
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(1.7).add_(0.1)
    expected = eager(other, sgd, 1e3)
    bound = api.understand(model, DATA, loss_of)

    def loaded(module: ParallelModule) -> Any:
        module.forward_backward(DATA)
        module.zero_grad()
        module.load_state_dict(other.state_dict())
        return trained(module, sgd, 1e3)

    for seed in range(3):
        for run in on_mesh(bound, (2, 2), seed, model, loaded):
            torch.testing.assert_close(run, expected, rtol=1e-9, atol=1e-11)


def test_weights_may_be_frozen_later_and_not_thawed() -> None:
    model = Small(lambda s, x: s.linear(s.first(x)), first=nn.Linear(6, 6))
    model.first.weight.requires_grad_(False)
    bound = api.understand(model, DATA, loss_of)

    def frozen(module: ParallelModule) -> bool:
        module.forward_backward(DATA)
        module.zero_grad()
        module.get_parameter("first.bias").requires_grad_(False)
        module.forward_backward(DATA)
        gone = module.get_parameter("first.bias").grad is None
        module.get_parameter("first.weight").requires_grad_(True)
        with pytest.raises(autopar.errors.RuntimeMismatch, match="planned as frozen"):
            module.forward_backward(DATA)
        return gone and module.get_parameter("linear.weight").grad is not None

    for seed in range(3):
        assert all(on_mesh(bound, (2,), seed, model, frozen))


def test_buffers_may_change_after_planning() -> None:
    """Statistics that are still zeros and ones, and a temperature: loaded or written later, they count."""

    def forward(self: Any, x: Tensor) -> Tensor:
        return self.linear((x - self.mean[None]) * (1 / self.std[None])) * self.tau.exp()

    def changed(module: nn.Module) -> None:
        module.load_state_dict(STATISTICS, strict=False)
        with torch.no_grad():
            module.get_buffer("tau").fill_(0.2)

    model = Small(forward, mean=torch.zeros(6), std=torch.ones(6), tau=torch.tensor(1.0))
    reference = copy.deepcopy(model)
    changed(reference)
    bound = api.understand(model, DATA, loss_of)

    def output(module: ParallelModule) -> Tensor:
        changed(module)
        out: Tensor = module(**DATA)
        return out.detach()

    for out in on_mesh(bound, (2,), 0, model, output):
        torch.testing.assert_close(out, reference(DATA["x"]).detach(), rtol=1e-9, atol=1e-11)


def test_dropout_of_a_buffer_is_drawn_anew() -> None:
    """It depends on no input and yet is no constant: another mask every step, none in evaluation."""
    model = Small(lambda s, x: s.linear(x) + s.drop(s.table), table=torch.ones(6), drop=nn.Dropout(0.5))
    bound = api.understand(model, DATA, loss_of)

    def outputs(module: ParallelModule) -> tuple[list[Tensor], Tensor]:
        with torch.no_grad():
            steps = [module(**DATA) for _ in range(4)]
            return steps, module.eval()(**DATA)

    for steps, evaluated in on_mesh(bound, (2,), 0, model, outputs):
        assert len({tuple(s.flatten().tolist()) for s in steps}) > 1
        torch.testing.assert_close(evaluated, copy.deepcopy(model).eval()(DATA["x"]).detach())


def test_dropout_beside_batch_norm() -> None:
    """Functional graphs call it native_dropout; its masks are those of one process on every mesh."""
    layers = [nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU(inplace=True), nn.Dropout(0.4), nn.Linear(6, 6)]
    model = Small(lambda s, x: s.layers(x), layers=nn.Sequential(*layers))
    bound = api.understand(model, DATA, loss_of)
    run = lambda module: trained(module, sgd, 1e3)  # noqa: E731
    expected = on_mesh(bound, (1,), 0, model, run)[0]
    for seed in range(3):
        for result in on_mesh(bound, (2, 2), seed, model, run):
            torch.testing.assert_close(result, expected, rtol=1e-8, atol=1e-10)


class LearnedMask(nn.Module):
    """Attention with a trained mask."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv = nn.Linear(6, 18)
        self.mask = nn.Parameter(torch.randn(2, 4, 4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.view(5, 4, 2, 3).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v, self.mask).transpose(1, 2).reshape(5, 4, 6)


def test_every_rank_has_a_gradient_for_a_trained_mask() -> None:
    """A rank without heads once had none, and left the others waiting in its reduction."""
    model = LearnedMask().double()
    torch.manual_seed(1)
    data = {"x": torch.randn(5, 4, 6).double(), "y": torch.randn(5, 4, 6).double()}
    reference = copy.deepcopy(model)
    loss_of(reference(data["x"]), data).backward()
    bound = api.understand(model, data, loss_of)

    def gradients(module: ParallelModule) -> dict[str, Tensor]:
        module.forward_backward(data)
        return module.full_gradients()

    for seed in range(16):
        for result in on_mesh(bound, (2, 2), seed, model, gradients):
            for name, p in reference.named_parameters():
                torch.testing.assert_close(result[name], p.grad, rtol=1e-9, atol=1e-11)


def test_autocast_inside_the_model() -> None:
    """Its casts become ops of the graph."""

    def forward(self: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.linear(x)
        return y.float()

    model = Small(forward).float()
    data = {k: v.float() for k, v in DATA.items()}
    bound = api.understand(model, data, loss_of)
    for loss in on_mesh(bound, (2,), 0, model, lambda module: module.forward_backward(data)):
        torch.testing.assert_close(loss, loss_of(model(data["x"]), data).detach(), rtol=1e-2, atol=0)


def test_dropout_that_is_always_on_is_refused_in_evaluation() -> None:
    """Modules drop nothing in evaluation."""
    model = Small(lambda s, x: F.dropout(s.linear(x), 0.5, training=True)).eval()
    with pytest.raises(autopar.errors.CaptureError, match="on in evaluation"):
        api.understand(model, DATA, loss_of)


def test_a_random_op_without_a_rule_is_refused() -> None:
    """Ranks would draw numbers of their own."""
    model = Small(lambda s, x: F.rrelu(s.linear(x), training=True))
    with pytest.raises(autopar.errors.RuleError, match="rrelu"):
        api.understand(model, DATA, loss_of)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_means_of_16_bits_do_not_overflow(dtype: torch.dtype) -> None:
    """The sum of 90,000 squares does not fit into fp16, their mean does."""
    torch.manual_seed(0)
    model = nn.Linear(8, 300).to(dtype)
    data = {"input": torch.randn(300, 8).to(dtype), "y": (3 * torch.randn(300, 300)).to(dtype)}
    for loss_fn in (lambda o, b: F.mse_loss(o, b["y"]), lambda o, b: (o - b["y"]).square().mean()):
        bound = api.understand(model, data, loss_fn)
        expected = loss_fn(model(data["input"]), data).detach()
        for loss in on_mesh(bound, (2,), 0, model, lambda module: module.forward_backward(data)):
            torch.testing.assert_close(loss, expected, rtol=1e-2, atol=0)


def test_one_backward_through_many_forwards_with_shared_gradients() -> None:
    model = Small(lambda s, x: s.linear(x) * s.a + (s.a + s.b), a=parameter(5, 6), b=parameter(5, 6))
    reference = copy.deepcopy(model)
    x = DATA["x"]
    sum(reference(x * (i + 1)).square().sum() for i in range(4)).backward()  # type: ignore[union-attr]
    bound = api.understand(model, DATA, loss_of)

    def gradients(module: ParallelModule) -> dict[str, Tensor]:
        sum(module(**{**DATA, "x": x * (i + 1)}).square().sum() for i in range(4)).backward()  # type: ignore[union-attr]
        return module.full_gradients()

    for sizes in WORLDS:
        for seed in range(3):
            for result in on_mesh(bound, sizes, seed, model, gradients):
                for name, p in reference.named_parameters():
                    torch.testing.assert_close(result[name], p.grad, rtol=1e-9, atol=1e-11)
