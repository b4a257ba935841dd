"""The rule notation: one line of data says how an op may be split.

    rule("aten.linear.default", "... k, n k, n -> ... n", args="x w b", form="x*w + b", sum="k", saves="x w")

A dimension that two tensors share by name is a *factor*.  ``(g c)`` is a compound, major to minor; ``...`` stands for
any number of leading dimensions; ``_`` is a dimension of its own that may not be split; ``1`` is a unit dimension.

`define` checks the text once, when the table is read; `bind` gives the factors of one node their sizes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from autopar.errors import RuleError
from autopar.layout import Shape

Dims = tuple[tuple[str, ...], ...]  # one tensor: the factors of each dimension, major to minor; () for a unit


@dataclass(frozen=True, slots=True)
class Algorithm:
    """A second implementation of an op that carries its own communication.

    name: shown in plans.  splits: the factors that it makes splittable (any one of them, or several on several axes).
    run: a function, called as the op is, with the keyword ``parts``: {factor: Part} for each factor in ``splits`` and
    its image (`Rule`). Inputs and outputs that have the factor are S; inputs that lack it are R, outputs that lack it
    are ``lacking`` ("I", or "P" where each rank returns a term of a sum).

    pairs: {factor: partner}.  Splitting the factor then also splits, on the same axis, what lacks the factor and has
    the partner; a product whose rows are split thus finds its other operand split along the contraction.  No work is
    saved on the partner: the algorithm sees to it that every rank meets all of it.  ``run`` is given
    ``pairs``: {factor: Part of the partner} too, as the tensors without the factor hold it, and ``parts`` of partners.
    alike: of equal sizes, factor and partner are cut alike.
    traffic: what it sends, from (op type, choice, ranks of the axis); None for all-reduces of statistics, one number
    per row.  overlaps: it sends while it computes, in as many steps as the axis has ranks.
    """

    name: str
    splits: tuple[str, ...]
    run: Callable[..., Any]
    lacking: str = "I"
    pairs: Mapping[str, str] = field(default_factory=dict)
    alike: bool = False
    traffic: Callable[..., Sequence[Traffic]] | None = None
    overlaps: bool = False

    def factors(self, rule: Rule) -> tuple[str, ...]:
        """The factors of ``rule`` of which ``run`` is told the parts: those it splits, images, partners."""
        own = [f for f in self.splits if f in rule.sizes]
        images = [rule.images[f] for f in own if f in rule.images]
        return tuple(dict.fromkeys([*own, *images, *(self.pairs[f] for f in own if f in self.pairs)]))


class Traffic(NamedTuple):
    """What an algorithm sends on one axis.

    kind: a collective (`autopar.cost_model.collectives`).  tensor: ("in", i) or ("out", j), of whose bytes on one
    rank, with this axis undone, it is.  forward, backward: how often.
    """

    kind: Any
    tensor: tuple[str, int]
    forward: float
    backward: float


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule bound to one node: every factor has a size.

    form: the sum of products in which the op is linear, as positions of inputs.  sums: factors whose parts add up.
    whole: factors that may not be split.  size_args: arguments of the op that are sizes, each in factors.
    part_args: keyword arguments that receive which part of a factor this rank holds.
    saves: what autograd keeps for backward, ("in", i) or ("out", j).  flops: terms (coefficient, factors).
    inner: elements that autograd keeps inside the op, as such terms.
    images: a factor of the output that an algorithm cuts where it cuts the factor of the input (positions before and
    after a window).  quiet: (tensor, factor) where a cut of the factor is no candidate; the search leaves it out.
    """

    ins: tuple[Dims, ...]
    outs: tuple[Dims, ...]
    sizes: Mapping[str, int]
    form: tuple[tuple[int, ...], ...] = ()
    sums: frozenset[str] = frozenset()
    whole: frozenset[str] = frozenset()
    size_args: Mapping[str, Any] = field(default_factory=dict)
    part_args: Mapping[str, Dims] = field(default_factory=dict)
    saves: tuple[tuple[str, int], ...] = ()
    flops: tuple[tuple[float, tuple[str, ...]], ...] = ()
    algorithms: tuple[Algorithm, ...] = ()
    images: Mapping[str, str] = field(default_factory=dict)
    quiet: frozenset[tuple[int, str]] = frozenset()
    view: bool = False  # only relabels dimensions: may be contracted
    reshapes: bool = False  # runs as a reshape to the local shape of its output
    causal: str = ""
    filled: bool = False  # a split may leave no rank without rows: torch's kernel does not take them
    inner: tuple[tuple[float, tuple[str, ...]], ...] = ()

    @property
    def factors(self) -> tuple[str, ...]:
        seen = dict.fromkeys(f for t in self.ins + self.outs for d in t for f in d)
        return tuple(seen)


@dataclass(frozen=True, slots=True)
class Definition:
    """A rule as written; `bind` makes it a `Rule` of one node."""

    op: str
    signature: str
    ins: tuple[tuple[str, ...], ...]
    outs: tuple[tuple[str, ...], ...]
    args: tuple[str, ...]
    form: tuple[tuple[str, ...], ...]
    sums: frozenset[str]
    whole: frozenset[str]
    size_args: Mapping[str, str]
    saves: tuple[str, ...]
    flops: tuple[tuple[float, tuple[str, ...]], ...]


_NUMBER = re.compile(r"\d+(\.\d+)?")
_TOKEN = re.compile(r"\([\w\s']+\)|\.\.\.|[\w']+")


def _tokens(text: str, op: str) -> tuple[str, ...]:
    tokens = tuple(_TOKEN.findall(text))
    if "".join(tokens).replace(" ", "") != text.replace(" ", ""):
        raise RuleError("a rule's dimensions cannot be read", where=op, got=text, hint="see autopar.rules.notation")
    return tokens


def _names(token: str) -> tuple[str, ...]:
    if token == "1":
        return ()
    return tuple(token.strip("()").split())


def define(
    op: str,
    signature: str,
    *,
    args: str,
    form: str = "",
    sum: str = "",
    whole: str = "",
    sizes: Mapping[str, str] | None = None,
    saves: str = "",
    flops: str = "",
) -> Definition:
    """Check a rule's text and take it apart.

    Raises RuleError when the text cannot be read, when it names an argument or a factor that is not there, and when a
    factor is missing from an output without a role that says how the parts combine: nothing is implicit.
    """
    left, arrow, right = signature.partition("->")
    if not arrow:
        raise RuleError("a rule needs inputs -> outputs", where=op, got=signature)
    ins = tuple(_tokens(t, op) for t in left.split(","))
    outs = tuple(_tokens(t, op) for t in right.split(","))
    names = tuple(args.split())
    if len(names) != len(ins):
        raise RuleError(
            "a rule names one argument per input tensor", where=op, expected=f"{len(ins)} names", got=args or "none"
        )
    terms = tuple(tuple(p.strip() for p in t.split("*")) for t in form.split("+") if t.strip())
    for name in (n for t in terms for n in t):
        if name not in names:
            raise RuleError("form names no argument of the rule", where=op, expected=args, got=name)
    kept = tuple(saves.split())
    for name in kept:
        if name not in names and name != "out":
            raise RuleError("saves names no argument of the rule", where=op, expected=f"{args} out", got=name)
    sums, wholes = frozenset(sum.split()), frozenset(whole.split())
    known = {f for t in ins + outs for d in t for f in _names(d)} - {"_"}
    for role, given in (("sum", sums), ("whole", wholes)):
        if given - known:
            raise RuleError(f"{role} names no factor", where=op, expected=" ".join(sorted(known)), got=str(given))
    for factor in sorted(known):
        lacking = any(factor not in [f for d in t for f in _names(d)] for t in outs)
        if lacking and factor not in sums | wholes:
            raise RuleError(
                f"factor {factor!r} is missing from an output and has no role",
                where=f"{op}: {signature}",
                expected=f"sum={factor!r} if the parts add up, whole={factor!r} if it may not be split",
                got="neither",
            )
    for tensor in ins + outs:
        found = [f for d in tensor for f in _names(d) if f != "_"]
        twice = {f for f in found if found.count(f) > 1}
        if twice:
            raise RuleError("a factor stands twice in one tensor", where=op, got=" ".join(tensor))
    for name, text in (sizes or {}).items():
        strange = {f for d in _tokens(text, op) for f in _names(d)} - known
        if strange:
            raise RuleError(
                f"sizes of {name!r} name no factor", where=op, expected=" ".join(sorted(known)), got=" ".join(strange)
            )
    products = []
    for term in filter(None, (t.strip() for t in flops.split("+"))):
        coefficient, *factors = term.split()
        if not _NUMBER.fullmatch(coefficient) or set(factors) - known:
            raise RuleError(
                "flops are terms of a number and factors", where=op, expected=" ".join(sorted(known)), got=term
            )
        products.append((float(coefficient), tuple(factors)))
    return Definition(op, signature, ins, outs, names, terms, sums, wholes, sizes or {}, kept, tuple(products))


def bind(
    definition: Definition,
    inputs: Mapping[str, Shape],
    outputs: Sequence[Shape],
    *,
    where: str = "",
    algorithms: tuple[Algorithm, ...] = (),
    given: Mapping[str, int] | None = None,
) -> Rule:
    """Give the factors of ``definition`` their sizes from the shapes of one node.

    inputs: shapes by argument name; an optional argument that is absent drops out of signature and form.
    given: sizes of factors that shapes alone do not determine.  Raises RuleError where shapes and signature part.
    """
    sizes: dict[str, int] = dict(given or {})
    counter = 0
    leading: int | None = None

    def read(tokens: tuple[str, ...], shape: Shape, name: str) -> Dims:
        nonlocal counter, leading
        dims: list[tuple[str, ...]] = []
        fixed = len(tokens) - tokens.count("...")
        free = len(shape) - fixed
        if free < 0 or ("..." not in tokens and free):
            raise RuleError(
                f"rank of {name} does not fit the rule",
                where=where or definition.op,
                expected=f"{' '.join(tokens)} in {definition.signature!r}",
                got=f"shape {list(shape)}",
            )
        for token in tokens:
            if token == "...":
                if leading is None:
                    leading = free
                elif leading != free:
                    raise RuleError(
                        "'...' stands for different numbers of dimensions",
                        where=where or definition.op,
                        expected=str(leading),
                        got=f"{free} in {name}",
                    )
                dims += [(f"b{i}",) for i in range(free)]
            elif token == "_":
                dims.append((f"_{counter}",))
                counter += 1
            else:
                dims.append(_names(token))
        out: list[tuple[str, ...]] = []
        for names, size in zip(dims, shape, strict=True):
            unknown = [f for f in names if f not in sizes]
            known = math.prod(sizes[f] for f in names if f in sizes)
            if len(unknown) == 1 and size % known == 0:
                sizes[unknown[0]] = size // known
            elif unknown or known != size:
                raise RuleError(
                    f"size of {name} does not fit the rule",
                    where=where or definition.op,
                    expected=f"({' '.join(names) or '1'}) = {known if not unknown else 'determined'}",
                    got=f"{size} in shape {list(shape)}",
                )
            out.append(names)
        return tuple(out)

    present = [(n, t) for n, t in zip(definition.args, definition.ins, strict=True) if n in inputs]
    order = sorted(range(len(present)), key=lambda i: any(len(_names(t)) > 1 for t in present[i][1]))
    read_ins: dict[int, Dims] = {}
    for i in order:  # tensors with compounds last: by then the sizes of their factors are known
        read_ins[i] = read(present[i][1], inputs[present[i][0]], present[i][0])
    ins = tuple(read_ins[i] for i in range(len(present)))
    outs = tuple(read(t, s, "the output") for t, s in zip(definition.outs, outputs, strict=True))
    position = {n: i for i, (n, _) in enumerate(present)}
    form = tuple(tuple(position[n] for n in term) for term in definition.form if all(n in position for n in term))
    saves = tuple(
        ("out", 0) if n == "out" else ("in", position[n]) for n in definition.saves if n == "out" or n in position
    )
    lead = tuple(f"b{i}" for i in range(leading or 0))

    def spread(names: Sequence[str]) -> tuple[str, ...]:
        return tuple(f for n in names for f in (lead if n == "..." else (n,)))

    opaque = frozenset(f for f in sizes if f.startswith("_"))
    unit = {f for f, n in sizes.items() if n == 1}  # a factor of size 1 cannot be split

    def trim(t: Dims) -> Dims:
        return tuple(tuple(f for f in d if f not in unit) for d in t)

    return Rule(
        tuple(map(trim, ins)),
        tuple(map(trim, outs)),
        sizes,
        form,
        frozenset(spread(sorted(definition.sums))) - unit,
        (frozenset(spread(sorted(definition.whole))) | opaque) - unit,
        {k: tuple(_names(t) for t in _tokens(v, definition.op)) for k, v in definition.size_args.items()},
        {},
        saves,
        tuple((c, spread(fs)) for c, fs in definition.flops),
        algorithms,
    )
