"""Attention."""

from __future__ import annotations

from torch import fx

from autopar.errors import RuleError
from autopar.layout import Shape
from autopar.program import call_arguments, is_tensor, place, shape_of
from autopar.rules.derive import Choice, OpType, is_paired
from autopar.rules.notation import Dims, Rule, Traffic
from autopar.rules.registry import algorithm, algorithms_of, computed
from autopar.runtime.kernels.ring import ring_attention, ring_scaled_dot_product_attention


def _unit(dims: Dims, shape: Shape) -> Dims:
    return tuple(() if n == 1 else f for f, n in zip(dims, shape, strict=True))


@computed("aten.scaled_dot_product_attention.default", "autopar.attention")
def _attention(node: fx.Node) -> Rule:
    """``b h s e, b h t e, b h t v, mask -> b h s v``, linear in v.

    With grouped queries ``b (h r) s e, b h t e, b h t v, mask -> b (h r) s v``.  A ring needs a mask that tells keys
    apart, or none: it could not say whether one that has a single column is cut as the keys are.
    """
    given = call_arguments(node)
    q, k, v = (shape_of(given[n]) for n in ("query", "key", "value"))
    if len(q) != 4:
        raise RuleError("attention needs [batch, heads, rows, width]", where=place(node), got=f"{list(q)}")
    sizes = {"b": q[0], "h": k[1], "r": q[1] // k[1], "s": q[2], "e": q[3], "t": k[2], "v": v[3]}
    heads = ("h", "r") if sizes["r"] > 1 else ("h",)
    ins: list[Dims] = [
        (("b",), heads, ("s",), ("e",)),
        (("b",), ("h",), ("t",), ("e",)),
        (("b",), ("h",), ("t",), ("v",)),
    ]
    ins = [_unit(d, s) for d, s in zip(ins, (q, k, v), strict=True)]
    mask = given.get("attn_mask", given.get("mask"))
    if mask is not None and is_tensor(mask):
        shape = shape_of(mask)
        full: Dims = (("b",), heads, ("s",), ("t",))
        ins.append(_unit(full[4 - len(shape) :], shape))
    outs = (_unit((("b",), heads, ("s",), ("v",)), (q[0], q[1], q[2], v[3])),)
    whole = {"e", "t"}
    if given.get("is_causal") and "dims" not in given:
        whole.add("s")
    sizes = {f: n for f, n in sizes.items() if n > 1}
    parts = {"dims": (("b",), heads, ("s",), ("t",))} if "dims" in given else {}
    half = 0.5 if given.get("is_causal") else 1.0
    group = ("b", "h", "r", "s", "t")
    drops = "dims" not in given and bool(given.get("dropout_p"))  # by torch's own random numbers, unlike on every rank
    may_travel = not drops and all(("t",) in dims for dims in ins[3:])
    return Rule(
        tuple(ins),
        outs,
        {**dict.fromkeys(("b", "h", "r", "s", "e", "t", "v"), 1), **sizes},
        ((2,),),
        whole=frozenset(f for f in whole if f in sizes),
        part_args=parts,
        saves=(("in", 0), ("in", 1), ("in", 2), ("out", 0)),
        flops=((2 * half, (*group, "e")), (2 * half, (*group, "v"))),
        algorithms=algorithms_of(node) if may_travel else (),
        # torch leaves a mask out of the graph where nothing is attended to: no gradient would come from that rank
        filled=mask is not None and is_tensor(mask) and mask.meta["val"].is_floating_point(),
        causal="s" if given.get("is_causal") and "s" in sizes else "",
    )


def _ring_traffic(op: OpType, choice: Choice, n: int) -> list[Traffic]:
    """What is cut along the keys goes round, forward and backward; its gradient once all the way, home included."""
    again = n - 1 if any(op.differentiable_outs) else 0
    return [
        Traffic("permute", ("in", i), n - 1, again + n * flows)
        for i, (dims, flows) in enumerate(zip(op.rule.ins, op.differentiable_ins, strict=True))
        if is_paired(dims, choice)
    ]


for _op, _run in (
    ("aten.scaled_dot_product_attention.default", ring_scaled_dot_product_attention),
    ("autopar.attention", ring_attention),
):
    algorithm(_op, "ring", splits="s/t", run=_run, alike=True, traffic=_ring_traffic, overlaps=True)
