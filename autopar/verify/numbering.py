"""Which op of the program a call in an emitted graph is: by what it computes, not by what emission says of it.

Every value of the program has a number, equal for values that are computed alike.  A call in an emitted graph is looked
up by its target, the numbers of its inputs and its literal arguments; sizes and parts of factors, which differ on every
rank, are left out of the key and checked afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autopar.program import args_of, call_arguments, is_tensor
from autopar.rules.analysis import Bound, Operation
from autopar.rules.notation import Algorithm

RESHAPE = torch.ops.aten.reshape.default
Key = tuple[Hashable, ...]


@dataclass(frozen=True, slots=True)
class Candidate:
    """An op that a call may be, and by which algorithm it then runs."""

    op: Operation
    algorithm: Algorithm | None
    outputs: tuple[int, ...]


@dataclass(slots=True)
class Numbering:
    """numbers: of every value of the program.  values: the first value that has a number."""

    numbers: dict[str, int] = field(default_factory=dict)
    values: list[str] = field(default_factory=list)
    calls: dict[Key, list[Candidate]] = field(default_factory=dict)
    free: dict[Any, frozenset[str]] = field(default_factory=dict)  # target -> arguments that differ on every rank

    def look_up(self, node: fx.Node, number: Callable[[fx.Node], Hashable]) -> list[Candidate]:
        """What the call ``node`` of an emitted graph may be, its inputs having these numbers."""
        if node.target is RESHAPE:
            source = node.args[0]
            return self.calls.get((RESHAPE, number(source)), []) if isinstance(source, fx.Node) else []
        free = self.free.get(node.target, frozenset())
        return self.calls.get(_key(node.target, node.args, node.kwargs, free, number), [])


def number_values(bound: Bound) -> Numbering:
    """Give every value of the program its number."""
    out = Numbering()
    for op in bound.operations:
        free = _free_arguments(op)
        for target in (op.node.target, *(a.run for a in op.rule.algorithms)):
            out.free[target] = out.free.get(target, frozenset()) | free
    known: dict[Key, int] = {}

    def number_of(key: Key, name: str) -> int:
        if key not in known:
            known[key] = len(out.values)
            out.values.append(name)
        out.numbers[name] = known[key]
        return known[key]

    def number(node: fx.Node) -> Hashable:
        return out.numbers.get(node.name, node.name)

    for name, value in bound.values.items():
        if value.kind != "op":
            number_of(("placeholder", name), name)
    for op in bound.operations:
        args, kwargs = op.node.args, op.node.kwargs
        views = op.rule.reshapes  # whatever the program calls it, a rank runs it as a reshape
        source = number(args_of(op.node)[0]) if views else None
        exact: Key = (RESHAPE, source, op.type.out_shapes)
        if not views:
            exact = _key(op.node.target, args, kwargs, frozenset(), number)
        outputs = tuple(number_of((*exact, k), name) for k, name in enumerate(op.outputs))
        ways: list[tuple[Any, Algorithm | None]] = [(op.node.target, None), *((a.run, a) for a in op.rule.algorithms)]
        for target, algorithm in ways:
            loose: Key = (RESHAPE, source) if views else _key(target, args, kwargs, out.free[target], number)
            alike = out.calls.setdefault(loose, [])
            if all(c.outputs != outputs for c in alike):
                alike.append(Candidate(op, algorithm, outputs))
    return out


def _free_arguments(op: Operation) -> frozenset[str]:
    """Arguments that are local: by name, and by position as ``#i`` (an algorithm names them as it likes)."""
    names = {*op.rule.size_args, *op.rule.part_args, "parts", "pairs"}
    positions = {f"#{i}" for i, n in enumerate(call_arguments(op.node)) if n in names and i < len(op.node.args)}
    return frozenset(names | positions)


def _key(
    target: Any, args: Any, kwargs: Mapping[str, Any], free: frozenset[str], number: Callable[[fx.Node], Hashable]
) -> Key:
    def freeze(arg: Any) -> Hashable:
        if isinstance(arg, fx.Node):
            return ("node", number(arg))
        if isinstance(arg, (list, tuple)):
            return tuple(freeze(a) for a in arg)
        return repr(arg)

    given = tuple("local" if f"#{i}" in free else freeze(a) for i, a in enumerate(args))
    return (target, given, tuple((k, freeze(v)) for k, v in sorted(kwargs.items()) if k not in free))


def arguments_by_name(node: fx.Node, op: Operation) -> dict[str, Any]:
    """What the call ``node`` passes, by the names of the program's op and in the order of its schema."""
    names = list(call_arguments(op.node))
    given = dict(zip(names, node.args, strict=False))
    given.update(node.kwargs)
    return {n: given[n] for n in names if n in given} | {k: v for k, v in node.kwargs.items() if k not in names}


def tensors_of(node: fx.Node, op: Operation) -> list[fx.Node]:
    """Nodes of the emitted graph that the call takes for the op's tensors, in the order in which rules count them."""
    out: list[fx.Node] = []

    def walk(mine: Any, theirs: Any) -> None:
        if isinstance(theirs, (list, tuple)) and isinstance(mine, (list, tuple)):
            for a, b in zip(mine, theirs, strict=False):
                walk(a, b)
        elif is_tensor(theirs) and isinstance(mine, fx.Node):
            out.append(mine)

    given, wanted = arguments_by_name(node, op), call_arguments(op.node)
    for name, arg in wanted.items():
        walk(given.get(name), arg)
    return out
