"""Training and evaluation are two programs: a module in either mode gives what the model gives in that mode."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import BATCH, MODELS
from torch import Tensor, nn

import autopar
from autopar import api
from autopar.cluster import ClusterSpec
from autopar.errors import CaptureError, RuntimeMismatch
from autopar.layout import Mesh
from autopar.testing import run_local


class Branching(nn.Module):
    """Adds noise of its own kind in training, and in evaluation goes through a layer that training never sees."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(7, 10)
        self.norm = nn.BatchNorm1d(10)
        self.only_then = nn.Linear(10, 10, bias=False)
        self.down = nn.Linear(10, 13)
        for p in self.only_then.parameters():
            p.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        h = F.dropout(self.norm(self.up(x)), 0.3, self.training)
        h = torch.tanh(h) if self.training else torch.relu(self.only_then(h)) * 2
        return self.down(h)


def branching() -> tuple[nn.Module, dict[str, Tensor], Any]:
    torch.manual_seed(0)
    batch = {"x": torch.randn(BATCH, 7).double(), "y": torch.randn(BATCH, 13).double()}
    return Branching().double(), batch, lambda out, batch: F.mse_loss(out, batch["y"])


CASES = {"branching": branching} | {
    name: (lambda name=name: (lambda c: (c.model, c.batch, c.loss_fn))(MODELS[name]()))
    for name in ("gpt2-padded-dropout", "llama-padded", "resnet")
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("mesh", [{"x": 2}, {"x": 3}, {"x": 2, "y": 2}], ids=str)
def test_evaluation_runs_the_model_in_evaluation(name: str, mesh: dict[str, int]) -> None:
    """After a step in training: its weights and running statistics, the other branch, no dropout; then it trains on."""
    model, batch, loss_fn = CASES[name]()
    cluster = ClusterSpec(nodes=1, devices_per_node=math.prod(mesh.values()), device="cpu")
    bound, evaluation = api.understand(model, batch, loss_fn), api.in_evaluation(model, batch, loss_fn)()
    plan = api.solve(bound, cluster, mesh=Mesh.of(mesh))

    def job(rank: int) -> tuple[Any, dict[str, Tensor], Tensor]:
        module = api.build(model, bound, plan, evaluation=lambda: evaluation)  # one capture: threads cannot
        engine = autopar.Engine(module, lambda ps: torch.optim.SGD(ps, lr=0.1))
        engine.step(batch)
        state = module.full_state_dict()
        module.eval()
        with torch.no_grad():
            outputs, loss = module(**batch), module.loss(batch)
        after = module.full_state_dict()
        for n, value in state.items():
            assert torch.equal(after[n], value), f"evaluation changed {n}"
        module.train()
        assert torch.isfinite(engine.step(batch))
        return outputs, state, loss

    inputs = {k: v for k, v in batch.items() if k != "y" or loss_fn is None}
    for outputs, state, loss in run_local(job, cluster.world_size):
        reference = CASES[name]()[0]
        reference.load_state_dict(state)
        reference.eval()
        with torch.no_grad():
            expected = reference(**inputs)
            wanted = expected.loss if loss_fn is None else loss_fn(expected, batch)
        found = outputs if isinstance(outputs, Tensor) else outputs.logits
        logits = expected if isinstance(expected, Tensor) else expected.logits
        torch.testing.assert_close(found, logits, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(loss, wanted, rtol=1e-6, atol=1e-6)


def test_a_model_planned_in_evaluation_is_not_trained() -> None:
    model, batch, loss_fn = branching()
    module = autopar.parallelize(model.eval(), "1xcpu", batch, loss_fn=loss_fn)
    with torch.no_grad():
        torch.testing.assert_close(module(**batch), model(batch["x"]))
    module.train()
    with pytest.raises(RuntimeMismatch, match="evaluation mode when it was planned"):
        module.forward_backward(batch)


class Uncopied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 13)

    def __deepcopy__(self, memo: object) -> object:
        raise TypeError("one of a kind")

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def test_a_model_that_cannot_be_copied_trains_and_refuses_evaluation() -> None:
    _, batch, loss_fn = branching()
    module = autopar.parallelize(Uncopied().double(), "1xcpu", batch, loss_fn=loss_fn)
    module.forward_backward(batch)
    module.eval()
    with pytest.raises(CaptureError, match="one of a kind"):
        module(**batch)
