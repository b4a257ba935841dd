"""Norms as functions whose rules say what may be split; running statistics as values that the program returns."""

from __future__ import annotations

import operator

import torch
from torch import fx

from autopar.errors import CaptureError
from autopar.passes.rewrite import argument, calls, new_node, renamed
from autopar.program import Program, args_of, place, shape_of
from autopar.runtime.kernels.norm import batch_norm, batch_norm_fixed, batch_norm_stateless, group_norm

aten = torch.ops.aten


def norms(program: Program) -> None:
    """Every norm over the batch, over groups and over positions in its one form."""
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

    Running statistics are refused in training: torch's op changes them where no graph shows it.
    """
    graph = program.graph
    for node in calls(graph, aten.instance_norm.default):
        names = ("input", "weight", "bias", "running_mean", "running_var", "use_input_stats", "eps")
        x, weight, bias, mean, var, own, eps = (argument(node, n) for n in names)
        with graph.inserting_before(node):
            if not own:
                new = new_node(graph, batch_norm_fixed, (x, weight, bias, mean, var, eps), like=node)
            elif mean is not None:
                raise CaptureError(
                    "instance norm that keeps running statistics has no rule in training",
                    where=place(node),
                    expected="track_running_stats=False, or statistics that are fixed (eval mode)",
                    got="track_running_stats=True",
                    hint="training does not use them: set track_running_stats=False",
                )
            else:
                new = new_node(graph, group_norm, (x, shape_of(x)[1], weight, bias, eps), like=node)
        renamed(program, node, new)
