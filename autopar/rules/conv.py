"""Convolution, pooling and interpolation: which positions go with which."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from autopar.errors import RuleError
from autopar.layout import Shape
from autopar.program import call_arguments, place, shape_of, tensor_inputs
from autopar.rules.notation import Algorithm, Dims, Rule
from autopar.rules.registry import algorithm, algorithms_of, computed
from autopar.runtime.kernels import halo


@dataclass(frozen=True, slots=True)
class _Positions:
    """One spatial dimension of input and output, in factors; ``image``: (input factor, output factor) under a halo."""

    ins: tuple[str, ...]
    outs: tuple[str, ...]
    sizes: dict[str, int]
    whole: tuple[str, ...] = ()
    image: tuple[str, str] | None = None


def _positions(i: int, y: int, z: int, window: int, stride: int, dilation: int, padding: Any) -> _Positions:
    """Dimension ``i`` of ``y`` positions, ``z`` after the window.

    A window of one position keeps them; windows side by side are a compound ``(z w)``, of which z may be split; others
    overlap or leave rows out: ``y -> z``, both whole, split only with rows that neighbours hold.
    """
    ys, ws, zs = f"y{i}", f"w{i}", f"z{i}"
    plain = padding in (0, "valid")
    if window == stride == 1 and (plain or padding == "same"):
        return _Positions((ys,), (ys,), {ys: y, ws: 1})
    if plain and window == stride and dilation == 1 and y == z * window:
        return _Positions((zs, ws), (zs,), {zs: z, ws: window}, (ws,))
    image = (ys, zs) if y > 1 and z > 1 else None
    return _Positions((ys,), (zs,), {ys: y, ws: window, zs: z}, (ys, ws, zs), image)


def _kept(dims: Sequence[tuple[str, ...]], sizes: dict[str, int]) -> Dims:
    return tuple(tuple(f for f in d if sizes[f] > 1) for d in dims)


def _with_halo(node: fx.Node, images: dict[str, str]) -> tuple[Algorithm, ...]:
    """The op's algorithms, for those of its positions that have an image."""
    found = (replace(a, splits=tuple(f for f in a.splits if f in images)) for a in algorithms_of(node))
    return tuple(a for a in found if a.splits)


def _each(value: Any, count: int) -> list[Any]:
    """A window's argument for each spatial dimension."""
    if isinstance(value, (int, str)):
        return [value] * count
    return list(value) * (count if len(value) == 1 else 1)


_CONVS = tuple(f"aten.conv{d}d.{kind}" for kind in ("default", "padding") for d in (1, 2, 3))


@computed(*_CONVS)
def _conv(node: fx.Node) -> Rule:
    """``n (g c) y x, (g o) c r s, (g o) -> n (g o) y' x'``; sum c."""
    inputs, given = tensor_inputs(node), call_arguments(node)
    x, w, out = shape_of(inputs[0]), shape_of(inputs[1]), shape_of(node)
    space = len(w) - 2
    if len(x) != len(w):
        raise RuleError("a convolution without a batch has no rule", where=place(node), hint="x.unsqueeze(0)")
    options = zip(
        *(_each(given.get(n, d), space) for n, d in (("stride", 1), ("dilation", 1), ("padding", 0))), strict=True
    )
    positions = [
        _positions(i, x[2 + i], out[2 + i], w[2 + i], stride, dilation, padding)
        for i, (stride, dilation, padding) in enumerate(options)
    ]
    groups = given.get("groups", 1)
    return _linear_in_window(node, positions, {"n": x[0], "g": groups, "c": w[1], "o": w[0] // groups}, False)


@computed("aten.conv_transpose1d.default", "aten.conv_transpose2d.input", "aten.conv_transpose3d.input")
def _conv_transpose(node: fx.Node) -> Rule:
    """``n (g c) y x, (g c) o r s, (g o) -> n (g o) y' x'``; sum c; positions whole unless the window is one."""
    inputs, given = tensor_inputs(node), call_arguments(node)
    x, w, out = shape_of(inputs[0]), shape_of(inputs[1]), shape_of(node)
    if len(x) != len(w):
        raise RuleError("a convolution without a batch has no rule", where=place(node), hint="x.unsqueeze(0)")
    positions = []
    for i in range(len(w) - 2):
        stride, dilation = (_each(given.get(n, 1), len(w) - 2)[i] for n in ("stride", "dilation"))
        found = _positions(i, x[2 + i], out[2 + i], w[2 + i], stride, dilation, 0 if x[2 + i] == out[2 + i] else None)
        if found.outs == found.ins:
            positions.append(found)
        else:
            y, k, z = f"y{i}", f"w{i}", f"z{i}"
            positions.append(_Positions((y,), (z,), {y: x[2 + i], k: w[2 + i], z: out[2 + i]}, (y, k, z)))
    groups = given.get("groups", 1)
    return _linear_in_window(node, positions, {"n": x[0], "g": groups, "c": w[0] // groups, "o": w[1]}, True)


def _linear_in_window(node: fx.Node, positions: list[_Positions], sizes: dict[str, int], transposed: bool) -> Rule:
    """The rule of a convolution with these positions; its weight is ``(g o) c ...``, or ``(g c) o ...`` transposed."""
    for p in positions:
        sizes = sizes | p.sizes
    weight = (("g", "c"), ("o",)) if transposed else (("g", "o"), ("c",))
    window = tuple((f"w{i}",) for i in range(len(positions)))
    ins = [(("n",), ("g", "c"), *(p.ins for p in positions)), (*weight, *window)]
    if len(tensor_inputs(node)) == 3:
        ins.append((("g", "o"),))
    outs = (("n",), ("g", "o"), *(p.outs for p in positions))
    kept = {f for f, n in sizes.items() if n > 1}
    images = dict(p.image for p in positions if p.image is not None)
    taps = math.prod(sizes[f"w{i}"] for i in range(len(positions)))
    spread = tuple(f for p in positions for f in (p.ins if transposed else p.outs))
    return Rule(
        tuple(_kept(d, sizes) for d in ins),
        (_kept(outs, sizes),),
        sizes,
        ((0, 1),) if len(ins) == 2 else ((0, 1), (2,)),
        sums=frozenset({"c"}) & kept,
        whole=frozenset(f for p in positions for f in p.whole) & kept,
        size_args={"groups": ("g",)},
        saves=(("in", 0), ("in", 1)),
        flops=((2.0 * taps, ("n", "g", "o", "c", *spread)),),
        algorithms=_with_halo(node, images),
        images=images,
        filled=True,  # an empty contraction comes out with no channels at all, other empty operands raise
    )


for _op in _CONVS:
    algorithm(_op, "halo", splits="y0 y1 y2", run=halo.conv_halo)


# ------------------------------------------------------------------------------------------------ pooling

_MAX = ("aten.max_pool1d.default", "aten.max_pool2d.default", "aten.max_pool3d.default")
_AVG = ("aten.avg_pool1d.default", "aten.avg_pool2d.default", "aten.avg_pool3d.default")
_HALO = (
    *(halo.max_pool1d_halo, halo.max_pool2d_halo, halo.max_pool3d_halo),
    *(halo.avg_pool1d_halo, halo.avg_pool2d_halo, halo.avg_pool3d_halo),
)
_INDICES = (
    "aten.max_pool1d_with_indices.default",
    "aten.max_pool2d_with_indices.default",
    "aten.max_pool3d_with_indices.default",
)
_ADAPTIVE = tuple(f"aten.adaptive_{kind}_pool{d}d.default" for kind in ("avg", "max") for d in (1, 2, 3))


def _pooling(node: fx.Node, positions: list[_Positions], **more: Any) -> Rule:
    """``... y x -> ... y' x'``; averages are linear, a maximum is not.  Indices of maxima go as the maxima."""
    x = shape_of(tensor_inputs(node)[0])
    lead = tuple((f"d{i}",) for i in range(len(x) - len(positions)))
    sizes = {f"d{i}": n for i, n in enumerate(x[: len(lead)])}
    for p in positions:
        sizes |= p.sizes
    outs = _kept((*lead, *(p.outs for p in positions)), sizes)
    return Rule(
        (_kept((*lead, *(p.ins for p in positions)), sizes),),
        (outs,) if isinstance(node.meta["val"], torch.Tensor) else (outs, outs),
        sizes,
        ((0,),) if "avg" in str(node.target) else (),
        whole=frozenset(f for p in positions for f in p.whole if sizes[f] > 1),
        saves=(("in", 0),),
        filled=True,
        **more,
    )


def _first_shape(node: fx.Node) -> Shape:
    value = node.meta["val"]
    return tuple((value if isinstance(value, torch.Tensor) else value[0]).shape)


@computed(*_MAX, *_AVG)
def _pool(node: fx.Node) -> Rule:
    given = call_arguments(node)
    x, out = shape_of(tensor_inputs(node)[0]), shape_of(node)
    space = int(str(node.target).split("pool")[1][0])
    window = _each(given["kernel_size"], space)
    stride = _each(given.get("stride") or window, space)
    dilation, padding = (_each(given.get(n, d), space) for n, d in (("dilation", 1), ("padding", 0)))
    positions = [
        _positions(i, x[i - space], out[i - space], window[i], stride[i], dilation[i], padding[i]) for i in range(space)
    ]
    images = dict(p.image for p in positions if p.image is not None)
    return _pooling(node, positions, algorithms=_with_halo(node, images), images=images)


for _op, _run in zip(_MAX + _AVG, _HALO, strict=True):
    algorithm(_op, "halo", splits="y0 y1 y2", run=_run)


@computed(*_INDICES)
def _pool_with_indices(node: fx.Node) -> Rule:
    """Indices speak of all positions, so positions stay whole."""
    x, out = shape_of(tensor_inputs(node)[0]), _first_shape(node)
    space = int(str(node.target).split("pool")[1][0])
    return _pooling(node, [_whole(i, x[i - space], out[i - space]) for i in range(space)])


def _whole(i: int, y: int, z: int) -> _Positions:
    return _Positions((f"y{i}",), (f"z{i}",), {f"y{i}": y, f"z{i}": z}, (f"y{i}", f"z{i}"))


@computed(*_ADAPTIVE)
def _adaptive_pool(node: fx.Node) -> Rule:
    """Windows of one size stand side by side where the positions divide; others overlap, and positions stay whole."""
    x, out = shape_of(tensor_inputs(node)[0]), _first_shape(node)
    space = int(str(node.target).split("pool")[1][0])
    positions = []
    for i in range(space):
        y, z = x[i - space], out[i - space]
        tiled = y % z == 0 and isinstance(node.meta["val"], torch.Tensor)
        positions.append(_positions(i, y, z, y // z, y // z, 1, 0) if tiled else _whole(i, y, z))
    return _pooling(node, positions, size_args={"output_size": tuple(p.outs for p in positions)})


# ------------------------------------------------------------------------------------------------ interpolation

_NEAREST = tuple(f"aten.{name}{d}d.vec" for name in ("upsample_nearest", "_upsample_nearest_exact") for d in (1, 2, 3))
_SMOOTH = (
    "aten.upsample_linear1d.vec",
    "aten.upsample_bilinear2d.vec",
    "aten.upsample_bicubic2d.vec",
    "aten.upsample_trilinear3d.vec",
    "aten._upsample_bilinear2d_aa.vec",
    "aten._upsample_bicubic2d_aa.vec",
)


@computed(*_NEAREST, *_SMOOTH)
def _upsample(node: fx.Node) -> Rule:
    """``n c y x -> n c (y r) (x s)`` where every position is repeated; else positions are whole.  Linear."""
    x, out, given = shape_of(tensor_inputs(node)[0]), shape_of(node), call_arguments(node)
    space = len(x) - 2
    scales = given.get("scale_factors") or [None] * space
    ins: list[tuple[str, ...]] = [("n",), ("c",)]
    outs = list(ins)
    sizes, whole = {"n": x[0], "c": x[1]}, []
    for i, scale in enumerate(scales):
        y, z = x[2 + i], out[2 + i]
        repeats = str(node.target) in _NEAREST and z % y == 0 and scale in (None, z // y)
        ins.append((f"y{i}",))
        outs.append((f"y{i}", f"r{i}") if repeats else (f"z{i}",))
        sizes |= {f"y{i}": y} | ({f"r{i}": z // y} if repeats else {f"z{i}": z})
        whole += [f"r{i}"] if repeats else [f"y{i}", f"z{i}"]
    kept = frozenset(f for f in whole if sizes[f] > 1)
    local = {"output_size": tuple(outs[2:])} if given.get("output_size") is not None else {}
    return Rule((_kept(ins, sizes),), (_kept(outs, sizes),), sizes, ((0,),), whole=kept, size_args=local, filled=True)
