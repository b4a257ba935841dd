"""Verify: what an emitted module does is what its plan says, and what the model means.

    types         our own propagation of layouts over every kind of rank's graph, and the checker of spmd_types
    collectives   those of the graph are the plan's, in kind, axis and bytes, and the bytes that a step really sends
    step          one step on all ranks against one process, in float64

The first two run nothing, need no other process, and take a model of any size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autopar import api
from autopar.cluster import ClusterSpec
from autopar.errors import RuntimeMismatch
from autopar.layout import Mesh
from autopar.passes.fold import expand
from autopar.passes.resolve import Resolved, resolve
from autopar.plan import Plan
from autopar.rules.analysis import Bound, bind_program
from autopar.runtime.module import ParallelModule
from autopar.testing import run_local
from autopar.verify.eager import check_eager
from autopar.verify.numbering import number_values
from autopar.verify.ranks import compare_ranks
from autopar.verify.report import Finding, Report
from autopar.verify.step import check_step
from autopar.verify.subject import RankGraph, Ways, coordinates_that_matter, rank_graph
from autopar.verify.traffic import check_traffic, own_transfers, planned, sent_by_plan
from autopar.verify.trial import Outcome, Trial
from autopar.verify.types import Types, check_types
from autopar.verify.widen import invented, wide_batch, wide_model, wide_program
from autopar.verify.wire import REGATHERED

MAX_WORLD = 8  # ranks of the largest plan of which a step is run
MAX_INVENTED = 50_000_000  # numbers that are made up for a model without values, so that a step can be run


def verify(
    module: ParallelModule, batch: Any = None, *, step: bool = True, public: bool = True, max_world: int = MAX_WORLD
) -> Report:
    """Check a module that `autopar.parallelize` made; every rank calls it, and gets the report on its own graph.

    batch: what a step is run on, the example batch if it is left out.  step: run one, where there are at most
    ``max_world`` ranks; it works on copies, in float64, and every rank holds the whole model meanwhile.  public: run
    the checker of spmd_types, where it is installed.

    Raises RuntimeMismatch for a module that has no plan.  What is found is in the report; nothing is raised for it.
    """
    origin = module.origin
    if origin is None:
        raise RuntimeMismatch(
            "this module cannot be verified",
            expected="a module that autopar.parallelize made",
            got="an emitted program, which knows its decisions only",
            hint="autopar verify plan.json MODEL checks the plan that it was emitted from",
        )
    resolved: Resolved = origin.resolved
    graph = RankGraph(
        module.coordinates,
        module.graph_module.graph,
        *module.compiled_as(),
        {w.node: Ways(w.gather, w.final) for w in module.weights()},
    )
    findings = check_axes(module)
    found, counts = check_graphs(origin.bound, resolved, [graph])
    findings += found
    left_out: dict[str, str] = {}
    untyped: dict[str, int] = {}
    if public:
        more, untyped, why = check_public(resolved, graph)
        findings += more
        left_out |= {"spmd_types": why} if why else {}
    batch = origin.batch if batch is None else batch
    world = resolved.mesh.size
    why = _no_step(step, batch, world, max_world)
    if why:
        left_out["step"] = why
    else:
        whole = module.full_state_dict(persistent_only=False)
        buffers = dict(module.named_buffers(remove_duplicate=False))
        parameters = {n: v for n, v in whole.items() if n not in buffers}
        holder = wide_model(parameters, buffers, module)
        trial = _trial(holder, origin.bound, module.plan, batch, lambda job: _gathered(job, world))
        more, sent, _ = _step_findings(trial, resolved)
        findings += more
        counts |= sent
    return Report(f"plan {module.plan.id} on {resolved.mesh}", tuple(findings), counts, untyped, left_out)


def verify_plan(
    plan: Plan,
    model: nn.Module,
    example_inputs: Any = None,
    *,
    cluster: ClusterSpec | str | None = None,
    loss_fn: Callable[[Any, Any], Tensor] | None = None,
    step: bool = True,
    public: bool = True,
    max_world: int = MAX_WORLD,
) -> Report:
    """Check a plan of a model on one process: what would run on every kind of rank is emitted and looked at.

    The model may have no values (fake or meta tensors); a step of a small one then runs on invented ones.  Options as
    of `verify`.  Raises PlanError where the plan is for another model, and what capture raises.
    """
    bound = api.understand(model, example_inputs, loss_fn)
    api.check_plan(plan, bound, None if cluster is None else api.as_cluster(cluster))
    resolved = resolve(plan, bound, *expand(plan, bound))
    graphs = [rank_graph(resolved, at) for at in coordinates_that_matter(resolved)]
    findings, counts = check_graphs(bound, resolved, graphs)
    left_out: dict[str, str] = {}
    untyped: dict[str, int] = {}
    if public:
        more, untyped, why = check_public(resolved, graphs[0])
        findings += more
        left_out |= {"spmd_types": why} if why else {}
    why = _no_step(step, example_inputs, plan.world_size, max_world)
    parameters: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers())
    real = all(_is_real(t) for t in [*parameters.values(), *buffers.values()])
    if not why and not real:
        size = sum(p.numel() for p in model.parameters())
        why = f"the model has no values, and {size:,} are too many to invent" if size > MAX_INVENTED else ""
    if why:
        left_out["step"] = why
    else:
        batch = example_inputs
        if not real:  # any will do: both sides have the same
            generator = torch.Generator().manual_seed(0)
            made = {
                id(t): t if _is_real(t) else invented(t, generator) for t in [*parameters.values(), *buffers.values()]
            }
            parameters, buffers = ({n: made[id(t)] for n, t in d.items()} for d in (parameters, buffers))
            batch = pytree.tree_map(lambda x: invented(x, generator) if isinstance(x, Tensor) else x, batch)
            counts["weights whose values are invented"] = len(parameters)
        holder = wide_model(parameters, buffers, model)
        trial = _trial(holder, bound, plan, batch, lambda job: run_local(job, plan.world_size))
        more, sent, expected = _step_findings(trial, resolved)
        findings += more
        counts |= sent
        if real:
            more, why = check_eager(model, holder, batch, loss_fn, bound, expected)
            findings += more
            left_out |= {"the model itself": why} if why else {}
    return Report(f"plan {plan.id} on {plan.device_mesh}", tuple(findings), counts, untyped, left_out)


def check_graphs(
    bound: Bound, resolved: Resolved, graphs: Sequence[RankGraph]
) -> tuple[list[Finding], dict[str, float]]:
    """(a) and (b): types and collectives of the training graphs of these ranks, which nothing runs."""
    numbering = number_values(bound)
    outputs = resolved.analysis.program.loss is None
    findings: list[Finding] = []
    types: list[Types] = []
    for graph in graphs:
        types.append(check_types(resolved, numbering, graph))
        findings += types[-1].findings
        findings += check_traffic(resolved, graph, types[-1], outputs)
    findings += compare_ranks(resolved, graphs, types)
    first = planned(resolved, graphs[0].at, outputs) + Counter(own_transfers(resolved, graphs[0].at, outputs))
    counts: dict[str, float] = {
        "kinds of ranks": len(graphs),
        "nodes of a graph": len(graphs[0].graph.nodes),
        "collectives of a step": sum(first.values()),
        "bytes sent by a rank, forward": sum(t.nbytes * n for t, n in first.items() if t.direction == "forward"),
        "bytes sent by a rank, backward": sum(t.nbytes * n for t, n in first.items() if t.direction == "backward"),
    }
    return findings, counts


def check_axes(module: ParallelModule) -> list[Finding]:
    """Every axis of a live module is the group of ranks that the mesh says."""
    mesh, at = module.plan.device_mesh, module.coordinates
    out = []
    for k, (name, axis) in enumerate(zip(mesh.axes, module.axes(), strict=True)):
        ranks = [r for r in range(mesh.size) if _beside(mesh, r, at, k)]
        group = ranks if axis.group is None and len(ranks) == 1 else dist.get_process_group_ranks(axis.group)
        wanted, got = (name, mesh.sizes[k], at[k], ranks), (axis.name, axis.size, axis.index, list(group))
        if wanted != got:
            out.append(
                Finding("collectives", f"axis {name} joins other ranks than the mesh says", "", str(wanted), str(got))
            )
    return out


def _beside(mesh: Mesh, rank: int, at: tuple[int, ...], axis: int) -> bool:
    """Whether ``rank`` differs from the rank at ``at`` on one axis at most."""
    return all(i == j for a, (i, j) in enumerate(zip(mesh.coordinates(rank), at, strict=True)) if a != axis)


def check_public(resolved: Resolved, graph: RankGraph) -> tuple[list[Finding], dict[str, int], str]:
    """(findings, ops that it cannot type, why the check was left out) of spmd_types' checker."""
    try:
        import spmd_types  # noqa: F401
    except ImportError:
        return [], {}, "spmd_types is not installed (pip install spmd-types)"
    from autopar.verify.public import check

    return *check(resolved, graph), ""


# ------------------------------------------------------------------------------------------------ the step


def _no_step(step: bool, batch: Any, world: int, max_world: int) -> str:
    if not step:
        return "not asked for"
    if world > max_world:
        return f"{world} ranks are more than max_world={max_world}"
    if batch is None:
        return "no batch to run it on"
    if not all(_is_real(x) for x in pytree.tree_leaves(batch) if isinstance(x, Tensor)):
        return "the batch has no values"
    return ""


def _is_real(x: Tensor) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return not x.is_meta and not isinstance(x, FakeTensor)


def _trial(holder: nn.Module, bound: Bound, plan: Plan, batch: Any, on_ranks: Any) -> Trial:
    wide = bind_program(wide_program(bound.program))
    return Trial(holder, wide, plan, wide_batch(batch), on_ranks)


def _gathered(job: Callable[[int], Outcome], world: int) -> list[Any]:
    """``job`` on this rank of a live group, and what the other ranks made of it."""
    if world == 1:
        return [job(0)]
    made: list[Any] = [None] * world
    dist.all_gather_object(made, job(dist.get_rank()))
    return made


def _step_findings(trial: Trial, resolved: Resolved) -> tuple[list[Finding], dict[str, float], Outcome]:
    findings, outcomes, reference = check_step(trial)
    if not outcomes:
        return findings, {}, reference
    mesh = resolved.mesh
    counts = {"ranks that ran a step": float(len(outcomes))}
    wide = resolve(trial.plan, trial.bound, *expand(trial.plan, trial.bound))
    for rank, outcome in enumerate(outcomes):
        expected, exact = sent_by_plan(wide, mesh.coordinates(rank), trial.bound.program.loss is None)
        for axis in mesh.axes:
            got, wanted = outcome.sent.get(axis, 0.0), expected.get(axis, 0.0)
            if (abs(got - wanted) > 0.5) if exact else (got < wanted - 0.5):
                findings.append(
                    Finding(
                        "collectives",
                        f"rank {rank} sends other bytes over {axis} than the plan says",
                        "",
                        f"{'' if exact else 'at least '}{wanted:,.0f}",
                        f"{got:,.0f}",
                    )
                )
        if not rank:
            counts |= {f"bytes sent over {a} by rank 0": outcome.sent.get(a, 0.0) for a in mesh.axes}
            counts["bytes of weights gathered again"] = outcome.sent.get(REGATHERED, 0.0)
    return findings, counts, reference


__all__ = ["Finding", "Report", "check_graphs", "verify", "verify_plan"]
