"""What every rewrite needs: a new node with its value's shape, and the place it came from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.node import map_arg

from autopar.program import OutputName, Program, args_of, dtype_of, is_tensor


def fake_mode_of(graph: fx.Graph) -> FakeTensorMode:
    """The mode that the graph's values were traced in."""
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, FakeTensor):
            return value.fake_mode
    return FakeTensorMode()


def new_node(
    graph: fx.Graph,
    target: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    like: fx.Node,
) -> fx.Node:
    """A call at the insertion point of ``graph``, its value traced on fake tensors, its place that of ``like``."""
    node = graph.call_function(target, args, kwargs or {})
    for key in ("nn_module_stack", "stack_trace"):
        if key in like.meta:
            node.meta[key] = like.meta[key]
    mode = fake_mode_of(graph)
    with mode:
        values = map_arg((args, kwargs or {}), lambda n: n.meta["val"])
        node.meta["val"] = target(*values[0], **values[1])
    return node


def replace(node: fx.Node, new: fx.Node) -> None:
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)


def renamed(program: Program, old: fx.Node, new: fx.Node) -> None:
    """Replace ``old`` by ``new``, in the program's lists of names too."""
    if old is new:
        return
    if program.loss == old.name:
        program.loss = new.name
    program.outputs = [
        OutputName(new.name) if isinstance(o, OutputName) and o == old.name else o for o in program.outputs
    ]
    for buffer, name in program.mutations.items():
        if name == old.name:
            program.mutations[buffer] = new.name
    replace(old, new)


def tensors_of(node: fx.Node) -> list[fx.Node]:
    """The tensors that a call takes, each once."""
    return list(dict.fromkeys(n for n in node.all_input_nodes if is_tensor(n)))


def splice(program: Program, node: fx.Node, body: fx.Graph, **notes: Any) -> None:
    """Replace the call ``node`` by the calls of ``body``, whose placeholders are `tensors_of` it.

    notes: what is noted of the new nodes, beside their values and the place that they come from.
    """
    graph = node.graph
    known: dict[fx.Node, fx.Node] = dict(zip(body.find_nodes(op="placeholder"), tensors_of(node), strict=True))
    kept: dict[str, Any] = {k: node.meta[k] for k in ("nn_module_stack", "stack_trace") if k in node.meta}
    new = []
    with graph.inserting_before(node):
        for inner in body.nodes:
            if inner.op == "call_function":
                made = known[inner] = graph.node_copy(inner, lambda n: known[n])
                made.meta = {"val": inner.meta["val"], **kept, **notes}
                new.append(made)
    results: Any = map_arg(body.output_node().args[0], lambda n: known[n])
    if isinstance(node.meta["val"], torch.Tensor):
        renamed(program, node, results)
    else:
        for item in list(node.users):
            renamed(program, item, results[args_of(item)[1]])
        graph.erase_node(node)
    roots = program.roots()
    for made in reversed(new):
        if not made.users and made.name not in roots:
            graph.erase_node(made)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type in which sums of ``dtype`` are kept: 16-bit sums overflow or round where a mean does not."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def sum_over(x: fx.Node, dims: list[int], keep: bool = False) -> fx.Node:
    """``sum(x, dims)`` at the insertion point."""
    dtype = dtype_of(x)
    options = {} if wide(dtype) == dtype else {"dtype": wide(dtype)}
    return new_node(x.graph, torch.ops.aten.sum.dim_IntList, (x, dims, keep), options, like=x)


def cast_like(x: fx.Node, node: fx.Node) -> fx.Node:
    """``x`` in the type of ``node``."""
    dtype = dtype_of(node)
    return x if dtype_of(x) == dtype else new_node(x.graph, torch.ops.aten.to.dtype, (x, dtype), like=node)


def calls(graph: fx.Graph, *targets: Any) -> list[fx.Node]:
    """Nodes that call one of ``targets``, in order."""
    return [n for n in graph.nodes if n.op == "call_function" and n.target in targets]


def argument(node: fx.Node, name: str, default: Any = None) -> Any:
    """The argument ``name`` of an ATen op, wherever it was passed; its schema's default when it was not."""
    if name in node.kwargs:
        return node.kwargs[name]
    assert isinstance(node.target, torch._ops.OpOverload)
    for i, arg in enumerate(node.target._schema.arguments):
        if arg.name == name:
            if i < len(node.args):
                return node.args[i]
            return arg.default_value if arg.has_default_value() else default
    return default


def placeholder(graph: fx.Graph, name: str, value: Any) -> fx.Node:
    """A new input, after the ones that are there."""
    last = None
    for node in graph.nodes:
        if node.op == "placeholder":
            last = node
    with graph.inserting_after(last) if last is not None else graph.inserting_before(next(iter(graph.nodes))):
        node = graph.placeholder(name)
    node.meta["val"] = value
    return node
