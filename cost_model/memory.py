"""Bytes that parameters, gradients and optimizer state take, and the bytes that there are.

A parameter is kept in three layouts: *stored* (what the optimizer updates: the weights at full precision, and its
state), *held* (what a step computes from, made from the stored weights once a step), and *accumulated* (the gradient
between microbatches).  With Adam in mixed precision that is 12, 2 and 2 bytes per element, and ZeRO is nothing but a
choice of the three layouts (arXiv 1910.02054):

| stage | stored | held | accumulated | bytes per parameter on N ranks |
|---|---|---|---|---|
| 0 | whole | whole | whole | 16 |
| 1 | split | whole | whole | 4 + 12/N |
| 2 | split | whole | split | 2 + 14/N |
| 3 | split | split | split | 16/N |

In one precision (fp32, fp64) the held weights *are* the stored weights while both have one layout: one tensor, counted
in ``stored``.  Only where the layouts differ is there a second tensor, and then ``held`` counts.  ``aliased`` says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.cost_model.hardware import Device
from autopar.errors import PlanError

# State that the optimizer keeps per parameter, in tensors of the parameter's size. "none" is inference.
OPTIMIZERS: Mapping[str, int] = {"adamw": 2, "adam": 2, "sgd_momentum": 1, "sgd": 0, "none": 0}
# Bytes per element of (the weights that the optimizer updates and its state, the weights and gradients in use).
PRECISIONS: Mapping[str, tuple[int, int]] = {"fp64": (8, 8), "fp32": (4, 4), "bf16": (4, 2), "fp16": (4, 2)}

# Part of a device's memory that a plan leaves alone: for the driver's context, for the communication library's buffers,
# and for what the allocator loses to fragmentation.
DEFAULT_RESERVE = 0.08


@dataclass(frozen=True, slots=True)
class ParameterBytes:
    """Bytes per element of a parameter.

    stored     weights that the optimizer updates, and its state
    held       weights that a step computes from
    gradient   the accumulated gradient
    aliased    held and stored weights are one tensor where they have one layout, so that ``held`` is not added there
    """

    stored: int
    held: int
    gradient: int
    aliased: bool


def parameter_bytes(optimizer: str, precision: str) -> ParameterBytes:
    """Bytes per element for an optimizer (a key of ``OPTIMIZERS``) and a precision (a key of ``PRECISIONS``).

    Raises PlanError for an unknown one.
    """
    if optimizer not in OPTIMIZERS:
        raise PlanError("unknown optimizer", where="optimizer=", expected=", ".join(OPTIMIZERS), got=optimizer)
    if precision not in PRECISIONS:
        raise PlanError("unknown precision", where="precision=", expected=", ".join(PRECISIONS), got=precision)
    full, used = PRECISIONS[precision]
    if optimizer == "none":  # no optimizer, so no need of weights in more precision than they are used in
        return ParameterBytes(stored=used, held=used, gradient=0, aliased=True)
    return ParameterBytes(stored=full * (1 + OPTIMIZERS[optimizer]), held=used, gradient=used, aliased=full == used)


def bytes_on_rank(sizes: ParameterBytes, *, stored: float, held: float, accumulated: float, same_layout: bool) -> float:
    """Bytes of one parameter on one rank, given its local elements in each of the three layouts.

    ``same_layout``: stored and held have the same layout (equal numbers of elements alone do not say so).
    """
    copies = 0.0 if sizes.aliased and same_layout else sizes.held * held
    return sizes.stored * stored + copies + sizes.gradient * accumulated


def usable_memory(device: Device, reserve: float = DEFAULT_RESERVE) -> int:
    """Bytes of a device that a plan may fill: all but the part ``reserve`` of its memory.

    Raises PlanError when ``reserve`` is not in [0, 1).
    """
    if not 0 <= reserve < 1:
        raise PlanError(
            "the memory reserve is no part of the memory",
            where="usable_memory",
            expected="0 <= reserve < 1",
            got=reserve,
        )
    return int(device.memory * (1 - reserve))
