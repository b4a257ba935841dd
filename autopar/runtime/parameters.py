"""A weight's way into the step and its gradient's way out.

A use of a weight that moves it, or its gradient, is one node, `use`: forward it moves the weight from the layout in
which it is held to the one in which it is used, backward the gradient to the layout in which it accumulates.  Gradients
go to `Gradients`, which reduces complete ones in buckets while the backward pass goes on.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from autopar.layout import Split
from autopar.runtime.bundles import kind, move_along, signature, start
from autopar.runtime.collectives import Step

BUCKET_BYTES = 25 * 2**20  # as DistributedDataParallel's default


class _Use(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        gradients: Gradients,
        name: str,
        forward: tuple[Step, ...],
        backward: tuple[Step, ...],
    ) -> Tensor:
        ctx.way = (gradients, name, backward)
        used = move_along(weight, forward)
        if used is weight:
            return weight.view_as(weight)
        gradients.remember(used, weight, forward)
        return used

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
        gradients, name, backward = ctx.way
        gradients.add(name, move_along(grad, backward))
        return None, None, None, None, None


def use(
    weight: Tensor,
    gradients: Gradients | None,
    name: str,
    forward: tuple[Step, ...],
    backward: tuple[Step, ...],
) -> Tensor:
    """The weight ``name`` as one op uses it; its gradient goes to ``gradients``."""
    if gradients is None or not weight.requires_grad or not torch.is_grad_enabled():
        return move_along(weight, forward)
    used: Tensor = _Use.apply(weight, gradients, name, forward, backward)
    return used


def apart(grads: dict[str, Tensor]) -> dict[str, Tensor]:
    """Each gradient in memory of its own, so that it can be scaled and added to in place.

    Autograd gives both terms of a sum the same tensor, and a reduced weight one number that is expanded.
    """
    out = dict(grads)
    ends: dict[int, int] = {}  # by storage: where the last gradient that starts before this one ends
    for name, grad in sorted(grads.items(), key=lambda item: item[1].storage_offset()):
        if not grad.numel():
            continue
        storage, start = grad.untyped_storage()._cdata, int(grad.storage_offset())
        end = start + sum((n - 1) * stride for n, stride in zip(grad.shape, grad.stride(), strict=True)) + 1
        expanded = any(n > 1 and stride == 0 for n, stride in zip(grad.shape, grad.stride(), strict=True))
        if expanded or start < ends.get(storage, 0):
            out[name] = grad.clone(memory_format=torch.contiguous_format)
        ends[storage] = max(end, ends.get(storage, 0))
    return out


@dataclass(frozen=True, slots=True)
class _Pending:
    """The first collective of a bucket, under way."""

    names: list[str]
    wait: Callable[[], list[Tensor]]


@dataclass(slots=True)
class Gradients:
    """Collects the gradients of one backward pass and reduces complete ones in buckets.

    uses: how many gradients of each weight one backward pass hands over.  final: accumulated -> stored, per weight.
    deliver: takes {name: gradient in the stored layout} when the pass is over.
    """

    uses: dict[str, int]
    final: dict[str, tuple[Step, ...]]
    deliver: Callable[[dict[str, Tensor]], None]
    synchronize: bool = True
    bucket_bytes: int = BUCKET_BYTES
    _sums: dict[str, Tensor] = field(default_factory=dict)
    _seen: dict[str, int] = field(default_factory=dict)
    _buckets: dict[Any, list[str]] = field(default_factory=dict)
    _pending: list[_Pending] = field(default_factory=list)
    _done: dict[str, Tensor] = field(default_factory=dict)
    _armed: bool = False
    _ours: set[str] = field(default_factory=set)  # sums that no node of autograd holds too
    _gathered: dict[int, tuple[Any, Tensor, tuple[Step, ...]]] = field(default_factory=dict)

    # ------------------------------------------------------------------------------------------ backward

    def take(self, name: str, leaf: Tensor) -> None:
        """The gradient that autograd left on a weight which ops use without a `use` node."""
        grad, leaf.grad = leaf.grad, None
        if grad is not None:  # autograd calls without one where only `use` nodes take the weight
            self.add(name, grad)

    def add(self, name: str, grad: Tensor) -> None:
        """One use's gradient, in the accumulated layout."""
        if not self._armed:
            self._armed = True
            torch.autograd.Variable._execution_engine.queue_callback(self.finish)
        known = self._sums.get(name)
        if known is None:
            self._sums[name] = grad
        elif name in self._ours:
            known.add_(grad)
        else:  # autograd may still hand this tensor to another node
            self._sums[name] = known + grad
            self._ours.add(name)
        self._seen[name] = self._seen.get(name, 0) + 1
        if self._seen[name] == self.uses[name] and self.synchronize:
            self._reduce(name)

    def _take(self, name: str) -> Tensor:
        self._ours.discard(name)
        return self._sums.pop(name)

    def _reduce(self, name: str) -> None:
        steps = self.final[name]
        if not steps:
            self._collect({name: self._take(name)})
            return
        grad = self._sums[name]
        # 16-bit gradients are summed in fp32, one by one
        if kind(steps[0]) in ("all-reduce", "reduce-scatter") and grad.dtype in (torch.float32, torch.float64):
            key = (signature(steps), grad.dtype)
            bucket = self._buckets.setdefault(key, [])
            bucket.append(name)
            if sum(self._sums[n].nbytes for n in bucket) >= self.bucket_bytes:
                self._launch(self._buckets.pop(key))
        else:
            self._collect({name: move_along(self._take(name), steps)})

    def _collect(self, grads: dict[str, Tensor]) -> None:
        """Keep reduced gradients; a weight may be reduced twice when one pass goes back through two forward passes."""
        for name, grad in grads.items():
            self._done[name] = self._done[name] + grad if name in self._done else grad

    def _launch(self, names: list[str]) -> None:
        """Start the first collective of the gradients of ``names``."""
        grads = [self._take(n) for n in names]
        self._pending.append(_Pending(names, start(grads, [self.final[n][0] for n in names])))

    def _complete(self, pending: _Pending) -> None:
        """Wait for a bucket's first collective and run the others."""
        grads = pending.wait()
        for k in range(1, len(self.final[pending.names[0]])):
            grads = start(grads, [self.final[n][k] for n in pending.names])()
        self._collect(dict(zip(pending.names, grads, strict=True)))

    def finish(self) -> None:
        """The backward pass is over: reduce what is left, wait, deliver."""
        self._armed = False
        self._seen.clear()
        self._gathered.clear()
        if not self.synchronize:
            return
        for name in list(self._sums):
            if not any(name in b for b in self._buckets.values()):
                self._reduce(name)
        for key in list(self._buckets):
            self._launch(self._buckets.pop(key))
        for pending in self._pending:
            self._complete(pending)
        self._pending.clear()
        done, self._done = self._done, {}
        self.deliver(apart(done))

    # ------------------------------------------------------------------------------------------ gathered weights

    def remember(self, used: Tensor, weight: Tensor, steps: tuple[Step, ...]) -> None:
        """``used`` was gathered from ``weight``: what autograd would keep of it can be gathered again."""
        if any(isinstance(s.src, Split) for s in steps):
            storage = used.untyped_storage()
            self._gathered[storage._cdata] = (weakref.ref(storage), weight, steps)

    def pack(self, x: Tensor) -> Any:
        """`saved_tensors_hooks`: a gathered weight is kept as its shard."""
        found = self._gathered.get(x.untyped_storage()._cdata)
        if found is None or found[0]() is None:
            return x
        return (found[1], found[2], x.size(), x.stride(), x.storage_offset())

    def unpack(self, kept: Any) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        weight, steps, size, stride, offset = kept
        with torch.no_grad():
            return move_along(weight, steps).as_strided(size, stride, offset)
