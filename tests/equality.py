"""A plan against one process: what a training run gives, and a reference that owes nothing to our passes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
from models import Case
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.utils import _pytree as pytree

from autopar import api
from autopar.capture import export, from_exported
from autopar.layout import Mesh
from autopar.passes.normalize import normalize
from autopar.plan import Fingerprints, Plan
from autopar.program import split_batch, strip_wrapper
from autopar.rules.analysis import Analysis, Bound, Operation, bind_program
from autopar.rules.derive import Strategy, apply, parse_choice
from autopar.runtime.engine import Engine, total_norm
from autopar.runtime.module import ParallelModule
from autopar.solver import sample as sampling
from autopar.solver.sample import random_decisions
from autopar.testing import run_local

STEPS, LEARNING_RATE = 3, 1e-2
RTOL, ATOL, NOISE, EPS = 1e-10, 1e-12, 1e-15, 1e-8


@dataclass(frozen=True, slots=True)
class Run:
    """All that must not depend on the plan: outputs, gradients and norm before, losses and state of three steps."""

    outputs: list[Tensor]
    losses: Tensor
    gradients: dict[str, Tensor]
    norm: Tensor
    state: dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A model with its rules bound, in float64 throughout, and the run of one process."""

    case: Case
    bound: Bound
    reference: Run


# ------------------------------------------------------------------------------------------------ in float64


def widen(exported: ExportedProgram) -> None:
    """Turn float32 among the graph's arguments into float64, and trace its values anew.

    Hugging Face hard-codes float32 casts inside float64 models; with them no comparison can be exact.
    """
    nodes = list(exported.graph.nodes)
    mode = next(n.meta["val"].fake_mode for n in nodes if isinstance(n.meta.get("val"), Tensor))

    def wide(value: Any) -> Any:
        return torch.float64 if value is torch.float32 else value

    with mode:
        for node in nodes:
            value = node.meta.get("val")
            if node.op == "placeholder" and isinstance(value, Tensor) and value.dtype is torch.float32:
                node.meta["val"] = torch.empty(value.shape, dtype=torch.float64)
            if node.op == "call_function":
                node.args = fx.node.map_aggregate(node.args, wide)
                node.kwargs = fx.node.map_aggregate(node.kwargs, wide)
                if "assert" not in str(node.target):
                    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
                    node.meta["val"] = node.target(*args, **kwargs)


def wide_buffers(model: nn.Module) -> dict[str, Tensor]:
    return {n: b.double() if b.dtype is torch.float32 else b for n, b in model.named_buffers()}


# ------------------------------------------------------------------------------------------------ one process


# torch has no derivative of what it makes of ``x[:] = y``
_DIFFERENTIABLE: dict[Any, Callable[..., Tensor]] = {
    torch.ops.aten.copy.default: lambda x, y, non_blocking=False: y.to(x.dtype).expand(x.shape),
    torch.ops.aten.view.default: torch.ops.aten.reshape.default,  # some real ops lay values out unlike fake ones
}


class Eager:
    """The exported graph as torch runs it: no pass of ours has touched it, and autograd differentiates it."""

    def __init__(self, exported: ExportedProgram, model: nn.Module) -> None:
        self.exported = exported
        trained = dict(model.named_parameters(remove_duplicate=False))
        leaf = {id(p): nn.Parameter(p.detach().clone(), p.requires_grad) for p in trained.values()}
        self.parameters = {n: leaf[id(p)] for n, p in trained.items()}  # tied weights are one leaf
        self.names = [n for n, p in model.named_parameters() if p.requires_grad]
        self.buffers = {n: b.clone() for n, b in wide_buffers(model).items()}
        self.persistent = set(model.state_dict())

    def __call__(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
        """(loss, tensors among the outputs); buffers take their new values."""
        leaves = iter(pytree.tree_leaves((split_batch(batch), {})))
        values: dict[fx.Node, Any] = {}
        placeholders = [n for n in self.exported.graph.nodes if n.op == "placeholder"]
        for node, spec in zip(placeholders, self.exported.graph_signature.input_specs, strict=True):
            name = strip_wrapper(spec.target or "")
            if spec.kind is InputKind.PARAMETER:
                values[node] = self.parameters[name]
            elif spec.kind is InputKind.BUFFER:
                values[node] = self.buffers[name]
            elif spec.kind is InputKind.CONSTANT_TENSOR:
                values[node] = self.exported.constants[spec.target or ""]
            else:
                values[node] = next(leaves)
        for node in self.exported.graph.nodes:
            if node.op == "call_function" and "assert" not in str(node.target):
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: values[n])
                values[node] = _DIFFERENTIABLE.get(node.target, node.target)(*args, **kwargs)
        results = fx.node.map_arg(self.exported.graph.output_node().args[0], lambda n: values[n])
        outputs = []
        for spec, value in zip(self.exported.graph_signature.output_specs, results, strict=True):
            if spec.kind is OutputKind.BUFFER_MUTATION:
                self.buffers[strip_wrapper(spec.target or "")] = value.detach()
            elif isinstance(value, Tensor):
                outputs.append(value)
        return outputs[0], outputs[1:]


def train_eagerly(eager: Eager, batch: Mapping[str, Tensor], eps: float = EPS) -> Run:
    """As `train`, in plain torch."""
    with torch.no_grad():
        outputs = eager(batch)[1]
    weights = [eager.parameters[n] for n in eager.names]
    eager(batch)[0].backward()
    gradients = {n: _gradient(eager.parameters[n]) for n in eager.names}
    norm = torch.nn.utils.get_total_norm(list(gradients.values()))
    optimizer = torch.optim.AdamW(weights, lr=LEARNING_RATE, eps=eps)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = eager(batch)[0]
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
    state = {n: v.detach() for n, v in {**eager.parameters, **eager.buffers}.items() if n in eager.persistent}
    return Run(outputs, torch.stack(losses), gradients, norm, state)


def _gradient(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


# ------------------------------------------------------------------------------------------------ by a plan


def adamw(parameters: Iterable[nn.Parameter], eps: float = EPS) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, eps=eps)


def train(module: ParallelModule, batch: Mapping[str, Tensor], on_dtensors: bool = False, eps: float = EPS) -> Run:
    """Outputs, then gradients, then three AdamW steps; everything gathered under its original name.

    on_dtensors: torch's own AdamW over the module's DTensors; else over local shards, which is ten times faster.
    eps: of AdamW; where it is large, the rounding of gradients that are zero does not grow.
    """
    with torch.no_grad():
        outputs = [x for x in pytree.tree_leaves(module(**batch)) if isinstance(x, Tensor)]
    module.forward_backward(batch)
    gradients, norm = module.full_gradients(), total_norm(module)
    module.zero_grad()
    optimizer = partial(adamw, eps=eps)
    engine = Engine(module, optimizer(module.parameters()) if on_dtensors else optimizer)
    losses = torch.stack([engine.step(batch) for _ in range(STEPS)])
    return Run(outputs, losses, gradients, norm, module.full_state_dict())


def widened(case: Case) -> tuple[ExportedProgram, Callable[[], Bound]]:
    """The model exported in float64 throughout, and what binds it (which takes the exported graph apart)."""
    exported = export(case.model, case.batch, case.loss_fn)
    widen(exported)
    return exported, lambda: bind_program(normalize(from_exported(exported, case.model), wide_buffers(case.model)))


def prepare(case: Case, exact: bool = True, eps: float = EPS) -> Prepared:
    """Capture in float64 throughout.  exact: the reference is `Eager`; else our own module on one rank (dropout)."""
    exported, bind = widened(case)
    if exact:
        reference = train_eagerly(Eager(exported, case.model), case.batch, eps)
        return Prepared(case, bind(), reference)
    bound = bind()
    return Prepared(case, bound, train(api.build(case.model, bound, sample(bound, ())), case.batch))


def mesh_of(sizes: tuple[int, ...]) -> Mesh:
    return Mesh(("x", "y", "z")[: len(sizes)], sizes)


def sample(bound: Bound, sizes: tuple[int, ...], seed: int = 0) -> Plan:
    """A random plan of a program that is already bound."""
    return random_decisions(bound, mesh_of(sizes), Fingerprints("", "", ""), seed)


def forced(bound: Bound, sizes: tuple[int, ...], choices: Mapping[str, tuple[str, ...]], seed: int = 0) -> Plan:
    """A random plan in which ops make these choices, one per axis, by name."""
    sampled = sampling._reachable_strategy

    def pick(analysis: Analysis, op: Operation, rng: random.Random) -> Strategy:
        if op.name not in choices:
            return sampled(analysis, op, rng)
        strategy = apply(op.type, [parse_choice(c, op.rule) for c in choices[op.name]], sizes)
        assert strategy is not None, f"{op.name} cannot run as {choices[op.name]}"
        return strategy

    with mock.patch.object(sampling, "_reachable_strategy", pick):
        plan = sample(bound, sizes, seed)
    assert set(choices) <= {o.name for o in plan.ops}
    return plan


def run_plan(prepared: Prepared, plan: Plan, job: Callable[[ParallelModule, Any], Any] = train) -> list[Any]:
    """``job(module, batch)`` of every rank, on ranks as threads."""
    case = prepared.case
    return run_local(lambda rank: job(api.build(case.model, prepared.bound, plan), case.batch), plan.world_size)


def assert_equal_runs(run: Run, expected: Run) -> None:
    """Every number, by name; nothing missing and nothing more.

    AdamW divides a gradient by its own size plus 1e-8, and so the rounding of one that is zero, or nearly (the bias of
    keys, or before a batch norm): weights may differ by that much more.
    """

    def close(what: str, actual: Any, wanted: Any) -> None:
        torch.testing.assert_close(actual, wanted, rtol=RTOL, atol=ATOL, msg=lambda text: f"{what}: {text}")

    close("outputs", run.outputs, expected.outputs)
    close("losses", run.losses, expected.losses)
    close("gradients", run.gradients, expected.gradients)
    close("norm", run.norm, expected.norm)
    assert run.state.keys() == expected.state.keys()
    for name, wanted in expected.state.items():
        gradient = expected.gradients.get(name)
        if gradient is not None:
            extra = STEPS * LEARNING_RATE * NOISE / (gradient.abs() + 1e-8)
            excess = (run.state[name] - wanted).abs() - RTOL * wanted.abs() - ATOL - extra
            if bool((excess <= 0).all()):
                continue
        close(name, run.state[name], wanted)


def assert_equals_one_process(prepared: Prepared, plan: Plan, label: str, **options: Any) -> None:
    """Train by ``plan`` and compare every rank with the reference; ``options`` of `train`."""
    try:
        for rank, run in enumerate(run_plan(prepared, plan, lambda module, batch: train(module, batch, **options))):
            try:
                assert_equal_runs(run, prepared.reference)
            except AssertionError as error:
                error.add_note(f"on rank {rank}")
                raise
    except BaseException as error:
        error.add_note(f"{label} on {plan.device_mesh}")
        raise
