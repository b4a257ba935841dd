"""Pointwise ops: every op with torch's own tag has a rule by broadcasting; here stands in what they are linear."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopar.layout import Shape
from autopar.program import call_arguments, is_tensor, shape_of, target_name, tensor_inputs
from autopar.rules.notation import Dims, Rule
from autopar.rules.registry import algorithms_of, computed

_PRODUCTS = {"aten.mul.Tensor", "aten.mul.Scalar"}
_SUMS = {"aten.add.Tensor", "aten.sub.Tensor", "aten.lerp.Scalar"}
_QUOTIENTS = {"aten.div.Tensor", "aten.div.Scalar"}
_LINEAR = {
    "aten.neg.default",
    "aten.positive.default",
    "aten.deg2rad.default",
    "aten.rad2deg.default",
    "aten.conj_physical.default",
    "aten._conj_physical.default",
    "aten.clone.default",
    "aten.contiguous.default",
    "aten.alias.default",
}

# what autograd keeps for backward, by position of input or "out"; ops that are not listed and not linear keep inputs
_KEEPS_OUTPUT = {
    "aten.relu.default",
    "aten.tanh.default",
    "aten.sigmoid.default",
    "aten.exp.default",
    "aten.rsqrt.default",
}


def broadcast_dims(shape: Shape, out: Shape) -> Dims:
    """Dimensions of an operand in the factors d0, d1, ... of the output; unit ones have none."""
    offset = len(out) - len(shape)
    return tuple(() if n == 1 else (f"d{i + offset}",) for i, n in enumerate(shape))


def pointwise_rule(
    node: fx.Node, form: tuple[tuple[int, ...], ...], saves: tuple[tuple[str, int], ...], **more: Any
) -> Rule:
    """Rule of an op that works element by element on its broadcast inputs."""
    out = shape_of(node)
    ins = tuple(broadcast_dims(shape_of(v), out) for v in tensor_inputs(node))
    sizes = {f"d{i}": n for i, n in enumerate(out) if n != 1}
    return Rule(ins, (broadcast_dims(out, out),), sizes, form, saves=saves, algorithms=algorithms_of(node), **more)


@computed("pointwise")
def _pointwise(node: fx.Node) -> Rule:
    name = target_name(node)
    inputs = tensor_inputs(node)
    keeps = tuple(("in", i) for i in range(len(inputs)))
    if name in _PRODUCTS:
        return pointwise_rule(node, (tuple(range(len(inputs))),), keeps if len(inputs) > 1 else ())
    if name in _SUMS:
        return pointwise_rule(node, ((0,), (1,)) if len(inputs) == 2 else (), ())
    if name in _QUOTIENTS and "rounding_mode" not in call_arguments(node):
        # parts over zero are infinities of both signs, which add up to nan where the sum over zero is one infinity
        one = len(inputs) == 1 or not shape_of(inputs[1])
        return pointwise_rule(node, ((0,),) if one else (), keeps if len(inputs) > 1 else ())
    if name in _LINEAR:
        return pointwise_rule(node, ((0,),), ())
    return pointwise_rule(node, (), (("out", 0),) if name in _KEEPS_OUTPUT else keeps)


@computed("aten.clone.default", "aten.contiguous.default", "aten.alias.default")
def _copies(node: fx.Node) -> Rule:
    return pointwise_rule(node, ((0,),), ())


@computed("aten.rsub.Tensor", "aten.complex.default")
def _sums(node: fx.Node) -> Rule:
    return pointwise_rule(node, ((0,), (1,)), ())


@computed("aten.hardswish.default", "aten.log_sigmoid.default", "aten._prelu_kernel.default")
def _untagged(node: fx.Node) -> Rule:
    """Pointwise without torch's tag."""
    return pointwise_rule(node, (), tuple(("in", i) for i in range(len(tensor_inputs(node)))))


@computed("aten.glu.default")
def _glu(node: fx.Node) -> Rule:
    """``... (t c) -> ... c``: of the two halves every rank holds the same share."""
    given, shape = call_arguments(node), shape_of(node)
    d = given.get("dim", -1) % len(shape)
    outs = broadcast_dims(shape, shape)
    ins = (*outs[:d], ("t", *outs[d]), *outs[d + 1 :])
    sizes = {f"d{i}": n for i, n in enumerate(shape) if n != 1} | {"t": 2}
    return Rule((ins,), (outs,), sizes, whole=frozenset("t"), saves=(("in", 0),))


@computed("aten.to.dtype")
def _cast(node: fx.Node) -> Rule:
    """A cast to a type that can hold every value is linear; to fewer bits it rounds, and rounding is not."""
    source, target = tensor_inputs(node)[0].meta["val"].dtype, node.meta["val"].dtype
    wider = source.is_floating_point and target.is_floating_point and torch.promote_types(source, target) == target
    return pointwise_rule(node, ((0,),) if wider else (), ())


@computed("aten.where.self", "aten.where.ScalarOther", "aten.where.ScalarSelf", "aten.where.Scalar")
def _where(node: fx.Node) -> Rule:
    """Linear in both branches together, where no branch is a number but zero."""
    given = call_arguments(node)
    branches = [given["self"], given["other"]]
    linear = all(is_tensor(b) or b == 0 for b in branches)
    form = tuple((k + 1,) for k in range(sum(map(is_tensor, branches)))) if linear else ()
    return pointwise_rule(node, form, (("in", 0),))


@computed("aten.masked_fill.Scalar", "aten.masked_fill.Tensor")
def _masked_fill(node: fx.Node) -> Rule:
    """Filling with zero is linear in the filled tensor; with a tensor's value, in both together."""
    value = call_arguments(node)["value"]
    form = ((0,), (2,)) if is_tensor(value) else ((0,),) if value == 0 else ()
    return pointwise_rule(node, form, (("in", 1),))


@computed(
    *(f"aten.__{name}__.{kind}" for name in ("and", "or", "xor") for kind in ("Tensor", "Scalar")),
    "aten.detach.default",
    "aten.floor_divide.default",
)
def _not_linear(node: fx.Node) -> Rule:
    return pointwise_rule(node, (), ())
