"""Ranks against each other: they must make the same calls in the same order."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch import fx

from autopar.layout import (
    format_layout,
)
from autopar.passes.resolve import Resolved
from autopar.verify.places import whereabouts
from autopar.verify.report import Finding
from autopar.verify.subject import RankGraph, mesh_text
from autopar.verify.types import Types


def compare_ranks(resolved: Resolved, graphs: Sequence[RankGraph], types: Sequence[Types]) -> list[Finding]:
    """Ranks run the same calls in the same order, on the same values in the same layouts: else they would wait for each
    other, or mix parts of different cuts."""
    for graph, found in zip(graphs[1:], types[1:], strict=True):
        pairs = itertools.zip_longest(graphs[0].graph.nodes, graph.graph.nodes)
        for mine, theirs in pairs:
            if mine is None or theirs is None or mine.op != theirs.op or mine.target != theirs.target:
                what, expected, got = "ranks run other calls", str(mine), str(theirs)
            elif set(found.values.get(theirs.name, ())).isdisjoint(types[0].values.get(mine.name, ())) and (
                mine.name in types[0].values and theirs.name in found.values
            ):
                what = "ranks hold one value in different layouts"
                expected, got = (_reading(resolved, t, n) for t, n in ((types[0], mine), (found, theirs)))
            else:
                continue
            where = whereabouts(mine or theirs, types[0].ops if mine is not None else found.ops)
            return [Finding("types", what, f"{where} ({mesh_text(resolved.mesh, graph.at)})", expected, got)]
    return []


def _reading(resolved: Resolved, types: Types, node: fx.Node) -> str:
    """Values and layouts of a node, as a person reads them."""
    first = types.values[node.name][0]
    return ", ".join(f"value {number} in {format_layout(layout, resolved.mesh.axes)}" for number, layout in first)
