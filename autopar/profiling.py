"""`autopar.profile`: measure what a plan of a model could run, on this machine.

On one process the ops at their local shapes; under torchrun also the collectives among all its ranks, each between
two ops, as they stand in a training step, where they take several times as long as in a loop of nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from autopar.api import as_cluster, understand
from autopar.capture import LossFn
from autopar.cluster import ClusterSpec
from autopar.cost_model.hardware import device as device_of
from autopar.cost_model.profiler import Profile, empty_profile, op_seconds, overlap_of, seconds_of
from autopar.layout import Mesh, Split, local_shape
from autopar.passes.emit import RNG, local_arguments, local_sizes
from autopar.passes.fold import fold
from autopar.rules.analysis import Analysis, Bound, Operation, contract
from autopar.rules.derive import Strategy, algorithm_of
from autopar.runtime.collectives import Axis, all_reduce, all_to_all, gather_rows, reduce_rows
from autopar.runtime.kernels.parts import Part
from autopar.solver.prices import local_key, prices
from autopar.solver.search import Search
from autopar.solver.space import build

SIZES = (2**12, 2**16, 2**20, 2**24)  # bytes of the value that a collective gathers or reduces
_MOST_AXES = 2  # of the meshes whose local shapes are measured: a third axis only makes them smaller


def profile(
    model: torch.nn.Module,
    cluster: ClusterSpec | str,
    example_inputs: Any = None,
    *,
    loss_fn: LossFn | None = None,
    search: Search | None = None,
    known: Profile | None = None,
    time_limit: float = 120,
    progress: Callable[[str], None] | None = None,
) -> Profile:
    """What the cluster's plans of ``model`` could run, as measured here, added to ``known``.

    Every (op, strategy) of the meshes in ``search`` is timed once at its local shapes, forward and backward, until
    ``time_limit`` seconds are over; ops that communicate themselves are left to the catalogue.  The machine should be
    one of the cluster's, and otherwise idle.  Where torch.distributed is initialized the collectives are timed too.

    Raises what `autopar.plan` raises, and PlanError where ``known`` is of another device or torch.
    """
    cluster = as_cluster(cluster)
    bound = understand(model, example_inputs, loss_fn)
    kind = device_of(cluster).name
    found = known or empty_profile(kind)
    found.check(kind)
    if dist.is_initialized() and dist.get_world_size() > 1:
        found = _collectives(found)
    deadline = time.perf_counter() + time_limit
    ops = dict(found.ops)
    where = torch.device("cpu" if kind == "cpu" else "cuda")
    for mesh in (search or Search()).meshes(cluster.world_size):
        if len(mesh.axes) > _MOST_AXES:
            continue
        for analysis, op, strategy, key in _runs(bound, cluster, mesh):
            if key not in ops and time.perf_counter() < deadline:
                ops[key] = _measure(analysis, op, strategy, mesh.sizes, where)
        if progress is not None:
            progress(f"{mesh}: {len(ops)} ops measured")
    return msgspec.structs.replace(found, ops=ops)


def _runs(bound: Bound, cluster: ClusterSpec, mesh: Mesh) -> Iterator[tuple[Analysis, Operation, Strategy, str]]:
    """Every distinct local op of ``mesh`` with its key."""
    analysis = contract(bound, mesh.sizes)
    space = build(analysis, fold(bound), mesh, prices(cluster, mesh.sizes))
    for op in space.ops:
        ins, outs = ([analysis.values[v] for v in names] for names in (op.inputs, op.outputs))
        for strategy in space.strategies[op.name]:
            if not any(algorithm_of(op.rule, c) for c in strategy.choices) and not op.rule.reshapes:
                yield analysis, op, strategy, local_key(op, strategy, ins, outs, mesh.sizes)


def _measure(
    analysis: Analysis, op: Operation, strategy: Strategy, sizes: tuple[int, ...], where: torch.device
) -> tuple[float, float]:
    """(forward, backward) seconds of what the first rank runs."""
    at = (0,) * len(sizes)
    inputs = []
    for name, layout, differentiable in zip(op.inputs, strategy.ins, op.type.differentiable_ins, strict=True):
        value = analysis.values[name]
        shape = local_shape(value.shape, layout, sizes, at)
        if value.dtype.is_floating_point or value.dtype.is_complex:
            x = torch.randn(shape, dtype=value.dtype, device=where)
        else:  # 0 is an index into everything; a mask lets everything pass
            x = torch.full(shape, value.dtype is torch.bool, dtype=value.dtype, device=where)
        inputs.append(x.requires_grad_(differentiable))
    overrides = local_sizes(op.rule.size_args, op.rule, strategy, sizes, at)
    for name, held in local_sizes(op.rule.part_args, op.rule, strategy, sizes, at).items():
        overrides[name] = [Part(n) for n in held]  # as if what the rank holds were all that there is

    def call(*tensors: Tensor) -> Any:
        args, kwargs = local_arguments(op.node, iter(tensors), overrides, {RNG: 0})
        return op.node.target(*args, **kwargs)  # type: ignore[operator]

    return op_seconds(call, inputs)


# ------------------------------------------------------------------------------------------------ collectives


def _collectives(found: Profile) -> Profile:
    """Every kind of collective among all ranks, and what of an all-reduce hides behind compute."""
    n, rank, group = dist.get_world_size(), dist.get_rank(), dist.group.WORLD
    where = "cuda" if dist.get_backend() == "nccl" else "cpu"
    axis = Axis("all", n, rank, group, dist.get_backend())
    work = torch.randn(384, 384, device=where)

    def compute() -> Tensor:
        return work @ work

    measured = {kind: dict(of) for kind, of in found.collectives.items()}
    dist.barrier()
    alone = _agreed(seconds_of(compute))  # what follows repeats it as often on every rank
    for kind in ("all-reduce", "all-gather", "reduce-scatter", "all-to-all"):
        times = {}
        for nbytes in SIZES:
            run = _collective(kind, nbytes, axis, where)

            def between_ops(run: Callable[[], object] = run) -> None:
                compute()
                run()

            dist.barrier()
            times[nbytes] = _agreed(max(seconds_of(between_ops, budget=0.0, least=9) - alone, 1e-7))
        measured.setdefault(kind, {})[n] = times
    flat = torch.randn(SIZES[-1] // 4, device=where)
    repeats = max(1, round(measured["all-reduce"][n][SIZES[-1]] / alone))

    def start() -> Callable[[], object]:
        return dist.all_reduce(flat.clone(), group=group, async_op=True).wait

    dist.barrier()
    hidden = _agreed(overlap_of(lambda: [compute() for _ in range(repeats)], start))
    return msgspec.structs.replace(found, collectives=measured, overlap=hidden)


def _collective(kind: str, nbytes: int, axis: Axis, where: str) -> Callable[[], object]:
    """A run of a collective; bytes as in `cost_model.collectives.sent_bytes`."""
    n = axis.size
    rows = -(-nbytes // (4 * n)) * n
    if kind == "all-reduce":
        whole = torch.randn(rows, device=where)
        return lambda: all_reduce(whole, axis)
    if kind == "reduce-scatter":
        whole = torch.randn(rows, device=where)
        return lambda: reduce_rows(whole, axis)
    part = torch.randn(rows // n, device=where)
    if kind == "all-gather":
        return lambda: gather_rows(part, axis)
    row = torch.randn(1, rows // n, device=where)  # of n
    return lambda: all_to_all(row, Split(0, 1, n, 1), Split(1, 1, rows // n, 1), axis)


def _agreed(seconds: float) -> float:
    """The mean over ranks, so that every rank's profile says the same."""
    where = "cuda" if dist.get_backend() == "nccl" else "cpu"
    total = torch.tensor([seconds], dtype=torch.float64, device=where)
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()
