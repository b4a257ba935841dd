"""Ops that look along a dimension: in order, for the largest, or as they add up.  It stays whole, the others pass."""

from __future__ import annotations

from torch import fx

from autopar.layout import Shape
from autopar.program import call_arguments, is_tensor, shape_of, target_name, tensor_inputs
from autopar.rules.notation import Algorithm, Dims, Rule
from autopar.rules.registry import computed
from autopar.rules.view import plain_dims, plain_sizes
from autopar.runtime.kernels.scan import cumsum_parts


def _outputs(node: fx.Node) -> list[Shape]:
    value = node.meta["val"]
    return [tuple(v.shape) for v in (value if isinstance(value, (list, tuple)) else [value])]


@computed(
    "aten.argmax.default",
    "aten.argmin.default",
    "aten.cummax.default",
    "aten.cummin.default",
    "aten.cumprod.default",
    "aten.kthvalue.default",
    "aten.logcumsumexp.default",
    "aten.max.dim",
    "aten.median.default",
    "aten.median.dim",
    "aten.min.dim",
    "aten.mode.default",
    "aten.nanmedian.default",
    "aten.nanmedian.dim",
    "aten.sort.default",
    "aten.sort.stable",
    "aten.topk.default",
)
def _along(node: fx.Node) -> Rule:
    """Along one dimension, or along all: outputs have it in another size, in size one, or not at all."""
    given, shape = call_arguments(node), shape_of(tensor_inputs(node)[0])
    last = any(name in target_name(node) for name in ("sort", "topk", "kthvalue", "mode"))
    d = given.get("dim", -1 if last else None)
    sizes = plain_sizes(shape)
    dims = plain_dims(shape)
    touched = set(range(len(shape))) if d is None or not shape else {d % len(shape)}
    whole = {f for i in touched for f in dims[i]}
    outs: list[Dims] = []
    for out in _outputs(node):
        if len(out) == len(shape):
            for i in touched:
                if out[i] not in (1, shape[i]):
                    sizes[f"k{i}"] = out[i]
                    whole.add(f"k{i}")
            kept = [f if i not in touched or out[i] == shape[i] else (f"k{i}",) for i, f in enumerate(dims)]
            outs.append(tuple(() if n == 1 else f for n, f in zip(out, kept, strict=True)))
        else:
            outs.append(tuple(f for i, f in enumerate(dims) if i not in touched))
    saves = (("out", len(outs) - 1), *([] if len(outs) > 1 else [("in", 0)]))
    return Rule((dims,), tuple(outs), sizes, whole=frozenset(whole), saves=saves)


@computed("aten.cumsum.default")
def _cumsum(node: fx.Node) -> Rule:
    """Linear; along its own dimension split by an algorithm."""
    shape = shape_of(node)
    dims = plain_dims(shape)
    own = dims[call_arguments(node)["dim"] % len(shape)] if shape else ()
    parts = (Algorithm("parts", own, cumsum_parts),) if own else ()
    return Rule((dims,), (dims,), plain_sizes(shape), ((0,),), whole=frozenset(own), algorithms=parts)


@computed("aten.histc.default")
def _histc(node: fx.Node) -> Rule:
    """Counts of the parts add up, where the bins do not depend on the values."""
    given, shape = call_arguments(node), shape_of(tensor_inputs(node)[0])
    bins = shape_of(node)
    sizes = plain_sizes(shape)
    counted = frozenset(sizes)
    fixed = given.get("min", 0) != given.get("max", 0)
    out: tuple[str, ...] = ("n",) if bins[0] > 1 else ()
    sizes["n"] = bins[0]
    whole = frozenset(out) | (frozenset() if fixed else counted)
    return Rule((plain_dims(shape),), ((out,),), sizes, sums=counted if fixed else frozenset(), whole=whole)


@computed("aten.one_hot.default")
def _one_hot(node: fx.Node) -> Rule:
    """A new dimension of classes, which is whole."""
    out = shape_of(node)
    dims = plain_dims(out)
    return Rule((dims[:-1],), (dims,), plain_sizes(out), whole=frozenset(dims[-1]))


_LISTS = {
    "aten.bucketize.Tensor": "self",
    "aten.searchsorted.Tensor": "self",
    "aten.isin.Tensor_Tensor": "elements",
}


@computed(*_LISTS)
def _placed(node: fx.Node) -> Rule:
    """Every value of one tensor compared with the whole of a list; searchsorted may have a list for each row."""
    given, out = call_arguments(node), shape_of(node)
    dims, sizes = plain_dims(out), plain_sizes(out)
    ins, whole = [], set()
    for name, value in given.items():
        if not is_tensor(value):
            continue
        if name == _LISTS[target_name(node)]:
            ins.append(dims)
            continue
        shape = shape_of(value)
        listed = tuple(() if n == 1 else (f"n{i}",) for i, n in enumerate(shape))
        sizes |= {f"n{i}": n for i, n in enumerate(shape)}
        shared = "searchsorted" in target_name(node) and len(shape) > 1
        ins.append((*dims[:-1], listed[-1]) if shared else listed)
        whole |= {f for d in ins[-1] for f in d if f.startswith("n")}
    return Rule(tuple(ins), (dims,), sizes, whole=frozenset(whole))
