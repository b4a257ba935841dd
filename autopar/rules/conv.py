"""Convolution and pooling; positions are whole until halo exchange is there."""

from __future__ import annotations

import math

from torch import fx

from autopar.program import call_arguments, shape_of, tensor_inputs
from autopar.rules.notation import Dims, Rule
from autopar.rules.registry import computed


@computed("aten.conv1d.default", "aten.conv2d.default", "aten.conv3d.default")
def _conv(node: fx.Node) -> Rule:
    """``n (g c) y x, (g o) c r s, (g o) -> n (g o) y' x'``; sum c; positions and the window whole."""
    inputs = tensor_inputs(node)
    groups = call_arguments(node).get("groups", 1)
    x, w, y = shape_of(inputs[0]), shape_of(inputs[1]), shape_of(node)
    space = len(x) - 2
    sizes = {"n": x[0], "g": groups, "c": w[1], "o": w[0] // groups}
    for name, shape in (("y", x), ("w", w), ("z", y)):
        sizes |= {f"{name}{i}": shape[2 + i] for i in range(space)}
    kept = {f: n for f, n in sizes.items() if n > 1}

    def dims(*names: tuple[str, ...]) -> Dims:
        return tuple(tuple(f for f in d if f in kept) for d in names)

    window = [(f"w{i}",) for i in range(space)]
    ins = [
        dims(("n",), ("g", "c"), *[(f"y{i}",) for i in range(space)]),
        dims(("g", "o"), ("c",), *window),
    ]
    if len(inputs) == 3:
        ins.append(dims(("g", "o")))
    whole = {f for f in kept if f[0] in "yzw"}
    if groups > 1:
        whole |= {"c", "o", "g"} & set(kept)  # splitting groups changes the op's own ``groups`` argument
    out = dims(("n",), ("g", "o"), *[(f"z{i}",) for i in range(space)])
    flops = ((2.0 * math.prod(w[2:]) * math.prod(y[2:]), ("n", "g", "o", "c")),)
    form = ((0, 1),) if len(inputs) == 2 else ((0, 1), (2,))
    return Rule(
        tuple(ins),
        (out,),
        sizes,
        form,
        sums=frozenset({"c"} & set(kept)) - whole,
        whole=frozenset(whole),
        saves=(("in", 0), ("in", 1)),
        flops=flops,
        filled=True,  # an empty contraction comes out with no channels at all, other empty operands raise
    )


@computed("aten.max_pool2d.default", "aten.avg_pool2d.default", "aten.adaptive_avg_pool2d.default")
def _pool(node: fx.Node) -> Rule:
    """``n c y x -> n c y' x'``: positions whole.  Averages are linear, a maximum is not."""
    x, y = shape_of(tensor_inputs(node)[0]), shape_of(node)
    lead = len(x) - 2
    sizes = {f"d{i}": n for i, n in enumerate(x[:lead]) if n > 1}
    common = tuple((f"d{i}",) if n > 1 else () for i, n in enumerate(x[:lead]))
    ins = tuple((f"y{i}",) if n > 1 else () for i, n in enumerate(x[lead:]))
    outs = tuple((f"z{i}",) if n > 1 else () for i, n in enumerate(y[lead:]))
    sizes |= {f"y{i}": n for i, n in enumerate(x[lead:])} | {f"z{i}": n for i, n in enumerate(y[lead:])}
    whole = frozenset(f for d in ins + outs for f in d)
    form = ((0,),) if "avg" in str(node.target) else ()
    return Rule((common + ins,), (common + outs,), sizes, form, whole=whole, saves=(("in", 0),), filled=True)
