"""Look-ups by index, and writes by index.

All are linear in the values for given indices.  The dimension that is indexed may be split too: every rank looks at
the rows that it holds (`autopar.runtime.kernels.index`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from autopar.errors import RuleError
from autopar.layout import Shape
from autopar.program import call_arguments, dtype_of, is_tensor, place, shape_of, target_name, tensor_inputs
from autopar.rules.notation import Algorithm, Dims, Rule, define
from autopar.rules.registry import algorithm, computed, from_text, named_inputs
from autopar.rules.view import plain_dims, plain_sizes
from autopar.runtime.kernels import index as kernels
from autopar.runtime.kernels.embedding import BAG_MAX, embedding_parts

_EMBEDDING = define("aten.embedding.default", "v d, ... -> ... d", args="w i", form="w", whole="v", saves="i")


@computed("aten.embedding.default")
def _embedding(node: fx.Node) -> Rule:
    """``v d, ... -> ... d``, linear in w; the vocabulary is split by an algorithm."""
    given = call_arguments(node)
    for option in ("scale_grad_by_freq", "sparse"):
        if given.get(option):
            raise RuleError(
                f"embedding with {option} has no rule",
                where=place(node),
                expected=f"{option}=False",
                got="True: " + ("gradients depend on the whole batch" if option[1] == "c" else "gradients are sparse"),
            )
    return from_text(node, _EMBEDDING)


algorithm("aten.embedding.default", "vocabulary", splits="v", run=embedding_parts, lacking="P")


_BAG = "autopar.embedding_bag"


@computed(_BAG)
def _embedding_bag(node: fx.Node) -> Rule:
    """Which rows are in which bag depends on the offsets: only d may be split.  A maximum is not linear."""
    form = "" if call_arguments(node)["mode"] == BAG_MAX else "w*s" if "s" in named_inputs(node, "wios") else "w"
    return from_text(node, define(_BAG, "v d, i, o, i -> b d", args="w i o s", form=form, whole="v i o b", saves="i"))


def _named(d: int, prefix: str, size: int, factors: dict[str, int]) -> tuple[str, ...]:
    if size == 1:
        return ()
    factors[f"{prefix}{d}"] = size
    return (f"{prefix}{d}",)


def _by_rows(run: Callable[..., Any], node: fx.Node, *factors: str) -> tuple[Algorithm, ...]:
    """The algorithm that splits the indexed ``factors``: a look-up gives a term of a sum, a write the rank's own rows.

    There is no sum of booleans, and nothing to split of one row.
    """
    if not factors or (run in _LOOKUPS and dtype_of(node) is torch.bool):
        return ()
    return (Algorithm("rows", factors, run, "P"),)


_LOOKUPS = (kernels.index_parts, kernels.index_select_parts, kernels.gather_parts)


# ------------------------------------------------------------------------------------------------ x[i, :, j]


def _advanced(node: fx.Node) -> tuple[Dims, list[Dims], Dims, dict[str, int], tuple[str, ...]]:
    """(x, indices, x[indices], sizes, indexed factors) of ``x[indices]``.

    Dimensions of the indices, broadcast, stand where the first of them was; in front, where others lie between.
    """
    given = call_arguments(node)
    x, indices = shape_of(tensor_inputs(node)[0]), given["indices"]
    tensors = [i for i in indices if i is not None]
    if any(dtype_of(i) in (torch.bool, torch.uint8) for i in tensors):
        raise RuleError(
            "an index by a mask has no rule",
            where=place(node),
            expected="whole numbers as indices",
            got=f"{target_name(node)} with a mask",
            hint="use torch.where(mask, values, x)",
        )
    sizes: dict[str, int] = {}
    common = torch.broadcast_shapes(*(shape_of(i) for i in tensors))
    wide = [_named(j, "b", n, sizes) for j, n in enumerate(common)]

    def broadcast(shape: Shape) -> Dims:
        return tuple(() if n == 1 else f for n, f in zip(shape, wide[len(wide) - len(shape) :], strict=True))

    places = [d for d, i in enumerate(indices) if i is not None]
    dims = tuple(_named(d, "i" if d in places else "d", n, sizes) for d, n in enumerate(x))
    rest = [f for d, f in enumerate(dims) if d not in places]
    first = places[0] if places[-1] - places[0] == len(places) - 1 else 0
    out = (*rest[:first], *wide, *rest[first:])
    indexed = tuple(f for d in places for f in dims[d])
    return dims, [broadcast(shape_of(i)) for i in tensors], out, sizes, indexed


@computed("aten.index.Tensor", "aten._unsafe_index.Tensor")
def _index(node: fx.Node) -> Rule:
    x, indices, out, sizes, indexed = _advanced(node)
    saves = tuple(("in", k + 1) for k in range(len(indices)))
    split = _by_rows(kernels.index_parts, node, *indexed)
    return Rule((x, *indices), (out,), sizes, ((0,),), whole=frozenset(indexed), saves=saves, algorithms=split)


@computed("aten.index_put.default", "aten._unsafe_index_put.default")
def _index_put(node: fx.Node) -> Rule:
    """Values that are added may be split by their rows: the sums of all ranks add up.

    Without ``accumulate`` it is not taken as linear, for where two indices are equal torch picks either value.
    """
    x, indices, part, sizes, indexed = _advanced(node)
    given = call_arguments(node)
    shape = shape_of(given["values"])
    values = tuple(() if n == 1 else f for n, f in zip(shape, part[len(part) - len(shape) :], strict=True))
    rows = frozenset(f for i in indices for d in i for f in d)
    add = bool(given.get("accumulate"))
    last = len(indices) + 1
    return Rule(
        (x, *indices, values),
        (x,),
        sizes,
        ((0,), tuple(range(1, last + 1))) if add else (),
        sums=rows if add else frozenset(),
        whole=frozenset(indexed) | (frozenset() if add else rows),
        saves=tuple(("in", k + 1) for k in range(len(indices))),
        algorithms=_by_rows(kernels.index_put_parts, node, *indexed),
    )


# ------------------------------------------------------------------------------------------------ along one dim


@computed("aten.index_select.default")
def _index_select(node: fx.Node) -> Rule:
    given = call_arguments(node)
    shape, rows = shape_of(given["self"]), shape_of(given["index"])
    d = given["dim"] % max(len(shape), 1)
    sizes = plain_sizes(shape)
    sizes.pop(f"d{d}", None)
    x, out = list(plain_dims(shape)), list(plain_dims(shape))
    x[d] = ("v",) if shape[d] > 1 else ()
    out[d] = ("i",) if shape_of(node)[d] > 1 else ()
    sizes |= {"v": shape[d], "i": shape_of(node)[d]}
    return Rule(
        (tuple(x), (out[d],) if rows else ()),
        (tuple(out),),
        sizes,
        ((0,),),
        whole=frozenset(x[d]),
        saves=(("in", 1),),
        algorithms=_by_rows(kernels.index_select_parts, node, *x[d]),
    )


def _aligned(x: Shape, index: Shape, d: int) -> tuple[Dims, Dims, dict[str, int], frozenset[str]]:
    """(x, index, sizes, whole factors) where ``index`` says, in the place of each of its elements, a row of ``d``.

    Where index has fewer rows than x in another dimension, it is about the first ones: both stay whole there.
    """
    sizes: dict[str, int] = {}
    dims: list[tuple[str, ...]] = []
    rows: list[tuple[str, ...]] = []
    whole: set[str] = set()
    for k, (n, m) in enumerate(zip(x, index, strict=True)):
        if k == d:
            dims.append(("v",) if n > 1 else ())
            rows.append(("i",) if m > 1 else ())
            sizes |= {"v": n, "i": m}
            whole |= set(dims[-1])
        elif n == m:
            dims.append(_named(k, "d", n, sizes))
            rows.append(dims[-1])
        else:
            dims.append(_named(k, "x", n, sizes))
            rows.append(_named(k, "r", m, sizes))
            whole |= {*dims[-1], *rows[-1]}
    return tuple(dims), tuple(rows), sizes, frozenset(whole)


@computed("aten.gather.default")
def _gather(node: fx.Node) -> Rule:
    given = call_arguments(node)
    shape, index = shape_of(given["self"]), shape_of(given["index"])
    if given.get("sparse_grad") or not shape:
        raise RuleError("gather with sparse gradients, or of a number, has no rule", where=place(node))
    d = given["dim"] % len(shape)
    x, rows, sizes, whole = _aligned(shape, index, d)
    split = _by_rows(kernels.gather_parts, node, *x[d])
    return Rule((x, rows), (rows,), sizes, ((0,),), whole=whole, saves=(("in", 1),), algorithms=split)


# ------------------------------------------------------------------------------------------------ writes


def _writes(
    node: fx.Node, ins: list[Dims], sizes: dict[str, int], *, rows: frozenset[str], whole: frozenset[str], add: bool
) -> Rule:
    """The rule of a write into the first of ``ins``: what adds to what is there may be split by its ``rows``.

    Only that is taken as linear, too: where two indices are equal, torch picks either value.
    """
    rows -= whole
    return Rule(
        tuple(ins),
        (ins[0],),
        sizes,
        ((0,), tuple(range(1, len(ins)))) if add else (),
        sums=rows if add else frozenset(),
        whole=whole if add else whole | rows,
        saves=(("in", 1),),
        algorithms=_by_rows(_WRITES[target_name(node)], node, *(f for f in ("v",) if f in whole)),
    )


_SCATTERS: dict[str, Callable[..., Any]] = {
    "aten.scatter.src": kernels.scatter_parts,
    "aten.scatter.value": kernels.scatter_parts,
    "aten.scatter_add.default": kernels.scatter_add_parts,
    "aten.scatter_reduce.two": kernels.scatter_reduce_parts,
}
_LINES: dict[str, Callable[..., Any]] = {
    "aten.index_add.default": kernels.index_add_parts,
    "aten.index_copy.default": kernels.index_copy_parts,
    "aten.index_fill.int_Scalar": kernels.index_fill_parts,
    "aten.index_fill.int_Tensor": kernels.index_fill_parts,
}
_WRITES = {**_SCATTERS, **_LINES}


@computed(*_SCATTERS)
def _scatter(node: fx.Node) -> Rule:
    """Element by element: the index has the dimensions of x, and so has the source."""
    given = call_arguments(node)
    shape, index = shape_of(given["self"]), shape_of(given["index"])
    if not shape:
        raise RuleError("a write by index into a number has no rule", where=place(node))
    x, rows, sizes, whole = _aligned(shape, index, given["dim"] % len(shape))
    ins = [x, rows]
    if is_tensor(given.get("src")):
        ins.append(rows)
        if shape_of(given["src"]) != index:
            raise RuleError(
                "torch has no gradient of a scatter whose source is larger than the index",
                where=place(node),
                expected=f"a source of shape {list(index)}",
                got=str(list(shape_of(given["src"]))),
                hint="slice the source",
            )
    name = target_name(node)
    add = name == "aten.scatter_add.default" or (
        name == "aten.scatter_reduce.two" and given["reduce"] == "sum" and given.get("include_self", True)
    )
    return _writes(node, ins, sizes, rows=frozenset({"i"}) & set(sizes), whole=whole, add=add)


@computed(*_LINES)
def _index_write(node: fx.Node) -> Rule:
    """Line by line: the index has one dimension."""
    given = call_arguments(node)
    shape, index = shape_of(given["self"]), shape_of(given["index"])
    if not shape:
        raise RuleError("a write by index into a number has no rule", where=place(node))
    d = given["dim"] % len(shape)
    count = math.prod(index)
    x, lines, sizes, whole = _aligned(shape, (*shape[:d], count, *shape[d + 1 :]), d)
    ins = [x, lines[d : d + 1] if index else ()]
    source: Any = given.get("source", given.get("value"))
    if is_tensor(source):
        ins.append(lines if shape_of(source) else ())
    add = target_name(node) == "aten.index_add.default"
    return _writes(node, ins, sizes, rows=frozenset({"i"}) & set(sizes), whole=whole, add=add)


@computed("aten.masked_scatter.default")
def _masked_scatter(node: fx.Node) -> Rule:
    """Where a value of the source goes depends on the whole mask: nothing can be split.  Linear in x and source."""
    sizes: dict[str, int] = {}
    x, mask, source = (shape_of(v) for v in tensor_inputs(node))
    common = torch.broadcast_shapes(x, mask)

    def dims(shape: Shape, name: str) -> Dims:
        return tuple(_named(k, name, n, sizes) for k, n in enumerate(shape, len(common) - len(shape)))

    ins = (dims(x, "d"), dims(mask, "d"), dims(source, "s"))
    return Rule(ins, (dims(common, "d"),), sizes, ((0,), (2,)), whole=frozenset(sizes), saves=(("in", 1),))
