"""A call again, with other sizes: where two factors are of one size, a rule that takes one for the other is wrong."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from calls import Call, single_call
from torch import Tensor
from torch.nn import Buffer

from autopar.passes.emit import RNG, local_arguments, local_sizes
from autopar.rules.derive import Strategy
from autopar.rules.notation import Dims, Rule
from autopar.runtime.kernels.parts import Part

LARGEST = 3000  # elements of one tensor


def resized(call: Call, factor: str, other: str) -> Call | None:
    """The call where two factors have one size: the larger of the two, so that indices stay in range, or the smaller.

    Sizes among the arguments follow as far as the rule names them.  None where torch or the rule refuses such a call.
    """
    rule = call.op.rule
    for size in sorted((rule.sizes[factor], rule.sizes[other]), reverse=True):
        try:
            made = _resized(call, replace(rule, sizes={**rule.sizes, factor: size, other: size}))
        except Exception:  # torch's own, of any kind
            continue
        if made.op.rule.sizes.get(factor) == made.op.rule.sizes.get(other):
            return made
    return None


def _resized(call: Call, rule: Rule) -> Call:
    node, unsplit = call.op.node, Strategy((), (), ())
    overrides = local_sizes(rule.size_args, rule, unsplit, (), ())
    for name, sizes in local_sizes(rule.part_args, rule, unsplit, (), ()).items():
        overrides[name] = [Part(n) for n in sizes]
    inputs = [
        _spread(x, dims, rule) if flows else Buffer(_spread(x, dims, rule))
        for x, dims, flows in zip(call.inputs, rule.ins, call.op.type.differentiable_ins, strict=True)
    ]
    rng = next((n for n in node.all_input_nodes if n.name == RNG), None)
    args, kwargs = local_arguments(node, iter(inputs), overrides, {RNG: rng})
    return single_call(node.target, args, kwargs)  # type: ignore[arg-type]


def _spread(x: Tensor, dims: Dims, rule: Rule) -> Tensor:
    """``x`` repeated or cut to its new sizes; each number of its own, but for whole ones, which may be indices."""
    shape = tuple(math.prod(rule.sizes[f] for f in names) for names in dims)
    if shape == tuple(x.shape):
        return x
    if math.prod(shape) > LARGEST:
        raise ValueError("a tensor too large to prove with")
    for d, size in enumerate(shape):
        x = x.index_select(d, torch.arange(size) % x.shape[d])
    if not (x.is_floating_point() or x.is_complex()):
        return x
    scale = torch.rand(shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return x * (0.5 + 0.5 * scale).to(x.dtype)
