"""Constants: what depends on no input is computed once, from the buffers, by a graph of its own (the prelude).

Position tables, rotary tables and attention masks leave the program this way, with the dozen ops that only they use.
A constant that does not vary along a dimension (a mask expanded over the batch) is kept without it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopar.program import Program, args_of, is_random, is_tensor, shape_of

aten = torch.ops.aten

_EXPANDED_BYTES = 1 << 28  # larger constants are not evaluated to look for dimensions along which they do not vary


def fold_constants(program: Program) -> None:
    """Move every node that depends on no input and no trained weight into ``program.prelude``.

    ``cos(mul(arange(8), inv_freq))`` used by the model --> a placeholder; the prelude computes it from ``inv_freq``.
    """
    graph = program.graph
    given = {*program.lifted, *(n for n, name in program.buffers.items() if name not in program.mutations)}
    fixed: dict[fx.Node, None] = {}
    for node in graph.nodes:
        if node.op == "call_function":
            is_fixed = not is_random(node) and all(a in fixed for a in node.all_input_nodes)
        else:
            is_fixed = node.op == "placeholder" and node.name in given
        if is_fixed:
            fixed[node] = None
    roots = set(program.roots())
    prelude = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    known: dict[str, fx.Node] = {}  # equal expressions are one constant: every layer writes ``cos[None]`` anew
    results: dict[str, fx.Node] = {}
    for node in fixed:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: copied[n])
        key = repr((node.target, args, kwargs))
        if node.op == "call_function" and key in known:
            copied[node] = known[key]
        else:
            new = known[key] = prelude.node_copy(node, lambda n: copied[n])
            new.meta = dict(node.meta)
            copied[node] = new
        new = copied[node]
        leaves_prelude = any(u not in fixed for u in node.users) or node.name in roots
        if leaves_prelude and is_tensor(node):
            results[node.name] = new
    placeholders: dict[fx.Node, fx.Node] = {}
    for node in [n for n in fixed if n.op == "call_function" and n.name in results]:
        made = results.pop(node.name)
        constant = placeholders.get(made)
        if constant is None:
            with graph.inserting_before(node):
                constant = placeholders[made] = graph.placeholder("c_" + node.name)
            constant.meta = dict(node.meta)
            results[constant.name] = made
        for user in list(node.users):
            if user not in fixed:
                user.replace_input_with(node, constant)
        name = constant.name
        program.outputs = [type(o)(name) if isinstance(o, str) and o == node.name else o for o in program.outputs]
    for node in reversed(fixed):
        if node.op == "call_function" or (node.name in program.lifted and node.name not in results):
            graph.erase_node(node)
    # a buffer that the model uses as it is stays a buffer
    results = {k: v for k, v in results.items() if k not in program.buffers}
    program.constants = dict.fromkeys(results)
    prelude.output(dict(results))
    prelude.lint()
    program.prelude = prelude
    order = [n for n in graph.nodes if n.op == "placeholder"]
    first = next(iter(graph.nodes))
    for node in order:  # inputs first, as in every graph
        if node is not first:
            first.append(node)
            first = node


def run_prelude(program: Program, buffers: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Values of all constants, from the model's buffers by original name and the tensors of its code."""
    assert program.prelude is not None
    env: dict[fx.Node, Any] = {}
    for node in program.prelude.nodes:
        if node.op == "placeholder":
            buffer = program.buffers.get(node.name)
            env[node] = program.lifted[node.name] if buffer is None else buffers[buffer]
        elif node.op == "call_function":
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: env[n])
            env[node] = node.target(*args, **kwargs)
        else:
            return {k: env[v].contiguous() for k, v in node.args[0].items()}
    raise AssertionError("a graph ends in its output")


def evaluate_constants(program: Program, buffers: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Values of the constants that can be known now, with dimensions along which they do not vary dropped to size 1.

    Changes graph and prelude so that such a constant is kept small: ``c [4, 1, 8, 8]`` --> ``expand(c [1, 1, 8, 8])``.
    Of those that depend on a meta buffer, or on one that a checkpoint may change, only expanded dimensions are known.
    """
    assert program.prelude is not None
    env: dict[fx.Node, Any] = {}
    values: dict[str, torch.Tensor] = {}
    prelude = program.prelude
    output = prelude.output_node()
    for node in prelude.nodes:
        if node.op == "placeholder":
            buffer = program.buffers.get(node.name, "")
            value = buffers.get(buffer, program.lifted.get(node.name))
            unknown = value is None or value.is_meta or buffer in program.saved_buffers
            env[node] = None if unknown else value
        elif node.op == "call_function":
            inputs = node.all_input_nodes
            result = node.meta.get("val")
            large = isinstance(result, torch.Tensor) and result.numel() * result.element_size() > _EXPANDED_BYTES
            if any(env[n] is None for n in inputs) or large:
                env[node] = None
            else:
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: env[n])
                if str(kwargs.get("device")) == "meta":  # of a model made on meta: masks and positions can be known
                    kwargs = {**kwargs, "device": torch.device("cpu")}
                value = node.target(*args, **kwargs)
                env[node] = None if isinstance(value, torch.Tensor) and value.is_meta else value
    roots = set(program.roots())  # what leaves the program leaves it whole
    results: dict[str, fx.Node] = dict(args_of(output)[0])
    for name, made in list(results.items()):
        value = env[made]
        if value is None:
            same = _expanded(made)
        else:
            same = [d for d, n in enumerate(value.shape) if n > 1 and bool((value == value.narrow(d, 0, 1)).all())]
        if name in roots:
            same = []
        if same:
            results[name] = _shrink(program, name, made, same)
        if value is not None:
            for d in same:
                value = value.narrow(d, 0, 1)
            values[name] = value
    output.args = (results,)
    prelude.eliminate_dead_code()
    return values


def _expanded(made: fx.Node) -> list[int]:
    """Dimensions along which ``made`` does not vary whatever its values, for it is expanded along them."""
    if made.target is not aten.expand.default:
        return []
    source, out = shape_of(args_of(made)[0]), shape_of(made)
    added = len(out) - len(source)
    return [d for d, n in enumerate(out) if n > 1 and (d < added or source[d - added] == 1)]


def _shrink(program: Program, name: str, made: fx.Node, same: list[int]) -> fx.Node:
    """Keep the constant with size 1 along ``same``; the program expands it where an op cannot broadcast."""
    assert program.prelude is not None
    node = program.nodes[name]
    full = shape_of(node)
    with program.prelude.inserting_before(program.prelude.output_node()):
        for d in same:
            made = program.prelude.call_function(aten.slice.Tensor, (made, d, 0, 1))
    small = node.meta["val"]
    for d in same:
        small = small.narrow(d, 0, 1)
    users = list(node.users)
    node.meta = {**node.meta, "val": small}
    first_call = next(n for n in program.graph.nodes if n.op == "call_function")
    wide = None
    for user in users:
        if _broadcasts(user, node):
            continue
        if wide is None:
            with program.graph.inserting_before(first_call):
                wide = program.graph.call_function(aten.expand.default, (node, list(full)))
            wide.meta = {**node.meta, "val": small.expand(full)}
        user.replace_input_with(node, wide)
    return made


def _broadcasts(user: fx.Node, node: fx.Node) -> bool:
    """Whether ``user`` gives the same result with a smaller ``node`` that broadcasts."""
    target = user.target
    if target is aten.scaled_dot_product_attention.default:
        return (len(user.args) > 3 and user.args[3] is node) or user.kwargs.get("attn_mask") is node
    if isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags:
        others = [shape_of(n) for n in user.all_input_nodes if is_tensor(n)]
        return tuple(torch.broadcast_shapes(*others)) == shape_of(user)
    return False
