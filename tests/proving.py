"""Rule proofs: an op, split in every way that its rule offers, gives what the whole op gives, gradients included.

``prove(fn, args)`` takes a call apart into the ops that capture makes of it.  For each op and each strategy every rank
runs what the emitter writes for it, on its parts of the inputs; the outputs, joined as their layouts say, must be
those of the whole op, and so must the gradients of all inputs, from parts of the outputs' gradients.

    report = prove(torch.cumsum, (x, 1))          # an op of torch, or any function of tensors
    report = prove(batch_norm, (x, w, b, ...))    # a function of autopar's that stands in captured graphs
    report.check()                                # raises AssertionError with all that is wrong

Floating arguments are differentiated, but for those wrapped as ``torch.nn.Buffer``.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from calls import KEY, Call, assert_same, captured, gradients_of, tolerance
from equality import mesh_of
from layouts import held, whole
from torch import Tensor, fx
from torch.distributed.device_mesh import init_device_mesh

from autopar.layout import Layout, Mesh, dual
from autopar.passes.emit import GRADIENTS, RNG, _Emitter
from autopar.passes.resolve import Resolved
from autopar.rules.analysis import Analysis, Bound, Operation, View
from autopar.rules.derive import Strategy, apply, axis_choices, random_strategy
from autopar.rules.factors import Cut
from autopar.runtime.collectives import Axis
from autopar.runtime.dtensor import runtime_axes
from autopar.testing import run_local

Sizes = tuple[int, ...]

MESHES: tuple[Sizes, ...] = ((2,), (3,), (4,))
CUTS = 6  # candidate cuts of one factor
PAIRS = 12  # strategies tried on a mesh of two axes


# ------------------------------------------------------------------------------------------------ cases


@dataclass(frozen=True, slots=True)
class Case:
    """One strategy of a call as every rank runs it.  steps: by rank, nodes to run and the ones that are outputs."""

    strategy: Strategy
    mesh: Mesh
    steps: tuple[tuple[fx.Graph, tuple[fx.Node, ...]], ...]

    @property
    def communicates(self) -> bool:
        """Whether a node is handed an axis, and may talk over it."""
        return any(n.name in self.mesh.axes and n.users for graph, _ in self.steps for n in graph.nodes)

    @property
    def signature(self) -> str:
        """Equal for cases that run alike."""
        ran = [[(str(n.target), n.args, n.kwargs) for n in g.nodes if n.op != "placeholder"] for g, _ in self.steps]
        return repr((self.strategy.ins, self.strategy.outs, ran))

    def __str__(self) -> str:
        return f"{', '.join(map(str, self.strategy.choices))} on {'x'.join(map(str, self.mesh.sizes))}"


def all_cuts(size: int) -> list[Cut]:
    """Cuts of a factor: the plain one first, then in groups and in units, a seeded choice of them."""
    found = [
        Cut(m, size // m // u, u)
        for m in range(1, size + 1)
        if size % m == 0
        for u in range(1, size // m + 1)
        if size // m % u == 0
    ] or [Cut(1, size, 1)]
    rest = [c for c in found[1:] if c.N > 1]
    return [found[0], *random.Random(size).sample(rest, min(len(rest), CUTS - 1))]


def strategies_of(op: Operation, sizes: Sizes) -> Iterator[Strategy]:
    """Every strategy on one axis, shards that are uneven or empty among them; on several axes random ones."""
    points = {f: all_cuts(n) for f, n in op.rule.sizes.items()}
    if len(sizes) == 1:
        for choice in axis_choices(op.type, points, sizes[0], empty=True):
            strategy = apply(op.type, [choice], sizes)
            if strategy is not None:
                yield strategy
        return
    seen = set()
    for seed in range(PAIRS):
        strategy = random_strategy(op.type, points, sizes, random.Random(seed))
        if strategy.choices not in seen:
            seen.add(strategy.choices)
            yield strategy


def cases_of(bound: Bound, sizes: Sizes) -> Iterator[Case]:
    """Every strategy as the emitter writes it; a view's as an op and, where it can be, as a relabelling."""
    mesh, op = mesh_of(sizes), bound.operations[0]
    plain = Analysis(bound.program, sizes, (op,), bound.values, {}, bound.points)
    view = View(op.outputs[0], op.inputs[0], op.node, op.rule) if op.rule.view else None
    relabelled = replace(plain, operations=(), views={view.name: view}) if view is not None else None
    for strategy in strategies_of(op, sizes):
        yield Case(strategy, mesh, tuple(_emitted(plain, op, strategy, mesh, at) for at in mesh.all_coordinates()))
        if relabelled is not None and relabelled.to_root(op.outputs[0], strategy.outs[0]) == strategy.ins[0]:
            ranks = mesh.all_coordinates()
            yield Case(strategy, mesh, tuple(_emitted(relabelled, op, strategy, mesh, at) for at in ranks))


def _emitted(
    analysis: Analysis, op: Operation, strategy: Strategy, mesh: Mesh, at: tuple[int, ...]
) -> tuple[fx.Graph, tuple[fx.Node, ...]]:
    e = _Emitter(Resolved(analysis, mesh, {op.name: strategy}, {}, {}), at)
    for axis in mesh.axes:
        e.axes.append(e.graph.placeholder(axis))
    for name in (RNG, GRADIENTS):
        e.extra[name] = e.graph.placeholder(name)
    for k, (name, layout) in enumerate(zip(op.inputs, strategy.ins, strict=True)):
        e.made(name, layout, e.graph.placeholder(f"in{k}"))
    if not analysis.views:
        e.operation(op)
    return e.graph, tuple(e.get(name, layout) for name, layout in zip(op.outputs, strategy.outs, strict=True))


# ------------------------------------------------------------------------------------------------ running


class Parts:
    """What ranks hold of a call's values, by layout: strategies share most of them."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self._held: dict[Any, list[Tensor]] = {}

    def of(self, kind: str, k: int, layout: Layout, mesh: Mesh) -> list[Tensor]:
        key = (kind, k, layout, mesh.sizes)
        if key not in self._held:
            self._held[key] = held(getattr(self.call, kind)[k], layout, mesh)
        return self._held[key]


Ran = tuple[tuple[Tensor, ...], list[Tensor | None]]  # a rank's outputs, and gradients of its inputs


def _run_rank(case: Case, parts: Parts, rank: int, axes: Sequence[Axis]) -> Ran:
    call, mesh, strategy = parts.call, case.mesh, case.strategy
    inputs = [parts.of("inputs", k, lay, mesh)[rank].detach() for k, lay in enumerate(strategy.ins)]
    for x, flows in zip(inputs, call.op.type.differentiable_ins, strict=True):
        x.requires_grad_(flows)
    graph, outputs = case.steps[rank]
    env: dict[fx.Node, Any] = {}
    given = iter([*axes, KEY, None, *inputs])
    for node in graph.nodes:
        if node.op == "placeholder":
            env[node] = next(given)
        else:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: env[n])
            env[node] = node.target(*args, **kwargs)
    made = tuple(env[n] for n in outputs)
    cotangents: list[Tensor | None] = []
    for k, (y, wanted, layout) in enumerate(zip(made, call.cotangents, strategy.outs, strict=True)):
        assert y.requires_grad or wanted is None, f"output {k} has no gradient on rank {rank}"
        duals = tuple(map(dual, layout))
        cotangents.append(None if wanted is None else parts.of("cotangents", k, duals, mesh)[rank])
    return tuple(y.detach() for y in made), gradients_of(made, inputs, cotangents)


def run_case(case: Case, parts: Parts) -> None:
    """Raises AssertionError where ranks together do not have what the whole op gives."""
    mesh = case.mesh
    if case.communicates:
        ran = run_local(lambda rank: _run_rank(case, parts, rank, _live_axes(mesh, rank)), mesh.size, timeout=20)
    else:
        ran = [_run_rank(case, parts, r, _idle_axes(mesh, r)) for r in range(mesh.size)]
    compare(case, parts.call, ran)


def _idle_axes(mesh: Mesh, rank: int) -> list[Axis]:
    return [Axis(a, n, k) for a, n, k in zip(mesh.axes, mesh.sizes, mesh.coordinates(rank), strict=True)]


def _live_axes(mesh: Mesh, rank: int) -> Sequence[Axis]:
    device_mesh = init_device_mesh("cpu", mesh.sizes, mesh_dim_names=mesh.axes)
    return runtime_axes(mesh, device_mesh, mesh.coordinates(rank))


def compare(case: Case, call: Call, ran: Sequence[Ran]) -> None:
    rtol = tolerance([*call.inputs, *call.outputs])
    for k, (wanted, layout) in enumerate(zip(call.outputs, case.strategy.outs, strict=True)):
        assert all(r[0][k].dtype == wanted.dtype for r in ran), f"output {k} is of another type"
        joined = whole([r[0][k] for r in ran], layout, case.mesh, tuple(wanted.shape))
        assert_same(joined, wanted, f"output {k}", rtol)
    for k, (wanted, layout) in enumerate(zip(call.gradients, case.strategy.ins, strict=True)):
        if wanted is None:
            continue
        terms = [r[1][k] for r in ran]
        for rank, term in enumerate(terms):
            assert term is not None, f"gradient {k} is missing on rank {rank}"
        joined = whole(terms, tuple(map(dual, layout)), case.mesh, tuple(wanted.shape))  # type: ignore[arg-type]
        assert_same(joined, wanted, f"gradient {k}", rtol)


# ------------------------------------------------------------------------------------------------ proofs


@dataclass(frozen=True, slots=True)
class Report:
    """checked: cases that came out equal, by op.  wrong: the others.  refused: ops without a rule."""

    checked: dict[str, int]
    wrong: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()

    def check(self) -> None:
        assert not self.wrong, "\n".join(self.wrong)
        assert not self.refused, "\n".join(self.refused)
        assert self.checked


def failure(case: Case, parts: Parts) -> str:
    """What is wrong with a case; empty if nothing is."""
    try:
        run_case(case, parts)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
    return ""


def prove_call(call: Call, meshes: Iterable[Sizes] = MESHES) -> Report:
    """Every strategy of one op on every mesh."""
    parts = Parts(call)
    checked, wrong = 0, []
    for sizes in meshes:
        try:
            for case in cases_of(call.bound, sizes):
                found = failure(case, parts)
                checked += not found
                if found:
                    wrong.append(f"{call}: {case}: {found}")
        except Exception as error:
            wrong.append(f"{call}: cannot be emitted on {sizes}: {error!r}")
    return Report({call.name: checked}, tuple(wrong))


def prove(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    meshes: Iterable[Sizes] = (*MESHES, (2, 2)),
) -> Report:
    """Prove every op of ``fn(*args, **kwargs)``, and that capture's own rewrites keep its values and gradients."""
    found = captured(fn, args, kwargs)
    reports = [prove_call(call, tuple(meshes)) for call in found.calls]
    checked: dict[str, int] = {}
    for report in reports:
        for name, n in report.checked.items():
            checked[name] = checked.get(name, 0) + n
    wrong = [w for r in reports for w in r.wrong] + ([found.differs] if found.differs else [])
    return Report(checked, tuple(wrong), found.refused)
