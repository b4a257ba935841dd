"""Pins: what a user decides about weights, ``{"layers.*.mlp.up.weight": "tp:S0"}``."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import replace

from autopar.errors import PlanError
from autopar.layout import I, Layout, Mesh, P, S, State, parse_state
from autopar.rules.analysis import Analysis, Bound, Operation
from autopar.rules.derive import Strategy
from autopar.solver.space import Space

Pinned = dict[str, dict[int, State]]  # weight's node name -> axis -> state


def read_pins(bound: Bound, mesh: Mesh, pins: Mapping[str, str]) -> Pinned:
    """The state that each pinned weight must have, by axis.  Raises PlanError for a pin that means nothing here.

    A glob matches a weight's name, or that of a module it lies in.
    """
    out: Pinned = {}
    for glob, text in pins.items():
        matched = [
            node
            for node, parameter in bound.program.parameters.items()
            if any(fnmatch.fnmatchcase(part, glob) for name in parameter.names for part in _prefixes(name))
        ]
        if not matched:
            names = ", ".join(p.name for p in list(bound.program.parameters.values())[:5])
            raise PlanError(
                "a pin matches no weight", where=f"pins[{glob!r}]", expected=f"a glob of names such as {names}"
            )
        for node in matched:
            for part in text.split():
                axis, colon, state = part.partition(":")
                if not colon or axis not in mesh.axes:
                    raise PlanError(
                        "a pin names no axis of the mesh",
                        where=f"pins[{glob!r}]",
                        expected=f"<axis>:<state>, axes {', '.join(mesh.axes)}",
                        got=part,
                        hint="fix the mesh with Search(mesh={...}), so that its axes have names",
                    )
                try:
                    parsed = parse_state(state, bound.values[node].shape)
                except ValueError as error:
                    raise PlanError("a pin's state cannot be read", where=f"pins[{glob!r}]", got=str(error)) from error
                if parsed == P:
                    raise PlanError(
                        "a weight cannot be pinned to P", where=f"pins[{glob!r}]", expected="I, R or S<dim>"
                    )
                out.setdefault(node, {})[mesh.axes.index(axis)] = parsed
    return out


def _prefixes(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:k]) for k in range(1, len(parts) + 1)]


def _obeys(layout: Layout, pinned: Mapping[int, State], *, stored: bool) -> bool:
    """R: used whole, stored anyhow.  I: used and stored whole.  A plain S: any cut of its dimension."""
    for axis, state in pinned.items():
        have = layout[axis]
        if isinstance(state, S):
            plain = state.m == 1 and state.u == 1
            if not isinstance(have, S) or (have.dim != state.dim if plain else have != state):
                return False
        elif isinstance(have, S) and not (stored and state != I):
            return False
    return True


def keeps(analysis: Analysis, pinned: Pinned, op: Operation, strategy: Strategy) -> bool:
    """Whether a strategy uses every pinned weight as it is pinned."""
    for name, layout in zip(op.inputs, strategy.ins, strict=True):
        root = analysis.root(name)
        if root in pinned:
            shown = analysis.to_root(name, layout)
            if shown is None or not _obeys(shown, pinned[root], stored=False):
                return False
    return True


def restrict(space: Space, pinned: Pinned) -> Space:
    """Keep only the storage layouts that the pins allow.  Raises PlanError where none is left."""
    weights = []
    for weight in space.weights:
        wanted = pinned.get(weight.edge.name)
        if wanted:
            stored = tuple(layout for layout in weight.stored if _obeys(layout, wanted, stored=True))
            if not stored:
                raise PlanError("no layout in which a weight can be stored satisfies its pin", where=weight.name)
            weight = replace(weight, stored=stored)
        weights.append(weight)
    return replace(space, weights=tuple(weights))
