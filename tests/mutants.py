"""Rules deliberately broken, one thing at a time: each must be caught by the proofs, or run as the rule itself does.

Mutants are made mechanically from a bound rule.  A mutant is

    caught      by a call in which a strategy that only it offers, or that it runs otherwise, comes out wrong
    equivalent  where it offers nothing else than the rule does, all of which is proven, for a reason that holds always
    renamed     where it offers exactly what the rule does, for no such reason
    idle        where it offers less, for no such reason: it may offer something wrong to tensors of other shapes
    survived    where all that it offers comes out right: the rule could offer it, too
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from calls import Call
from proving import Parts, Sizes, cases_of, failure
from resized import resized

from autopar.rules.analysis import Bound
from autopar.rules.derive import splittable
from autopar.rules.notation import Dims, Rule
from autopar.rules.registry import has_rule

Named = Iterator[tuple[str, Rule]]


def mutants(rule: Rule, floating: tuple[bool, ...]) -> Named:
    """(what is broken, the broken rule); ``floating``: which inputs can carry a sum."""
    yield from _roles(rule)
    yield from _tensors(rule)
    yield from _forms(rule, floating)
    for name in rule.size_args:
        yield f"size {name} is kept", replace(rule, size_args={k: v for k, v in rule.size_args.items() if k != name})
    for name in rule.part_args:
        yield (
            f"part {name} is not told",
            replace(rule, part_args={k: v for k, v in rule.part_args.items() if k != name}),
        )
    for i, known in enumerate(rule.algorithms):
        rest = rule.algorithms[:i], rule.algorithms[i + 1 :]
        other = "I" if known.lacking == "P" else "P"
        yield (
            f"{known.name} gives {other}",
            replace(rule, algorithms=(*rest[0], replace(known, lacking=other), *rest[1])),
        )
        yield f"no {known.name}", replace(rule, algorithms=(*rest[0], *rest[1]))
        for factor in sorted((rule.whole & {*rule.factors}) - {*known.splits}):
            wider = replace(known, splits=(*known.splits, factor))
            yield f"{known.name} splits {factor}", replace(rule, algorithms=(*rest[0], wider, *rest[1]))
        for factor, partner in ((f, p) for f, p in known.pairs.items() if f in rule.factors):
            for other in sorted(_beside(rule, factor) - {factor, partner}):
                wrong = replace(known, pairs={**known.pairs, factor: other})
                yield (
                    f"{known.name} splits {factor} with {other}",
                    replace(rule, algorithms=(*rest[0], wrong, *rest[1])),
                )
    if rule.filled:
        yield "may be empty", replace(rule, filled=False)
    if rule.reshapes:
        yield "does not reshape", replace(rule, reshapes=False)


def _beside(rule: Rule, factor: str) -> set[str]:
    """Factors of tensors that lack ``factor``."""
    tensors = [{f for d in dims for f in d} for dims in (*rule.ins, *rule.outs)]
    return set().union(*(t for t in tensors if factor not in t))


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


# Mutants that survive: what they offer is right, and why the rule does not offer it.
RIGHT_BUT_NOT_OFFERED = {
    **{
        (f"aten.{op}", "does not reshape"): "there is no size among the op's arguments"
        for op in ("flatten.using_ints", "unsqueeze.default", "squeeze.dim", "squeeze.dims")
    },
    ("aten.detach.default", "linear in input"): "its value is a constant to autograd; sums are joined before it",
    **{
        (f"aten.{op}", "linear in all together"): "not linear where an index stands twice: torch picks either value"
        for op in ("index_copy.default", "index_put.default", "scatter.src")
    },
    ("aten.index_fill.int_Tensor", "linear in all together"): "linear indeed; no sum that is pending has come to it",
    ("aten.native_dropout_backward.default", "linear in input"): "as above; only models that write gradients have it",
    ("aten.bucketize.Tensor", "n is not whole"): "counts of smaller boundaries add up; boundaries are few",
    ("aten.searchsorted.Tensor", "n is not whole"): "counts of smaller boundaries add up; boundaries are few",
    **{
        (f"aten.{op}.vec", "r is not whole"): "a share of the repeats: what is small could be split, not what is large"
        for op in (f"{name}{d}d" for name in ("upsample_nearest", "_upsample_nearest_exact") for d in (1, 2, 3))
    },
    **{
        (f"aten.{op}.input", "may be empty"): "the CPU takes an empty batch; kernels of other devices are not known to"
        for op in ("lstm", "gru", "rnn_tanh", "rnn_relu")
    },
    ("autopar.attention", "may be empty"): "only torch's own kernel drops a mask where no row is left",
    **{
        (op, "t is not in ins 3"): "a ring takes a mask of keys whole, too: every rank would hold it for all keys"
        for op in ("aten.scaled_dot_product_attention.default", "autopar.attention")
    },
}


def with_rule(call: Call, rule: Rule) -> Bound:
    op = call.op
    return replace(call.bound, operations=(replace(op, type=replace(op.type, rule=rule)),))


@dataclass(frozen=True, slots=True)
class Verdict:
    """What calls say of one mutant.  detail: how it was caught, why it is equivalent, or what came out right."""

    rule: str
    mutant: str
    verdict: str
    detail: str = ""


def trials(call: Call, meshes: Iterable[Sizes] = ((2,), (4,)), skip: Iterable[str] = ()) -> Iterator[Verdict]:
    """Try every mutant of a call's rule that is not in ``skip`` (names as in `general`)."""
    meshes, done, rule = tuple(meshes), set(skip), call.op.rule
    parts = Parts(call)
    proven = {sizes: {case.signature for case in cases_of(call.bound, sizes)} for sizes in meshes}
    for name, broken in mutants(rule, call.op.type.floating_ins):
        if general(name) not in done:
            yield Verdict(rule_name(call.name, name), general(name), *_trial(call, name, broken, parts, proven))


def _trial(call: Call, name: str, broken: Rule, parts: Parts, proven: dict[Sizes, set[str]]) -> tuple[str, str]:
    right, same = [], True
    for sizes, known in proven.items():
        offered = set()
        try:
            for case in cases_of(with_rule(call, broken), sizes):
                offered.add(case.signature)
                if case.signature not in known:
                    found = failure(case, parts)
                    if found:
                        return "caught", f"{case}: {found}"
                    right.append(str(case))
        except Exception as error:  # no rank's program can be written
            return "caught", repr(error)
        same = same and offered == known
    if right:
        return "survived", "; ".join(right[:3])
    reason = _why_less(call, broken, name)
    if reason:
        return "equivalent", reason
    return ("renamed", "it offers the same under other names") if same else ("idle", "")


def _why_less(call: Call, broken: Rule, name: str) -> str:
    """Why a mutant offers no more than the rule, whatever the shapes."""
    rule, floating = call.op.rule, call.op.type.floating_ins
    if re.search(r"is whole$|^not linear$|^no ", name) or not {*rule.factors} <= {*broken.factors}:
        return "it only offers less"
    by_parts = {f for a in rule.algorithms for f in a.splits}
    fixed = rule.whole - by_parts
    named = re.match(r"\(?([\w' ]+?)\)? (is not in|swapped|turned)", name)
    if named and set(named[1].replace(" and ", " ").split()) <= fixed:
        return "these factors are not split in any case"
    pair = re.match(r"([\w']+) and ([\w']+) swapped", name)
    tensors = (*rule.ins, *rule.outs)
    if pair and all(f in rule.sums and sum(_has(t, f, rule) for t in tensors) == 1 for f in pair.groups()):
        return "two factors that are summed and stand in no other tensor"
    factors = re.match(r"product (\d+) is a sum", name)
    if factors and not all(floating[i] for i in rule.form[int(factors[1])]):
        return "whole numbers carry no sum"
    kept = re.match(r"size (\w+) is kept", name)
    if kept and not _movable(rule) & {*re.findall(r"\w+", str(rule.size_args[kept[1]]))}:
        return "a size of factors that are not split in any case"
    given = re.match(r"(\w+) gives [PI]", name)
    if given and all(
        _has(out, f, rule) for a in rule.algorithms if a.name == given[1] for f in a.splits for out in rule.outs
    ):
        return "no output lacks what the algorithm splits"
    freed = re.match(r"([\w']+) is not (?:whole|in outs \d+)$", name)
    if freed and freed[1] not in rule.factors:
        return "no tensor has this factor"
    logical = [*zip(broken.outs, call.op.type.logical[len(rule.ins) :], strict=False)]
    lost = freed is not None and freed[1] not in by_parts
    if any(yes and (re.search("linear|product", name) or (lost and not _has(o, freed[1], rule))) for o, yes in logical):
        return "truth values carry no sum"
    if name.endswith("is no sum"):
        return "what a factor of no output is, define() asks: strategies follow from the signature"
    return ""


def _movable(rule: Rule) -> set[str]:
    """Factors that some strategy splits."""
    split = {f for _, f in splittable(rule)}
    partners = {a.pairs[f] for a in rule.algorithms for f in a.splits if f in a.pairs}
    return split | partners | {rule.images[f] for f in split if f in rule.images}


def _has(dims: Dims, factor: str, rule: Rule) -> bool:
    """Whether a tensor is cut where ``factor`` is; all have a factor that none has."""
    present = {f for d in dims for f in d}
    return bool({factor, rule.images.get(factor)} & present) or factor not in rule.factors


def rule_name(op: str, mutant: str) -> str:
    """The rule that a mutant breaks: ops with torch's tag share one, but not what they are linear in."""
    return op if has_rule(op) or re.search("linear|product", mutant) else "pointwise"


def general(name: str) -> str:
    """A mutant's name for all calls of an op: factors of numbered dimensions are one."""
    return re.sub(r"(?<=\b[a-z])\d+|(?<=linear in input) \d+", "", name)


# ------------------------------------------------------------------------------------------------ over many calls


TRIES = 3  # calls made for one mutant
_WEIGHT = {"equivalent": 0, "renamed": 1, "idle": 2, "survived": 3, "caught": 4}


def verdicts(
    calls: Iterable[Call], found: dict[tuple[str, str], Verdict] | None = None
) -> dict[tuple[str, str], Verdict]:
    """One verdict for each (rule, mutant): the gravest that any call gives; adds to ``found``."""
    found = {} if found is None else found
    for call in calls:
        caught = {m for (r, m), v in found.items() if v.verdict == "caught" and r == rule_name(call.name, m)}
        for verdict in trials(call, skip=caught):
            key = verdict.rule, verdict.mutant
            if key not in found or _WEIGHT[verdict.verdict] > _WEIGHT[found[key].verdict]:
                found[key] = verdict
    return found


def telling_calls(calls: Sequence[Call], found: Mapping[tuple[str, str], Verdict]) -> list[Call]:
    """Calls in which mutants that nothing is known of can be wrong: the factors that they exchange have one size."""
    made: dict[str, Call] = {}
    tries: Counter[str] = Counter()
    for call in calls:
        for name, _ in mutants(call.op.rule, call.op.type.floating_ins):
            pair = re.match(r"\(?([\w']+) (?:and )?([\w']+).* (?:swapped|turned)", name)
            known = found.get((rule_name(call.name, name), general(name)))
            if pair and known and known.verdict in ("idle", "renamed") and tries[general(name)] < TRIES:
                other = resized(call, pair[1], pair[2])
                if other is not None:
                    made[other.key] = other
                    tries[general(name)] += 1
    return list(made.values())
