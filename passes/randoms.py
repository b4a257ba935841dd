"""Random ops by name: what they draw is a function of (seed, step, salt, position), which no plan changes.

``salt`` is the place of the op among the program's random ops.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopar.errors import CaptureError, RuleError
from autopar.passes.rewrite import argument, calls, new_node, renamed
from autopar.program import Program, args_of, is_random, place, shape_of, target_name
from autopar.rules.registry import has_rule
from autopar.runtime.kernels.attention import attention
from autopar.runtime.kernels.dropout import dropout, random_normal, random_uniform
from autopar.runtime.kernels.parts import Part

aten = torch.ops.aten

_UNIFORM = (
    aten.rand.default,
    aten.rand_like.default,
    aten.uniform.default,
    aten.bernoulli.default,
    aten.bernoulli.p,
    aten.exponential.default,
    aten.randint.default,
    aten.randint.low,
    aten.randint_like.default,
    aten.randint_like.low_dtype,
)
_NORMAL = (
    aten.randn.default,
    aten.randn_like.default,
    aten.normal_functional.default,
    aten.normal.Tensor_float,
    aten.normal.Tensor_Tensor,
    aten.normal.float_Tensor,
)
_OTHERS = (aten.dropout.default, aten.scaled_dot_product_attention.default)


def name_random_ops(program: Program) -> None:
    """``dropout(x, p, True)`` --> ``dropout(x, p, rng, salt)``; attention that is causal or drops weights likewise.

    ``rand([3, 4])`` --> ``random_uniform([3, 4], rng, salt)``, and what else is drawn is made of that.
    """
    salt = 0
    for node in calls(program.graph, *_OTHERS, *_UNIFORM, *_NORMAL):
        with program.graph.inserting_before(node):
            new: fx.Node | None
            if node.target is aten.dropout.default:
                new = _dropout(program, node, salt)
            elif node.target is aten.scaled_dot_product_attention.default:
                new = _attention(program, node, salt)
            else:
                new = _drawn(program, node, salt)
        if new is not None:
            salt += 1
            renamed(program, node, new)
    for node in program.graph.nodes:
        if node.op == "call_function" and is_random(node) and not has_rule(target_name(node)):
            raise RuleError(
                f"no rule for {target_name(node)}, which draws random numbers",
                where=place(node),
                expected="dropout, rand, randn, bernoulli, randint, or what is made of them",
                hint="draw the numbers outside the model and pass them as an input",
            )


def _refuse_evaluation(program: Program, node: fx.Node, what: str, expected: str) -> None:
    if not program.training:
        raise CaptureError(
            f"{what} in evaluation has no rule",
            where=place(node),
            expected=expected,
            got=f"{target_name(node)} in a model in evaluation mode",
        )


def _dropout(program: Program, node: fx.Node, salt: int) -> fx.Node:
    expected = "F.dropout(..., training=self.training), or model.train()"
    _refuse_evaluation(program, node, "a dropout that is on", expected)
    dims = [Part(n) for n in shape_of(node)]
    args = (args_of(node)[0], argument(node, "p"), program.nodes["rng"], salt)
    return new_node(program.graph, dropout, args, {"dims": dims}, like=node)


def _attention(program: Program, node: fx.Node, salt: int) -> fx.Node | None:
    """Of torch's op stays what is neither causal nor drops weights."""
    p = argument(node, "dropout_p") if program.training else 0.0
    causal = argument(node, "is_causal")
    if not p and not causal:
        return None
    q, k, v = args_of(node)[:3]
    mask, scale = argument(node, "attn_mask"), argument(node, "scale")
    dims = [Part(n) for n in (*shape_of(q)[:-1], shape_of(k)[-2])]
    args = (q, k, v, mask, causal, scale, p, program.nodes["rng"], salt)
    return new_node(program.graph, attention, args, {"dims": dims}, like=node)


def _drawn(program: Program, node: fx.Node, salt: int) -> fx.Node:
    """The op's numbers from uniform or normal ones of its shape."""
    _refuse_evaluation(program, node, "a random number", "model.train(), or numbers that are passed as an input")
    graph, value = program.graph, node.meta["val"]
    shape = shape_of(node)
    dtype = value.dtype if value.dtype.is_floating_point else torch.float32
    source = random_normal if node.target in _NORMAL else random_uniform
    args = (list(shape), dtype, value.device, program.nodes["rng"], salt)
    drawn = new_node(graph, source, args, {"dims": [Part(n) for n in shape]}, like=node)

    def call(target: Any, *args: Any) -> fx.Node:
        return new_node(graph, target, args, like=node)

    name = target_name(node).split(".")[1]
    if name == "bernoulli":
        p = argument(node, "p")
        below = call(aten.lt.Tensor, drawn, args_of(node)[0]) if p is None else call(aten.lt.Scalar, drawn, p)
        return call(aten.to.dtype, below, value.dtype)
    if name == "exponential":  # drawn is never 1
        negative = call(aten.log1p.default, call(aten.neg.default, drawn))
        return call(aten.div.Tensor, negative, -argument(node, "lambd"))
    if name == "uniform":
        low, high = argument(node, "from"), argument(node, "to")
        return call(aten.add.Tensor, call(aten.mul.Tensor, drawn, high - low), low)
    if name.startswith("randint"):
        low, high = argument(node, "low") or 0, argument(node, "high")
        scaled = call(aten.floor.default, call(aten.mul.Tensor, drawn, high - low))
        return call(aten.to.dtype, call(aten.add.Tensor, scaled, low), value.dtype)
    if name.startswith("normal"):
        mean, std = argument(node, "mean"), argument(node, "std")
        return call(aten.add.Tensor, call(aten.mul.Tensor, drawn, std), mean)
    return drawn
