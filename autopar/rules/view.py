"""Views and moves of whole dimensions: computed from the shapes by common refinement."""

from __future__ import annotations

import math

from torch import fx

from autopar.errors import RuleError
from autopar.layout import Shape
from autopar.program import args_of, call_arguments, output_values, place, shape_of, tensor_inputs
from autopar.rules.factors import common_refinement
from autopar.rules.notation import Dims, Rule
from autopar.rules.registry import computed


def plain_dims(shape: Shape, prefix: str = "d") -> Dims:
    return tuple(() if n == 1 else (f"{prefix}{i}",) for i, n in enumerate(shape))


def plain_sizes(shape: Shape, prefix: str = "d") -> dict[str, int]:
    return {f"{prefix}{i}": n for i, n in enumerate(shape) if n > 1}


@computed(
    "aten.view.default",
    "aten.reshape.default",
    "aten._unsafe_view.default",
    "aten.flatten.using_ints",
    "aten.unflatten.int",
    "aten.unsqueeze.default",
    "aten.squeeze.dim",
    "aten.squeeze.dims",
    "aten.squeeze.default",
)
def _view(node: fx.Node) -> Rule:
    """(8, 6) -> (4, 12) is (f0 f1) f2 -> f0 (f1 f2)."""
    ins, outs, sizes, opaque = common_refinement(shape_of(tensor_inputs(node)[0]), shape_of(node))
    return Rule((ins,), (outs,), sizes, ((0,),), whole=opaque, view=not opaque, reshapes=True)


@computed("aten.transpose.int", "aten.t.default", "aten.permute.default")
def _permute(node: fx.Node) -> Rule:
    shape = shape_of(tensor_inputs(node)[0])
    dims = plain_dims(shape)
    if "permute" in str(node.target):
        order = [d % len(shape) for d in call_arguments(node)["dims"]]
    else:
        order = list(range(len(shape)))
        if len(shape) > 1:
            a, b = (d % len(shape) for d in args_of(node)[1:3] or (0, 1))
            order[a], order[b] = order[b], order[a]
    return Rule((dims,), (tuple(dims[d] for d in order),), plain_sizes(shape), ((0,),), view=True)


@computed("aten.expand.default")
def _expand(node: fx.Node) -> Rule:
    """A dimension that is broadcast has a factor of its own, which the input lacks."""
    out, shape = shape_of(node), shape_of(tensor_inputs(node)[0])
    dims = plain_dims(out)
    source = tuple(() if n == 1 else dims[i + len(out) - len(shape)] for i, n in enumerate(shape))
    return Rule((source,), (dims,), plain_sizes(out), ((0,),), size_args={"size": dims})


@computed("aten.repeat_interleave.self_int")
def _repeat(node: fx.Node) -> Rule:
    """Every row r times in a row: ``a h -> a (h r)``."""
    given, shape = call_arguments(node), shape_of(tensor_inputs(node)[0])
    if given.get("dim") is None and len(shape) != 1:
        raise RuleError("repeat_interleave without a dimension has no rule", where=place(node), hint="pass dim=")
    d = (given.get("dim") or 0) % len(shape)
    ins, outs, sizes = plain_dims(shape), list(plain_dims(shape)), plain_sizes(shape)
    sizes["r"] = given["repeats"]
    outs[d] = (*ins[d], "r") if sizes["r"] > 1 else ins[d]
    return Rule((ins,), (tuple(outs),), sizes, ((0,),), size_args={"repeats": ("r",)})


@computed(
    "aten.slice.Tensor", "aten.constant_pad_nd.default", "aten.pad.default", "aten.roll.default", "aten.flip.default"
)
def _along_dims(node: fx.Node) -> Rule:
    """Dimensions whose rows move or change in number stay whole; the others pass."""
    shape, out = shape_of(tensor_inputs(node)[0]), shape_of(node)
    name, args = str(node.target), args_of(node)
    if "pad" in name:
        touched = {len(shape) - 1 - i // 2 for i, n in enumerate(args[1]) if n}
    elif "slice" in name:
        touched = {(args[1] if len(args) > 1 else 0) % len(shape)}
    else:
        dims = call_arguments(node).get("dims")
        touched = {d % len(shape) for d in dims} if dims else set(range(len(shape)))
    ins, outs, sizes = list(plain_dims(shape)), list(plain_dims(out)), {**plain_sizes(out), **plain_sizes(shape)}
    whole = set()
    for d in touched:
        ins[d] = (f"i{d}",) if shape[d] > 1 else ()
        outs[d] = (f"o{d}",) if out[d] > 1 else ()
        sizes |= {f"i{d}": shape[d], f"o{d}": out[d]}
        sizes.pop(f"d{d}", None)
        whole |= {*ins[d], *outs[d]}
    fills = "pad" in name and call_arguments(node).get("value") not in (None, 0)  # padding with a constant: affine
    return Rule((tuple(ins),), (tuple(outs),), sizes, () if fills else ((0,),), whole=frozenset(whole))


@computed("aten.select.int")
def _select(node: fx.Node) -> Rule:
    shape = shape_of(tensor_inputs(node)[0])
    d = args_of(node)[1] % len(shape)
    dims = plain_dims(shape)
    out = tuple(f for i, f in enumerate(dims) if i != d)
    return Rule((dims,), (out,), plain_sizes(shape), ((0,),), whole=frozenset(dims[d]))


@computed("aten.split_with_sizes.default", "aten.unbind.int")
def _split(node: fx.Node) -> Rule:
    """Equal parts are a compound (c n), of which n may be split: a fused QKV. Unequal ones stay whole."""
    shape = shape_of(tensor_inputs(node)[0])
    name, args = str(node.target), args_of(node)
    at = args[1] if "unbind" in name and len(args) > 1 else args[2] if len(args) > 2 else 0
    d = at % len(shape)
    count = len(output_values(node))
    dims, sizes = list(plain_dims(shape)), plain_sizes(shape)
    sizes.pop(f"d{d}", None)
    outs = [list(dims) for _ in range(count)]
    if "unbind" in name:
        sizes["c"] = shape[d]
        dims[d] = ("c",) if shape[d] > 1 else ()
        rest = [tuple(f for i, f in enumerate(o) if i != d) for o in outs]
        return Rule((tuple(dims),), tuple(rest), sizes, ((0,),), whole=frozenset(dims[d]))
    widths = [v.shape[d] for v in node.meta["val"]]
    if len(set(widths)) == 1 and math.prod([count, widths[0]]) == shape[d]:
        sizes |= {"c": count, "n": widths[0]}
        dims[d] = tuple(f for f, n in (("c", count), ("n", widths[0])) if n > 1)
        for o in outs:
            o[d] = ("n",) if widths[0] > 1 else ()
        whole = frozenset(("c",)) & set(sizes)
        local = {"split_sizes": (("n",),) * count}
        return Rule((tuple(dims),), tuple(map(tuple, outs)), sizes, ((0,),), whole=whole, size_args=local)
    sizes["i"] = shape[d]
    dims[d] = ("i",)
    opaque = {"i"}
    for k, (o, n) in enumerate(zip(outs, widths, strict=True)):
        o[d] = (f"o{k}",) if n > 1 else ()
        sizes[f"o{k}"] = n
        opaque |= set(o[d])
    return Rule((tuple(dims),), tuple(map(tuple, outs)), sizes, ((0,),), whole=frozenset(opaque))


@computed("aten.cat.default", "aten.stack.default")
def _cat(node: fx.Node) -> Rule:
    inputs, out, args = tensor_inputs(node), shape_of(node), args_of(node)
    d = (args[1] if len(args) > 1 else 0) % len(out)
    outs, sizes = list(plain_dims(out)), plain_sizes(out)
    sizes.pop(f"d{d}", None)
    outs[d] = ("o",) if out[d] > 1 else ()
    sizes["o"] = out[d]
    whole = set(outs[d])
    ins = []
    for k, v in enumerate(inputs):
        if "stack" in str(node.target):
            ins.append(tuple(f for i, f in enumerate(outs) if i != d))
            continue
        dims = list(outs)
        n = shape_of(v)[d]
        dims[d] = (f"i{k}",) if n > 1 else ()
        sizes[f"i{k}"] = n
        whole |= set(dims[d])
        ins.append(tuple(dims))
    return Rule(tuple(ins), (tuple(outs),), sizes, tuple((k,) for k in range(len(inputs))), whole=frozenset(whole))
