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
from autopar.passes.fills import fills
from autopar.passes.rewrite import argument, calls, cast_like, new_node, placeholder, renamed, replace
from autopar.program import Program, args_of, dtype_of, is_tensor, place, shape_of
from autopar.runtime.kernels.attention import attention
from autopar.runtime.kernels.dropout import dropout
from autopar.runtime.kernels.loss import cross_entropy_count, cross_entropy_sum
from autopar.runtime.kernels.norm import batch_norm
from autopar.runtime.kernels.parts import Part

aten = torch.ops.aten

RNG = "rng"  # the step's key for random numbers; None in evaluation


def normalize(program: Program, buffers: dict[str, torch.Tensor]) -> Program:
    """Apply every rewrite in place.  ``buffers``: the model's, by original name; meta ones are left unevaluated."""
    graph = program.graph
    placeholder(graph, RNG, 0)
    drop_asserts(graph)
    native_dropouts(program)
    broadcasts(program)
    embedding_bags(program)
    decompose(program)
    fills(program)
    drop_identities(program)
    splits_with_sizes(program)
    fold_constants(program)
    values = evaluate_constants(program, buffers)
    index_to_view(program, values)
    refold_linears(program)
    mean_to_sum(program)
    losses_to_sums(program)
    causal_masks(program, values)
    name_random_ops(program)
    batch_norms(program)
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
        if node.kwargs or (bias is not None and len(shape_of(bias)) != 1):
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
    for node in calls(graph, aten.mean.dim, aten.mean.default, aten.adaptive_avg_pool2d.default):
        x = args_of(node)[0]
        shape = shape_of(x)
        if node.target is aten.adaptive_avg_pool2d.default:
            if list(argument(node, "output_size")) != [1, 1]:
                continue
            dims, keep = [len(shape) - 2, len(shape) - 1], True
        else:
            given = argument(node, "dim") if node.target is aten.mean.dim else None
            dims = list(range(len(shape))) if given is None else [d % len(shape) for d in given if shape]
            keep = bool(argument(node, "keepdim"))
        if argument(node, "dtype") is not None:
            continue
        with graph.inserting_before(node):
            total = _sum(x, dims, keep, like=node)
            mean = new_node(graph, aten.div.Tensor, (total, math.prod(shape[d] for d in dims)), like=node)
            renamed(program, node, cast_like(mean, node))


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The type in which sums of ``dtype`` are kept: 16-bit sums overflow or round where a mean does not."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _sum(x: fx.Node, dims: list[int], keep: bool, *, like: fx.Node) -> fx.Node:
    dtype = dtype_of(x)
    options = {} if _wide(dtype) == dtype else {"dtype": _wide(dtype)}
    return new_node(like.graph, aten.sum.dim_IntList, (x, dims, keep), options, like=like)


def losses_to_sums(program: Program) -> None:
    """``cross_entropy(x, t)`` --> ``cross_entropy_sum(x, t) / cross_entropy_count(t)``; ``mse_loss`` --> sum / N.

    A mean of means is wrong wherever parts have unequal counts; a sum divided by a count is right on every split.
    """
    graph = program.graph
    for node in calls(graph, aten.cross_entropy_loss.default):
        logits, target = args_of(node)[:2]
        if argument(node, "weight") is not None or target.meta["val"].is_floating_point():
            raise CaptureError(
                "cross entropy with class weights or class probabilities has no rule yet",
                where=place(node),
                expected="integer targets, no weight",
                hint="write it as log_softmax and a sum",
            )
        reduction, ignore = argument(node, "reduction"), argument(node, "ignore_index")
        if reduction == 0:  # none
            continue
        with graph.inserting_before(node):
            loss = new_node(
                graph, cross_entropy_sum, (logits, target, ignore, argument(node, "label_smoothing")), like=node
            )
            if reduction == 1:  # mean
                dtype = _wide(dtype_of(logits))
                count = new_node(graph, cross_entropy_count, (target, ignore, dtype), like=node)
                loss = new_node(graph, aten.div.Tensor, (loss, count), like=node)
            renamed(program, node, cast_like(loss, node))
    for node in calls(graph, aten.mse_loss.default):
        reduction = argument(node, "reduction")
        with graph.inserting_before(node):
            gap = new_node(graph, aten.sub.Tensor, tuple(node.args[:2]), like=node)
            loss = new_node(graph, aten.square.default, (gap,), like=node)
            if reduction:
                shape = shape_of(gap)
                loss = _sum(loss, list(range(len(shape))), False, like=node)
                if reduction == 1:
                    loss = new_node(graph, aten.div.Tensor, (loss, math.prod(shape)), like=node)
            renamed(program, node, cast_like(loss, node))


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


def name_random_ops(program: Program) -> None:
    """``dropout(x, p, True)`` --> ``dropout(x, p, rng, salt)``; attention that is causal or drops weights likewise.

    ``salt`` is the place of the op among the program's random ops: the mask is a function of (seed, step, salt,
    position), which no plan changes.
    """
    graph = program.graph
    rng = program.nodes[RNG]
    salt = 0
    for node in calls(graph, aten.dropout.default, aten.scaled_dot_product_attention.default):
        with graph.inserting_before(node):
            if node.target is aten.dropout.default:
                dims = [Part(n) for n in shape_of(node)]
                x, p = args_of(node)[0], argument(node, "p")
                if not program.training:
                    raise CaptureError(
                        "a dropout that is on in evaluation has no rule",
                        where=place(node),
                        expected="F.dropout(..., training=self.training), or model.train()",
                        got="training=True in a model in evaluation mode",
                    )
                new = new_node(graph, dropout, (x, p, rng, salt), {"dims": dims}, like=node)
            else:
                p = argument(node, "dropout_p") if program.training else 0.0
                causal = argument(node, "is_causal")
                if not p and not causal:
                    continue
                q, k, v = args_of(node)[:3]
                mask, scale = argument(node, "attn_mask"), argument(node, "scale")
                dims = [Part(n) for n in (*shape_of(q)[:-1], shape_of(k)[-2])]
                args = (q, k, v, mask, causal, scale, p, rng, salt)
                new = new_node(graph, attention, args, {"dims": dims}, like=node)
        salt += 1
        renamed(program, node, new)


def batch_norms(program: Program) -> None:
    """``_native_batch_norm_legit_functional(x, w, b, mean, var, True)`` --> ``batch_norm(x, w, b, mean, var, rng)``."""
    graph = program.graph
    rng = program.nodes[RNG]
    for node in calls(graph, aten._native_batch_norm_legit_functional.default):
        x, weight, bias, mean, var, training, momentum, eps = node.args
        if not training:
            raise CaptureError("batch norm that is frozen inside a training graph has no rule yet", where=place(node))
        with graph.inserting_before(node):
            new = new_node(graph, batch_norm, (x, weight, bias, mean, var, momentum, eps, rng), like=node)
        place_of = {0: 0, 3: 1, 4: 2}
        for item in list(node.users):
            which = args_of(item)[1] if item.target is operator.getitem else None
            if which not in place_of:
                raise CaptureError("the saved statistics of batch norm are used outside it", where=place(item))
            with graph.inserting_before(item):
                renamed(program, item, new_node(graph, operator.getitem, (new, place_of[which]), like=item))
        graph.erase_node(node)


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
