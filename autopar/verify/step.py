"""One step on every rank against the program as one process runs it, in float64.

    ranks, each with its part:   loss, outputs, new buffers, every gradient gathered under its original name
    one process, unsplit:        the program's graph, op by op, differentiated by autograd

Where they part, both run again and keep every value: the first node whose gathered value is another one is named, or,
where all values agree, the last node whose gradient is another one.
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
from autopar.layout import I, Layout, Mesh, P, R, S, dual, local_shape, parse_layout
from autopar.passes.constants import run_prelude
from autopar.passes.emit import RNG
from autopar.plan import Plan
from autopar.program import OutputName, place, shape_of, split_batch
from autopar.rules.analysis import Bound
from autopar.runtime.collectives import Axis, Step, convert
from autopar.runtime.kernels.dropout import step_key
from autopar.runtime.kernels.parts import AxisCut, Part, positions
from autopar.runtime.module import Compiled, ParallelModule
from autopar.runtime.parameters import use
from autopar.verify.report import Finding
from autopar.verify.subject import RankGraph
from autopar.verify.wire import counted

RTOL, ATOL = 1e-9, 1e-11


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
                    v.register_hook(_keeper(out.gradients, n))
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


def _keeper(store: dict[str, Tensor], name: str) -> Callable[[Tensor], None]:
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


class _Recorder(fx.Interpreter):
    """Runs a graph and keeps the values of its calls, and their gradients."""

    def __init__(self, graph: fx.GraphModule, outcome: Outcome) -> None:
        super().__init__(graph)
        self.outcome = outcome

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n.op == "call_function" and isinstance(value, Tensor):
            self.outcome.values[n.name] = value.detach().clone()
            if value.requires_grad:
                value.register_hook(_keeper(self.outcome.gradients, n.name))
        return value


def record(trial: Trial, rank: int) -> Outcome:
    """Every value of the training graph on this rank, and every gradient, as far as the step gets."""
    module, out = build(trial, rank), Outcome({})
    mode = module.planned
    compiled = mode.graph(not mode.signature.has_loss)
    recorder = _Recorder(compiled.run, out)  # type: ignore[arg-type]
    mode.compiled[not mode.signature.has_loss] = dataclasses.replace(compiled, run=recorder.run)
    args, kwargs = split_batch(trial.batch)
    try:
        if mode.signature.has_loss:
            module.forward_backward(trial.batch)
        else:
            module(*args, **kwargs)
    except (RuntimeError, IndexError, ValueError) as error:
        out.results["error"] = torch.tensor(0)
        del error
    return out


# ------------------------------------------------------------------------------------------------ compared


def check_step(
    trial: Trial, expected: Outcome | None = None, locate: bool = True
) -> tuple[list[Finding], list[Outcome], Outcome]:
    """(findings, what every rank did, what one process did).

    expected: the latter, where it is known.  locate: run again to name the node where they part.
    """
    expected = expected or run_unsplit(trial)
    try:
        with counted() as sent_by:
            outcomes = trial.on_ranks(lambda rank: on_rank(trial, rank, sent_by))
    except (RuntimeError, IndexError, ValueError, TypeError) as error:
        text = str(error).splitlines() or [""]
        return (
            [
                Finding(
                    "step",
                    "the step fails",
                    _parts_at(trial) if locate else "",
                    "a step",
                    f"{type(error).__name__}: {text[0]}",
                )
            ],
            [],
            expected,
        )
    for rank, outcome in enumerate(outcomes):
        for name, wanted in expected.results.items():
            got = outcome.results.get(name)
            if got is None or not same(got, wanted):
                finding = Finding(
                    "step",
                    f"{name} is another one on rank {rank} than on one process",
                    _parts_at(trial) if locate else "",
                    _numbers(wanted),
                    "nothing" if got is None else _difference(got, wanted),
                )
                return [finding], outcomes, expected
    return [], outcomes, expected


def same(got: Tensor, wanted: Tensor, rtol: float = RTOL) -> bool:
    if got.shape != wanted.shape:
        return False
    if not (wanted.is_floating_point() or wanted.is_complex()):
        return bool(torch.equal(got, wanted))
    scale = float(wanted.abs().nan_to_num().max()) if wanted.numel() else 0.0
    return bool(torch.allclose(got.to(wanted.dtype), wanted, rtol=rtol, atol=max(ATOL, rtol * scale), equal_nan=True))


def _numbers(x: Tensor) -> str:
    return f"{list(x.shape)} {x.dtype}"


def _difference(got: Tensor, wanted: Tensor) -> str:
    if got.shape != wanted.shape:
        return _numbers(got)
    off, largest = (got.double() - wanted.double()).abs().max(), wanted.double().abs().max()
    return f"off by up to {float(off):.3g} of {float(largest):.3g}"


def _parts_at(trial: Trial) -> str:
    """The first node at which gathered values part, or else, from the loss back, the first of which gradients do."""
    expected = run_unsplit(trial, keep=True)
    try:
        ranks = trial.on_ranks(lambda rank: _recorded(trial, rank))
    except (RuntimeError, IndexError, ValueError, TypeError):
        return ""
    mesh, places = trial.plan.device_mesh, {o.name: o.node for o in trial.bound.operations}
    _, nodes = ranks[0]
    made_by = {v: o.name for o in trial.bound.operations for v in o.outputs}

    def where(node: str, value: str) -> str:
        op = places.get(made_by.get(value, ""))
        return f"{node}, {place(op) if op is not None else value}"

    def gathered(which: str, node: str, value: str, text: str, gradient: bool) -> bool:
        shape = trial.bound.values[value].shape
        layout = parse_layout(text, mesh.axes, shape)
        if gradient:
            layout = tuple(dual(s) for s in layout)
        parts = {mesh.coordinates(r): getattr(outcome, which).get(node) for r, (outcome, _) in enumerate(ranks)}
        whole = assemble(parts, shape, layout, mesh)
        wanted = getattr(expected, which).get(value)
        return wanted is None or (whole is not None and same(whole, wanted))

    for node, value, text, _ in nodes:
        if value in trial.bound.values and not gathered("values", node, value, text, False):
            return f"values part at {where(node, value)}"
    for node, value, text, is_call in reversed(nodes):
        if is_call and value in expected.gradients and not gathered("gradients", node, value, text, True):
            return f"gradients part at {where(node, value)}"
    return "values and gradients of all nodes agree: it is a weight's own way"


def _recorded(trial: Trial, rank: int) -> tuple[Outcome, list[tuple[str, str, str, bool]]]:
    """What `record` gives, with (node, value, layout, whether an op made it) of the nodes that emission noted."""
    outcome = record(trial, rank)
    graph = (
        trial.graphs[trial.plan.device_mesh.coordinates(rank)].graph
        if trial.graphs is not None
        else build(trial, rank).graph_module.graph
    )
    nodes = [
        (n.name, n.meta["value"], n.meta["layout"], n.target not in (convert, use))
        for n in graph.nodes
        if n.op == "call_function" and "value" in n.meta
    ]
    return outcome, nodes


def assemble(parts: Mapping[tuple[int, ...], Any], shape: tuple[int, ...], layout: Layout, mesh: Mesh) -> Tensor | None:
    """The whole value from what every rank holds; None where a rank holds something else than the layout says."""
    whole: Tensor | None = None
    for at, part in parts.items():
        if not isinstance(part, Tensor) or tuple(part.shape) != local_shape(shape, layout, mesh.sizes, at):
            return None
        full = tuple(i for i, s in zip(at, layout, strict=True) if s in (R, I))
        if any(full):
            twin = tuple(0 if s in (R, I) else i for i, s in zip(at, layout, strict=True))
            if parts[twin] is not None and parts[twin].shape == part.shape and not same(part, parts[twin]):
                return None
            continue
        if whole is None:
            whole = part.new_zeros(shape)
        index = [_rows(d, n, layout, mesh, at) for d, n in enumerate(shape)]
        if not shape:
            whole = whole + part
        elif part.dtype is torch.bool:
            whole[torch.meshgrid(*index, indexing="ij")] = part
        else:
            whole[torch.meshgrid(*index, indexing="ij")] += part
    return whole


def _rows(dim: int, size: int, layout: Layout, mesh: Mesh, at: Sequence[int]) -> Tensor:
    cuts = [
        AxisCut(Axis(mesh.axes[a], mesh.sizes[a], at[a]), s.m, s.N, s.u)
        for a, s in enumerate(layout)
        if isinstance(s, S) and s.dim == dim
    ]
    return positions(Part(size, tuple(sorted(cuts, key=lambda c: c.m))))


__all__ = ["Outcome", "P", "Trial", "assemble", "check_step", "on_rank", "record", "run_unsplit", "same"]
