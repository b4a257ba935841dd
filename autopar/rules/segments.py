"""Ops that put rows of a dimension side by side, or take some: where all pieces are multiples of one unit, every rank
can hold its share of each unit.

    cat of 8 and 4 rows      (i n), (j n) -> (o n)     n = 4, i = 2, j = 1, o = 3
    split into 6, 3 and 3    (i n) -> (o n), n, n      n = 3: queries, keys and values of different width
    x[..., 4:]  of 8         (i n) -> n                n = 4: half of a rotary pair

The unit n may be split; the numbers of units may not.  Pieces without a common unit stay whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import fx

from autopar.layout import Shape
from autopar.program import args_of, call_arguments, output_values, shape_of, tensor_inputs
from autopar.rules.notation import Dims, Rule
from autopar.rules.registry import computed
from autopar.rules.view import plain_dims, plain_sizes


class Pieces:
    """Dimensions of a rule's tensors, some of which are written in units of a common size.

    dims: of a tensor with ``shape`` where nothing is cut into pieces.  `piece` gives the dimension of one piece and
    notes its factors; pieces of one dimension share their unit.
    """

    def __init__(self, shape: Shape) -> None:
        self.dims: Dims = plain_dims(shape)
        self.sizes: dict[str, int] = plain_sizes(shape)
        self.whole: set[str] = set()

    def unit(self, d: int, lengths: Sequence[int]) -> int:
        """Start on dimension ``d``, whose pieces have these lengths; 1 where they share no unit."""
        self.sizes.pop(f"d{d}", None)
        unit = 1 if min(lengths, default=0) < 0 else math.gcd(*lengths)
        self.sizes[f"n{d}"] = max(unit, 1)
        return self.sizes[f"n{d}"]

    def piece(self, d: int, length: int, name: str) -> tuple[str, ...]:
        """The factors of a piece of dimension ``d``: how many units, called ``name``, and the unit."""
        unit = self.sizes[f"n{d}"]
        self.sizes[name] = length // unit
        factors = tuple(f for f in (name, f"n{d}") if self.sizes[f] != 1)
        self.whole |= set(factors) & {name}
        return factors

    def with_dim(self, d: int, factors: tuple[str, ...]) -> Dims:
        return (*self.dims[:d], factors, *self.dims[d + 1 :])

    def rule(
        self, ins: Sequence[Dims], outs: Sequence[Dims], form: Any, size_args: Any = None, filled: bool = False
    ) -> Rule:
        return Rule(
            tuple(ins),
            tuple(outs),
            self.sizes,
            form,
            whole=frozenset(self.whole),
            size_args=size_args or {},
            quiet=self._quiet([*ins, *outs]),
            filled=filled,
        )

    def _quiet(self, tensors: Sequence[Dims]) -> frozenset[tuple[int, str]]:
        """Cuts of a unit are worth trying on pieces of one unit, and so on the tensor that holds all; elsewhere they
        would only make the search longer: queries of several units are better cut by heads."""
        found = set()
        for unit in (f for f in self.sizes if f.startswith("n")):
            counts = {
                t: math.prod(self.sizes[f] for f in names if f != unit)
                for t, dims in enumerate(tensors)
                for names in dims
                if unit in names
            }
            most = max(counts.values(), default=1)
            found |= {(t, unit) for t, n in counts.items() if n > 1 and (n < most or 1 not in counts.values())}
        return frozenset(found)


@computed("aten.cat.default")
def _cat(node: fx.Node) -> Rule:
    inputs, out = tensor_inputs(node), shape_of(node)
    d = call_arguments(node).get("dim", 0) % len(out)
    pieces = Pieces(out)
    lengths = [shape_of(v)[d] for v in inputs]
    pieces.unit(d, lengths if all(lengths) else [1])
    ins = [pieces.with_dim(d, pieces.piece(d, n, f"i{k}")) for k, n in enumerate(lengths)]
    outs = pieces.with_dim(d, pieces.piece(d, out[d], "o"))
    return pieces.rule(ins, [outs], tuple((k,) for k in range(len(inputs))))


@computed("aten.stack.default")
def _stack(node: fx.Node) -> Rule:
    """The new dimension is whole."""
    inputs, out = tensor_inputs(node), shape_of(node)
    d = call_arguments(node).get("dim", 0) % len(out)
    dims = plain_dims(out)
    ins = tuple(f for i, f in enumerate(dims) if i != d)
    form = tuple((k,) for k in range(len(inputs)))
    return Rule((ins,) * len(inputs), (dims,), plain_sizes(out), form, whole=frozenset(dims[d]))


@computed("aten.split_with_sizes.default")
def _split(node: fx.Node) -> Rule:
    shape = shape_of(tensor_inputs(node)[0])
    d = call_arguments(node).get("dim", 0) % len(shape)
    pieces = Pieces(shape)
    widths = [v.shape[d] for v in node.meta["val"]]
    pieces.unit(d, widths if all(widths) else [1])
    ins = pieces.with_dim(d, pieces.piece(d, shape[d], "i"))
    outs = [pieces.with_dim(d, pieces.piece(d, n, f"o{k}")) for k, n in enumerate(widths)]
    local = {"split_sizes": tuple((f"o{k}", f"n{d}") for k in range(len(widths)))}
    return pieces.rule([ins], outs, ((0,),), local)


@computed("aten.unbind.int")
def _unbind(node: fx.Node) -> Rule:
    shape = shape_of(tensor_inputs(node)[0])
    d = call_arguments(node).get("dim", 0) % len(shape)
    dims = plain_dims(shape)
    out = tuple(f for i, f in enumerate(dims) if i != d)
    return Rule((dims,), (out,) * len(output_values(node)), plain_sizes(shape), ((0,),), whole=frozenset(dims[d]))


@computed("aten.select.int")
def _select(node: fx.Node) -> Rule:
    shape = shape_of(tensor_inputs(node)[0])
    d = args_of(node)[1] % len(shape)
    dims = plain_dims(shape)
    out = tuple(f for i, f in enumerate(dims) if i != d)
    return Rule((dims,), (out,), plain_sizes(shape), ((0,),), whole=frozenset(dims[d]))


@computed("aten.select_scatter.default")
def _select_scatter(node: fx.Node) -> Rule:
    """One row of x replaced by y: linear in both together."""
    shape = shape_of(node)
    d = call_arguments(node)["dim"] % len(shape)
    dims = plain_dims(shape)
    row = tuple(f for i, f in enumerate(dims) if i != d)
    return Rule((dims, row), (dims,), plain_sizes(shape), ((0,), (1,)), whole=frozenset(dims[d]))


def _rows(node: fx.Node, size: int) -> tuple[int, int, int]:
    """(start, stop, step) of a slice, within 0 and ``size``."""
    given = call_arguments(node)
    start, stop, step = slice(given.get("start"), given.get("end"), given.get("step", 1)).indices(size)
    return start, max(start, stop), step


def _sliced(node: fx.Node, shape: Shape) -> tuple[Pieces, Dims, Dims, dict[str, Any]]:
    """(pieces, the whole, the slice, local arguments) of a slice of a tensor with ``shape``.

    Every s-th row of (n s) is n.
    """
    d = call_arguments(node).get("dim", 0) % len(shape)
    start, stop, step = _rows(node, shape[d])
    count = len(range(start, stop, step))
    pieces = Pieces(shape)
    if step == 1 and count:
        pieces.unit(d, [start, stop, shape[d]])
        ins, outs = pieces.piece(d, shape[d], "i"), pieces.piece(d, count, "o")
        pieces.piece(d, start, "start")
        pieces.piece(d, stop, "stop")
        local: dict[str, Any] = {"start": ("start", f"n{d}"), "end": ("stop", f"n{d}")}
    elif step > 1 and shape[d] == count * step:
        pieces.unit(d, [count])
        pieces.sizes["s"] = step
        pieces.whole.add("s")
        outs = (f"n{d}",) if count > 1 else ()
        ins = (*outs, "s")
        local = {"end": (f"n{d}", "s")}
    else:
        pieces.unit(d, [1])
        ins, outs, local = pieces.piece(d, shape[d], "i"), pieces.piece(d, count, "o"), {}
    return pieces, pieces.with_dim(d, ins), pieces.with_dim(d, outs), local


@computed("aten.slice.Tensor")
def _slice(node: fx.Node) -> Rule:
    pieces, whole, part, local = _sliced(node, shape_of(tensor_inputs(node)[0]))
    return pieces.rule([whole], [part], ((0,),), local)


@computed("aten.slice_scatter.default")
def _slice_scatter(node: fx.Node) -> Rule:
    """Rows of x replaced by y: linear in both together."""
    pieces, whole, part, local = _sliced(node, shape_of(node))
    return pieces.rule([whole, part], [whole], ((0,), (1,)), local)


@computed("aten.constant_pad_nd.default", "aten.pad.default")
def _pad(node: fx.Node) -> Rule:
    """Padding with zero is linear, as is repeating the tensor's own rows; with another number it is not."""
    shape, out, given = shape_of(tensor_inputs(node)[0]), shape_of(node), call_arguments(node)
    fills = given.get("mode", "constant") == "constant"
    pieces = Pieces(shape)
    ins, outs = list(pieces.dims), list(pieces.dims)
    local: list[tuple[str, ...]] = []
    for k in range(len(given["pad"]) // 2):
        d = len(shape) - 1 - k
        before, after = given["pad"][2 * k : 2 * k + 2]
        if before == after == 0:
            local += [(f"zero{d}",)] * 2
            pieces.sizes[f"zero{d}"] = 0
            continue
        pieces.unit(d, [before, after, shape[d]] if fills else [1])
        ins[d], outs[d] = pieces.piece(d, shape[d], f"i{d}"), pieces.piece(d, out[d], f"o{d}")
        pieces.piece(d, before, f"before{d}")
        pieces.piece(d, after, f"after{d}")
        local += [(f"before{d}", f"n{d}"), (f"after{d}", f"n{d}")]
    form = ((0,),) if not fills or given.get("value") in (None, 0) else ()
    return pieces.rule([tuple(ins)], [tuple(outs)], form, {"pad": tuple(local)}, filled=not fills)


@computed("aten.roll.default")
def _roll(node: fx.Node) -> Rule:
    """Without dimensions it rolls the flattened tensor: all of it stays whole."""
    shape, given = shape_of(tensor_inputs(node)[0]), call_arguments(node)
    dims, shifts = given.get("dims") or [], given["shifts"]
    pieces = Pieces(shape)
    if not dims or len({d % len(shape) for d in dims}) < len(dims):
        pieces.whole |= set(pieces.sizes)
        return pieces.rule([pieces.dims], [pieces.dims], ((0,),))
    same, local = list(pieces.dims), []
    for d, shift in zip((d % len(shape) for d in dims), shifts, strict=True):
        pieces.unit(d, [shift % shape[d], shape[d]])
        same[d] = pieces.piece(d, shape[d], f"i{d}")
        pieces.piece(d, shift % shape[d], f"shift{d}")
        local.append((f"shift{d}", f"n{d}"))
    return pieces.rule([tuple(same)], [tuple(same)], ((0,),), {"shifts": tuple(local)})


@computed("aten.flip.default")
def _flip(node: fx.Node) -> Rule:
    shape = shape_of(node)
    dims = plain_dims(shape)
    touched = {f for d in call_arguments(node)["dims"] for f in dims[d % len(shape)]}
    return Rule((dims,), (dims,), plain_sizes(shape), ((0,),), whole=frozenset(touched))
