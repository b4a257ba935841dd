"""Calls of ops, whole: what capture makes of a function, op by op, with values, gradients and rules."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from autopar.capture import export, from_exported
from autopar.errors import RuleError
from autopar.passes.constants import run_prelude
from autopar.passes.emit import RNG
from autopar.passes.normalize import normalize
from autopar.program import Parameter, Program, is_random, is_tensor, target_name, tensor_inputs
from autopar.rules.analysis import Bound, Operation, bind_program
from autopar.runtime.kernels.dropout import step_key

KEY = step_key(1, 2)

# relative error allowed, by the narrowest type in a call
_RTOL = {torch.float16: 2e-2, torch.bfloat16: 5e-2, torch.float32: 2e-4, torch.complex64: 2e-4, torch.complex32: 5e-2}


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
            assert_same(a, b, f"output {k} of the normalised graph", tolerance([*weights, a]))
        for a, b, i in zip(*(gradients_of(y, weights, cotangents_of(y)) for y in (ours, theirs)), itertools.count()):
            a, b = (torch.zeros_like(weights[i]) if g is None else g for g in (a, b))
            assert_same(a, b, f"gradient {i} of the normalised graph", tolerance([*weights, *ours]))
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
        cotangents = cotangents_of(outputs)
        gradients = gradients_of(outputs, leaves, cotangents)
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


def cotangents_of(outputs: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    generator = torch.Generator().manual_seed(7)
    return tuple(torch.randn(y.shape, generator=generator, dtype=y.dtype) if y.requires_grad else None for y in outputs)


def gradients_of(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], cotangents: Sequence[Tensor | None]
) -> list[Tensor | None]:
    flowing = [(y, c) for y, c in zip(outputs, cotangents, strict=True) if c is not None]
    wanted = [x for x in inputs if x.requires_grad]
    if not flowing or not wanted:
        return [None] * len(inputs)
    ys, cs = zip(*flowing, strict=True)
    found = iter(torch.autograd.grad(ys, wanted, cs, allow_unused=True))
    return [next(found) if x.requires_grad else None for x in inputs]


# ------------------------------------------------------------------------------------------------ the same


def tolerance(tensors: Iterable[Tensor]) -> float:
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
