"""Views and moves of whole dimensions: computed from the shapes by common refinement."""

from __future__ import annotations

from torch import fx

from autopar.errors import RuleError
from autopar.layout import Shape
from autopar.program import args_of, call_arguments, place, shape_of, tensor_inputs
from autopar.rules.factors import common_refinement
from autopar.rules.notation import Dims, Rule
from autopar.rules.registry import computed


def plain_dims(shape: Shape, prefix: str = "d") -> Dims:
    return tuple(() if n == 1 else (f"{prefix}{i}",) for i, n in enumerate(shape))


def plain_sizes(shape: Shape, prefix: str = "d") -> dict[str, int]:
    return {f"{prefix}{i}": n for i, n in enumerate(shape) if n != 1}


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
    local = {"repeats": ("r",)} | ({"output_size": outs[d]} if given.get("output_size") and outs[d] else {})
    return Rule((ins,), (tuple(outs),), sizes, ((0,),), size_args=local)


@computed("aten.repeat.default")
def _tile(node: fx.Node) -> Rule:
    """All rows r times: ``h -> (r h)``; dimensions may be added in front."""
    shape, repeats = shape_of(tensor_inputs(node)[0]), call_arguments(node)["repeats"]
    added = len(repeats) - len(shape)
    sizes = plain_sizes(shape) | {f"r{i}": n for i, n in enumerate(repeats)}
    dims = plain_dims(shape)
    outs = tuple(
        ((f"r{i}",) if n != 1 else ()) + (dims[i - added] if i >= added else ()) for i, n in enumerate(repeats)
    )
    local = {"repeats": tuple((f"r{i}",) for i in range(len(repeats)))}
    whole = frozenset(sizes) if 0 in sizes.values() else frozenset()
    return Rule((dims,), (outs,), sizes, ((0,),), whole=whole, size_args=local)


@computed("aten.tril.default", "aten.triu.default")
def _triangle(node: fx.Node) -> Rule:
    """Rows and columns are counted: whole."""
    dims = plain_dims(shape_of(node))
    whole = frozenset(f for d in dims[-2:] for f in d)
    return Rule((dims,), (dims,), plain_sizes(shape_of(node)), ((0,),), whole=whole)


@computed("aten.diagonal.default")
def _diagonal(node: fx.Node) -> Rule:
    shape, given = shape_of(tensor_inputs(node)[0]), call_arguments(node)
    two = {given.get(name, k) % len(shape) for k, name in enumerate(("dim1", "dim2"))}
    dims, sizes = plain_dims(shape), plain_sizes(shape)
    last = ("k",) if shape_of(node)[-1] != 1 else ()
    sizes["k"] = shape_of(node)[-1]
    out = (*(f for i, f in enumerate(dims) if i not in two), last)
    return Rule((dims,), (out,), sizes, ((0,),), whole=frozenset((*last, *(f for i in two for f in dims[i]))))


@computed("aten.unfold.default")
def _unfold(node: fx.Node) -> Rule:
    """Windows of a dimension.  Those that lie side by side are a view, (w s) -> w s; others stay whole."""
    shape, given = shape_of(tensor_inputs(node)[0]), call_arguments(node)
    d, size, step = given["dimension"] % len(shape), given["size"], given["step"]
    dims, sizes, count = plain_dims(shape), plain_sizes(shape), shape_of(node)[d]
    sizes.pop(f"d{d}", None)
    sizes |= {"w": count, "s": size, "i": shape[d]}
    windows, inside = ((f,) if sizes[f] > 1 else () for f in "ws")
    side_by_side = step == size and count * size == shape[d]
    own = (*windows, *inside) if side_by_side else ("i",) if shape[d] > 1 else ()
    whole = {*inside, *(() if side_by_side else (*own, *windows))}
    ins, outs = (*dims[:d], own, *dims[d + 1 :]), (*dims[:d], windows, *dims[d + 1 :], inside)
    return Rule((ins,), (outs,), sizes, ((0,),), whole=frozenset(whole), filled=side_by_side)


@computed("aten.im2col.default", "aten.col2im.default")
def _columns(node: fx.Node) -> Rule:
    """``n c y x -> n (c k) l``, k positions of a window and l windows, or back: n and c pass."""
    shape, out, back = shape_of(tensor_inputs(node)[0]), shape_of(node), "col2im" in str(node.target)
    image, columns = (out, shape) if back else (shape, out)
    c = image[-3]
    sizes = {"n": image[0] if len(image) == 4 else 1, "c": c, "y": image[-2], "x": image[-1]}
    sizes |= {"k": columns[-2] // c, "l": columns[-1]}

    def dims(*names: str) -> Dims:
        return tuple(tuple(f for f in name if sizes[f] != 1) for name in names)

    lead = ("n",) if len(image) == 4 else ()
    wide, narrow = dims(*lead, "c", "y", "x"), dims(*lead, "ck", "l")
    ins, outs = (narrow, wide) if back else (wide, narrow)
    whole = frozenset(f for f in "yxkl" if sizes[f] != 1)
    return Rule((ins,), (outs,), sizes, ((0,),), whole=whole, filled=True)
