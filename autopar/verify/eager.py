"""The model itself, as its author wrote it, against the program that was captured of it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from autopar.capture import with_loss
from autopar.passes.emit import RNG
from autopar.program import split_batch
from autopar.rules.analysis import Bound
from autopar.verify.report import Finding
from autopar.verify.trial import Outcome, same

# relative to the largest entry of each tensor, by the narrowest type that the model computes in
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 1e-1}
_NARROW_CASTS = 1e-5  # of a float64 model that casts some values to fewer bits
_ROUNDING = 16  # units in the last place of the largest gradient: what is left of one that is zero, as of keys' bias


def check_eager(
    model: nn.Module,
    weights: nn.Module,
    batch: Any,
    loss_fn: Callable[[Any, Any], Tensor] | None,
    bound: Bound,
    expected: Outcome,
) -> tuple[list[Finding], str]:
    """(where loss or gradients differ from the captured program's in float64, why this was not looked at).

    weights: the values for which ``expected`` is what the program gives.
    """
    program = bound.program
    if program.loss is None:
        return [], "the plan is for inference"
    if any(n.name == RNG and n.users for n in program.graph.nodes):
        return [], "the model draws random numbers, which a plan draws from a hash of its own"
    model, (args, kwargs) = copy.deepcopy(model), split_batch(copy.deepcopy(batch))
    types = {v.dtype for v in bound.values.values() if v.dtype in _TOLERANCE}
    kinds = {p.dtype for p in program.parameters.values() if p.dtype in _TOLERANCE}
    tolerance = max((_TOLERANCE[t] for t in kinds), default=1e-3)
    if types - {torch.float64}:
        tolerance = max(tolerance, _NARROW_CASTS)
    values = dict(weights.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        for name, parameter in model.named_parameters(remove_duplicate=False):
            parameter.copy_(values[name])
    loss, _ = with_loss(model, kwargs, loss_fn)(args, kwargs)
    loss.backward()
    found = {"the loss": loss.detach()}
    trained = dict(model.named_parameters(remove_duplicate=False))
    for node, weight in program.parameters.items():
        if bound.values[node].differentiable:
            grad = trained[weight.name].grad
            key = f"the gradient of {weight.name}"
            found[key] = torch.zeros_like(trained[weight.name]) if grad is None else grad
    largest_of_all = max((float(g.abs().nan_to_num().max()) for g in found.values() if g.numel()), default=0.0)
    rounding = _ROUNDING * max((torch.finfo(t).eps for t in types), default=0.0) * largest_of_all
    for name, got in found.items():
        if not same(got.double(), expected.results[name], tolerance, rounding):
            off = float((got.double() - expected.results[name]).abs().max())
            largest = float(expected.results[name].abs().max())
            what = f"{name} of the model itself is another one than that of the program captured of it"
            return [Finding("step", what, "", f"within {tolerance:g} of {largest:.3g}", f"off by {off:.3g}")], ""
    return [], ""
