"""Pictures looked up at points of a grid."""

from __future__ import annotations

from torch import fx

from autopar.program import args_of, shape_of, tensor_inputs
from autopar.rules.notation import Dims, Rule
from autopar.rules.registry import computed, rule

# linear in the picture, of which any position may be asked for; an interpolation of two points is not linear in these
rule("aten.grid_sampler.default", "n c ..., n p q _ -> n c p q", args="x g", form="x", whole="...", saves="x g")
rule("aten.grid_sampler_2d.default", "n c y x, n p q _ -> n c p q", args="x g", form="x", whole="y x", saves="x g")


def _kept(dims: Dims, sizes: dict[str, int]) -> Dims:
    return tuple(tuple(f for f in d if sizes[f] > 1) for d in dims)


@computed("aten.affine_grid_generator.default")
def _affine_grid(node: fx.Node) -> Rule:
    """``n i j -> n y x i``: linear in the matrices; positions are fractions of the whole, so they stay whole."""
    theta, out, size = shape_of(tensor_inputs(node)[0]), shape_of(node), args_of(node)[1]
    space = [f"y{i}" for i in range(len(size) - 2)]
    sizes = {"n": theta[0], "i": theta[1], "j": theta[2], "c": size[1]} | dict(zip(space, out[1:-1], strict=True))
    ins, outs = (("n",), ("i",), ("j",)), (("n",), *((f,) for f in space), ("i",))
    local = {"size": (("n",), ("c",), *((f,) for f in space))}
    whole = frozenset(f for f in ("i", "j", *space) if sizes[f] > 1)
    return Rule((_kept(ins, sizes),), (_kept(outs, sizes),), sizes, ((0,),), whole=whole, size_args=local)
