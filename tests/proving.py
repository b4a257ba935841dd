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

import itertools
import math
import operator
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from equality import mesh_of
from layouts import held, whole
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils import _pytree as pytree

from autopar.capture import export, from_exported
from autopar.errors import RuleError
from autopar.layout import Layout, Mesh, dual
from autopar.passes.constants import run_prelude
from autopar.passes.emit import GRADIENTS, RNG, _Emitter
from autopar.passes.normalize import normalize
from autopar.passes.resolve import Resolved
from autopar.program import Parameter, Program, is_random, is_tensor, target_name, tensor_inputs
from autopar.rules.analysis import Analysis, Bound, Operation, View, bind_program
from autopar.rules.derive import Strategy, apply, axis_choices, random_strategy
from autopar.rules.factors import Cut
from autopar.runtime.collectives import Axis
from autopar.runtime.dtensor import runtime_axes
from autopar.runtime.kernels.dropout import step_key
from autopar.testing import run_local

Sizes = tuple[int, ...]

KEY = step_key(1, 2)
MESHES: tuple[Sizes, ...] = ((2,), (3,), (4,))
CUTS = 6  # candidate cuts of one factor
PAIRS = 12  # strategies tried on a mesh of two axes

# relative error allowed, by the narrowest type in a call
_RTOL = {torch.float16: 2e-2, torch.bfloat16: 5e-2, torch.float32: 2e-4, torch.complex64: 2e-4, torch.complex32: 5e-2}


# ------------------------------------------------------------------------------------------------ calls


@dataclass(frozen=True, slots=True)
class Call:
    """One op on whole values, as a program of its own, with its rule and what it gives.

    gradients: of ``inputs``, from ``cotangents``; None where none flows.
    """

    bound: Bound
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    cotangents: tuple[Tensor | None, ...]
    gradients: tuple[Tensor | None, ...]

    @property
    def op(self) -> Operation:
        return self.bound.operations[0]

    @property
    def name(self) -> str:
        return target_name(self.op.node)

    @property
    def key(self) -> str:
        """Equal for calls that differ in values only."""
        kinds = [(x.dtype, tuple(x.shape)) for x in self.inputs]
        return repr((self.name, kinds, self.op.type.differentiable_ins, self.op.node.args, self.op.node.kwargs))

    def __str__(self) -> str:
        shapes = ", ".join(f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}" for x in self.inputs)
        literals = [a for a in self.op.node.args if not isinstance(a, (fx.Node, list, tuple))]
        return f"{self.name}({shapes}; {', '.join(map(str, [*literals, *self.op.node.kwargs.items()]))})"


@dataclass(frozen=True, slots=True)
class Captured:
    """calls: ops with a rule.  refused: RuleErrors of the others.  differs: how the normalised graph is not ``fn``."""

    calls: tuple[Call, ...]
    refused: tuple[str, ...] = ()
    differs: str = ""


def captured(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> Captured:
    """The ops that capture and normalisation make of ``fn(*args, **kwargs)``; our own functions are ops themselves."""
    kwargs = kwargs or {}
    if isinstance(fn, torch._ops.OpOverload) or getattr(fn, "__module__", "").startswith("autopar."):
        return Captured((single_call(fn, args, kwargs),))
    leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
    model = _Function(fn, leaves, spec)
    inputs = tuple(x for x in leaves if _is_plain(x))
    exported = export(model, inputs)
    undetermined = any(is_random(n) or "empty" in str(n.target) for n in exported.graph.nodes)
    program = normalize(from_exported(exported, model), {})
    env = _evaluate(program, model, inputs)
    calls, refused = [], []
    for node in program.graph.nodes:
        if node.op == "call_function" and "getitem" not in str(node.target):
            given = fx.node.map_arg((node.args, node.kwargs), lambda n: env[n] if is_tensor(n) else n)
            try:
                calls.append(single_call(node.target, *given))
            except RuleError as error:
                refused.append(str(error).splitlines()[0])
    return Captured(tuple(calls), tuple(refused), "" if undetermined else _difference(program, model, inputs, env))


class _Function(nn.Module):
    """A function whose floating arguments are weights, so that gradients flow into them."""

    def __init__(self, fn: Callable[..., Any], leaves: Sequence[Any], spec: Any) -> None:
        super().__init__()
        self.fn, self.leaves, self.spec = fn, [None if isinstance(x, Tensor) else x for x in leaves], spec
        self.places = [i for i, x in enumerate(leaves) if isinstance(x, Tensor) and not _is_plain(x)]
        self.others = [i for i, x in enumerate(leaves) if _is_plain(x)]
        self.weights = nn.ParameterList(nn.Parameter(leaves[i].detach().clone()) for i in self.places)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        leaves = list(self.leaves)
        for i, x in itertools.chain(zip(self.places, self.weights, strict=True), zip(self.others, inputs, strict=True)):
            leaves[i] = x
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return tuple(x for x in pytree.tree_leaves(self.fn(*args, **kwargs)) if isinstance(x, Tensor))


def _is_plain(x: Any) -> bool:
    """Whether no gradient flows into ``x``: whole numbers, and what is wrapped as nn.Buffer."""
    return isinstance(x, Tensor) and (_is_exact(x) or getattr(x, "_is_buffer", False))


def _is_exact(x: Tensor) -> bool:
    return not (x.is_floating_point() or x.is_complex())


def _evaluate(program: Program, model: _Function, inputs: tuple[Tensor, ...]) -> dict[fx.Node, Any]:
    """Every value of the normalised graph."""
    constants = run_prelude(program, {})
    env: dict[fx.Node, Any] = {}
    for node in program.graph.nodes:
        if node.op == "placeholder":
            if node.name in program.parameters:
                env[node] = model.get_parameter(program.parameters[node.name].name)
            elif node.name in program.inputs:
                env[node] = inputs[program.inputs[node.name]]
            else:
                env[node] = KEY if node.name == RNG else constants[node.name]
        else:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: env[n])
            env[node] = node.target(*args, **kwargs)
    return env


def _difference(program: Program, model: _Function, inputs: tuple[Tensor, ...], env: dict[fx.Node, Any]) -> str:
    """Where outputs or gradients of the normalised graph are not those of the function itself."""
    named = {n.name: v for n, v in env.items()}
    ours = [named[o] for o in program.outputs if isinstance(o, str)]
    theirs = list(model(*inputs))
    weights = list(model.weights)
    try:
        for k, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            assert_same(a, b, f"output {k} of the normalised graph", _rtol([*weights, a]))
        for a, b, i in zip(*(_gradients(y, weights, _cotangents(y)) for y in (ours, theirs)), itertools.count()):
            a, b = (torch.zeros_like(weights[i]) if g is None else g for g in (a, b))
            assert_same(a, b, f"gradient {i} of the normalised graph", _rtol([*weights, *ours]))
    except AssertionError as error:
        return str(error)
    return ""


def single_call(target: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
    """``target(*args, **kwargs)`` as a program of one op.  Raises RuleError where it has no rule."""
    graph, values = fx.Graph(), list[Tensor]()
    rng = graph.placeholder(RNG)
    rng.meta["val"] = KEY

    def walk(arg: Any) -> Any:
        if isinstance(arg, (list, tuple)) and not hasattr(arg, "_fields"):
            return type(arg)(map(walk, arg))
        if isinstance(arg, fx.Node):  # the key of random numbers
            return rng
        if not isinstance(arg, Tensor):
            return arg
        node = graph.placeholder(f"x{len(values)}")
        values.append(arg.detach().clone().requires_grad_(not _is_plain(arg)))
        node.meta["val"] = values[-1]
        return node

    node = graph.call_function(target, walk(tuple(args)), {k: walk(v) for k, v in kwargs.items()})
    leaves = [values[int(n.name[1:])] for n in tensor_inputs(node)]
    with torch.no_grad():
        outputs = _run(node, values)
    node.meta["val"] = outputs if len(outputs) > 1 or _is_many(target) else outputs[0]
    if not isinstance(node.meta["val"], Tensor):
        for k, value in enumerate(outputs):
            graph.call_function(operator.getitem, (node, k)).meta["val"] = value
    parameters = {
        f"x{i}": Parameter((f"x{i}",), _shape(v), v.dtype, True) for i, v in enumerate(values) if v.requires_grad
    }
    inputs = {f"x{i}": i for i, v in enumerate(values) if not v.requires_grad}
    program = Program(graph, parameters, {}, inputs, None, {}, [], None, loss="some")  # so there are gradients
    bound = bind_program(program)
    try:
        outputs = _run(node, values)
        cotangents = _cotangents(outputs)
        gradients = _gradients(outputs, leaves, cotangents)
    except RuntimeError as error:  # torch itself cannot differentiate it
        if "derivative" not in str(error) or not parameters:
            raise
        plain = pytree.tree_map_only(Tensor, nn.Buffer, (tuple(args), dict(kwargs)))
        return single_call(target, *plain)
    return Call(bound, _detached(leaves), _detached(outputs), cotangents, tuple(gradients))


def _run(node: fx.Node, values: Sequence[Tensor]) -> tuple[Tensor, ...]:
    args, kwargs = fx.node.map_arg(
        (node.args, node.kwargs), lambda n: KEY if n.name == RNG else values[int(n.name[1:])]
    )
    made = node.target(*args, **kwargs)  # type: ignore[operator]
    return (made,) if isinstance(made, Tensor) else tuple(made)


def _is_many(target: Any) -> bool:
    """Whether an op returns a list, of one tensor perhaps."""
    return isinstance(target, torch._ops.OpOverload) and str(target._schema.returns[0].type) != "Tensor"


def _shape(x: Tensor) -> tuple[int, ...]:
    return tuple(x.shape)


def _detached(values: Iterable[Tensor]) -> tuple[Tensor, ...]:
    return tuple(x.detach() for x in values)


def _cotangents(outputs: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    generator = torch.Generator().manual_seed(7)
    return tuple(torch.randn(y.shape, generator=generator, dtype=y.dtype) if y.requires_grad else None for y in outputs)


def _gradients(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], cotangents: Sequence[Tensor | None]
) -> list[Tensor | None]:
    flowing = [(y, c) for y, c in zip(outputs, cotangents, strict=True) if c is not None]
    wanted = [x for x in inputs if x.requires_grad]
    if not flowing or not wanted:
        return [None] * len(inputs)
    ys, cs = zip(*flowing, strict=True)
    found = iter(torch.autograd.grad(ys, wanted, cs, allow_unused=True))
    return [next(found) if x.requires_grad else None for x in inputs]


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
    view = View(op.outputs[0], op.inputs[0], op.node, op.rule)
    relabelled = replace(plain, operations=(), views={view.name: view}) if op.rule.view else None
    for strategy in strategies_of(op, sizes):
        yield Case(strategy, mesh, tuple(_emitted(plain, op, strategy, mesh, at) for at in mesh.all_coordinates()))
        if relabelled is not None and relabelled.to_root(view.name, strategy.outs[0]) == strategy.ins[0]:
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
    return tuple(y.detach() for y in made), _gradients(made, inputs, cotangents)


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
    rtol = _rtol([*call.inputs, *call.outputs])
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


def _rtol(tensors: Iterable[Tensor]) -> float:
    return max((_RTOL.get(x.dtype, 1e-9) for x in tensors), default=1e-9)


def assert_same(actual: Tensor, expected: Tensor, what: str, rtol: float) -> None:
    """Equal where the true value is finite; what is infinite may come out of terms of both signs as nan."""
    if expected.dtype is torch.bool:
        actual, expected = actual.to(torch.int64), expected.to(torch.int64)
    assert actual.shape == expected.shape, f"{what} has shape {list(actual.shape)}, not {list(expected.shape)}"
    actual, expected = actual.detach(), expected.detach()
    finite = torch.isfinite(expected)
    assert not bool(torch.isfinite(actual[~finite]).any()), f"{what} is finite where it should not be"
    a, b = actual[finite], expected[finite]
    if not a.numel():
        return
    largest = max(1.0, float(b.abs().max()))
    gap = (a - b).abs()
    worst = float(gap.max())
    assert math.isfinite(worst) and bool((gap <= rtol * b.abs() + rtol * 1e-1 * largest).all()), (
        f"{what} differs by {worst:.2e} (values up to {largest:.2g})"
    )


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
