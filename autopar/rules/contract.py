"""Contractions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import fx

from autopar.errors import RuleError
from autopar.layout import Shape
from autopar.program import args_of, place, shape_of, target_name, tensor_inputs
from autopar.rules.derive import Choice, OpType
from autopar.rules.notation import Dims, Rule, Traffic, define
from autopar.rules.registry import algorithm, algorithms_of, computed, from_text, rule
from autopar.runtime.kernels.grouped import grouped_mm_fallback_parts, grouped_mm_parts
from autopar.runtime.kernels.summa import linear_stream

rule("aten.mm.default", "m k, k n -> m n", args="a b", form="a*b", sum="k", saves="a b", flops="2 m k n")
rule("aten.bmm.default", "b m k, b k n -> b m n", args="a b", form="a*b", sum="k", saves="a b", flops="2 b m k n")
rule(
    "aten.linear.default",
    "... k, n k, n -> ... n",
    args="x w b",
    form="x*w + b",
    sum="k",
    saves="x w",
    flops="2 ... k n",
)


def _streamed(op: OpType, choice: Choice, n: int) -> list[Traffic]:
    """The operand that is split along the contraction travels forward, again where the other one's gradient needs it,
    and its own gradient comes back."""
    own = 0 if choice.factor == "n" else 1
    wanted, travels = op.differentiable_ins[own], op.differentiable_ins[1 - own]
    sent = [Traffic("all-gather", ("in", own), 1, int(travels))]
    return [*sent, Traffic("reduce-scatter", ("in", own), 0, 1)] if wanted else sent


algorithm(
    "aten.linear.default",
    "stream",
    splits="b0/k b1/k b2/k n/k",
    run=linear_stream,
    traffic=_streamed,
    overlaps=True,
)
rule("aten.dot.default", "k, k -> ", args="a b", form="a*b", sum="k", saves="a b", flops="2 k")
rule("aten.mv.default", "m k, k -> m", args="a b", form="a*b", sum="k", saves="a b", flops="2 m k")

_BILINEAR = define(
    "aten.bilinear.default",
    "... i, ... j, o i j, o -> ... o",
    args="x y w b",
    form="x*y*w + b",
    sum="i j",
    saves="x y w",
    flops="2 ... o i j",
)


@computed("aten.bilinear.default")
def _bilinear(node: fx.Node) -> Rule:
    """``... i, ... j, o i j, o -> ... o``; torch's takes no empty operand."""
    return replace(from_text(node, _BILINEAR), filled=True)


@computed("aten.matmul.default")
def _matmul(node: fx.Node) -> Rule:
    """``... m k, ... k n -> ... m n``, the leading dimensions broadcast; a vector has no m, or no n."""
    a, b = (shape_of(v) for v in tensor_inputs(node))
    left, right = ("m", "k") if len(a) > 1 else ("k",), ("k", "n") if len(b) > 1 else ("k",)
    lead = max(len(a) - len(left), len(b) - len(right))
    tensors = [(s, (*_leading(lead, len(s) - len(last)), *last)) for s, last in ((a, left), (b, right))]
    return _products(node, tensors, (*_leading(lead, lead), *left[:-1], *right[1:]), ((0, 1),))


_ADDED = {  # factors of both matrices and of the result
    "aten.addmm.default": ("mk", "kn", "mn"),
    "aten.baddbmm.default": ("bmk", "bkn", "bmn"),
    "aten.addbmm.default": ("bmk", "bkn", "mn"),
    "aten.addmv.default": ("mk", "k", "m"),
}


@computed(*_ADDED)
def _added(node: fx.Node) -> Rule:
    """``c + a b``; c is broadcast."""
    c, a, b = (shape_of(v) for v in tensor_inputs(node))
    left, right, out = _ADDED[target_name(node)]
    product = _products(node, ((c, out[len(out) - len(c) :]), (a, left), (b, right)), out, ((0,), (1, 2)))
    # torch forgets to broadcast c where nothing is contracted
    return replace(product, filled=target_name(node) == "aten.addmv.default")


@computed("aten.einsum.default")
def _einsum(node: fx.Node) -> Rule:
    """The equation is the notation itself."""
    equation, inputs = args_of(node)[0].replace(" ", ""), tensor_inputs(node)
    left, arrow, right = equation.partition("->")
    terms = left.split(",")
    lead = max(len(shape_of(v)) - len(t) + 3 if "..." in t else 0 for t, v in zip(terms, inputs, strict=True))
    if not arrow:
        right = "..." * ("..." in left) + "".join(sorted(f for f in set(left) if f.isalpha() and left.count(f) == 1))
    tensors = []
    for term, value in zip(terms, inputs, strict=True):
        before, dots, after = term.partition("...")
        free = len(shape_of(value)) - len(before) - len(after)
        names = (*before, *_leading(lead, free if dots else 0), *after)
        if len(set(names)) < len(names):
            raise RuleError(
                "einsum over a diagonal has no rule",
                where=place(node),
                expected="every letter once in a term",
                got=equation,
                hint="take torch.diagonal first",
            )
        tensors.append((shape_of(value), names))
    before, dots, after = right.partition("...")
    out = (*before, *_leading(lead, lead if dots else 0), *after)
    return _products(node, tensors, out, (tuple(range(len(inputs))),))


_GROUPED = "s k, e k n, _ -> s n"  # rows in the order of experts, matrices, and where each expert's rows end


@computed("aten._grouped_mm.default", "transformers.grouped_mm_fallback.default")
def _grouped_mm(node: fx.Node) -> Rule:
    """All by an algorithm: a row's expert depends on values, and torch's op is particular about widths."""
    inputs = tensor_inputs(node)
    if [len(shape_of(v)) for v in inputs] != [2, 3, 1]:
        raise RuleError(
            "a grouped product of this kind has no rule",
            where=place(node),
            expected=f"{_GROUPED}, without bias",
            got=", ".join(str(list(shape_of(v))) for v in inputs),
        )
    name, whole, flops = target_name(node), "s e k n", "2 s k n"
    written = define(name, _GROUPED, args="x w o", form="x*w", whole=whole, saves="x w o", flops=flops)
    return from_text(node, written)


algorithm("aten._grouped_mm.default", "parts", splits="s e k n", run=grouped_mm_parts, lacking="P")
algorithm(
    "transformers.grouped_mm_fallback.default", "parts", splits="s e k n", run=grouped_mm_fallback_parts, lacking="P"
)


def _leading(lead: int, count: int) -> tuple[str, ...]:
    """Factors of the last ``count`` of ``lead`` leading dimensions, which are broadcast from the right."""
    return tuple(f"b{i}" for i in range(lead - count, lead))


def _products(
    node: fx.Node,
    tensors: Sequence[tuple[Shape, Sequence[str]]],
    out: Sequence[str],
    form: tuple[tuple[int, ...], ...],
) -> Rule:
    """A sum of products.  tensors: shape and factors of each input; size 1 is broadcast.  What ``out`` lacks is summed.

    Only the last product of ``form`` is counted as work, and kept for backward.
    """
    sizes: dict[str, int] = {}
    for shape, names in tensors:
        sizes |= {f: n for f, n in zip(names, shape, strict=True) if n != 1 or f not in sizes}

    def dims(shape: Shape, names: Sequence[str]) -> Dims:
        return tuple((f,) if n != 1 else () for f, n in zip(names, shape, strict=True))

    product = form[-1]
    return Rule(
        tuple(dims(*t) for t in tensors),
        (dims(tuple(sizes[f] for f in out), out),),
        sizes,
        form,
        sums=frozenset(f for f, n in sizes.items() if n != 1 and f not in out),
        saves=tuple(("in", i) for i in product) if len(product) > 1 else (),
        flops=((2.0, tuple(dict.fromkeys(f for i in product for f in tensors[i][1]))),),
        algorithms=algorithms_of(node),
    )
