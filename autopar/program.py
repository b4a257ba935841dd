"""A captured model: one torch.fx graph of ATen ops, and what its inputs and outputs are to the user."""

from __future__ import annotations

import hashlib
import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx


@dataclass(frozen=True, slots=True)
class Parameter:
    """A weight of the user's model.  Tied weights are one, under every name they have; the first is the main one."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @property
    def name(self) -> str:
        return self.names[0]


@dataclass(slots=True)
class Program:
    """What capture yields and normalisation refines.

    graph: placeholders are parameters, buffers, constants and inputs (by node name in the dicts below); there is no
        output node.  Every other node has ``meta["val"]`` (fake) and the place it came from.
    parameters, buffers: by node name; a buffer by its original name.
    inputs: node name -> position among the leaves of the flattened (args, kwargs).
    lifted: tensors that the model's code makes of literals, by node name.
    constants: node names of values that depend on no input; ``prelude`` computes them from buffers and lifted tensors,
        once.
    saved_buffers: original names of the buffers in the state dict, whose values a checkpoint may change.
    mutations: original buffer name -> node whose value it takes after a step.
    loss: the node of the scalar loss, or None for inference.
    outputs: leaves of the model's own output: node names, or literal values.
    """

    graph: fx.Graph
    parameters: dict[str, Parameter]
    buffers: dict[str, str]
    inputs: dict[str, int]
    in_spec: Any
    input_literals: dict[int, Any]
    outputs: list[Any]
    out_spec: Any
    loss: str | None
    mutations: dict[str, str] = field(default_factory=dict)
    constants: dict[str, None] = field(default_factory=dict)
    prelude: fx.Graph | None = None
    training: bool = True
    saved_buffers: frozenset[str] = frozenset()
    lifted: dict[str, torch.Tensor] = field(default_factory=dict)

    def node(self, name: str) -> fx.Node:
        for n in self.graph.nodes:
            if n.name == name:
                return n
        raise KeyError(name)

    @property
    def nodes(self) -> dict[str, fx.Node]:
        return {n.name: n for n in self.graph.nodes}

    def roots(self) -> list[str]:
        """Nodes that must be computed: loss, outputs, new values of buffers."""
        names = [] if self.loss is None else [self.loss]
        names += [o for o in self.outputs if isinstance(o, OutputName)]
        return list(dict.fromkeys([*names, *self.mutations.values()]))


class OutputName(str):
    """Name of a node among outputs, to tell it from a literal string."""

    __slots__ = ()


def split_batch(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A batch as (args, kwargs): a mapping is keyword arguments, a tuple or list positional ones."""
    if isinstance(example, Mapping):
        return (), dict(example)
    if isinstance(example, (tuple, list)):
        return tuple(example), {}
    return (example,), {}


def is_tensor(node: Any) -> bool:
    """Whether ``node`` is a graph node with one tensor as its value."""
    return isinstance(node, fx.Node) and isinstance(node.meta.get("val"), torch.Tensor)


def gives_tensors(node: fx.Node) -> bool:
    """Whether a call's value is one tensor or several, and no number that depends on the values of tensors."""
    value = node.meta.get("val")
    return all(isinstance(v, torch.Tensor) for v in (value if isinstance(value, (list, tuple)) else [value]))


def is_random(node: fx.Node) -> bool:
    """Whether a call draws random numbers."""
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in target.tags


def shape_of(node: fx.Node) -> tuple[int, ...]:
    return tuple(int(n) for n in node.meta["val"].shape)


def dtype_of(node: fx.Node) -> torch.dtype:
    dtype: torch.dtype = node.meta["val"].dtype
    return dtype


def is_continuous(dtype: torch.dtype) -> bool:
    """Whether values of this type may have a gradient, and be sums of parts of any size."""
    return dtype.is_floating_point or dtype.is_complex


def args_of(node: fx.Node) -> tuple[Any, ...]:
    """The positional arguments, untyped: torch.fx types them as all that may stand in a graph, which nobody can use."""
    return node.args


def target_name(node: fx.Node) -> str:
    """``aten.linear.default``, or ``autopar.dropout`` for a function of our own."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    if callable(target):
        module = (getattr(target, "__module__", "") or "").partition(".")[0].lstrip("_")
        return f"{module}.{getattr(target, '__name__', target)}"
    return str(target)


def module_path(node: fx.Node) -> str:
    """Dotted path of the module whose forward made this node; empty for the top."""
    stack = node.meta.get("nn_module_stack") or {}
    path = ""
    for entry in stack.values():
        path = entry[0] if isinstance(entry, tuple) else str(entry)
    return strip_wrapper(path)


def strip_wrapper(name: str) -> str:
    """Names as the user knows them: capture wraps the model in a module that calls it ``model``."""
    name = name.removeprefix("L['self'].").removeprefix("L__self__.")
    return "" if name == "model" else name.removeprefix("model.") if name.startswith("model.") else name


_FRAME = re.compile(r'File "([^"]+)", line (\d+), in')
_WRAPPER = "autopar/capture/__init__.py"  # whose forward calls the model's and loss_fn


def _frames(node: fx.Node) -> list[tuple[str, str]]:
    """(file, line) of the forward functions on the stack, outermost first; torch records no others."""
    return _FRAME.findall(node.meta.get("stack_trace") or "")


def source_line(node: fx.Node) -> str:
    """``file:line`` of the innermost frame outside torch, or an empty string."""
    frames = [f for f in _frames(node) if not f[0].endswith(_WRAPPER)]
    own = [f for f in frames if "/torch/" not in f[0]] or frames
    return f"{own[-1][0]}:{own[-1][1]}" if own else ""


def place(node: fx.Node) -> str:
    """Where a node comes from, for an error message."""
    frames = _frames(node)
    top = "loss_fn" if frames and frames[-1][0].endswith(_WRAPPER) else "the model's forward"
    return ", ".join(p for p in (module_path(node) or top, source_line(node)) if p)


def call_arguments(node: fx.Node) -> dict[str, Any]:
    """What the call passes, by parameter name, in the order of the op's schema or the function's signature."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        names = [a.name for a in target._schema.arguments]
    else:
        assert callable(target)  # only placeholders and outputs have a name for a target
        names = list(inspect.signature(target).parameters)
    given = dict(zip(names, node.args, strict=False))
    given.update(node.kwargs)
    return {n: given[n] for n in names if n in given}


def tensor_inputs(node: fx.Node) -> list[fx.Node]:
    """Tensor arguments in the order of the schema, lists flattened; one that is passed twice appears twice."""
    out: list[fx.Node] = []

    def walk(arg: Any) -> None:
        if isinstance(arg, (list, tuple)):
            for a in arg:
                walk(a)
        elif is_tensor(arg):
            out.append(arg)

    for arg in call_arguments(node).values():
        walk(arg)
    return out


def output_values(node: fx.Node) -> list[fx.Node | None]:
    """The nodes that stand for a call's outputs: itself, or its getitems (None where one is not used)."""
    if isinstance(node.meta.get("val"), torch.Tensor):
        return [node]
    out: list[fx.Node | None] = [None] * len(node.meta["val"])
    for user in node.users:
        out[args_of(user)[1]] = user
    return out


def fingerprint(program: Program) -> str:
    """Twelve hex digits over ops, shapes, arguments and parameters' names: the same model gives the same digits."""
    digest = hashlib.sha256()
    for node in program.graph.nodes:
        value = node.meta.get("val")
        values = value if isinstance(value, (list, tuple)) else [value]
        shapes = [(tuple(v.shape), str(v.dtype)) for v in values if isinstance(v, torch.Tensor)]
        digest.update(repr((node.name, target_name(node), str(node.args), str(node.kwargs), shapes)).encode())
    digest.update(repr(sorted((k, p.names, p.requires_grad) for k, p in program.parameters.items())).encode())
    digest.update(repr((program.loss, [str(o) for o in program.outputs], sorted(program.mutations.items()))).encode())
    return digest.hexdigest()[:12]
