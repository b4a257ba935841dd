"""Experts: which columns of rows and weights are one factor follows from the steps of the body.

    gate and up in one, down    s h, s, e (g i) h, e h i -> s h      whole h e g, sum i
    gate, up, down              s h, s, e i h, e i h, e h i -> s h
    one product                 s h, s, e o h -> s o                 x*w, sum h

Experts are split by algorithms: ``parts e`` leaves a term of a sum on every rank that holds all rows; ``exchange s with
e`` sends the rows of a rank to the ranks that hold their experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from autopar.program import call_arguments, shape_of
from autopar.rules.derive import Choice, OpType
from autopar.rules.notation import Dims, Rule, Traffic
from autopar.rules.registry import algorithm, algorithms_of, computed
from autopar.runtime.kernels.experts import LINEAR, PIECE, TAKE, experts_exchange, experts_parts


@dataclass(eq=False, slots=True)
class _Columns:
    """Columns of rows or of a weight.  alike: what they were found to be one with.  pieces: what they are made of."""

    size: int
    alike: _Columns | None = None
    pieces: list[_Columns] = field(default_factory=list)
    whole: bool = False

    def root(self) -> _Columns:
        return self if self.alike is None else self.alike.root()

    def leaves(self) -> Iterator[_Columns]:
        root = self.root()
        if not root.pieces:
            yield root
        for piece in root.pieces:
            yield from piece.leaves()

    def close(self) -> None:
        for leaf in self.leaves():
            leaf.whole = True

    def taken_apart(self, sizes: tuple[int, int]) -> list[_Columns]:
        """Outer and inner columns of these sizes; columns of which nothing is known to be split, if they are not."""
        root = self.root()
        if not root.pieces:
            root.pieces = [_Columns(n, whole=root.whole) for n in sizes]
        if tuple(p.size for p in root.pieces) == sizes:
            return root.pieces
        self.close()
        return [_Columns(n, whole=True) for n in sizes]

    def join(self, other: _Columns) -> None:
        a, b = self.root(), other.root()
        if a is b:
            return
        if not a.pieces and not b.pieces:
            b.alike, a.whole = a, a.whole or b.whole
        elif not b.pieces or not a.pieces:
            one, many = (a, b) if b.pieces else (b, a)
            if one.whole:
                many.close()
            one.alike = many
        elif [p.size for p in a.pieces] == [p.size for p in b.pieces]:
            for p, q in zip(a.pieces, b.pieces, strict=True):
                p.join(q)
        else:
            a.close()
            b.close()


@dataclass(slots=True)
class _Body:
    """What the steps of a body do with columns.

    rows: of what every step makes, the op's own rows first.  weights: of each weight, without the experts.
    products: (weight, columns that are summed over, columns made).  linear: whether the last product is what the body
    gives, but for the weights ``biases`` added to it.  kept: the rows that autograd keeps.
    """

    rows: list[_Columns]
    weights: list[list[_Columns]]
    products: list[tuple[int, _Columns, _Columns]] = field(default_factory=list)
    linear: bool = False
    biases: list[int] = field(default_factory=list)
    kept: set[int] = field(default_factory=set)


def _read(width: int, shapes: Sequence[Sequence[int]], body: Sequence[Any]) -> _Body:
    out = _Body([_Columns(width)], [[_Columns(n) for n in shape[1:]] for shape in shapes])
    taken: dict[int, int] = {}  # step -> the weight whose vectors it takes
    source: dict[int, int] = {}  # piece -> what it is a piece of
    used = [args[1] if name == LINEAR else args[0] for name, args, _ in body if name in (LINEAR, TAKE)]
    final = 0
    for step, (name, args, _) in enumerate(body, 1):
        operands = [int(a[1:]) for a in args if isinstance(a, str) and a.startswith("%")]
        if name == LINEAR:
            made, summed = out.weights[args[1]] if not args[2] else reversed(out.weights[args[1]])
            out.rows[operands[0]].join(summed)
            out.products.append((args[1], summed, made))
            final, out.biases = step, []
        elif name == TAKE:
            made = out.weights[args[0]][0]
            taken[step] = args[0]
        elif name == PIECE:
            made = _piece(out.rows[operands[0]], *args[2:])
            source[step] = source.get(operands[0], operands[0])
        else:
            made = max((out.rows[k] for k in operands), key=lambda c: c.size)
            for k in operands:
                if out.rows[k].size == made.size:
                    made.join(out.rows[k])
        out.rows.append(made)
        added = [taken[k] for k in operands if k in taken]
        if name == "aten.add.Tensor" and final in operands and len(added) == 1:
            final = step
            out.biases.append(added[0])
        elif name != PIECE and name not in _KEEPS_NOTHING:
            out.kept |= {source.get(k, k) for k in operands}
    out.linear = final == len(body) and all(used.count(k) == 1 for k in (out.products[-1][0], *out.biases))
    return out


_KEEPS_NOTHING = {"aten.add.Tensor", "aten.sub.Tensor", "aten.neg.default", "aten.to.dtype"}


def _piece(columns: _Columns, g: int, strided: bool) -> _Columns:
    width = columns.size // g
    outer, inner = columns.taken_apart((width, g) if strided else (g, width))
    group, piece = (inner, outer) if strided else (outer, inner)
    group.close()
    return piece


@computed("autopar.experts")
def _experts(node: fx.Node) -> Rule:
    given = call_arguments(node)
    x, weights, body = given["x"], given["weights"], given["body"]
    read = _read(shape_of(x)[1], [shape_of(w) for w in weights], body)
    out, last = set(read.rows[-1].leaves()), len(read.products) - 1
    sums: set[_Columns] = set()
    for k, (_, summed, _) in enumerate(read.products):
        for leaf in summed.leaves():
            if k == last and read.linear and leaf not in out:
                sums.add(leaf)
            else:
                leaf.whole = True
    names = _names(read)
    sizes = {f: leaf.size for leaf, f in names.items()} | {"s": shape_of(x)[0], "e": shape_of(weights[0])[0]}

    def factors(columns: _Columns) -> tuple[str, ...]:
        return tuple(names[leaf] for leaf in columns.leaves() if leaf.size > 1)

    s, e = (((f,) if sizes[f] > 1 else ()) for f in "se")
    ins: list[Dims] = [(s, factors(read.rows[0])), (s,)]
    ins += [(e, *map(factors, columns)) for columns in read.weights]
    share = 1 / sizes["e"]  # rows are spread over experts
    form: tuple[tuple[int, ...], ...] = ()
    if read.linear:
        product = (2 + read.products[-1][0],)
        form = ((0, *product) if len(read.products) == 1 else product, *((2 + b,) for b in read.biases))
    return Rule(
        tuple(ins),
        ((s, factors(read.rows[-1])),),
        sizes,
        form,
        sums=frozenset(names[leaf] for leaf in sums if not leaf.whole and leaf.size > 1),
        whole=frozenset(names[leaf] for leaf in names if leaf.whole and leaf.size > 1) | set(e),
        saves=(("in", 1),),
        flops=tuple((2 * share, ("s", "e", *factors(k), *factors(n))) for _, k, n in read.products),
        inner=tuple((share, ("s", "e", *factors(read.rows[k]))) for k in sorted(read.kept)),
        algorithms=algorithms_of(node),
    )


def _names(read: _Body) -> dict[_Columns, str]:
    """h of rows, o of what is made of them, g and i of what lies between: pieces side by side, and the others."""
    names: dict[_Columns, str] = {}
    taken: dict[str, int] = {}
    between = [leaf for columns in read.weights for c in columns for leaf in c.leaves()]
    for letter, leaves in (("h", read.rows[0].leaves()), ("o", read.rows[-1].leaves()), ("", between)):
        for leaf in leaves:
            if leaf not in names:
                name = letter or ("g" if leaf.whole else "i")
                taken[name] = taken.get(name, 0) + 1
                names[leaf] = name if taken[name] == 1 else f"{name}{taken[name]}"
    return names


def _sent(op: OpType, choice: Choice, n: int) -> list[Traffic]:
    """Rows on their way to experts and back, where experts have equally many; and how many rows each is sent.

    Gradients go back the same ways.
    """
    rows, experts = op.rule.sizes["s"], op.rule.sizes["e"]
    there, any_gradient = float(op.differentiable_ins[0]), float(any(op.differentiable_outs))
    return [
        Traffic("all-to-all", ("in", 0), 1, there),
        Traffic("all-to-all", ("out", 0), 1, any_gradient),
        Traffic("all-to-all", ("in", 1), experts * n / rows, 0),
    ]


algorithm("autopar.experts", "parts", splits="e", run=experts_parts, lacking="P")
algorithm("autopar.experts", "exchange", splits="s/e", run=experts_exchange, traffic=_sent)
