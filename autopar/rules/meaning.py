"""What dimensions mean: batch, sequence or features.

Rules know factors, not what they stand for; a person who says "2D" or "Ulysses" means batch, positions in a sequence,
and features.  Meanings start at the batch's tensors and at weights, and travel through the rules like cut points:

    ids [batch sequence] -> embedding [batch sequence features] -> view [(batch sequence) features]

A dimension is a list of (meaning, size), major to minor, so that flattening loses nothing.  What stays unknown has the
meaning "".  Nothing that runs depends on it: it names what plans do, and bounds a search.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter

from autopar.program import is_continuous
from autopar.rules.analysis import Bound, Operation, Value
from autopar.rules.derive import Choice
from autopar.rules.notation import Dims

BATCH, SEQUENCE, FEATURES, UNKNOWN = "batch", "sequence", "features", ""

Segments = tuple[tuple[str, int], ...]  # of one dimension or factor, major to minor


@dataclass(frozen=True, slots=True)
class Meanings:
    """factors: what each factor of an op is made of, by the op's name."""

    factors: dict[str, dict[str, Segments]]

    def of(self, op: Operation, choice: Choice) -> str:
        """What the choice splits; "" where it splits nothing, or nobody knows."""
        outside = 1
        for meaning, size in self.factors[op.name].get(choice.factor, ()):
            if outside <= choice.cut.m < outside * size:
                return meaning
            outside *= size
        return UNKNOWN

    def has(self, op: Operation, meaning: str) -> list[str]:
        """The factors of an op that are, in part, of this meaning."""
        return [f for f, segments in self.factors[op.name].items() if any(m == meaning for m, _ in segments)]

    def mixes_sequence(self, op: Operation) -> bool:
        """Whether an op relates the positions of a sequence to one another, as attention does."""
        return len(self.has(op, SEQUENCE)) > 1


def meanings(bound: Bound) -> Meanings:
    """Forward through the program, back for what joins it later (positions, masks, labels), and forward again."""
    known = {name: _start(value) for name, value in bound.values.items()}
    weights = {name for name, value in bound.values.items() if value.kind == "parameter"}
    for op in bound.operations:
        if op.inputs and all(v in weights for v in op.inputs):
            weights.update(op.outputs)
    factors: dict[str, dict[str, Segments]] = {}
    for forward in (True, False, True):
        for op in bound.operations if forward else reversed(bound.operations):
            sources = [*zip(op.rule.ins, op.inputs, strict=True), *zip(op.rule.outs, op.outputs, strict=True)]
            activations = [(dims, v) for dims, v in sources if v not in weights]
            found = _factors(op, [(dims, known[v]) for dims, v in activations])
            brought = {f for dims, v in sources if v in weights for names in dims for f in names}
            carried = {f for dims, v in sources[: len(op.inputs)] if v not in weights for names in dims for f in names}
            for factor in brought - carried:
                if not _says_something(found.get(factor, ())):
                    found[factor] = ((FEATURES, op.rule.sizes[factor]),)
            factors[op.name] = found
            for dims, v in activations:
                if (v in op.outputs) == forward:
                    known[v] = tuple(
                        old if _says_something(old) else sum((found.get(f, ()) for f in names), ())
                        for old, names in zip(known[v], dims, strict=True)
                    )
    return Meanings(factors)


def _start(value: Value) -> tuple[Segments, ...]:
    """An input's first dimension is the batch; of ids the second is the sequence, of vectors the last are features."""
    said = [UNKNOWN] * len(value.shape)
    if value.kind == "input" and said:
        if is_continuous(value.dtype):
            said[-1] = FEATURES if len(said) in (2, 3) else UNKNOWN
            said[1:2] = [SEQUENCE if len(said) == 3 else said[1]] if len(said) > 1 else []
        elif len(said) > 1:
            said[1] = SEQUENCE
        said[0] = BATCH
    return tuple(((m, n),) if n > 1 else () for m, n in zip(said, value.shape, strict=True))


def _says_something(segments: Segments) -> bool:
    return any(map(itemgetter(0), segments))


def _factors(op: Operation, tensors: Iterable[tuple[Dims, Sequence[Segments]]]) -> dict[str, Segments]:
    """The segments of each factor, from the first tensor that knows them."""
    found: dict[str, Segments] = {}
    for dims, known in tensors:
        for names, segments in zip(dims, known, strict=True):
            sizes = [op.rule.sizes[f] for f in names]
            for factor, part in zip(names, _apart(segments, sizes), strict=True):
                if not _says_something(found.get(factor, ())):
                    found[factor] = part
    return found


def _apart(segments: Segments, sizes: Sequence[int]) -> list[Segments]:
    """One dimension's segments by the factors of these sizes; all of its first meaning where boundaries differ."""
    if len(sizes) == 1:
        return [segments]
    rest, out = list(segments), []
    for size in sizes:
        part: list[tuple[str, int]] = []
        lacking = size
        while lacking > 1 and rest:
            meaning, n = rest.pop(0)
            taken = math.gcd(n, lacking)
            if taken not in (n, lacking):
                return [((segments[0][0], s),) for s in sizes]
            part.append((meaning, taken))
            lacking //= taken
            if n > taken:
                rest.insert(0, (meaning, n // taken))
        out.append(tuple(part))
    return out
