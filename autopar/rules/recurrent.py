"""Recurrent layers: examples may be split, time and width may not."""

from __future__ import annotations

from typing import Any

from torch import fx

from autopar.errors import RuleError
from autopar.program import call_arguments, is_tensor, place, shape_of
from autopar.rules.notation import Dims, Rule
from autopar.rules.registry import computed


@computed("aten.lstm.input", "aten.gru.input", "aten.rnn_tanh.input", "aten.rnn_relu.input")
def _recurrent(node: fx.Node) -> Rule:
    """``b _ _, _ b _, ... -> b _ _, _ b _``: one example after the other, or time first."""
    given = call_arguments(node)
    if given.get("dropout", 0) and given.get("train"):
        raise RuleError(
            "dropout between recurrent layers has no rule",
            where=place(node),
            expected="dropout=0",
            got=f"dropout={given['dropout']}",
            hint="write the layers one by one, with nn.Dropout between them",
        )
    x = given["input"]
    if len(shape_of(x)) != 3:
        raise RuleError("a recurrent layer without a batch has no rule", where=place(node), hint="x.unsqueeze(0)")
    sizes: dict[str, int] = {}

    def dims(shape: tuple[int, ...], batch: int | None) -> Dims:
        out: list[tuple[str, ...]] = []
        for d, n in enumerate(shape):
            name = "b" if d == batch else f"_{len(sizes)}"
            sizes[name] = n
            out.append((name,) if n > 1 else ())
        return tuple(out)

    first = 0 if given["batch_first"] else 1
    state = given["hx"] if isinstance(given["hx"], (list, tuple)) else [given["hx"]]
    weights: Any = given["params"]
    ins = [dims(shape_of(x), first), *(dims(shape_of(h), 1) for h in state)]
    ins += [dims(shape_of(w), None) for w in weights if is_tensor(w)]
    outs = tuple(dims(tuple(v.shape), first if k == 0 else 1) for k, v in enumerate(node.meta["val"]))
    used = {f for t in (*ins, *outs) for d in t for f in d}
    whole = frozenset(used - {"b"})
    time, width = shape_of(x)[1 - first], sum(n * m for n, m in (shape_of(w) for w in weights if len(shape_of(w)) == 2))
    return Rule(
        tuple(ins),
        outs,
        sizes,
        whole=whole,
        saves=(("in", 0), ("out", 0)),
        flops=((2.0 * time * width, ("b",)),),
        filled=True,
    )
