"""The module that a user trains: weights as DTensors under their original names, and the emitted graph of this rank."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree

from autopar.errors import RuntimeMismatch
from autopar.layout import I, Layout, Mesh, Shape, default_path
from autopar.plan import Plan
from autopar.program import split_batch
from autopar.runtime.bundles import move_along, move_together
from autopar.runtime.collectives import Axis, Step
from autopar.runtime.dtensor import local_of, runtime_axes, steps, take_local, wrap, wrap_like
from autopar.runtime.kernels.dropout import step_key
from autopar.runtime.mode import Mode, check_leaves
from autopar.runtime.parameters import Gradients


@dataclass(frozen=True, slots=True)
class Weight:
    """One parameter as this rank keeps it.  names: all it has; the first is the main one."""

    names: tuple[str, ...]
    node: str
    shape: Shape
    stored: Layout
    held: Layout
    accumulated: Layout
    gather: tuple[Step, ...]
    final: tuple[Step, ...]
    requires_grad: bool


class ParallelModule(nn.Module):
    """A model that runs by a plan.  Made by `autopar.parallelize`.

    Every rank is handed the same global batch; ``forward`` returns the model's own outputs, whole on every rank.
    After ``forward_backward(batch)``, or ``loss.backward()``, every ``p.grad`` is the whole batch's gradient.
    """

    def __init__(
        self,
        plan: Plan | None,
        mesh: Mesh,
        weights: tuple[Weight, ...],
        state: Mapping[str, Tensor],
        buffers: Mapping[str, tuple[Tensor, bool]],
        mode: Mode,
        print_code: Callable[[], str],
        device_mesh: DeviceMesh | None,
        rank: int,
        seed: int = 0,
        training: bool = True,
        evaluation: Callable[[], Mode] | None = None,
        origin: Any = None,
    ):
        super().__init__()
        self.origin = origin  # what it was compiled from, for autopar.verify; None in an emitted program
        self._plan, self._mesh, self._device_mesh = plan, mesh, device_mesh
        self._at = mesh.coordinates(rank)
        self._weights = {w.names[0]: w for w in weights}
        self._print_code = print_code
        self._modes, self._evaluation = {training: mode}, evaluation
        self._seed, self._step = seed, 0
        self._held: dict[str, tuple[tuple[int, int], Tensor]] = {}
        self._trained = False  # gradients came since weights were moved to where the step holds them
        self._gradients = Gradients({}, {w.names[0]: w.final for w in weights}, self._deliver)
        axes = runtime_axes(mesh, device_mesh, self._at)
        self._axes = {a.name: a for a in axes}
        for weight in weights:
            local = take_local(state[weight.names[0]], weight.stored, mesh, self._at, axes)
            value = wrap(local, weight.stored, weight.shape, mesh, device_mesh)
            parameter = nn.Parameter(value, requires_grad=weight.requires_grad)
            for name in weight.names:
                _place(self, name).register_parameter(name.rpartition(".")[2], parameter)
        own: dict[int, Tensor] = {}  # a buffer with two names stays one
        for name, (tensor, persistent) in buffers.items():
            buffer = own.setdefault(id(tensor), tensor.detach().clone())
            _place(self, name).register_buffer(name.rpartition(".")[2], buffer, persistent)
        self._parameter = {w.names[0]: self.get_parameter(w.names[0]) for w in weights}
        self._buffer_owners = [(n, _place(self, n)._buffers) for n in buffers]
        self.register_load_state_dict_pre_hook(self._shard_loaded)
        self.register_load_state_dict_post_hook(lambda *_: self._loaded())
        self.train(training)

    # ------------------------------------------------------------------------------------------ what it is

    @property
    def plan(self) -> Plan:
        """The plan by which it runs.  Raises RuntimeMismatch in an emitted program, which knows its decisions only."""
        if self._plan is None:
            raise RuntimeMismatch("an emitted program has no plan", hint="read the plan.json that it was emitted from")
        return self._plan

    @property
    def device_mesh(self) -> DeviceMesh | None:
        return self._device_mesh

    @property
    def coordinates(self) -> tuple[int, ...]:
        """This rank's position on every mesh axis."""
        return self._at

    @property
    def graph_module(self) -> fx.GraphModule:
        """The emitted training graph of this rank."""
        run = self.planned.graph(not self.planned.signature.has_loss).run
        assert isinstance(run, fx.GraphModule)
        return run

    def compiled_as(self) -> tuple[tuple[tuple[str, str], ...], Mapping[str, int]]:
        """(what each placeholder of `graph_module` takes, how many gradients each weight hands over)."""
        compiled = self.planned.graph(not self.planned.signature.has_loss)
        return compiled.inputs, compiled.uses

    def axes(self) -> tuple[Axis, ...]:
        """This rank's place on every mesh axis, in the mesh's order."""
        return tuple(self._axes.values())

    @property
    def code(self) -> str:
        """The emitted program as a file that runs alone under torchrun."""
        return self._print_code()

    @property
    def planned(self) -> Mode:
        """The program that the plan is for."""
        return next(iter(self._modes.values()))

    @property
    def _mode(self) -> Mode:
        """The program of the mode that the module is in.

        One planned in training gets its program of evaluation when that is first needed; without ``evaluation`` (an
        emitted program) it is the same one, in which nothing is dropped.
        """
        if self.training not in self._modes:
            if self.training:
                raise RuntimeMismatch(
                    "the model was in evaluation mode when it was planned",
                    expected="module.eval()",
                    got="module.train()",
                    hint="call model.train() before autopar.parallelize; evaluation is always possible",
                )
            self._modes[False] = self.planned if self._evaluation is None else self._evaluation()
        return self._modes[self.training]

    # ------------------------------------------------------------------------------------------ running

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own outputs for one global batch, whole on every rank."""
        _, leaves = self._run(args, kwargs, outputs=True)
        return pytree.tree_unflatten(leaves, self._mode.signature.out_spec)

    def forward_backward(self, batch: Any) -> Tensor:
        """Loss of one global batch, with gradients in ``p.grad``.

        A dict is keyword arguments, a tuple positional ones.  Raises RuntimeMismatch where the plan has no loss.
        """
        if not self.planned.signature.has_loss:
            raise RuntimeMismatch(
                "this plan is for inference: it has no loss",
                expected="a model whose outputs have a loss, or loss_fn=",
                hint="pass loss_fn= to autopar.parallelize",
            )
        loss, _ = self._run(*split_batch(batch), outputs=False)
        loss.backward()
        return loss.detach()

    def loss(self, batch: Any) -> Tensor:
        """Loss of one global batch, whole on every rank, without gathering the other outputs."""
        return self._run(*split_batch(batch), outputs=False)[0]

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: bool) -> tuple[Any, list[Any]]:
        mode = self._mode
        leaves = mode.signature.flatten(args, kwargs)
        check_leaves(mode.signature, leaves)
        compiled = mode.graph(outputs)
        rng = None
        if self.training:
            rng = step_key(self._seed, self._step)
            self._step += 1
        if torch.is_grad_enabled():
            self._gradients.uses = dict(compiled.uses)
        self._hold()
        self._refresh_constants(mode)
        values = [self._value(mode, kind, name, leaves, rng) for kind, name in compiled.inputs]
        with self._hooks():
            loss, out, buffers = compiled.run(*values)
        if self.training:
            with torch.no_grad():
                for name, new in zip(mode.signature.mutations, buffers, strict=True):
                    self.get_buffer(name).copy_(new)
        return loss, out

    def _value(self, mode: Mode, kind: str, name: str, leaves: list[Any], rng: int | None) -> Any:
        signature = mode.signature
        if kind == "parameter":
            return self._held[signature.weight_of[name]][1]
        if kind == "input":
            return leaves[signature.leaf_of[name]]
        if kind == "constant":
            return mode.constants[name]
        if kind == "buffer":
            buffer = self.get_buffer(signature.buffer_of[name])
            # what autograd keeps of a buffer must not change with it: hooks on saved tensors check no versions
            moves = signature.buffer_of[name] in signature.mutations and torch.is_grad_enabled()
            return buffer.clone() if moves else buffer
        if kind == "axis":
            return self._axes[name]
        return rng if kind == "rng" else self._gradients

    def _hold(self) -> None:
        """Every weight in the layout in which the step holds it, as a leaf of the graph; moved anew after an update."""
        stale: list[Weight] = []
        versions = {}
        for name, weight in self._weights.items():
            parameter = self._parameter[name]
            local = local_of(parameter)
            versions[name] = (parameter._version, local._version)  # updates through DTensor count on the outside only
            known = self._held.get(name)
            trains = parameter.requires_grad
            if trains and not weight.requires_grad:
                raise RuntimeMismatch(
                    "a weight that was planned as frozen, or that the loss does not use, cannot be trained",
                    where=name,
                    expected="requires_grad=False",
                    got="requires_grad=True",
                    hint="set requires_grad before autopar.parallelize, and plan again",
                )
            moved = weight.gather and known is not None and (self._trained or known[0] != versions[name])
            if known is None or moved or known[1].requires_grad != trains:
                stale.append(weight)
        with torch.no_grad():
            locals_ = [local_of(self._parameter[w.names[0]]) for w in stale]
            held = move_together(locals_, [w.gather for w in stale])
        self._trained = False
        for weight, tensor in zip(stale, held, strict=True):
            name = weight.names[0]
            leaf = tensor.detach().requires_grad_(self._parameter[name].requires_grad)
            if leaf.requires_grad:
                leaf.register_post_accumulate_grad_hook(partial(self._gradients.take, name))
            self._held[name] = (versions[name], leaf)

    def _refresh_constants(self, mode: Mode) -> None:
        """Position tables, rotary tables and masks follow from the buffers, which a checkpoint may change."""
        moving = set(mode.signature.mutations)
        now = [owner[n.rpartition(".")[2]] for n, owner in self._buffer_owners if n not in moving]
        versions = [(id(b), -1 if b is None else b._version) for b in now]
        if mode.made_from != versions:
            with torch.no_grad():
                mode.constants = mode.make_constants(dict(self.named_buffers(remove_duplicate=False)))
            mode.made_from = versions

    @staticmethod
    def _shard_loaded(module: ParallelModule, state: dict[str, Any], prefix: str, *_: Any) -> None:
        """Whole tensors in a state dict (of the model itself, or `full_state_dict`) become this rank's parts."""
        axes = list(module._axes.values())
        for weight in module._weights.values():
            for name in weight.names:
                value: Any = state.get(prefix + name)
                if type(value) in (Tensor, nn.Parameter) and tuple(value.shape) == weight.shape:
                    local = take_local(value.detach(), weight.stored, module._mesh, module._at, axes)
                    state[prefix + name] = wrap(local, weight.stored, weight.shape, module._mesh, module._device_mesh)

    def _loaded(self) -> None:
        """After load_state_dict, which puts other parameters in place where assign=True."""
        for name, weight in self._weights.items():
            parameter = self.get_parameter(name)
            if parameter is self._parameter[name]:
                continue
            if local_of(parameter).shape != local_of(self._parameter[name]).shape:
                raise RuntimeMismatch(
                    "a loaded parameter is not in the plan's layout",
                    where=name,
                    expected=f"a local shard {list(local_of(self._parameter[name]).shape)}",
                    got=f"{list(local_of(parameter).shape)}",
                    hint="load a state_dict() of a module with the same plan",
                )
            self._parameter[name] = parameter
            for other in weight.names[1:]:
                _place(self, other).register_parameter(other.rpartition(".")[2], parameter)
        for mode in self._modes.values():
            mode.made_from = None
        self._held.clear()

    def train(self, mode: bool = True) -> ParallelModule:
        """As for any module; weights that were gathered are gathered again, should ``p.data`` have been changed."""
        self._held.clear()
        super().train(mode)
        return self

    def _hooks(self) -> Any:
        """Gathered weights are not kept for backward: they are gathered again."""
        if not torch.is_grad_enabled():
            return contextlib.nullcontext()
        return torch.autograd.graph.saved_tensors_hooks(self._gradients.pack, self._gradients.unpack)

    # ------------------------------------------------------------------------------------------ gradients and state

    def _deliver(self, grads: dict[str, Tensor]) -> None:
        self._trained = True  # an optimizer may now write to p.data, which no version counts
        for name, grad in grads.items():
            parameter = self._parameter[name]
            local = grad.reshape(local_of(parameter).shape)
            if parameter.grad is not None:
                local_of(parameter.grad).add_(local)
            else:
                parameter.grad = wrap_like(local, parameter)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, gradients accumulate on each rank; the first pass outside reduces the sum, once."""
        self._gradients.synchronize = False
        try:
            yield
        finally:
            self._gradients.synchronize = True

    def full_state_dict(self, persistent_only: bool = True) -> dict[str, Tensor]:
        """Every parameter and persistent buffer whole, under all its names; all ranks must call it.

        persistent_only=False adds the other buffers: with them an emitted program (`code`) can run alone.
        """
        out: dict[str, Tensor] = {}
        with torch.no_grad():
            for weight in self._weights.values():
                whole = self.gather(self._parameter[weight.names[0]], weight)
                out.update(dict.fromkeys(weight.names, whole))
        buffers = dict(self.named_buffers(remove_duplicate=False))
        kept = set(self.state_dict()) if persistent_only else set(buffers)
        out.update({n: b.detach().clone() for n, b in buffers.items() if n in kept})
        return out

    def gather(self, value: Tensor, weight: Weight) -> Tensor:
        """A parameter, or its gradient, whole on every rank."""
        whole = (I,) * len(self._mesh.sizes)
        moves = default_path(weight.shape, weight.stored, whole, self._mesh.sizes)
        way = steps(moves, weight.shape, self._mesh, self._at, list(self._axes.values()))
        return move_along(local_of(value).detach(), way).clone()

    def full_gradients(self) -> dict[str, Tensor]:
        """Every gradient whole, by the parameter's main name; zeros where a parameter has none yet."""
        out = {}
        for name, weight in self._weights.items():
            if weight.requires_grad:
                grad = self._parameter[name].grad
                missing = torch.zeros_like(local_of(self._parameter[name]))
                out[name] = self.gather(missing if grad is None else grad, weight)
        return out

    def weights(self) -> tuple[Weight, ...]:
        return tuple(self._weights.values())


def _place(root: nn.Module, name: str) -> nn.Module:
    """The submodule in which ``name`` lives, made if it is missing."""
    for part in name.split(".")[:-1]:
        child = root._modules.get(part)
        if child is None:
            child = nn.Module()
            root.add_module(part, child)
        root = child
    return root
