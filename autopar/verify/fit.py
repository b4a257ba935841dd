"""How an op can run on inputs in given layouts: the rule decides, and the call's sizes and parts must agree."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from autopar.layout import (
    I,
    Layout,
    Mesh,
    P,
    R,
    S,
    format_layout,
    format_state,
    local_shape,
)
from autopar.program import args_of
from autopar.rules.analysis import Analysis, Operation
from autopar.rules.derive import Choice, Strategy, apply, splittable
from autopar.rules.factors import Cut, dimension_cut, factor_cut
from autopar.rules.notation import Algorithm
from autopar.rules.work import factor_size
from autopar.runtime.kernels.parts import AxisCut, Part
from autopar.verify.moves import Mistyped
from autopar.verify.numbering import RESHAPE, arguments_by_name


@dataclass(frozen=True, slots=True)
class Fit:
    """The rules on one rank's part of the mesh."""

    analysis: Analysis
    mesh: Mesh
    at: tuple[int, ...]

    def text(self, layout: Layout) -> str:
        return format_layout(layout, self.mesh.axes)

    def strategies(
        self, node: fx.Node, op: Operation, algorithm: Algorithm | None, layouts: Sequence[Layout]
    ) -> list[Strategy]:
        """Every way for the call ``node`` to be ``op`` on inputs in these layouts.  Raises Mistyped if there is none.

        There are several only where an op makes a dimension of its own, such as one that is expanded.
        """
        sizes = self.mesh.sizes
        per_axis = [self.choices(op, algorithm, [lay[a] for lay in layouts], a) for a in range(len(sizes))]
        out: list[Strategy] = []
        error: Mistyped | None = None
        for choices in itertools.product(*per_axis):
            strategy = apply(op.type, choices, sizes)
            try:
                if strategy is None:
                    raise Mistyped(
                        "cuts of its inputs do not go together", "cuts that nest", ", ".join(map(str, choices))
                    )
                self.compare(op, strategy, layouts)
                self.local_arguments(node, op, strategy, algorithm)
            except Mistyped as e:
                error = error or e
                continue
            out.append(strategy)
        if not out:
            raise error or Mistyped("no choice fits")
        return out

    def choices(self, op: Operation, algorithm: Algorithm | None, states: Sequence[Any], axis: int) -> list[Choice]:
        """How the op can run on one axis, its inputs being in these states."""
        rule, n, name = op.rule, self.mesh.sizes[axis], self.mesh.axes[axis]

        def kind(factor: str) -> str:
            own = algorithm is not None and factor in algorithm.splits and factor not in algorithm.pairs
            return algorithm.name if algorithm is not None and own else "split"

        cuts: dict[Choice, int] = {}
        for i, state in enumerate(states):
            if isinstance(state, S):
                hit = factor_cut(rule.ins[i], state, n, rule.sizes)
                if hit is None:
                    raise Mistyped(
                        f"input {i} is cut on {name} across factors", "a cut of one factor", format_state(state)
                    )
                cuts.setdefault(Choice(kind(hit[0]), *hit), i)
        if algorithm is not None and len(cuts) == 2:
            a, b = cuts
            for own, other in ((a, b), (b, a)):
                if algorithm.pairs.get(own.factor) == other.factor:
                    paired = Choice(algorithm.name, own.factor, own.cut, partner=(other.factor, other.cut))
                    cuts = {paired: cuts[own]}
                    break
        if cuts:
            choice, *others = cuts
            if others:
                raise Mistyped(
                    f"inputs are cut apart on {name}",
                    f"{choice} for all, as for input {cuts[choice]}",
                    f"{others[0]} for input {cuts[others[0]]}",
                )
            if (choice.kind, choice.factor) not in splittable(rule):
                raise Mistyped(
                    f"an input is cut on {name} along a dimension that the op needs whole", "no cut", str(choice)
                )
            return [choice]
        if P in states:
            terms = []
            for product in rule.form:
                carriers = [i for i in product if states[i] == P]
                if len(carriers) != 1:
                    break
                terms.append(carriers[0])
            if not rule.form or len(terms) < len(rule.form):
                raise Mistyped(
                    f"a pending sum over {name} goes into an op that is not linear in it",
                    f"linear: {rule.form or 'in nothing'}",
                    self.states_text(states),
                )
            return [Choice(P, terms=tuple(terms))]
        flows = {s for s, d in zip(states, op.type.differentiable_ins, strict=True) if d}
        if len(flows) > 1:
            raise Mistyped(
                f"replicated and invariant inputs are mixed on {name}", "R, or I, for all", self.states_text(states)
            )
        if flows == {I}:
            return [Choice(I)]
        made = [f for f in rule.factors if not any(f in d for t in rule.ins for d in t) and f not in rule.whole]
        choices = [Choice(R if flows else I)]
        for factor in made:  # a dimension that the op makes is of any size that its arguments say
            choices += [Choice(kind(factor), factor, cut) for cut in self.cuts(op, factor, axis)]
        return choices

    def cuts(self, op: Operation, factor: str, axis: int) -> list[Cut]:
        """Candidate cuts of a factor that no input has: those that travel along the program, by themselves and inside
        what other axes cut."""
        others = [n for a, n in enumerate(self.mesh.sizes) if a != axis]
        groups = {math.prod(some) for k in range(len(others) + 1) for some in itertools.combinations(others, k)}
        size = op.rule.sizes[factor]
        found: dict[Cut, None] = {}
        for cut in self.analysis.factor_points(op)[factor]:
            found[cut] = None
            for outside in {c.m for c in self.analysis.factor_points(op)[factor]}:
                for m in (outside * g for g in groups):
                    if size % (m * cut.u) == 0:
                        found[Cut(m, size // m // cut.u, cut.u)] = None
        return list(found)

    def states_text(self, states: Sequence[Any]) -> str:
        return ", ".join(format_state(s) for s in states)

    def compare(self, op: Operation, strategy: Strategy, layouts: Sequence[Layout]) -> None:
        for i, (wanted, got) in enumerate(zip(strategy.ins, layouts, strict=True)):
            if wanted != got:
                raise Mistyped(
                    f"input {i} ({op.inputs[i]}) is in a layout that does not go with the others",
                    self.text(wanted),
                    self.text(got),
                )

    def local_arguments(self, node: fx.Node, op: Operation, strategy: Strategy, algorithm: Algorithm | None) -> None:
        """Sizes among the arguments are local, and parts say what this rank holds."""
        sizes, at, given = self.mesh.sizes, self.at, arguments_by_name(node, op)
        if node.target is RESHAPE and op.rule.reshapes:
            wanted = local_shape(op.type.out_shapes[0], strategy.outs[0], sizes, at)
            if tuple(args_of(node)[1]) != wanted:
                raise Mistyped("a reshape to another shape than the rank's", str(list(wanted)), str(args_of(node)[1]))
            return

        def rows(names: Sequence[str]) -> int:
            out = 1
            for f in names:
                out *= factor_size(op.rule, strategy, f, sizes, at)
            return out

        for name, dims in op.rule.size_args.items():
            expected: Any = rows(dims) if dims and isinstance(dims[0], str) else [rows(d) for d in dims]
            got = given.get(name)
            if (list(got) if isinstance(got, (list, tuple)) else got) != expected:
                raise Mistyped(f"argument {name} is not this rank's size", str(expected), str(got))
        for name, dims in op.rule.part_args.items():
            self.same_parts(name, [self.part(op, strategy, d) for d in dims], list(given.get(name) or ()))
        if algorithm is not None:
            splits, parts = algorithm.factors(op.rule), given.get("parts") or {}
            self.same_parts("parts", [self.part(op, strategy, (f,)) for f in splits], [parts.get(f) for f in splits])
            pairs = given.get("pairs") or {}
            for factor, partner, cuts in strategy.pairs():
                named = tuple(AxisCut(self.mesh.axes[axis], *cut) for axis, cut in cuts)  # type: ignore[arg-type]
                self.same_parts("pairs", [Part(op.rule.sizes[partner], named)], [pairs.get(factor)])

    def same_parts(self, name: str, expected: Sequence[Part], got: Sequence[Any]) -> None:
        def text(part: Any) -> str:
            if part is None:
                return "nothing"
            return f"{part.size} rows" + "".join(f", {c.axis} cuts {(c.m, c.N, c.u)}" for c in part.cuts)

        if list(map(text, expected)) != list(map(text, got)):
            raise Mistyped(
                f"argument {name} does not say what this rank holds",
                "; ".join(map(text, expected)),
                "; ".join(map(text, got)),
            )

    def part(self, op: Operation, strategy: Strategy, names: Sequence[str]) -> Part:
        """What this rank holds of a dimension of these factors; axes by name."""
        cuts = []
        for factor in names:
            for axis, cut in strategy.cuts(factor):
                image = dimension_cut((tuple(names),), factor, cut, op.rule.sizes)
                assert image is not None  # the factor is among the names
                cuts.append(AxisCut(self.mesh.axes[axis], *image[1:]))  # type: ignore[arg-type]
        whole = math.prod(op.rule.sizes.get(f, 1) for f in names)
        return Part(whole, tuple(sorted(cuts, key=lambda c: c.m)))
