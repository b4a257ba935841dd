"""Where a step of many ranks parts from that of one process: both run again and keep every value.

The first node of the graph whose gathered value is another one is named; where all values agree, the first node, from
the loss back, whose gradient is.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx

from autopar.layout import I, Layout, Mesh, R, S, dual, local_shape, parse_layout
from autopar.program import place, split_batch
from autopar.runtime.collectives import Axis, convert
from autopar.runtime.kernels.parts import AxisCut, Part, positions
from autopar.runtime.parameters import use
from autopar.verify.trial import FAILURES, Outcome, Trial, build, keeper, run_unsplit, same


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
                value.register_hook(keeper(self.outcome.gradients, n.name))
        return value


_Nodes: TypeAlias = list[tuple[str, str, str, bool]]  # node, value, layout, whether an op made it


def record(trial: Trial, rank: int, outcome: Outcome, nodes: _Nodes) -> None:
    """Keep every value of the training graph on this rank, and every gradient, as far as the step gets."""
    module = build(trial, rank)
    mode = module.planned
    has_loss = mode.signature.has_loss
    compiled = mode.graph(not has_loss)
    assert isinstance(compiled.run, fx.GraphModule)
    recorder = _Recorder(compiled.run, outcome)
    nodes += [
        (n.name, n.meta["value"], n.meta["layout"], n.target not in (convert, use))
        for n in compiled.run.graph.nodes
        if n.op == "call_function" and "value" in n.meta  # emission noted it
    ]
    mode.compiled[not has_loss] = dataclasses.replace(compiled, run=recorder.run)
    if has_loss:
        module.forward_backward(trial.batch)
    else:
        args, kwargs = split_batch(trial.batch)
        module(*args, **kwargs)


def parts_at(trial: Trial) -> str:
    """The first node at which gathered values part, or else, from the loss back, the first of which gradients do."""
    expected = run_unsplit(trial, keep=True)
    mesh = trial.plan.device_mesh
    kept: dict[int, tuple[Outcome, _Nodes]] = {rank: (Outcome({}), []) for rank in range(mesh.size)}

    def job(rank: int) -> tuple[Outcome, _Nodes]:
        outcome, nodes = kept[rank]
        record(trial, rank, outcome, nodes)
        return outcome, nodes

    # where ranks are threads, what they kept before one of them failed is there
    failed = True
    with contextlib.suppress(*FAILURES):
        kept = dict(enumerate(trial.on_ranks(job)))
        failed = False
    ranks = [kept[r] for r in range(mesh.size)]
    places = {o.name: o.node for o in trial.bound.operations}
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
        if failed and any(p is None for p in parts.values()):
            return True  # the step was over before all ranks had it
        whole = assemble(parts, shape, layout, mesh)
        wanted = getattr(expected, which).get(value)
        return wanted is None or (whole is not None and same(whole, wanted))

    for node, value, text, _ in nodes:
        if value in trial.bound.values and not gathered("values", node, value, text, False):
            return f"values part at {where(node, value)}"
    for node, value, _, _ in nodes:
        if failed and value in trial.bound.values and not any(node in outcome.values for outcome, _ in ranks):
            return f"no rank gets to {where(node, value)}"
    for node, value, text, is_call in reversed(nodes):
        if is_call and value in expected.gradients and not gathered("gradients", node, value, text, True):
            return f"gradients part at {where(node, value)}"
    return "values and gradients of all nodes agree: it is a weight's own way"


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
