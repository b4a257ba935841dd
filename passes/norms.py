"""Norms as functions whose rules say what may be split; running statistics as values that the program returns."""

from __future__ import annotations

import operator

import torch
from torch import fx

from autopar.errors import CaptureError
from autopar.passes.rewrite import argument, calls, new_node, renamed
from autopar.program import Program, args_of, place, shape_of
from autopar.runtime.kernels.norm import batch_norm, batch_norm_fixed, batch_norm_stateless, group_norm, instance_norm

aten = torch.ops.aten


def norms(program: Program) -> None:
    """Every norm in its one form."""
    batch_norms(program)
    group_norms(program)
    instance_norms(program)


def batch_norms(program: Program) -> None:
    """``_native_batch_norm_legit_functional(x, w, b, mean, var, True)`` --> ``batch_norm(x, w, b, mean, var, rng)``.

    By fixed statistics --> ``batch_norm_fixed(x, w, b, mean, var)``; without any --> ``batch_norm_stateless(x, w, b)``.
    """
    graph = program.graph
    rng = program.nodes["rng"]
    for node in calls(graph, aten._native_batch_norm_legit_functional.default):
        x, weight, bias, mean, var, training, momentum, eps = args_of(node)
        with graph.inserting_before(node):
            if training:
                args = (x, weight, bias, mean, var, momentum, eps, rng)
                _items(program, node, new_node(graph, batch_norm, args, like=node), {0: 0, 3: 1, 4: 2})
            else:
                fixed = new_node(graph, batch_norm_fixed, (x, weight, bias, mean, var, eps), like=node)
                _items(program, node, None, {0: fixed, 3: mean, 4: var})
    for node in calls(graph, aten._native_batch_norm_legit_no_training.default):
        x, weight, bias, mean, var, _, eps = args_of(node)
        with graph.inserting_before(node):
            fixed = new_node(graph, batch_norm_fixed, (x, weight, bias, mean, var, eps), like=node)
        _items(program, node, None, {0: fixed})
    for node in calls(graph, aten._native_batch_norm_legit.no_stats):
        x, weight, bias, _, _, eps = args_of(node)
        with graph.inserting_before(node):
            new = new_node(graph, batch_norm_stateless, (x, weight, bias, eps), like=node)
        _items(program, node, None, {0: new})


def _items(program: Program, node: fx.Node, new: fx.Node | None, place_of: dict[int, int | fx.Node]) -> None:
    """Replace the outputs of ``node``, by index: by an output of ``new``, or by a node."""
    graph = program.graph
    for item in list(node.users):
        which = args_of(item)[1] if item.target is operator.getitem else None
        if which not in place_of:
            raise CaptureError("the saved statistics of batch norm are used outside it", where=place(item))
        found = place_of[which]
        if isinstance(found, int):
            with graph.inserting_before(item):
                found = new_node(graph, operator.getitem, (new, found), like=item)
        renamed(program, item, found)
    graph.erase_node(node)


def group_norms(program: Program) -> None:
    """``group_norm(x, groups, w, b, eps)`` --> our own, which takes ranks without channels."""
    for node in calls(program.graph, aten.group_norm.default):
        args = tuple(argument(node, n) for n in ("input", "num_groups", "weight", "bias", "eps"))
        with program.graph.inserting_before(node):
            renamed(program, node, new_node(program.graph, group_norm, args, like=node))


def instance_norms(program: Program) -> None:
    """``instance_norm(x, w, b)`` --> ``group_norm(x, channels, w, b)``; by fixed statistics --> ``batch_norm_fixed``.

    With running statistics, which torch's op changes where no graph shows it --> ``instance_norm(..., rng)[0]``, whose
    other outputs are the buffers' new values.
    """
    graph = program.graph
    rng = program.nodes["rng"]
    for node in calls(graph, aten.instance_norm.default):
        names = ("input", "weight", "bias", "running_mean", "running_var", "use_input_stats", "momentum", "eps")
        x, weight, bias, mean, var, own, momentum, eps = (argument(node, n) for n in names)
        with graph.inserting_before(node):
            if not own:
                new = new_node(graph, batch_norm_fixed, (x, weight, bias, mean, var, eps), like=node)
            elif mean is None:
                new = new_node(graph, group_norm, (x, shape_of(x)[1], weight, bias, eps), like=node)
            else:
                buffers = [program.buffers[v.name] for v in (mean, var)]
                # of a layer that runs twice the second call begins with what the first one left
                mean, var = (
                    program.node(program.mutations[n]) if n in program.mutations else v
                    for n, v in zip(buffers, (mean, var), strict=True)
                )
                every = new_node(graph, instance_norm, (x, weight, bias, mean, var, momentum, eps, rng), like=node)
                new, *kept = (new_node(graph, operator.getitem, (every, k), like=node) for k in range(3))
                program.mutations.update(zip(buffers, (k.name for k in kept), strict=True))
        renamed(program, node, new)
