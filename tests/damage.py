"""Damage to emitted graphs: what a wrong compiler could emit, the same on every rank, to see that verify finds it."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar.layout import I, P, R, Split
from autopar.runtime.collectives import Step, convert
from autopar.runtime.kernels.parts import AxisCut, Part
from autopar.runtime.parameters import use
from autopar.verify.subject import RankGraph, Ways
from autopar.verify.traffic import collective

Graphs = Mapping[tuple[int, ...], RankGraph]


@dataclass(frozen=True, slots=True)
class Damage:
    """kind: a row of the table.  where: module paths that a finding may name.  apply: changes one rank's copy.

    waits: ranks would wait for each other, so that it cannot be run.
    """

    kind: str
    target: str
    where: frozenset[str]
    apply: Callable[[RankGraph], RankGraph]
    waits: bool = False


def copied(rank: RankGraph) -> RankGraph:
    """A copy whose graph can be changed."""
    graph = fx.Graph()
    nodes: dict[fx.Node, fx.Node] = {}
    for node in rank.graph.nodes:
        new = nodes[node] = graph.node_copy(node, lambda n: nodes[n])
        if new.name != node.name:
            new._rename(node.name)
        new.meta = dict(node.meta)
    return dataclasses.replace(rank, graph=graph)


def damaged(graphs: Graphs, damage: Damage) -> Graphs:
    return {at: damage.apply(copied(rank)) for at, rank in graphs.items()}


# ------------------------------------------------------------------------------------------------ changes of one step


def _other_axis(step: Any, axes: Sequence[Any]) -> Iterator[Any]:
    for axis in axes:
        if axis.name != step.axis.name:
            yield step._replace(axis=axis)


def _slices(split: Split) -> Iterator[Split]:
    """Cuts of the same dimension that take other rows."""
    for k in (2, 3, 5):
        if split.inner % k == 0:
            yield split._replace(outer=split.outer * k, inner=split.inner // k)
        if split.outer % k == 0:
            yield split._replace(outer=split.outer // k, inner=split.inner * k)
    if split.units > 1 and split.inner > 1:
        yield split._replace(units=split.inner, inner=split.units)


def changes(step: Step, axes: Sequence[Any]) -> Iterator[tuple[str, Step]]:
    """(kind of damage, changed step)."""
    for wrong in _other_axis(step, axes):
        yield "wrong axis", wrong
    for end in ("src", "dst"):
        state = getattr(step, end)
        if isinstance(state, Split):
            yield "wrong dim", step._replace(**{end: state._replace(dim=state.dim + 1)})
            if state.dim:
                yield "wrong dim", step._replace(**{end: state._replace(dim=state.dim - 1)})
            for wrong in _slices(state):
                yield "wrong slice", step._replace(**{end: wrong})
        elif state in (R, I):
            yield "wrong backward", step._replace(**{end: I if state == R else R})
        if state == P:
            yield "wrong state", step._replace(**{end: R})


def chain_changes(way: Sequence[Step], axes: Sequence[Any]) -> Iterator[tuple[str, tuple[Step, ...]]]:
    """Damage to a chain of conversions, as (kind, changed chain)."""
    way = tuple(way)
    for k, step in enumerate(way):
        yield "dropped", (*way[:k], *way[k + 1 :])
        yield "doubled", (*way[: k + 1], *way[k:])
        if k:
            yield "wrong order", (*way[: k - 1], step, way[k - 1], *way[k + 1 :])
        for kind, wrong in changes(step, axes):
            yield kind, (*way[:k], wrong, *way[k + 1 :])


# ------------------------------------------------------------------------------------------------ changes of a graph


def _axes(rank: RankGraph) -> list[fx.Node]:
    kinds = {name for kind, name in rank.inputs if kind == "axis"}
    return [n for n in rank.graph.nodes if n.op == "placeholder" and n.name in kinds]


def _node(rank: RankGraph, name: str) -> fx.Node:
    return next(n for n in rank.graph.nodes if n.name == name)


def _around(node: fx.Node) -> frozenset[str]:
    """Module paths at which the damage may show first: of the node, of what it takes, of those who take it."""
    users = list(node.users)
    for user in list(users):  # a view or a conversion in between
        users += list(user.users)
    near = [node, *node.all_input_nodes, *users]
    weights = [n.args[2] for n in near if n.target is use]
    return frozenset(filter(None, (n.meta.get("where", "") for n in near))) | frozenset(map(str, weights))


def _set(name: str, change: Callable[[fx.Node, RankGraph], None]) -> Callable[[RankGraph], RankGraph]:
    def apply(rank: RankGraph) -> RankGraph:
        change(_node(rank, name), rank)
        return rank

    return apply


def _drop(node: fx.Node, rank: RankGraph) -> None:
    node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
    rank.graph.erase_node(node)


def _double(node: fx.Node, rank: RankGraph) -> None:
    with rank.graph.inserting_after(node):
        again = rank.graph.call_function(convert, node.args, {})
    node.replace_all_uses_with(again)
    again.args = (node, *node.args[1:])


def _scale(factor: float) -> Callable[[fx.Node, RankGraph], None]:
    def change(node: fx.Node, rank: RankGraph) -> None:
        with rank.graph.inserting_after(node):
            scaled = rank.graph.call_function(torch.ops.aten.mul.Scalar, (node, factor), {})
        node.replace_all_uses_with(scaled)
        scaled.args = (node, factor)

    return change


def _nth(options: Iterator[tuple[str, Any]], kind: str, k: int) -> Any:
    """The k-th change of this kind; the same choice on every rank, whatever its sizes."""
    found = [o for name, o in options if name == kind]
    return found[k] if k < len(found) else None


def _step_change(kind: str, k: int) -> Callable[[fx.Node, RankGraph], None]:
    def change(node: fx.Node, rank: RankGraph) -> None:
        wrong = _nth(changes(Step(*node.args[1:]), _axes(rank)), kind, k)  # type: ignore[arg-type]
        if wrong is not None:
            node.args = (node.args[0], *wrong)

    return change


def _way_change(index: int, kind: str, k: int) -> Callable[[fx.Node, RankGraph], None]:
    """index: of the chain among the arguments of `use`; 3 is forward, 4 backward."""

    def change(node: fx.Node, rank: RankGraph) -> None:
        wrong = _nth(chain_changes(node.args[index], _axes(rank)), kind, k)  # type: ignore[arg-type]
        if wrong is not None:
            node.args = (*node.args[:index], wrong, *node.args[index + 1 :])

    return change


def _once_change(weight: str, which: str, kind: str, k: int) -> Callable[[RankGraph], RankGraph]:
    def apply(rank: RankGraph) -> RankGraph:
        ways = rank.ways[weight]
        axes = list({s.axis.name: s.axis for w in rank.ways.values() for s in (*w.gather, *w.final)}.values())
        wrong = _nth(chain_changes(getattr(ways, which), axes), kind, k)
        if wrong is None:
            return rank
        changed: Ways = dataclasses.replace(ways, **{which: wrong})
        return dataclasses.replace(rank, ways={**rank.ways, weight: changed})

    return apply


def _parts_of(node: fx.Node) -> list[Part]:
    found: list[Part] = []

    def walk(arg: Any) -> None:
        if isinstance(arg, Part):
            found.append(arg)
        elif isinstance(arg, dict):
            for a in arg.values():
                walk(a)
        elif isinstance(arg, (list, tuple)):
            for a in arg:
                walk(a)

    walk([*node.args, *node.kwargs.values()])
    return found


def _shift_part(node: fx.Node, rank: RankGraph) -> None:
    """The op is told that it holds other rows: as if the cut lay in twice the groups, or were not there."""

    def walk(arg: Any) -> Any:
        if isinstance(arg, Part) and arg.cuts:
            cut = arg.cuts[0]
            even = cut.N % 2 == 0
            wrong = AxisCut(cut.axis, cut.m * 2, cut.N // 2, cut.u) if even else AxisCut(cut.axis, cut.N, cut.m, cut.u)
            return Part(arg.size, (wrong, *arg.cuts[1:]))
        if isinstance(arg, dict):
            return {k: walk(v) for k, v in arg.items()}
        if isinstance(arg, (list, tuple)) and not hasattr(arg, "_fields"):
            return [walk(a) for a in arg]
        return arg

    node.kwargs = {k: walk(v) for k, v in node.kwargs.items()}


def _wrong_group(first: str, second: str) -> Callable[[RankGraph], RankGraph]:
    """Every collective over one axis runs in the group of another."""

    def apply(rank: RankGraph) -> RankGraph:
        swap = {("axis", first): ("axis", second), ("axis", second): ("axis", first)}
        return dataclasses.replace(rank, inputs=tuple(swap.get(i, i) for i in rank.inputs))

    return apply


def _reordered(node: str, other: str, at: tuple[int, ...]) -> Callable[[RankGraph], RankGraph]:
    """One rank makes two collectives in another order than the others."""

    def apply(rank: RankGraph) -> RankGraph:
        if rank.at == at:
            _node(rank, node).prepend(_node(rank, other))
        return rank

    return apply


def _communicates(node: fx.Node) -> bool:
    return collective(*node.args[2:]) != "local"


def _independent(first: fx.Node, second: fx.Node) -> bool:
    """Whether ``second`` follows ``first`` and could as well stand before it."""
    return all(n.op == "placeholder" or n < first for n in second.all_input_nodes)


def every_damage(graphs: Graphs, names: Mapping[str, str]) -> Iterator[Damage]:
    """All that this file can do to these graphs; names: of weights, by their nodes in the program."""
    first = graphs[(0,) * len(next(iter(graphs)))]
    axes = _axes(first)
    previous: fx.Node | None = None
    for node in first.graph.nodes:
        near = _around(node)
        if node.target is convert:
            name = node.name
            yield Damage("dropped", name, near, _set(name, _drop))
            yield Damage("doubled", name, near, _set(name, _double))
            yield Damage("wrong scale", name, near, _set(name, _scale(2.0)))
            yield Damage("wrong scale", name, near, _set(name, _scale(0.5)))
            counts: dict[str, int] = {}
            for kind, _ in changes(Step(*node.args[1:]), axes):
                k = counts[kind] = counts.get(kind, -1) + 1
                yield Damage(kind, name, near, _set(name, _step_change(kind, k)))
            if not _communicates(node):
                continue
            if previous is not None and previous.args[1] is node.args[1] and _independent(previous, node):
                yield Damage("order on a rank", name, near, _reordered(previous.name, name, first.at), waits=True)
            previous = node
        elif node.target is use:
            for index, side in ((3, ""), (4, " of a gradient")):
                counts = {}
                for kind, _ in chain_changes(node.args[index], axes):
                    k = counts[kind] = counts.get(kind, -1) + 1
                    yield Damage(kind + side, node.name, near, _set(node.name, _way_change(index, kind, k)))
            yield Damage("wrong scale", node.name, near, _set(node.name, _scale(0.5)))
        elif node.op == "call_function" and any(p.cuts for p in _parts_of(node)):
            yield Damage("wrong part", node.name, near, _set(node.name, _shift_part))
    for weight, ways in first.ways.items():
        chains = {s.axis.name: s.axis for w in first.ways.values() for s in (*w.gather, *w.final)}
        for which, side in (("gather", ""), ("final", " of a gradient")):
            counts = {}
            for kind, _ in chain_changes(getattr(ways, which), list(chains.values())):
                k = counts[kind] = counts.get(kind, -1) + 1
                yield Damage(kind + side, weight, frozenset({names[weight]}), _once_change(weight, which, kind, k))
    for i, a in enumerate(axes):
        for b in axes[i + 1 :]:
            yield Damage("wrong group", a.name, frozenset(), _wrong_group(a.name, b.name))


def some(graphs: Graphs, names: Mapping[str, str], count: int, rng: random.Random) -> list[Damage]:
    """``count`` of them, every kind as often as the others where there are enough."""
    by_kind: dict[str, list[Damage]] = {}
    for damage in every_damage(graphs, names):
        by_kind.setdefault(damage.kind, []).append(damage)
    for known in by_kind.values():
        rng.shuffle(known)
    out: list[Damage] = []
    while len(out) < count and any(by_kind.values()):
        out += [known.pop() for known in by_kind.values() if known]
    return out[:count]
