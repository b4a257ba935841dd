"""The engine: one global norm, clipping, accumulation, gradients under the user's own hands."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
from torch import Tensor

import autopar
from autopar.runtime.engine import clip_grad_norm
from autopar.runtime.module import ParallelModule
from autopar.testing import run_local

CLUSTER = autopar.ClusterSpec(nodes=1, devices_per_node=4, device="cpu")
MESH = autopar.Search(mesh={"dp": 2, "tp": 2})


def on_four_ranks(case: models.Case, seed: int, fn: Callable[[ParallelModule], Any]) -> Any:
    """``fn`` of the module that runs a random plan on 2 x 2 ranks; every rank's result must be the same."""
    plan = autopar.random_plan(case.model, CLUSTER, case.batch, seed, loss_fn=case.loss_fn, search=MESH)
    bound = autopar.api.understand(case.model, case.batch, case.loss_fn)
    results = run_local(lambda rank: fn(autopar.api.build(case.model, bound, plan)), 4)
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=0, atol=1e-12)
    return results[0]


def eager_gradients(case: models.Case) -> dict[str, Tensor]:
    model = copy.deepcopy(case.model)
    assert case.loss_fn is not None
    case.loss_fn(model(case.batch["x"]), case.batch).backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
@pytest.mark.parametrize("seed", range(4))
def test_total_norm_and_clipping_are_those_of_one_process(seed: int, norm_type: float) -> None:
    case = models.mlp()
    expected = eager_gradients(case)
    parameters = [torch.nn.Parameter(g) for g in expected.values()]
    for p, g in zip(parameters, expected.values(), strict=True):
        p.grad = g.clone()
    norm = torch.nn.utils.clip_grad_norm_(parameters, 0.1, norm_type)

    def clipped(module: ParallelModule) -> tuple[Tensor, dict[str, Tensor]]:
        module.forward_backward(case.batch)
        return clip_grad_norm(module, 0.1, norm_type), module.full_gradients()

    ours, grads = on_four_ranks(case, seed, clipped)
    torch.testing.assert_close(ours, norm, rtol=1e-10, atol=1e-12)
    for name, parameter in zip(expected, parameters, strict=True):
        torch.testing.assert_close(grads[name], parameter.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("seed", range(4))
def test_accumulation_is_the_mean_over_its_batches(seed: int) -> None:
    """Two engine steps with accumulation 2 make one SGD update by the mean gradient of the two batches."""
    case = models.mlp()
    second = {"x": case.batch["x"].flip(0) * 1.5, "y": case.batch["y"] - 0.25}
    reference = copy.deepcopy(case.model)
    assert case.loss_fn is not None
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    loss = (case.loss_fn(reference(case.batch["x"]), case.batch) + case.loss_fn(reference(second["x"]), second)) / 2
    loss.backward()
    optimizer.step()

    def trained(module: ParallelModule) -> dict[str, Tensor]:
        engine = autopar.Engine(module, lambda ps: torch.optim.SGD(ps, lr=0.1), accumulation=2)
        engine.step(case.batch)
        engine.step(second)
        return module.full_state_dict()

    state = on_four_ranks(case, seed, trained)
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_backward_of_the_users_own_loss(seed: int) -> None:
    """``outputs`` of forward carry gradients: a loss that the user computes from them trains the same."""
    case = models.mlp()
    reference = copy.deepcopy(case.model)
    (reference(case.batch["x"]).pow(3).sum() * 0.1).backward()

    def grads(module: ParallelModule) -> dict[str, Tensor]:
        (module(**case.batch).pow(3).sum() * 0.1).backward()
        return module.full_gradients()

    ours = on_four_ranks(case, seed, grads)
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(ours[name], parameter.grad, rtol=1e-10, atol=1e-12)


def test_gradients_add_up_until_they_are_cleared() -> None:
    case = models.mlp()

    def grads(module: ParallelModule) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        module.forward_backward(case.batch)
        once = module.full_gradients()
        module.forward_backward(case.batch)
        return once, module.full_gradients()

    once, twice = on_four_ranks(case, 0, grads)
    for name, grad in once.items():
        torch.testing.assert_close(twice[name], 2 * grad, rtol=1e-10, atol=1e-12)


def test_scheduler_and_optimizer_of_the_users() -> None:
    """An optimizer over the module's DTensor parameters, and one over shards made by a function, train alike."""
    case = models.mlp()

    def trained(module: ParallelModule, mine: bool) -> dict[str, Tensor]:
        make = lambda ps: torch.optim.AdamW(ps, lr=0.05)  # noqa: E731
        optimizer: Any = make(module.parameters()) if mine else make
        engine = autopar.Engine(module, optimizer, lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5))
        for _ in range(3):
            engine.step(case.batch)
        assert engine.optimizer.param_groups[0]["lr"] == pytest.approx(0.05 / 8)
        return module.full_state_dict()

    first = on_four_ranks(case, 1, lambda m: trained(m, True))
    second = on_four_ranks(case, 1, lambda m: trained(m, False))
    for name, value in first.items():
        torch.testing.assert_close(second[name], value, rtol=1e-10, atol=1e-12)


def test_evaluation_draws_no_mask_and_moves_no_statistics() -> None:
    case = models.resnet()
    eager = copy.deepcopy(case.model).eval()

    def evaluated(module: ParallelModule) -> tuple[Tensor, dict[str, Tensor]]:
        module.eval()
        with torch.no_grad():
            return module(**case.batch), module.full_state_dict()

    out, state = on_four_ranks(case, 0, evaluated)
    torch.testing.assert_close(out, eager(case.batch["x"]), rtol=1e-10, atol=1e-12)
    for name, value in eager.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=0, atol=0)


def test_one_backward_through_two_forwards() -> None:
    """The sum of two batches' losses: no use of a weight may be lost."""
    case = models.mlp()
    reference = copy.deepcopy(case.model)
    x = case.batch["x"]
    (reference(x).pow(2).sum() + reference(x * 2).pow(2).sum()).backward()

    def grads(module: ParallelModule) -> dict[str, Tensor]:
        second = {**case.batch, "x": x * 2}
        (module(**case.batch).pow(2).sum() + module(**second).pow(2).sum()).backward()
        return module.full_gradients()

    for seed in range(3):
        ours = on_four_ranks(case, seed, grads)
        for name, parameter in reference.named_parameters():
            torch.testing.assert_close(ours[name], parameter.grad, rtol=1e-10, atol=1e-12)
