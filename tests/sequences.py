"""Plans that split a whole model by kinds of parallelism that people know: everything else follows from the layouts."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterator, Mapping
from unittest import mock

from equality import forced
from models import BATCH as SEQUENCES

from autopar.layout import I, Layout
from autopar.plan import Plan
from autopar.rules.analysis import Analysis, Bound, Operation, contract
from autopar.rules.derive import Choice, Strategy, _nested, _with_partners, apply, axis_choices
from autopar.rules.factors import Cut
from autopar.solver import sample as sampling

BATCH, RING, ULYSSES, MEGATRON = "batch", "ring", "ulysses", "megatron"

_COLUMNS = r"(c_attn|c_fc|query|key|value|intermediate\.dense|[qkv]_proj|gate_proj|up_proj)\.weight"
_ROWS = r"(c_proj|output\.dense|o_proj|down_proj)\.weight"


def sequence_plan(
    bound: Bound,
    sizes: tuple[int, ...],
    kinds: tuple[str, ...],
    length: int,
    *,
    striped: bool = False,
    whole: bool = False,
) -> Plan:
    """A plan in which every axis splits the model by its kind; weights and ways of values at random.

    length: of the sequence, by which its dimensions are known.  striped: ranks take its rows in turn.  whole: weights
    are, on every rank.
    """
    analysis = contract(bound, sizes)
    made: dict[str, Layout] = {}
    picked: dict[str, tuple[str, ...]] = {}
    for op in analysis.operations:
        ranked = [
            sorted(_wishes(op, kinds[a], length, striped, sizes, analysis, a), key=lambda w: w[0])
            for a in range(len(sizes))
        ]
        best: tuple[tuple[int, int], Strategy] | None = None
        for wishes in itertools.product(*ranked):
            strategy = _strategy(op, [w for _, w in wishes], sizes)
            if strategy is None:
                continue
            needs = [analysis.to_root(v, lay) for v, lay in zip(op.inputs, strategy.ins, strict=True)]
            if any(n is None for n in needs):
                continue
            rank = sum(w for w, _ in wishes)
            score = (min(rank, 0), _moved(analysis, op, needs, made), rank)  # what is forced goes before all
            if best is None or score < best[0]:
                best = score, strategy
        assert best is not None, op.name
        made.update(zip(op.outputs, best[1].outs, strict=True))
        picked[op.name] = tuple(map(str, best[1].choices))
    kept = mock.patch.object(sampling, "_random_layout", lambda *given, **more: (I,) * len(sizes))
    with kept if whole else contextlib.nullcontext():
        return forced(bound, sizes, picked)


def _strategy(op: Operation, choices: list[Choice], sizes: tuple[int, ...]) -> Strategy | None:
    nested: list[Choice] = []
    for choice in choices:
        fitted = _nested(choice, nested, sizes) if choice.factor else choice
        if fitted is None:
            return None
        nested.append(fitted)
    paired = _with_partners(nested, sizes)
    return None if paired is None else apply(op.type, paired, sizes)


def _moved(analysis: Analysis, op: Operation, needs: list[Layout | None], made: dict[str, Layout]) -> int:
    """How many values that ops have made, on how many axes, are not in the layout that is needed."""
    count = 0
    for name, need in zip(op.inputs, needs, strict=True):
        have = made.get(analysis.root(name))
        if have is not None and need is not None:
            count += sum(a != b for a, b in zip(have, need, strict=True) if a != I)
    return count


def _points(op: Operation, analysis: Analysis, length: int, cut: Cut) -> Mapping[str, tuple[Cut, ...]]:
    """Candidate cuts, with ``cut`` of the sequence, also where it is joined with the batch."""
    images = {length: cut, SEQUENCES * length: cut._replace(m=SEQUENCES * cut.m)}
    known = analysis.factor_points(op)
    return {f: (*cuts, *([images[n]] if (n := op.rule.sizes[f]) in images else [])) for f, cuts in known.items()}


def _wishes(
    op: Operation, kind: str, length: int, striped: bool, sizes: tuple[int, ...], analysis: Analysis, axis: int
) -> Iterator[tuple[int, Choice]]:
    """(how little it is wanted, choice) on one axis; below 0 it must be."""
    n, rule = sizes[axis], op.rule
    hands = 1
    for m in sizes[axis:]:
        hands *= m
    cut = Cut(length // hands, hands, 1) if striped else Cut(1, length, 1)
    is_attention = "attention" in str(op.node.target)
    known = analysis.program.parameters
    weight = next((p.name for v in op.inputs if (p := known.get(analysis.root(v))) is not None), "")
    rows = next((f for f in rule.factors if rule.sizes[f] == length), None)
    for choice in axis_choices(op.type, _points(op, analysis, length, cut), n, empty=True):
        wanted = 5
        if kind == BATCH:
            wanted = 0 if choice.factor in ("b", "b0") and rule.sizes[choice.factor] != length else 4
        elif is_attention:
            if kind == RING and choice.kind == "ring" and choice.cut in (cut, Cut(cut.m, length // cut.m, 1)):
                wanted = -1
            if kind in (ULYSSES, MEGATRON) and choice == Choice("split", "h", choice.cut) and choice.cut.m == 1:
                wanted = -1
        elif kind == MEGATRON and rule.sums and weight and re.search(f"{_COLUMNS}$|{_ROWS}$", weight):
            side = "n" if re.search(f"{_COLUMNS}$", weight) else "k"
            groups = 3 if "c_attn" in weight else 1
            if choice.factor == side and choice.cut.m == groups:
                wanted = -2 if choice.cut.u > 1 else -1
        elif choice.kind == "split" and choice.factor == rows and choice.cut in (cut, Cut(cut.m, length // cut.m, 1)):
            wanted = 0 if kind == MEGATRON else -1
        elif choice.kind == I:
            wanted = 4
        yield wanted, choice
