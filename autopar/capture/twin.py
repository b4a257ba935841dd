"""A copy of a model without its weights: enough to capture it again, in another mode, when the model itself is gone."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from autopar.errors import CaptureError


def weightless(model: nn.Module, batch: Any) -> tuple[nn.Module, Any]:
    """(a copy of ``model``, a copy of ``batch``) whose tensors have shapes but no values.

    Raises CaptureError where the model cannot be copied.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def fake(x: Any) -> Any:
        return mode.from_tensor(x.detach()) if isinstance(x, torch.Tensor) else x

    copied: dict[int, Any] = {id(b): fake(b) for b in model.buffers()}
    for p in model.parameters():
        copied[id(p)] = nn.Parameter(fake(p), requires_grad=p.requires_grad)
    try:
        twin = copy.deepcopy(model, copied)
    except Exception as error:
        raise CaptureError(
            "the model cannot be copied, and so not be captured in evaluation mode",
            where=type(model).__name__,
            expected="a model that copy.deepcopy takes",
            got=f"{type(error).__name__}: {error}",
            hint="evaluate the model itself, with full_state_dict() loaded",
        ) from error
    config = getattr(twin, "config", None)
    if getattr(config, "use_cache", False):
        config.use_cache = False  # type: ignore[union-attr]  # as in training: see `capture`
    return twin, pytree.tree_map(fake, batch)
