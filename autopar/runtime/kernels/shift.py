"""Values that travel round a ring of ranks, each hop under way while the block that is there is worked on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.runtime.collectives import Axis

Shape = tuple[int, ...]


class Arriving(NamedTuple):
    """A message on its way from the rank before this one.  sent: kept until it has left."""

    received: Tensor
    sent: Tensor
    work: Any = None

    def wait(self) -> Tensor:
        if self.work is not None:
            self.work.wait()
        return self.received


def start_shift(row: Tensor, expected: int, axis: Axis) -> Arriving:
    """Start to send ``row`` to the next rank and to receive ``expected`` elements from the one before, both flat.

    An all-to-all in which every rank speaks to one other: of all backends only some have send and receive.
    """
    if axis.size == 1:
        return Arriving(row, row)
    give, take = [0] * axis.size, [0] * axis.size
    give[(axis.index + 1) % axis.size] = row.numel()
    take[(axis.index - 1) % axis.size] = expected
    received = row.new_empty(expected)
    work = dist.all_to_all_single(received, row, take, give, group=axis.group, async_op=True)
    return Arriving(received, row, work)


def travel(
    tensors: Sequence[Tensor], shapes: Callable[[int], Sequence[Shape]], axis: Axis
) -> Iterator[tuple[int, list[Tensor]]]:
    """(rank of origin, its tensors) for every rank of the axis, this one first: n - 1 hops.

    shapes: those of the tensors of any rank.  All tensors of a rank travel as one message.
    """
    held, row = list(tensors), _packed(tensors)
    for hop in range(axis.size):
        arriving = None
        if hop + 1 < axis.size:
            following = shapes((axis.index - hop - 1) % axis.size)
            nbytes = sum(math.prod(s) * x.element_size() for s, x in zip(following, tensors, strict=True))
            arriving = start_shift(row, nbytes, axis)
        yield (axis.index - hop) % axis.size, held
        if arriving is not None:
            row = arriving.wait()
            held = _unpacked(row, tensors, following)


def _widest_first(tensors: Sequence[Tensor]) -> list[int]:
    """The order in a message, in which every tensor starts at a multiple of its own element."""
    return sorted(range(len(tensors)), key=lambda i: -tensors[i].element_size())


def _packed(tensors: Sequence[Tensor]) -> Tensor:
    """The bytes of all tensors, one after the other."""
    return torch.cat([tensors[i].contiguous().reshape(-1).view(torch.uint8) for i in _widest_first(tensors)])


def _unpacked(row: Tensor, like: Sequence[Tensor], shapes: Sequence[Shape]) -> list[Tensor]:
    out, start = list(like), 0
    for i in _widest_first(like):
        nbytes = math.prod(shapes[i]) * like[i].element_size()
        out[i] = row.narrow(0, start, nbytes).view(like[i].dtype).reshape(shapes[i])
        start += nbytes
    return out
