"""The ledger of one GPT layer: in every mode ranks send exactly what theory says, and hold what theory says.

Symbols as in the papers: T = b s h elements of an activation of width h; p ranks, q x q, d x q x q or l x l x l.
A layer's inputs of linears are 7 T, their outputs 9 T, their weights 12 h^2.  Sources: Megatron (arXiv 1909.08053,
2205.05198), Optimus (2104.05343), Tesseract (2105.14500), 3D (2105.14450), Ulysses (2309.14509), ring (2310.01889).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import ledger
import pytest
import torch
from equality import sample
from gpt_layers import gpt_layers
from models import Case

from autopar import api
from autopar.cluster import ClusterSpec
from autopar.modes import describe
from autopar.plan import Plan
from autopar.rules.analysis import Bound
from autopar.solver.search import Search

Shape = tuple[int, int, int]  # b, s, h


@dataclass(frozen=True, slots=True)
class Layer:
    """What a layer is in one mode, in elements per rank.

    forward, backward: sent by its linears and its attention.  weights, saved: held of them; saved is None where
    gathered operands are kept.  norms: sent beside for norms and biases, both ways; statistics: of it for means and
    variances by parts.
    """

    said: str
    mesh: dict[str, int]
    search: dict[str, Any]
    shape: Shape
    heads: tuple[int, int]
    forward: Fraction
    backward: Fraction
    weights: Fraction
    saved: Fraction | None = None
    norms: Fraction = Fraction(0)
    statistics: Fraction = Fraction(0)
    pins: Mapping[str, str] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        return torch.Size(self.mesh.values()).numel()


def sizes(shape: Shape, heads: int) -> tuple[Fraction, Fraction, Fraction, Fraction, Fraction]:
    """T, h, h^2, rows b s, and the numbers of a softmax that attention keeps, one for a row of a head."""
    b, s, h = map(Fraction, shape)
    return b * s * h, h, h * h, b * s, b * s * heads


def reduced(n: int, size: Fraction) -> Fraction:
    """Sent by each of n ranks for the all-reduce of ``size``."""
    return 2 * Fraction(n - 1, n) * size


# ------------------------------------------------------------------------------------------------ theory

EVEN, LONG, NARROW = (6, 8, 24), (8, 8, 24), (6, 4, 24)


def flat(p: int, shape: Shape = EVEN) -> Layer:
    """Biases of columns are split, those of rows are added once to a pending sum, and norms run whole.

    Pinned, for columns twice in turn send as much as columns and rows, and keep less.
    """
    t, _, h2, _, soft = sizes(shape, 8)
    pins = {"layers.*.qkv.*.weight": "S0", "layers.*.up.weight": "S0"}
    pins |= {"layers.*.proj.weight": "S1", "layers.*.down.weight": "S1"}
    pins = {name: f"tp:{state}" for name, state in pins.items()}
    way, saved = reduced(p, 2 * t), 2 * t + (12 * t + soft) / p
    given = {"tp": p}, {"tensor_modes": "1d", "sequence": "none"}, shape, (8, 8)
    return Layer("tp: tensor 1D", *given, way, way, 12 * h2 / p, saved, pins=pins)


def megatron(p: int, shape: Shape = EVEN) -> Layer:
    """Whole inputs of columns (2 T) are kept.  Of norms the weights' gradients are reduced; biases are as in 1D."""
    t, h, h2, _, soft = sizes(shape, 8)
    way = reduced(p, 2 * t)
    saved = 2 * t + (12 * t + soft) / p
    said, search = "tp: tensor 1D, sequence split", {"sequence": "megatron"}
    return Layer(said, {"tp": p}, search, shape, (8, 8), way, way, 12 * h2 / p, saved, reduced(p, 4 * h))


def ulysses(p: int, shared: int = 8, shape: Shape = EVEN) -> Layer:
    """The output of attention is kept twice, by heads for attention and by positions for the linear."""
    t, h, h2, _, soft = sizes(shape, 8)
    g, weights = Fraction(shared, 8), (10 + 2 * Fraction(shared, 8)) * h2
    way = 2 * (1 + g) * (p - 1) * t / p**2
    said, search = "sp: sequence split, Ulysses", {"tensor_modes": "none", "sequence": "ulysses", "zero": 0}
    saved = ((13 + 2 * g) * t + soft) / p
    given = {"sp": p}, search, shape, (8, shared)
    return Layer(said, *given, way, way + reduced(p, weights), weights, saved, reduced(p, 13 * h))


def ring(p: int, shared: int = 8, shape: Shape = EVEN) -> Layer:
    """Of the softmax two numbers are kept: the sum, and the peak that it is relative to."""
    t, h, h2, _, soft = sizes(shape, 8)
    g, weights = Fraction(shared, 8), (10 + 2 * Fraction(shared, 8)) * h2
    forward, backward = 2 * g * (p - 1) * t / p, 2 * g * (2 * p - 1) * t / p
    said, search = "cp: sequence split, ring attention", {"tensor_modes": "none", "sequence": "ring", "zero": 0}
    saved = ((12 + 2 * g) * t + 2 * soft) / p
    given = {"cp": p}, search, shape, (8, shared)
    return Layer(said, *given, forward, backward + reduced(p, weights), weights, saved, reduced(p, 13 * h))


def square(q: int, operands: str, shape: Shape, heads: int) -> Layer:
    """Gathered operands, x over y and w over x, are kept; streamed ones come again, and so do their gradients."""
    t, h, h2, rows, soft = sizes(shape, heads)
    way = (q - 1) * (7 * t + 12 * h2) / q**2
    again = 2 if operands == "streamed" else 1
    saved = (14 * t + soft) / q**2 if operands == "streamed" else None
    statistics = 8 * reduced(q, rows / q)
    said, search = f"x, y: tensor 2D ({operands})", {"tensor_modes": f"2d {operands}", "sequence": "none"}
    given = {"x": q, "y": q}, search, shape, (heads, heads)
    norms = statistics + reduced(q, 13 * h / q)
    return Layer(said, *given, way, again * way, 12 * h2 / q**2, saved, norms, statistics)


def tesseract(q: int, d: int, shape: Shape, heads: int) -> Layer:
    """Gradients of norms and biases are reduced over all rows, d x q ranks.

    The fused bias of queries, keys and values, cut in three groups, is cut once more only where that is between them.
    """
    t, h, h2, rows, soft = sizes(shape, heads)
    way = (q - 1) * (7 * t + 12 * d * h2) / (d * q**2)
    backward = 2 * way + reduced(d, 12 * h2 / q**2)
    statistics = 8 * reduced(q, rows / (d * q))
    of_three = reduced(d * q, 3 * h / q) if d == 3 else reduced(d, 3 * h / q) + reduced(q, 3 * h / q)
    norms = statistics + reduced(d * q, 10 * h / q) + of_three
    said, search = "d, x, y: tensor 2.5D (streamed)", {"tensor_modes": "2.5d streamed", "sequence": "none"}
    given = {"d": d, "x": q, "y": q}, search, shape, (heads, heads)
    return Layer(said, *given, way, backward, 12 * h2 / q**2, (14 * t + soft) / (d * q**2), norms, statistics)


def cube(operands: str, shape: Shape = LONG, n: int = 2) -> Layer:
    """Biases are reduced over the axis of rows, norms over that and the one which splits rows again.

    Streamed operands are cut along the contraction, each in the order in which the two axes turn: the residual is
    exchanged twice, since of two axes that cut one dimension the search puts the first outside.
    """
    t, h, h2, rows, soft = sizes(shape, 8)
    once, side = (7 * t + 12 * h2, 9 * t), Fraction(n - 1, n**3)
    forward = side * sum(once)
    backward = side * (2 * once[0] + once[1]) if operands == "streamed" else forward
    exchanged = 2 * Fraction(n - 1, n) * t / n**3 if operands == "streamed" else Fraction(0)
    statistics = 8 * reduced(n, rows / n**2)
    norms = statistics + reduced(n, 9 * h / n) + reduced(n**2, 4 * h / n)
    saved = (14 * t + soft) / n**3 if operands == "streamed" else None
    said, search = f"x, y, z: tensor 3D ({operands})", {"tensor_modes": f"3d {operands}", "sequence": "none"}
    given = {"x": n, "y": n, "z": n}, search, shape, (8, 8)
    sent = forward + exchanged, backward + exchanged
    return Layer(said, *given, *sent, 12 * h2 / n**3, saved, norms, statistics)


THEORY = {
    **{f"1D, p={p}": flat(p) for p in (2, 4, 8)},
    **{f"Megatron, p={p}": megatron(p) for p in (2, 4)},
    **{f"Ulysses, p={p}": ulysses(p) for p in (2, 4)},
    **{f"ring, p={p}": ring(p) for p in (2, 4)},
    **{f"Ulysses of grouped queries, p={p}": ulysses(p, 4) for p in (2, 4)},
    **{f"ring of grouped queries, p={p}": ring(p, 4) for p in (2, 4)},
    **{f"2D {o}, q=2": square(2, o, LONG, 8) for o in ("gathered", "streamed")},
    **{f"2D {o}, q=3": square(3, o, NARROW, 3) for o in ("gathered", "streamed")},
    "2.5D streamed, q=2 d=2": tesseract(2, 2, LONG, 8),
    "2.5D streamed, q=2 d=3": tesseract(2, 3, NARROW, 4),
    **{f"3D {o}, l=2": cube(o) for o in ("gathered", "streamed")},
}
COMPLETE = [mode for mode in THEORY if "grouped" not in mode]
DEAR = ("q=3", "d=3", "3D streamed", "p=8")


def published(mode: str) -> Fraction:
    """Both ways of a layer without norms and biases, as one formula."""
    of = THEORY[mode]
    t, _, h2, *_ = sizes(of.shape, 1)
    g, p = Fraction(of.heads[1], of.heads[0]), of.ranks
    q, d = of.mesh.get("x", 1), of.mesh.get("d", 1)
    name = of.said.partition(": ")[2]
    if name in ("tensor 1D", "tensor 1D, sequence split"):
        return 8 * (p - 1) * t / p
    if name in ("sequence split, Ulysses", "sequence split, ring attention"):
        moved = 4 * (1 + g) * (p - 1) * t / p**2 if "Ulysses" in name else 2 * g * (3 * p - 2) * t / p
        return moved + reduced(p, (10 + 2 * g) * h2)
    return {
        "tensor 2D (gathered)": 2 * (q - 1) * (7 * t + 12 * h2) / q**2,
        "tensor 2D (streamed)": 3 * (q - 1) * (7 * t + 12 * h2) / q**2,
        "tensor 2.5D (streamed)": 3 * (q - 1) * (7 * t + 12 * d * h2) / (d * q**2) + 24 * (d - 1) * h2 / (d * q**2),
        "tensor 3D (gathered)": 2 * (q - 1) * (16 * t + 12 * h2) / q**3,
    }[name]


@pytest.mark.parametrize("mode", [mode for mode in THEORY if mode != "3D streamed, l=2"])
def test_both_ways_are_as_published(mode: str) -> None:
    assert THEORY[mode].forward + THEORY[mode].backward == published(mode)


# ------------------------------------------------------------------------------------------------ measured


@functools.cache
def model(shape: Shape, layers: int, heads: tuple[int, int], plain: bool) -> tuple[Case, Bound]:
    case = gpt_layers(shape, layers, *heads, plain)
    return case, api.understand(case.model, case.batch, case.loss_fn)


@functools.cache
def found(mode: str, layers: int, plain: bool) -> tuple[Case, Bound, Plan]:
    """The plan that moves least: links cost their bytes alone, and compute nothing."""
    of = THEORY[mode]
    case, bound = model(of.shape, layers, of.heads, plain)
    free = {"peak_flops": 1e30, "memory_bandwidth": 1e30, "launch_overhead": 0.0, "intra_node_latency": 0.0}
    machines = ClusterSpec(nodes=1, devices_per_node=of.ranks, device="H100", intra_node_bandwidth=1e9, **free)
    plan = api.solve(bound, machines, search=Search(mesh=of.mesh, **of.search), gap=0.0, pins=of.pins)
    assert describe(plan, bound) == of.said
    return case, bound, plan


def elements(two: dict[str, int], three: dict[str, int], ranks: int) -> Fraction:
    """Per rank, of the one layer that three have beyond two."""
    return Fraction(sum(three.values()) - sum(two.values()), 8 * ranks)


@pytest.mark.parametrize("mode", THEORY)
def test_a_layer_sends_what_theory_says(mode: str) -> None:
    """Its linears and attention, forward and backward apart, and emission lists no more and no less."""
    of, ledgers = THEORY[mode], []
    for layers in (2, 3):
        case, bound, plan = found(mode, layers, True)
        sent = ledger.sent(case, bound, plan)
        assert (sent.forward, sent.backward, sent.again) == ledger.listed(bound, plan)
        ledgers.append(sent)
    two, three = ledgers
    assert elements(two.forward, three.forward, of.ranks) == of.forward
    assert elements(two.backward, three.backward, of.ranks) == of.backward


@pytest.mark.parametrize(
    "mode",
    [pytest.param(m, marks=[pytest.mark.slow] if any(d in m for d in DEAR) else []) for m in COMPLETE],
)
def test_norms_and_biases_add_their_own(mode: str) -> None:
    """A whole GPT layer; a step may gather a small weight forward and scatter its gradient, or reduce the gradient."""
    of, ledgers = THEORY[mode], []
    for layers in (2, 3):
        case, bound, plan = found(mode, layers, False)
        sent, listed = ledger.sent(case, bound, plan), ledger.listed(bound, plan)
        assert not sent.again
        ledgers.append((sent, listed))
    (two, two_listed), (three, three_listed) = ledgers
    both = [elements(getattr(two, way), getattr(three, way), of.ranks) for way in ("forward", "backward")]
    assert sum(both) == of.forward + of.backward + of.norms
    said = [elements(getattr(two_listed, way), getattr(three_listed, way), of.ranks) for way in ("forward", "backward")]
    assert sum(both) - sum(said) == of.statistics


@pytest.mark.parametrize("mode", THEORY)
def test_a_layer_holds_what_theory_says(mode: str) -> None:
    """Weights, and what is saved for the backward pass, of each rank."""
    of = THEORY[mode]
    two, three = (ledger.held(*found(mode, layers, True)) for layers in (2, 3))
    for before, after in zip(two, three, strict=True):
        assert after.weights - before.weights == of.weights
        if of.saved is not None:
            assert after.saved - before.saved == of.saved


def test_one_rank_saves_a_layer_whole() -> None:
    """What the shares above are shares of: inputs of linears (7 T), of gelu, queries, keys and values, and a number for
    every row of a head."""
    held = []
    for layers in (2, 3):
        case, bound = model(LONG, layers, (8, 8), True)
        held += ledger.held(case, bound, sample(bound, ()))
    t, _, h2, _, soft = sizes(LONG, 8)
    assert held[1].weights - held[0].weights == 12 * h2
    assert held[1].saved - held[0].saved == 14 * t + soft
