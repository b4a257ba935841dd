"""Rules deliberately broken, one thing at a time: each must be caught by the proofs, or run as the rule itself does.

Mutants are made mechanically from a bound rule.  A mutant is *caught* by a call in which a strategy that only it
offers, or one that it runs otherwise, comes out wrong; it is *alike* in a call where there is no such strategy, for
then all that it offers is proven already.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from proving import Call, Parts, Sizes, cases_of, failure

from autopar.rules.analysis import Bound
from autopar.rules.notation import Dims, Rule

Named = Iterator[tuple[str, Rule]]


def mutants(rule: Rule, floating: tuple[bool, ...]) -> Named:
    """(what is broken, the broken rule); ``floating``: which inputs can carry a sum."""
    yield from _roles(rule)
    yield from _tensors(rule)
    yield from _forms(rule, floating)
    for name in rule.size_args:
        yield f"size {name} is kept", replace(rule, size_args={k: v for k, v in rule.size_args.items() if k != name})
    for name in rule.part_args:
        yield f"part {name} is not told", replace(rule, part_args={k: v for k, v in rule.part_args.items() if k != name})
    for i, known in enumerate(rule.algorithms):
        rest = rule.algorithms[:i], rule.algorithms[i + 1 :]
        other = "I" if known.lacking == "P" else "P"
        yield f"{known.name} gives {other}", replace(rule, algorithms=(*rest[0], replace(known, lacking=other), *rest[1]))
        yield f"no {known.name}", replace(rule, algorithms=(*rest[0], *rest[1]))
        for factor in sorted(rule.whole - {*known.splits}):
            wider = replace(known, splits=(*known.splits, factor))
            yield f"{known.name} splits {factor}", replace(rule, algorithms=(*rest[0], wider, *rest[1]))
    if rule.filled:
        yield "may be empty", replace(rule, filled=False)
    if rule.reshapes:
        yield "does not reshape", replace(rule, reshapes=False)


def _roles(rule: Rule) -> Named:
    for factor in sorted(rule.whole):
        yield f"{factor} is not whole", replace(rule, whole=rule.whole - {factor})
    for factor in sorted(rule.sums):
        yield f"{factor} is whole", replace(rule, sums=rule.sums - {factor}, whole=rule.whole | {factor})
        yield f"{factor} is no sum", replace(rule, sums=rule.sums - {factor})


def _tensors(rule: Rule) -> Named:
    """A factor dropped from a tensor, two swapped, a compound the other way round, a dimension's factors moved."""
    for side in ("ins", "outs"):
        tensors: tuple[Dims, ...] = getattr(rule, side)
        for i, dims in enumerate(tensors):

            def put(new: Dims, side: str = side, tensors: tuple[Dims, ...] = tensors, i: int = i) -> Rule:
                changed = (*tensors[:i], new, *tensors[i + 1 :])
                return replace(rule, ins=changed) if side == "ins" else replace(rule, outs=changed)

            present = [f for d in dims for f in d]
            for f in present:
                yield f"{f} is not in {side} {i}", put(tuple(tuple(g for g in d if g != f) for d in dims))
            for f, g in itertools.combinations(present, 2):
                swap = {f: g, g: f}
                yield f"{f} and {g} swapped in {side} {i}", put(tuple(tuple(swap.get(h, h) for h in d) for d in dims))
            for d, names in enumerate(dims):
                if len(names) > 1:
                    yield f"({' '.join(names)}) turned in {side} {i}", put((*dims[:d], names[::-1], *dims[d + 1 :]))
                for e, others in enumerate(dims):
                    if names and not others:
                        moved = tuple(() if k == d else names if k == e else x for k, x in enumerate(dims))
                        yield f"{' '.join(names)} moved in {side} {i}", put(moved)


def _forms(rule: Rule, floating: tuple[bool, ...]) -> Named:
    used = {i for term in rule.form for i in term}
    for i, can in enumerate(floating):
        if can and i not in used:
            yield f"linear in input {i}", replace(rule, form=(*rule.form, (i,)) if rule.form else ((i,),))
            for k, term in enumerate(rule.form):
                joined = (*rule.form[:k], (*term, i), *rule.form[k + 1 :])
                yield f"product {k} has input {i}", replace(rule, form=joined)
    for k, term in enumerate(rule.form):
        if len(rule.form) > 1:
            yield f"no product {k}", replace(rule, form=(*rule.form[:k], *rule.form[k + 1 :]))
        if len(term) > 1:
            apart = tuple((i,) for i in term)
            yield f"product {k} is a sum", replace(rule, form=(*rule.form[:k], *apart, *rule.form[k + 1 :]))
    if len(rule.form) > 1:
        yield "sum is a product", replace(rule, form=(tuple(i for t in rule.form for i in t),))
    many = [i for i, can in enumerate(floating) if can]
    if not rule.form and len(many) > 1:
        yield "linear in all together", replace(rule, form=tuple((i,) for i in many))
        yield "linear in each", replace(rule, form=(tuple(many),))
    if rule.form:
        yield "not linear", replace(rule, form=())


def with_rule(call: Call, rule: Rule) -> Bound:
    op = call.op
    return replace(call.bound, operations=(replace(op, type=replace(op.type, rule=rule)),))


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one call says of one mutant: caught, alike, or survived with the strategies that came out right."""

    op: str
    mutant: str
    verdict: str
    detail: str = ""


def trials(call: Call, meshes: Iterable[Sizes] = ((2,), (4,)), skip: Iterable[str] = ()) -> Iterator[Verdict]:
    """Try every mutant of a call's rule that is not in ``skip`` (names as in `general`)."""
    meshes, done = tuple(meshes), set(skip)
    parts = Parts(call)
    proven = {sizes: {case.signature for case in cases_of(call.bound, sizes)} for sizes in meshes}
    for name, rule in mutants(call.op.rule, call.op.type.floating_ins):
        if general(name) not in done:
            verdict, detail = _trial(call, rule, parts, proven)
            yield Verdict(call.name, general(name), verdict, detail)


def _trial(call: Call, rule: Rule, parts: Parts, proven: dict[Sizes, set[str]]) -> tuple[str, str]:
    right = []
    for sizes, known in proven.items():
        try:
            for case in cases_of(with_rule(call, rule), sizes):
                if case.signature not in known:
                    found = failure(case, parts)
                    if found:
                        return "caught", f"{case}: {found}"
                    right.append(str(case))
        except Exception as error:  # no rank's program can be written
            return "caught", repr(error)
    return ("survived", "; ".join(right[:3])) if right else ("alike", "")


def general(name: str) -> str:
    """A mutant's name for all calls of an op: factors of numbered dimensions are one."""
    return re.sub(r"(?<=\b[a-z])\d+", "", name)
