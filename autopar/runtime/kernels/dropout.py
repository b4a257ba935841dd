"""Dropout whose mask is a hash of (seed, step, node, global position): no plan changes it, recomputation repeats it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.errors import RuntimeMismatch
from autopar.runtime.kernels.parts import Part, positions

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def _mix(word: int) -> int:
    """One round of a 64-bit mixer (multiply and xor-shift), on Python integers."""
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB & _MASK
    return word ^ (word >> 31)


def step_key(seed: int, step: int) -> int:
    """The key of one training step, the ``rng`` argument of `dropout`."""
    return _mix(_mix(seed * _GOLDEN & _MASK) + step & _MASK)


def _signed(word: int) -> int:
    word &= 0xFFFFFFFF
    return word - (1 << 32) if word >> 31 else word


def _scramble(x: Tensor) -> Tensor:
    """In place on int32: two rounds of multiply and shift."""
    for factor, shift in ((0x7FEB352D, 15), (0x846CA68B, 16)):
        x.mul_(_signed(factor))
        high = (x >> shift).bitwise_and_((1 << 32 - shift) - 1)  # torch shifts the sign in; with it no word is negative
        x.bitwise_xor_(high)
    return x


def _words(rows: Sequence[Tensor], rng: int, salt: int, device: torch.device) -> Tensor:
    """One random int32 for each combination of global positions, ``rows`` of each dimension."""
    word = _mix(rng + salt * _GOLDEN & _MASK)
    mask = torch.tensor(_signed(word), dtype=torch.int32, device=device)
    for index in rows:  # every dimension mixes its global position into the word of the dimensions before it
        mask = _scramble(mask.unsqueeze(-1) + index.to(torch.int32) * _signed(0x9E3779B1))
    return mask


def _held(dims: Sequence[Part], device: torch.device) -> list[Tensor]:
    return [positions(part, device) for part in dims]


def keep_mask(rows: Sequence[Tensor], p: float, rng: int, salt: int, device: torch.device) -> Tensor:
    """Bool, True with probability 1 - p; ``rows``: the global positions of each dimension that are asked for."""
    return _words(rows, rng, salt, device) >= _signed(round(p * (1 << 32)) - (1 << 31))


class _Masked(torch.autograd.Function):
    """x * keep * scale, which keeps one byte per element for backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, keep: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(keep)
        ctx.scale = scale
        return (x * keep).mul_(scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (keep,) = ctx.saved_tensors
        return (grad * keep).mul_(ctx.scale), None, None


def dropout(x: Tensor, p: float, rng: int | None, salt: int, *, dims: Sequence[Part]) -> Tensor:
    """``x`` with elements dropped by probability ``p`` and the others scaled; the identity where ``rng`` is None.

    dims: what part of each of x's dimensions this rank holds.
    """
    if rng is None or p == 0:
        return x
    if p >= 1:
        return x * 0
    keep = keep_mask(_held(dims, x.device), p, rng, salt, x.device)
    dropped: Tensor = _Masked.apply(x, keep, 1 / (1 - p))
    return dropped


def random_uniform(
    size: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    rng: int | None,
    salt: int,
    *,
    dims: Sequence[Part],
) -> Tensor:
    """Numbers from [0, 1), each a function of its global position; ``size`` is local, ``dims`` the part it is."""
    bits = -round(math.log2(torch.finfo(dtype).eps)) if dtype.itemsize == 2 else 24  # fewer than rounding would reach 1
    whole = (_words(_held(dims, device), _key(rng), salt, device).to(torch.int64) + (1 << 31)) >> (32 - bits)
    return (whole.to(torch.float64) / (1 << bits)).to(dtype).reshape(tuple(size))


def random_normal(
    size: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    rng: int | None,
    salt: int,
    *,
    dims: Sequence[Part],
) -> Tensor:
    """`random_uniform` of the standard normal distribution."""
    uniform = (_words(_held(dims, device), _key(rng), salt, device).to(torch.float64) + (1 << 31) + 0.5) / (1 << 32)
    return (torch.erfinv(2 * uniform - 1) * math.sqrt(2)).to(dtype).reshape(tuple(size))


def _key(rng: int | None) -> int:
    if rng is None:
        raise RuntimeMismatch(
            "this model draws random numbers that evaluation does not",
            expected="a model in training mode",
            got="eval()",
            hint="plan the model in evaluation mode for evaluation",
        )
    return rng
