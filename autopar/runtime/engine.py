"""One training step over the global batch, whatever the plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar.errors import RuntimeMismatch
from autopar.layout import S
from autopar.runtime.dtensor import local_of
from autopar.runtime.module import ParallelModule, Weight

OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class Engine:
    """Runs a `ParallelModule`: gradients, one global norm, clipping, optimizer, schedule.

    optimizer: a torch optimizer over the module's parameters, or a function that makes one from parameters (the engine
    then gives it this rank's shards, which costs no DTensor dispatch; element-wise optimizers only), or "adamw".
    scheduler: a function that makes a learning-rate scheduler from the optimizer, or None.
    max_grad_norm: the total norm over all weights to which gradients are clipped, or None.
    accumulation: how many batches one optimizer step takes.
    """

    def __init__(
        self,
        module: ParallelModule,
        optimizer: torch.optim.Optimizer | OptimizerFactory | str = "adamw",
        scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
        max_grad_norm: float | None = None,
        accumulation: int = 1,
    ):
        if accumulation < 1:
            raise RuntimeMismatch("accumulation counts batches", expected="at least 1", got=str(accumulation))
        self.module = module
        self.max_grad_norm, self.accumulation = max_grad_norm, accumulation
        self.grad_norm: Tensor | None = None
        self._count = 0
        self._shards: dict[str, nn.Parameter] | None = None
        if isinstance(optimizer, torch.optim.Optimizer):
            self.optimizer = optimizer
        else:
            make = _adamw if optimizer == "adamw" else optimizer
            if not callable(make):
                raise RuntimeMismatch(
                    "unknown optimizer",
                    expected="an optimizer, a function that makes one, or 'adamw'",
                    got=repr(optimizer),
                )
            self._shards = {
                name: nn.Parameter(local_of(p).detach(), p.requires_grad)
                for name, p in module.named_parameters()
                if p.requires_grad
            }
            self.optimizer = make(list(self._shards.values()))
        self.scheduler = scheduler(self.optimizer) if scheduler is not None else None

    def step(self, batch: Any) -> Tensor:
        """Loss of one global batch after forward, backward and (every ``accumulation`` calls) an update.

        With accumulation the gradient is the mean over its batches.
        """
        last = (self._count + 1) % self.accumulation == 0
        self._count += 1
        if last:
            loss = self.module.forward_backward(batch)
            self._update()
        else:
            with self.module.no_sync():
                loss = self.module.forward_backward(batch)
        return loss

    def _update(self) -> None:
        parameters = dict(self.module.named_parameters())
        grads = [local_of(p.grad) for p in parameters.values() if p.grad is not None]
        if self.accumulation > 1:
            torch._foreach_div_(grads, float(self.accumulation))
        if self.max_grad_norm is not None:
            self.grad_norm = clip_grad_norm(self.module, self.max_grad_norm)
        if self._shards is not None:
            for name, shard in self._shards.items():
                grad = parameters[name].grad
                shard.grad = None if grad is None else local_of(grad)
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)
        for parameter in parameters.values():
            parameter.grad = None


def _adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters)


def total_norm(module: ParallelModule, norm_type: float = 2.0) -> Tensor:
    """The norm over all gradients as one vector, the same on every rank; all ranks must call it.

    A replicated gradient counts once, an empty shard as nothing (torch's own clipping raises on one for the maximum
    norm and leaves the other ranks waiting).
    """
    ours: list[Tensor] = []
    device, dtype = local_of(next(module.parameters())).device, torch.float32
    for weight in module.weights():
        grad = module.get_parameter(weight.names[0]).grad
        if grad is None:
            continue
        local = local_of(grad)
        dtype = torch.promote_types(dtype, local.dtype)
        if local.numel() and _counts_here(module, weight):
            ours.append(local)
    zero = torch.zeros((), dtype=dtype, device=device)
    if not ours:
        total = zero
    else:
        norms = torch.stack([n.to(dtype) for n in torch._foreach_norm(ours, norm_type)])
        total = norms.max() if math.isinf(norm_type) else norms.pow(norm_type).sum()
    if module.device_mesh is not None and dist.get_world_size() > 1:
        dist.all_reduce(total, dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM)
    return total if math.isinf(norm_type) else total.pow(1 / norm_type)


def _counts_here(module: ParallelModule, weight: Weight) -> bool:
    """Whether this rank is the one that counts the weight: the first on every axis that holds it whole."""
    return all(isinstance(s, S) or at == 0 for s, at in zip(weight.stored, module.coordinates, strict=True))


def clip_grad_norm(module: ParallelModule, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Scale all gradients so that their total norm is at most ``max_norm``; returns the norm before."""
    norm = total_norm(module, norm_type)
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    grads = [local_of(p.grad) for p in module.parameters() if p.grad is not None]
    if grads:
        torch._foreach_mul_(grads, scale.to(grads[0].dtype))
    return norm
