"""One step on one process and on one rank: what runs, and all that must not depend on the plan.

one rank, with its part:     loss, outputs, new buffers, every gradient gathered under its original name
one process, unsplit:        the program's graph, op by op, differentiated by autograd
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from autopar import api
from autopar.capture import flatten_batch
from autopar.passes.constants import run_prelude
from autopar.passes.emit import RNG
from autopar.plan import Plan
from autopar.program import OutputName, shape_of, split_batch
from autopar.rules.analysis import Bound
from autopar.runtime.collectives import Step
from autopar.runtime.kernels.dropout import step_key
from autopar.runtime.kernels.parts import Part
from autopar.runtime.mode import Compiled
from autopar.runtime.module import ParallelModule
from autopar.verify.subject import RankGraph

RTOL, ATOL = 1e-9, 1e-11
FAILURES = (RuntimeError, IndexError, ValueError, TypeError)  # of a step that a wrong graph makes impossible


@dataclass(frozen=True, slots=True)
class Trial:
    """What runs: a plan of a bound program in float64, with the weights and buffers of ``model``.

    graphs: by coordinates, in place of what emission gives.  jobs are run on every rank by ``on_ranks``.
    """

    model: nn.Module
    bound: Bound
    plan: Plan
    batch: Any
    on_ranks: Callable[[Callable[[int], Any]], list[Any]]
    seed: int = 0
    graphs: Mapping[tuple[int, ...], RankGraph] | None = None


@dataclass(slots=True)
class Outcome:
    """What must not depend on the plan; of a rank also the bytes that it sent, by axis."""

    results: dict[str, Tensor]
    sent: Mapping[str, float] = field(default_factory=dict)
    values: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)


# ------------------------------------------------------------------------------------------------ one process


def run_unsplit(trial: Trial, keep: bool = False) -> Outcome:
    """The program on one process, two steps: gradients of the first, outputs of the second, as `on_rank` has them."""
    program = trial.bound.program
    weights = dict(trial.model.named_parameters(remove_duplicate=False))
    buffers = {n: b.clone() for n, b in trial.model.named_buffers()}
    leaves = {
        node: weights[p.name].detach().clone().requires_grad_(p.requires_grad and program.loss is not None)
        for node, p in program.parameters.items()
    }
    with torch.no_grad():
        constants = run_prelude(program, buffers)
    given = flatten_batch(program, *split_batch(trial.batch))
    rules = {op.name: op.rule for op in trial.bound.operations}

    def step(k: int) -> dict[str, Any]:
        rng = step_key(trial.seed, k) if program.training else None
        env: dict[str, Any] = {}
        for node in program.graph.nodes:
            if node.op == "placeholder":
                if node.name in leaves:
                    env[node.name] = leaves[node.name]
                elif node.name in program.buffers:
                    env[node.name] = buffers[program.buffers[node.name]]
                elif node.name in program.inputs:
                    env[node.name] = given[program.inputs[node.name]]
                else:
                    env[node.name] = rng if node.name == RNG else constants[node.name]
                continue
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: env[n.name])
            rule = rules.get(node.name)
            for name, dims in (rule.part_args if rule is not None else {}).items():
                kwargs = {**kwargs, name: [_whole(d, rule.sizes) for d in dims]}  # type: ignore[union-attr]
            if rule is not None and rule.reshapes:  # a view of what our functions leave need not be contiguous
                env[node.name] = args[0].reshape(shape_of(node))
            else:
                env[node.name] = node.target(*args, **kwargs)
        if program.training:
            buffers.update({n: env[v].detach().clone() for n, v in program.mutations.items()})
        return env

    results: dict[str, Tensor] = {}
    out = Outcome(results)
    if program.loss is not None:
        env = step(0)
        if keep:
            out.values = {n: v.detach() for n, v in env.items() if isinstance(v, Tensor)}
            for n, v in env.items():
                if isinstance(v, Tensor) and v.requires_grad:
                    v.register_hook(keeper(out.gradients, n))
        env[program.loss].backward()
        results["the loss"] = env[program.loss].detach()
        for node, p in program.parameters.items():
            if trial.bound.values[node].differentiable:
                grad = leaves[node].grad
                results[f"the gradient of {p.name}"] = torch.zeros_like(leaves[node]) if grad is None else grad
    with torch.no_grad():
        env = step(0 if program.loss is None else 1)
        if keep and program.loss is None:
            out.values = {n: v for n, v in env.items() if isinstance(v, Tensor)}
    for k, name in enumerate(program.outputs):
        if isinstance(name, OutputName):
            results[f"output {k}"] = env[name].detach()
    results.update({f"buffer {n}": buffers[n] for n in program.mutations})
    return out


def _whole(names: Sequence[str], sizes: Mapping[str, int]) -> Part:
    rows = 1
    for f in names:
        rows *= sizes.get(f, 1)
    return Part(rows)


def keeper(store: dict[str, Tensor], name: str) -> Callable[[Tensor], None]:
    def keep(grad: Tensor) -> None:
        store[name] = grad.detach().clone()

    return keep


# ------------------------------------------------------------------------------------------------ one rank


def on_rank(trial: Trial, rank: int, sent_by: Callable[[ParallelModule], Mapping[str, float]]) -> Outcome:
    """The same two steps on one rank of many, everything gathered."""
    module = build(trial, rank)
    program = trial.bound.program
    results: dict[str, Tensor] = {}
    out = Outcome(results)
    if program.loss is not None:
        results["the loss"] = module.forward_backward(trial.batch)
        out.sent = dict(sent_by(module))
        results.update({f"the gradient of {n}": g for n, g in module.full_gradients().items()})
    args, kwargs = split_batch(trial.batch)
    with torch.no_grad():
        leaves = pytree.tree_leaves(module(*args, **kwargs))
    if program.loss is None:
        out.sent = dict(sent_by(module))
    for k, (leaf, name) in enumerate(zip(leaves, program.outputs, strict=False)):
        if isinstance(name, OutputName):
            results[f"output {k}"] = leaf
    results.update({f"buffer {n}": module.get_buffer(n) for n in program.mutations})
    return out


def build(trial: Trial, rank: int) -> ParallelModule:
    module = api.build(trial.model, trial.bound, trial.plan, trial.seed)
    if trial.graphs is not None:
        install(module, trial.graphs[trial.plan.device_mesh.coordinates(rank)])
    return module


def install(module: ParallelModule, graph: RankGraph) -> None:
    """Run ``graph`` in training in place of what was emitted."""
    mode = module.planned
    emitted, has_loss = mode.compile_graph, mode.signature.has_loss
    given = Compiled(fx.GraphModule(nn.Module(), graph.graph), graph.inputs, graph.uses)
    mode.compile_graph = lambda outputs: given if outputs != has_loss else emitted(outputs)

    def bound(way: Sequence[Step]) -> tuple[Step, ...]:
        return tuple(Step(module._axes[s.axis.name], s.src, s.dst) for s in way)

    for name, weight in list(module._weights.items()):
        ways = graph.ways[weight.node]
        changed = dataclasses.replace(weight, gather=bound(ways.gather), final=bound(ways.final))
        module._weights[name] = changed
        module._gradients.final[name] = changed.final


# ------------------------------------------------------------------------------------------------ compared


def same(got: Tensor, wanted: Tensor, rtol: float = RTOL, atol: float = ATOL) -> bool:
    if got.shape != wanted.shape:
        return False
    if not (wanted.is_floating_point() or wanted.is_complex()):
        return bool(torch.equal(got, wanted))
    scale = float(wanted.abs().nan_to_num().max()) if wanted.numel() else 0.0
    return bool(torch.allclose(got.to(wanted.dtype), wanted, rtol=rtol, atol=max(atol, rtol * scale), equal_nan=True))
