"""Normalise a captured program: fewer kinds of op, and forms in which the algebra sees what a person sees.

Each rewrite draws ``before --> after``.
"""

from __future__ import annotations

import math
import operator

import torch
from torch import fx

from autopar.errors import CaptureError
from autopar.passes.bags import embedding_bags
from autopar.passes.constants import evaluate_constants, fold_constants
from autopar.passes.decompose import decompose
from autopar.passes.expand import expand_ops
from autopar.passes.experts import fuse_experts
from autopar.passes.fills import fills
from autopar.passes.losses import losses_to_sums
from autopar.passes.norms import norms
from autopar.passes.randoms import name_random_ops
from autopar.passes.rewrite import argument, calls, cast_like, new_node, placeholder, renamed, replace, sum_over
from autopar.program import Program, args_of, dtype_of, is_tensor, place, shape_of

aten = torch.ops.aten

RNG = "rng"  # the step's key for random numbers; None in evaluation


def normalize(program: Program, buffers: dict[str, torch.Tensor]) -> Program:
    """Apply every rewrite in place.  ``buffers``: the model's, by original name; meta ones are left unevaluated."""
    graph = program.graph
    placeholder(graph, RNG, 0)
    drop_asserts(graph)
    native_dropouts(program)
    norms(program)
    expand_ops(program)
    broadcasts(program)
    embedding_bags(program)
    decompose(program)
    fills(program)
    drop_identities(program)
    splits_with_sizes(program)
    slices_to_splits(program)
    drop_empty_parts(program)
    squeeze_what_was_unsqueezed(program)
    fold_constants(program)
    values = evaluate_constants(program, buffers)
    index_to_view(program, values)
    eliminate_dead_code(program)  # what nothing needs is no use from outside
    fuse_experts(program, values)
    refold_linears(program)
    losses_to_sums(program)
    mean_to_sum(program)
    causal_masks(program, values)
    name_random_ops(program)
    eliminate_dead_code(program)
    return program


def drop_asserts(graph: fx.Graph) -> None:
    """``_assert_tensor_metadata(x, ...)`` --> nothing: shapes and types are ours to keep."""
    for node in list(graph.nodes):
        if node.op == "call_function" and "assert" in str(node.target) and not node.users:
            graph.erase_node(node)


_IDENTITIES = {
    aten.alias.default,
    aten.contiguous.default,
    aten.clone.default,
    aten.lift_fresh_copy.default,
    aten.to.dtype,
    aten.to.dtype_layout,
    aten.to.device,
    aten.to.other,
    aten._to_copy.default,
    aten.type_as.default,
    aten.expand.default,
    aten.dropout.default,
    aten.slice.Tensor,
    aten.view.default,
    aten.reshape.default,
    aten.detach.default,
}


def native_dropouts(program: Program) -> None:
    """``native_dropout(x, p, True)[0]`` --> ``dropout(x, p, True)``: what functional graphs have in its place."""
    for node in calls(program.graph, aten.native_dropout.default):
        if any(args_of(item)[1] != 0 for item in node.users):
            raise CaptureError("the mask of a dropout is used outside it", where=place(node))
        x, p, train = args_of(node)
        for item in list(node.users):
            with program.graph.inserting_before(item):
                train = True if train is None else train
                renamed(program, item, new_node(program.graph, aten.dropout.default, (x, p, train), like=node))
        program.graph.erase_node(node)


def broadcasts(program: Program) -> None:
    """``broadcast_tensors([x, y])[1]`` --> ``expand(y, shape)``."""
    for node in calls(program.graph, aten.broadcast_tensors.default):
        for item in list(node.users):
            with program.graph.inserting_before(item):
                source = args_of(node)[0][args_of(item)[1]]
                wide = new_node(program.graph, aten.expand.default, (source, list(shape_of(item))), like=item)
            renamed(program, item, wide)
        program.graph.erase_node(node)


def splits_with_sizes(program: Program) -> None:
    """``split(x, 16, d)``, ``chunk(x, 3, d)`` --> ``split_with_sizes(x, [16, 16, 16], d)``.

    It is right for empty shards too.
    """
    for node in calls(program.graph, aten.split.Tensor, aten.chunk.default):
        x = args_of(node)[0]
        dim = argument(node, "dim") % len(shape_of(x))
        sizes = [v.shape[dim] for v in node.meta["val"]]
        with program.graph.inserting_before(node):
            new = new_node(program.graph, aten.split_with_sizes.default, (x, sizes, dim), like=node)
        replace(node, new)


def drop_empty_parts(program: Program) -> None:
    """``cat([x, x[:, 8:]], 1)`` of 8 columns --> ``x``: what is empty adds nothing."""
    for node in calls(program.graph, aten.cat.default):
        parts = [x for x in args_of(node)[0] if math.prod(shape_of(x))]
        if len(parts) == 1 and dtype_of(parts[0]) == dtype_of(node):
            renamed(program, node, parts[0])
        elif parts:
            node.args = (parts, *node.args[1:])


def squeeze_what_was_unsqueezed(program: Program) -> None:
    """``squeeze(unsqueeze(x, 1), 1)`` --> ``x``: what remains of a change in place of one row of a matrix."""
    for node in calls(program.graph, aten.squeeze.dim):
        wide = args_of(node)[0]
        if wide.target is aten.unsqueeze.default and shape_of(args_of(wide)[0]) == shape_of(node):
            dims = len(shape_of(wide))
            if argument(node, "dim") % dims == argument(wide, "dim") % dims:
                renamed(program, node, args_of(wide)[0])


def slices_to_splits(program: Program) -> None:
    """``x[:, :4], x[:, 4:6], x[:, 6:]`` --> ``split_with_sizes(x, [4, 2, 2], 1)``: pieces that are all of x.

    What is known of all pieces together, their common unit, is not known of one.
    """
    graph = program.graph
    families: dict[tuple[fx.Node, int], dict[tuple[int, int], list[fx.Node]]] = {}
    for node in calls(graph, aten.slice.Tensor):
        x = args_of(node)[0]
        dim = argument(node, "dim") % len(shape_of(x))
        start, stop, step = slice(*(argument(node, n) for n in ("start", "end", "step"))).indices(shape_of(x)[dim])
        if step == 1 and start < stop:
            families.setdefault((x, dim), {}).setdefault((start, stop), []).append(node)
    order = {n: k for k, n in enumerate(graph.nodes)}
    for (x, dim), family in families.items():
        pieces = sorted(family)
        ends = [0, *(stop for _, stop in pieces)]
        if len(pieces) < 2 or [start for start, _ in pieces] != ends[:-1] or ends[-1] != shape_of(x)[dim]:
            continue
        first = min((n for nodes in family.values() for n in nodes), key=order.__getitem__)
        with graph.inserting_before(first):
            widths = [stop - start for start, stop in pieces]
            whole = args_of(first)[0]  # x, or what x has become as a piece itself
            split = new_node(graph, aten.split_with_sizes.default, (whole, widths, dim), like=first)
            items = [new_node(graph, operator.getitem, (split, k), like=first) for k in range(len(pieces))]
        for piece, item in zip(pieces, items, strict=True):
            for node in family[piece]:
                renamed(program, node, item)


def drop_identities(program: Program) -> None:
    """``contiguous(x)``, ``to(x, its dtype)``, ``view(x, its shape)`` --> ``x``; a cast --> ``to(x, dtype)``.

    Layout in memory is the emitter's matter: it reshapes where the original viewed.
    """
    graph = program.graph
    for node in calls(graph, *_IDENTITIES):
        source = args_of(node)[0]
        if not is_tensor(source) or node.meta["val"].dtype != source.meta["val"].dtype:
            if is_tensor(source) and node.target is not aten.to.dtype:
                with graph.inserting_before(node):
                    cast = new_node(graph, aten.to.dtype, (source, node.meta["val"].dtype), like=node)
                renamed(program, node, cast)
            continue
        if shape_of(source) != shape_of(node):
            continue
        if node.target is aten.detach.default and (source.op != "placeholder" or source.name in program.parameters):
            continue  # it stops a gradient
        if node.target is aten.dropout.default and argument(node, "train") and argument(node, "p") > 0:
            continue
        renamed(program, node, source)


def index_to_view(program: Program, values: dict[str, torch.Tensor]) -> None:
    """``index(x, [arange(4)[:, None], arange(8)[None]])`` --> ``view(x, [4, 8])``: the identity, relabelled.

    Hugging Face's padding masks are built so; as a view they split by batch like everything else.
    """
    graph = program.graph
    for node in calls(graph, aten.index.Tensor):
        source, indices = args_of(node)
        if len(indices) != len(shape_of(source)) or not all(i is not None and i.name in values for i in indices):
            continue
        out = shape_of(node)
        where: list[int] = []
        for index, size in zip(indices, shape_of(source), strict=True):
            value = values[index.name]
            wide = [d for d, n in enumerate(value.shape) if n > 1]
            if len(wide) > 1 or not torch.equal(value.flatten(), torch.arange(size)):
                break
            where.append(wide[0] + len(out) - value.dim() if wide else -1)
        else:
            wide_dims = [d for d in where if d >= 0]
            if len(set(wide_dims)) != len(wide_dims) or math.prod(out) != math.prod(shape_of(source)):
                continue
            with graph.inserting_before(node):
                order = sorted(range(len(where)), key=lambda k: where[k])
                if order != list(range(len(where))):
                    source = new_node(graph, aten.permute.default, (source, order), like=node)
                renamed(program, node, new_node(graph, aten.view.default, (source, list(out)), like=node))


def refold_linears(program: Program) -> None:
    """``view(addmm(b, view(x), w))`` --> ``linear(x, t(w), b)``: sequence splits become visible."""
    graph = program.graph
    for node in calls(graph, aten.addmm.default, aten.mm.default):
        bias, x, weight = args_of(node) if node.target is aten.addmm.default else (None, *args_of(node))
        if node.kwargs or (bias is not None and shape_of(bias) != shape_of(node)[-1:]):
            continue
        with graph.inserting_before(node):
            if weight.target in (aten.t.default, aten.transpose.int) and len(shape_of(weight)) == 2:
                flipped = weight.args[0]
            else:
                flipped = new_node(graph, aten.t.default, (weight,), like=node)
            viewed = x.target in (aten.view.default, aten.reshape.default)
            source = x.args[0] if viewed and shape_of(x.args[0])[-1] == shape_of(x)[-1] else x
            y = new_node(graph, aten.linear.default, (source, flipped, bias), like=node)
            for user in list(node.users):
                if user.target in (aten.view.default, aten.reshape.default) and shape_of(user) == shape_of(y):
                    renamed(program, user, y)
            if shape_of(y) != shape_of(node):
                y = new_node(graph, aten.view.default, (y, list(shape_of(node))), like=node)
        renamed(program, node, y)


def mean_to_sum(program: Program) -> None:
    """``mean(x, dims)`` --> ``sum(x, dims) / N``; average pooling to one position likewise."""
    graph = program.graph
    pools = (aten.adaptive_avg_pool1d.default, aten.adaptive_avg_pool2d.default, aten.adaptive_avg_pool3d.default)
    for node in calls(graph, aten.mean.dim, aten.mean.default, *pools):
        x = args_of(node)[0]
        shape = shape_of(x)
        if node.target in pools:
            size = argument(node, "output_size")
            if any(n != 1 for n in size):
                continue
            dims, keep = list(range(len(shape) - len(size), len(shape))), True
        else:
            given = argument(node, "dim") if node.target is aten.mean.dim else None
            dims = [d % len(shape) for d in given if shape] if given else list(range(len(shape)))
            keep = bool(argument(node, "keepdim"))
        with graph.inserting_before(node):
            total = sum_over(cast_like(x, node), dims, keep)
            mean = new_node(graph, aten.div.Tensor, (total, math.prod(shape[d] for d in dims)), like=node)
            renamed(program, node, cast_like(mean, node))


def causal_masks(program: Program, values: dict[str, torch.Tensor]) -> None:
    """``sdpa(q, k, v, tril)`` --> ``sdpa(q, k, v, causal)``; ``sdpa(q, k, v, all true)`` --> ``sdpa(q, k, v)``.

    No mask is kept, and queries may be split.
    """
    for node in calls(program.graph, aten.scaled_dot_product_attention.default):
        mask = argument(node, "attn_mask")
        while mask is not None and mask.target is aten.expand.default:
            mask = mask.args[0]
        value = None if mask is None else values.get(mask.name)
        if value is None or value.dtype is not torch.bool:
            continue
        s, t = (shape_of(x)[-2] for x in args_of(node)[:2])  # the mask itself may have been cut to size 1
        tril = torch.ones(s, t, dtype=torch.bool).tril()
        if bool(value.all()):
            causal = argument(node, "is_causal")
        elif s == t and tuple(value.shape[-2:]) == (s, t) and bool((value == tril).all()):
            causal = True
        else:
            continue
        node.args = (*node.args[:3], None, argument(node, "dropout_p"), causal)
        node.kwargs = {k: v for k, v in node.kwargs.items() if k not in ("attn_mask", "dropout_p", "is_causal")}


def eliminate_dead_code(program: Program) -> None:
    """Drop what neither loss, outputs nor buffers need."""
    wanted = set(program.roots())
    for node in reversed(list(program.graph.nodes)):
        if node.op == "call_function" and not node.users and node.name not in wanted:
            program.graph.erase_node(node)
    for node in list(program.graph.nodes):
        if node.op == "placeholder" and not node.users and node.name in program.constants and node.name not in wanted:
            program.graph.erase_node(node)
            del program.constants[node.name]
