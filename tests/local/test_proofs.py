"""Every rule, proven: see `proving`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from proving import prove


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


def test_linear() -> None:
    torch.manual_seed(0)
    prove(F.linear, (randn(5, 7, 6), randn(10, 6), randn(10))).check()
