"""Complex numbers: pairs of real ones, and ops between the two.  They are linear over the real numbers."""

from __future__ import annotations

from torch import fx

from autopar.program import call_arguments, shape_of, target_name, tensor_inputs
from autopar.rules.notation import Rule
from autopar.rules.pointwise import pointwise_rule
from autopar.rules.registry import computed
from autopar.rules.view import plain_dims, plain_sizes


@computed("aten.view_as_complex.default", "aten.view_as_real.default")
def _pairs(node: fx.Node) -> Rule:
    """``... 2 -> ...`` and back: a pair is whole."""
    shape = max(shape_of(tensor_inputs(node)[0]), shape_of(node), key=len)
    pairs = plain_dims(shape)
    numbers = pairs[:-1]
    ins, out = (pairs, numbers) if target_name(node) == "aten.view_as_complex.default" else (numbers, pairs)
    return Rule((ins,), (out,), plain_sizes(shape), ((0,),), whole=frozenset(pairs[-1]))


@computed("aten.resolve_conj.default", "aten.resolve_neg.default")
def _resolved(node: fx.Node) -> Rule:
    return pointwise_rule(node, ((0,),), ())


@computed("aten.polar.default")
def _polar(node: fx.Node) -> Rule:
    """Not taken as linear in the length: torch's gradient needs it to be positive, and parts of a sum are not."""
    return pointwise_rule(node, (), (("in", 0), ("in", 1)))


@computed("aten._fft_c2c.default", "aten._fft_r2c.default", "aten._fft_c2r.default")
def _fft(node: fx.Node) -> Rule:
    """Dimensions that are transformed are whole; one of them may change its size."""
    shape, out = shape_of(tensor_inputs(node)[0]), shape_of(node)
    dims, outs = list(plain_dims(shape)), list(plain_dims(shape))
    sizes, whole = plain_sizes(shape), set()
    for d in {d % len(shape) for d in call_arguments(node)["dim"]}:
        outs[d] = (f"k{d}",) if out[d] > 1 else ()
        sizes[f"k{d}"] = out[d]
        whole |= {*dims[d], *outs[d]}
    return Rule((tuple(dims),), (tuple(outs),), sizes, ((0,),), whole=frozenset(whole), filled=True)
