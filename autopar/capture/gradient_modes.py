"""Gradients in a captured graph: regions without them, values that stop them, writes that autograd does not see."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from autopar.capture.hidden import NO_WRITE
from autopar.errors import CaptureError
from autopar.program import is_continuous, place

aten = torch.ops.aten


def inline_regions(exported: torch.export.ExportedProgram) -> None:
    """``with torch.no_grad(): y = f(x)`` --> ``y = f(x.detach()).detach()``, in place.

    torch.export keeps such a region as a graph of its own, and making in-place ops functional forgets its mode.
    """
    graph, owner = exported.graph, exported.graph_module
    buffers = set(exported.graph_signature.inputs_to_buffers)
    for call in [n for n in graph.nodes if n.target is torch.ops.higher_order.wrap_with_set_grad_enabled]:
        enabled, body, *args = call.args

        def stopped(value: Any, enabled: Any = enabled) -> Any:
            tensor = value.meta.get("val") if isinstance(value, torch.fx.Node) else None
            if enabled or not isinstance(tensor, torch.Tensor) or not is_continuous(tensor.dtype):
                return value
            node = graph.call_function(torch.ops.aten.detach.default, (value,))
            node.meta = {k: v for k, v in value.meta.items() if k in ("val", "nn_module_stack", "stack_trace")}
            return node

        inner = getattr(owner, str(body.target)).graph
        with graph.inserting_before(call):
            known = {
                given: arg if getattr(arg, "name", "") in buffers else stopped(arg)
                for given, arg in zip(inner.find_nodes(op="placeholder"), args, strict=True)
            }
            results = graph.graph_copy(inner, known)
            for item in list(call.users):
                made: Any = results[item.args[1]]
                item.replace_all_uses_with(stopped(made))
                graph.erase_node(item)
        graph.erase_node(call)
        if not body.users:
            graph.erase_node(body)


def stop_in_place(graph: fx.Graph) -> None:
    """``x.detach_()`` --> ``x.detach()`` for all that use ``x`` from there on; functional graphs would forget it."""
    for node in graph.find_nodes(op="call_function", target=aten.detach_.default):
        source: Any = node.args[0]
        with graph.inserting_before(node):
            stopped = graph.call_function(aten.detach.default, (source,))
        stopped.meta = dict(node.meta)
        later = [n for n in source.users if n > node]
        node.replace_all_uses_with(stopped)
        for user in later:
            user.replace_input_with(source, stopped)
        graph.erase_node(node)


def refuse_unseen_writes(owner: fx.GraphModule, trained: set[str]) -> None:
    """Raise CaptureError on writes that autograd does not see into values that have a gradient.

    ``with torch.no_grad(): h.mul_(2)`` and ``h.detach().mul_(2)`` change ``h`` and leave its gradient as it was; the
    same ops made functional would scale or lose it.  trained: names of the placeholders of trained weights.
    """
    aliases: dict[fx.Node, tuple[fx.Node, bool]] = {}  # what it shares memory with, and whether autograd loses sight
    carrying = {n for n in owner.graph.find_nodes(op="placeholder") if n.name in trained}

    def flows(node: fx.Node) -> bool:
        base, unseen = aliases[node]
        return base in carrying and not unseen

    def walk(owner: fx.GraphModule, enabled: bool) -> None:
        for node in owner.graph.nodes:
            if node.op != "call_function":
                aliases.setdefault(node, (node, False))
                continue
            if node.target is torch.ops.higher_order.wrap_with_set_grad_enabled:
                inside, body, *args = node.args
                inner: Any = getattr(owner, str(body.target))
                for given, arg in zip(inner.graph.find_nodes(op="placeholder"), args, strict=True):
                    aliases[given] = aliases.get(arg, (given, False))
                walk(inner, bool(inside))
                for item in node.users:
                    base, unseen = aliases[inner.graph.output_node().args[0][item.args[1]]]
                    aliases[item] = (base, unseen or not inside)
                continue
            if node in aliases:  # a result of a region
                continue
            inputs = node.all_input_nodes
            has_gradient = enabled and _is_continuous(node) and any(map(flows, inputs))
            if inputs and _is_alias(node):
                base, unseen = aliases[inputs[0]]
                unseen |= node.target is aten.detach.default or not enabled
                if _writes(node):
                    if unseen and (base in carrying or has_gradient):
                        raise CaptureError(
                            "a write that autograd does not see, into a value that has a gradient",
                            where=place(node),
                            got=str(node.target),
                            hint=NO_WRITE,
                        )
                    if has_gradient:
                        carrying.add(base)
                aliases[node] = (base, unseen)
            else:
                aliases[node] = (node, False)
                if has_gradient:
                    carrying.add(node)

    walk(owner, True)


def _is_alias(node: fx.Node) -> bool:
    """Whether the result shares memory with the first tensor that ``node`` takes, or may share it."""
    if node.target is operator.getitem:
        return True
    if not isinstance(node.target, torch._ops.OpOverload) or not any(r.alias_info for r in node.target._schema.returns):
        return False
    value, source = node.meta.get("val"), node.all_input_nodes[0].meta.get("val")
    same = isinstance(value, torch.Tensor) and isinstance(source, torch.Tensor) and value.dtype == source.dtype
    return same or not isinstance(value, torch.Tensor)


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _is_continuous(node: fx.Node) -> bool:
    value = node.meta.get("val")
    values = value if isinstance(value, (list, tuple)) else [value]
    return any(isinstance(v, torch.Tensor) and is_continuous(v.dtype) for v in values)
