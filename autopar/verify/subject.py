"""What is verified: the graph and the weights' ways of one rank, beside the program that they must compute."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import fx

from autopar.layout import Mesh
from autopar.passes.code import rank_classes
from autopar.passes.emit import emit
from autopar.passes.resolve import Resolved
from autopar.runtime.collectives import Axis, Step
from autopar.runtime.dtensor import steps


@dataclass(frozen=True, slots=True)
class Ways:
    """How a weight gets from where it is stored to where the step holds it, and its gradient back: once a step."""

    gather: tuple[Step, ...]
    final: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class RankGraph:
    """What the rank at coordinates ``at`` runs.  ways: by the weight's node in the program."""

    at: tuple[int, ...]
    graph: fx.Graph
    inputs: tuple[tuple[str, str], ...]
    uses: Mapping[str, int]
    ways: Mapping[str, Ways]


def rank_graph(resolved: Resolved, at: tuple[int, ...], outputs: bool | None = None) -> RankGraph:
    """What `autopar.parallelize` would run on the rank at ``at``; no process group is needed.

    outputs: also the model's own outputs; if left out only where there is no loss.
    """
    program, mesh = resolved.analysis.program, resolved.mesh
    emitted = emit(resolved, at, program.loss is None if outputs is None else outputs)
    axes = [Axis(name, n, i) for name, n, i in zip(mesh.axes, mesh.sizes, at, strict=True)]
    ways = {}
    for node, parameter in program.parameters.items():
        stored = resolved.parameters[node]
        gather, final = (steps(m, parameter.shape, mesh, at, axes) for m in (stored.gather, stored.final))
        ways[node] = Ways(gather, final)
    return RankGraph(at, emitted.graph, emitted.inputs, emitted.uses, ways)


def coordinates_that_matter(resolved: Resolved) -> Iterable[tuple[int, ...]]:
    """One rank of every kind: ranks of one kind hold equal sizes of everything, and differ by their index alone."""
    classes = rank_classes(resolved)
    kinds: list[tuple[int, ...]] = [()]
    for row in classes:
        kinds = [(*k, row.index(c)) for k in kinds for c in sorted(set(row))]
    return kinds


def mesh_text(mesh: Mesh, at: tuple[int, ...]) -> str:
    """``rank dp 0, tp 1``."""
    return "rank " + ", ".join(f"{a} {i}" for a, i in zip(mesh.axes, at, strict=True)) if at else "the only rank"
