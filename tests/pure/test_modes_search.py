"""Modes by name: what is asked for is planned, or refused with the numbers before anything runs."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest
import torch
import torch.nn.functional as F
from models import MODELS, mixture
from test_fold import bind
from test_solver import cluster, gpt2
from torch import Tensor, nn

from autopar.api import understand
from autopar.cluster import ClusterSpec
from autopar.errors import InfeasiblePlan, PlanError
from autopar.modes import describe, groups
from autopar.rules.analysis import Bound
from autopar.rules.meaning import BATCH, FEATURES, SEQUENCE, meanings
from autopar.solver.forms import forms
from autopar.solver.ilp import solve
from autopar.solver.search import Search


class Chain(nn.Module):
    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(widths))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.gelu(layer(x))
        return x


def chain(rows: int, *widths: int) -> Bound:
    return bind(Chain(*widths), {"x": torch.randn(rows, widths[0])})


@pytest.fixture(scope="module")
def small() -> Bound:
    return gpt2(8, 16, 32)


# ------------------------------------------------------------------------------------------------ what dimensions mean


def test_flattened_dimensions_keep_their_meanings(small: Bound) -> None:
    """The loss sees rows of all tokens: the batch outside, the sequence inside."""
    known = meanings(small).factors
    assert known["cross_entropy_sum"]["b"] == ((BATCH, 8), (SEQUENCE, 16))
    assert known["cross_entropy_sum"]["c"] == ((FEATURES, 64),)
    assert known["attention"] == {
        "b": ((BATCH, 8),),
        "h": ((FEATURES, 4),),
        "s": ((SEQUENCE, 16),),
        "t": ((SEQUENCE, 16),),
        "e": ((FEATURES, 8),),
        "v": ((FEATURES, 8),),
    }
    assert known["embedding_1"]["b1"] == ((SEQUENCE, 16),)  # of positions: it comes back from where they are added


@pytest.mark.parametrize("name", ["bert", "llama-padded", "resnet"])
def test_every_product_knows_its_rows_and_columns(name: str) -> None:
    case = MODELS[name]()
    bound = understand(case.model, case.batch, case.loss_fn)
    known = meanings(bound).factors
    for op in bound.operations:
        if op.name.startswith("linear"):
            assert known[op.name]["b0"] == ((BATCH, 5),)
            assert {m for f in "kn" for m, _ in known[op.name][f]} == {FEATURES}


# ------------------------------------------------------------------------------------------------ names


def test_zero_with_columns_is_2d_only_where_activations_are_split(small: Bound) -> None:
    """The same products and the same weights: 2D splits the residual over y, and the others hold it whole there."""
    plan = solve(small, cluster(), search=Search(mesh={"x": 2, "y": 2}, tensor_modes="2d gathered"))
    assert describe(plan, small) == "x, y: tensor 2D (gathered), vocabulary split"
    whole = tuple(
        d if "linear" in d.name else msgspec.structs.replace(d, choices=(d.choices[0], "I")) for d in plan.ops
    )
    names = dict(groups(msgspec.structs.replace(plan, ops=whole), small))
    assert names["x",] == ("data parallel", "ZeRO-1") and names["y",] == ("tensor 1D",)


def test_2d_over_depth_is_25d_unless_weights_are_split_over_it(small: Bound) -> None:
    mesh = {"d": 2, "x": 2, "y": 2}
    machines = cluster(8, intra_node_latency=0.0, peak_flops=1e8)
    found = solve(small, machines, search=Search(mesh=mesh, tensor_modes="2.5d gathered"))
    assert describe(found, small) == "d, x, y: tensor 2.5D (gathered), vocabulary split"
    weight = next(d for d in found.parameters if d.name.endswith("c_fc.weight"))
    assert "d:" not in weight.stored and "x:S" in weight.stored and "y:S" in weight.stored
    assert any("d:P" in move.partition(" > ")[0] for move in weight.final)  # gradients are reduced over depth
    found = solve(small, machines, search=Search(mesh=mesh, tensor_modes="2d gathered", zero=1, sequence="none"))
    assert describe(found, small).startswith("d: data parallel, ZeRO-1; x, y: tensor 2D (gathered)")


@pytest.mark.parametrize(("split", "said"), [("ring", "ring attention"), ("ulysses", "Ulysses")])
def test_2d_beside_a_sequence_split_is_called_both(small: Bound, split: str, said: str) -> None:
    plan = solve(
        small,
        cluster(8, intra_node_latency=0.0, peak_flops=1e8),
        search=Search(mesh={"x": 2, "y": 2, "s": 2}, tensor_modes="2d gathered", sequence=split),
        gap=0.05,
    )
    names = dict(groups(plan, small))
    assert names["x", "y"][0] == "tensor 2D (gathered)" and names["s",][:2] == ("sequence split", said)


def test_a_ring_keeps_its_name_where_its_axis_is_one_of_2d(small: Bound) -> None:
    """Weights that are stored split over the ring, beside columns, are 2D."""
    search = Search(mesh={"dp": 2, "cp": 2}, sequence="ring", zero=3)
    plan = solve(small, cluster(intra_node_latency=0.0, peak_flops=1e8), search=search, gap=0.05)
    assert "ring attention" in describe(plan, small)


def test_experts_do_not_hide_the_mode_of_other_products() -> None:
    case = mixture()
    bound = understand(case.model, case.batch, case.loss_fn)
    plan = solve(bound, cluster(8, intra_node_latency=0.0, peak_flops=1e8), search=Search(tensor_modes="3d gathered"))
    assert describe(plan, bound).startswith("x, y, z: tensor 3D (gathered)")


def test_3d_turns_from_one_product_to_the_next(small: Bound) -> None:
    found = solve(small, cluster(8), search=Search(tensor_modes="3d gathered"))
    assert found.mesh == {"x": 2, "y": 2, "z": 2}
    assert describe(found, small).startswith("x, y, z: tensor 3D (gathered)")
    choices = {d.name: d.choices for d in found.ops}
    turns = [[c.split()[1] for c in choices[n][1:]] for n in ("linear_default_2", "linear_default_3")]
    assert sorted(turns[0]) == ["k", "n"] and turns[1] == turns[0][::-1]
    for d in found.parameters:
        if d.name.endswith(("c_fc.weight", "c_proj.weight", "c_attn.weight")):
            assert all(f"{axis}:S" in d.stored for axis in "xyz")


# ------------------------------------------------------------------------------------------------ what is asked for


def test_of_several_modes_the_fastest_is_chosen(small: Bound) -> None:
    machines = cluster(intra_node_latency=1e-6, intra_node_bandwidth=1e9)
    alone = {m: solve(small, machines, search=Search(tensor_modes=m), gap=1e-4) for m in ("1d", "2d gathered")}
    both = solve(small, machines, search=Search(tensor_modes=tuple(alone)), gap=1e-4)
    best = min(plan.solver.objective for plan in alone.values())
    assert both.solver.objective == pytest.approx(best, rel=1e-3)
    assert len({plan.id for plan in alone.values()}) == 2
    assert both.solver.status == "optimal" and both.solver.bound <= best * (1 + 1e-9)


def test_without_a_mode_nothing_is_restricted(small: Bound) -> None:
    """The free search is at least as fast as any mode, and any mode's plan is in it."""
    free = solve(small, cluster(), search=Search(mesh={"x": 2, "y": 2}), gap=1e-4)
    for mode in ("1d", "2d", "none"):
        forced = solve(small, cluster(), search=Search(mesh={"x": 2, "y": 2}, tensor_modes=mode), gap=1e-4)
        assert free.solver.objective <= forced.solver.objective * (1 + 1e-3)


def test_the_axes_of_a_given_mesh_keep_their_names(small: Bound) -> None:
    machines = cluster()
    given = forms(("2d",), (), tuple(Search(mesh={"a": 2, "b": 2}).meshes(4)), machines)
    assert [(f.mesh.axes, f.roles) for f in given] == [(("a", "b"), ("rows", "columns"))]
    free = forms(("2d",), (), None, cluster(8))
    assert {(f.mesh.axes, f.mesh.sizes) for f in free} == {
        (("x", "y"), (2, 4)),
        (("x", "y"), (4, 2)),
        (("dp", "x", "y"), (2, 2, 2)),
    }


def test_weights_whole_is_a_mode_too(small: Bound) -> None:
    plan = solve(small, cluster(peak_flops=1e8), search=Search(tensor_modes="none", sequence="none"))
    assert all("split n" not in c and "split k" not in c for d in plan.ops if "linear" in d.name for c in d.choices)
    assert describe(plan, small).startswith("dp: data parallel")


def test_a_plan_says_why_its_mode(small: Bound) -> None:
    """Against the commonest other one: the figures are those of plans that were made."""
    machines = cluster(intra_node_latency=1e-6, intra_node_bandwidth=1e9, peak_flops=1e9)
    plan = solve(small, machines)
    (why,) = [note for note in plan.notes if note.startswith("why ") and not note.startswith("why not")]
    assert f"{plan.predicted.step_time * 1e3:.3g} ms" in why and "MiB per rank" in why
    other = "1d" if "data parallel" in why.partition("?")[0] else "none"
    assert ("tensor 1D" if other == "1d" else "data parallel") in why.partition("?")[2]
    forced = solve(small, machines, search=Search(mesh={"all": 4}, tensor_modes=other), gap=1e-6)
    times = float(why.partition("takes ")[2].partition(" times")[0])
    assert times == pytest.approx(forced.predicted.step_time / plan.predicted.step_time, rel=0.02)
    assert "why not otherwise" not in plan.explain()


# ------------------------------------------------------------------------------------------------ what is sent

ROWS, TOKENS, WIDTH = 8, 64, 128
T, H2 = ROWS * TOKENS * WIDTH, WIDTH**2


@pytest.fixture(scope="module")
def two_depths() -> list[Bound]:
    return [gpt2(ROWS, TOKENS, WIDTH, layers=n, heads=8) for n in (2, 3)]


@pytest.mark.parametrize(
    ("mesh", "search", "elements"),
    [
        ({"tp": 4}, {"tensor_modes": "1d", "sequence": "none"}, 8 * 3 / 4 * T),
        ({"tp": 4}, {"sequence": "megatron"}, 8 * 3 / 4 * T),
        ({"sp": 4}, {"tensor_modes": "none", "sequence": "ulysses"}, 8 * 3 / 16 * T + 2 * 3 / 4 * 12 * H2),
        ({"x": 2, "y": 2}, {"tensor_modes": "2d gathered"}, 2 / 4 * (7 * T + 12 * H2)),
        ({"d": 2, "x": 2, "y": 2}, {"tensor_modes": "2.5d gathered"}, 2 / 8 * (7 * T + 24 * H2) + 24 / 8 * H2),
        ({"x": 2, "y": 2, "z": 2}, {"tensor_modes": "3d gathered"}, 2 / 8 * (16 * T + 12 * H2)),
    ],
    ids=str,
)
def test_a_layer_sends_what_theory_says(
    two_depths: list[Bound], mesh: dict[str, int], search: dict[str, Any], elements: float
) -> None:
    """Per rank, forward and backward: the closed forms of the papers, and up to 1 % by norms and biases."""
    ranks = torch.Size(mesh.values()).numel()
    machines = ClusterSpec(nodes=1, devices_per_node=ranks, device="A100", intra_node_latency=0.0)
    two, three = (solve(b, machines, search=Search(mesh=mesh, **search), gap=0.0) for b in two_depths)
    sent = (three.predicted.comm_bytes - two.predicted.comm_bytes) / 4
    assert elements <= sent <= 1.01 * elements


# ------------------------------------------------------------------------------------------------ what is refused

FIVE_HEADS = "5 heads, 5 = 2+2+1+0"


@pytest.mark.parametrize(
    ("ranks", "search", "error", "said"),
    [
        (4, {"mesh": {"tp": 4}, "tensor_modes": "1d"}, InfeasiblePlan, [FIVE_HEADS, "h.0.attn", "4 ranks of tp=4"]),
        (4, {"mesh": {"tp": 4}, "sequence": "megatron"}, InfeasiblePlan, [FIVE_HEADS, "1D with sequence split"]),
        (4, {"mesh": {"sp": 4}, "sequence": "ulysses"}, InfeasiblePlan, [FIVE_HEADS]),
        (16, {"mesh": {"x": 4, "y": 4}, "tensor_modes": "2d"}, InfeasiblePlan, [FIVE_HEADS, "2D cannot be", "x=4 y=4"]),
        (8, {"mesh": {"tp": 4, "sp": 2}, "tensor_modes": "1d", "sequence": "ulysses"}, InfeasiblePlan, [FIVE_HEADS]),
        (6, {"mesh": {"tp": 3, "sp": 2}, "tensor_modes": "1d", "sequence": "ulysses"}, InfeasiblePlan,
         ["6 ranks of tp=3 sp=2", "5 heads, 5 = 1+1+1+1+1+0"]),
        (5, {"sequence": "ring"}, InfeasiblePlan, ["5 ranks of cp=5", "8 rows, 8 = 2+2+2+2+0"]),
        (4, {"mesh": {"x": 2, "y": 2}, "tensor_modes": "2.5d"}, PlanError, ["2.5D needs 3", "x=2 y=2"]),
        (7, {"tensor_modes": "2d"}, PlanError, ["2D needs 2", "7 ranks"]),
        (4, {"tensor_modes": "3d"}, PlanError, ["3D needs 3", "4 ranks"]),
        (4, {"tensor_modes": "2d", "sequence": "megatron"}, PlanError, ["belongs to tensor mode 1D"]),
        (4, {"tensor_modes": "2d gathered", "zero": 0}, PlanError, ["stored split over the axis of rows"]),
        (8, {"tensor_modes": "2.5d", "zero": 1}, PlanError, ["whole over depth"]),
        (4, {"tensor_modes": "4d"}, PlanError, ["no such value", "2.5d", "4d"]),
        (4, {"sequence": ("ring", "rings")}, PlanError, ["no such value", "ring+ulysses", "rings"]),
        (4, {"tensor_modes": ()}, PlanError, ["no value of tensor_modes is left"]),
    ],
    ids=str,
)  # fmt: skip
def test_what_a_transformer_of_5_heads_cannot_do(
    ranks: int, search: dict[str, Any], error: type[PlanError], said: list[str]
) -> None:
    bound = gpt2(4, 8, 20, layers=1, heads=5)
    with pytest.raises(error) as caught:
        solve(bound, cluster(ranks), search=Search(**search))
    for part in said:
        assert part in str(caught.value), str(caught.value)


def test_5_heads_on_2_ranks_are_3_and_2() -> None:
    bound = gpt2(4, 8, 20, layers=1, heads=5)
    plan = solve(bound, cluster(), search=Search(mesh={"x": 2, "y": 2}, tensor_modes="2d"))
    assert "tensor 2D" in describe(plan, bound)
    assert ("split b", "split h") in [d.choices for d in plan.ops]


@pytest.mark.parametrize(
    ("rows", "mesh", "search", "said"),
    [
        (5, {"x": 8, "y": 2}, {"tensor_modes": "2d"}, ["5 rows, 10 columns, 7 contracted", "rows over x=8"]),
        (5, {"d": 2, "x": 2, "y": 2}, {"tensor_modes": "2.5d"}, ["5 rows", "rows over d=2, rows over x=2"]),
        (8, {"x": 2, "y": 16}, {"tensor_modes": "2d"}, ["10 columns", "y=16"]),
        (8, {"cp": 2}, {"sequence": "ring"}, ["8 rows", "the sequence over cp=2"]),
        (8, {"tp": 2}, {"sequence": "megatron"}, ["split a sequence over tp=2"]),
    ],
    ids=str,
)
def test_what_a_chain_of_linears_cannot_do(
    rows: int, mesh: dict[str, int], search: dict[str, Any], said: list[str]
) -> None:
    """No batch on 2 x 2 ranks without one for each, no sequence where there is none."""
    ranks = torch.Size(mesh.values()).numel()
    with pytest.raises(InfeasiblePlan) as caught:
        solve(chain(rows, 7, 10, 13), cluster(ranks), search=Search(mesh=mesh, **search))
    for part in said:
        assert part in str(caught.value), str(caught.value)


class Thin(nn.Module):
    """Most of the arithmetic in a product of 3 by 3, which 4 ranks cannot share by columns."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.head = nn.Linear(3, 3), nn.Linear(3, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.inside(x)).mean(1))


def test_a_mode_that_the_large_products_cannot_follow_is_refused() -> None:
    with torch.device("meta"):
        model, batch = Thin(), {"x": torch.empty(16, 64, 3)}
    bound = understand(model, batch, lambda out, batch: out.square().sum())
    with pytest.raises(InfeasiblePlan, match="tensor mode 1D cannot be on a mesh of tp=4") as error:
        solve(bound, cluster(4), search=Search(mesh={"tp": 4}, tensor_modes="1d"))
    assert "3 columns, 3 contracted" in str(error.value) and "inside" in str(error.value)
    assert describe(solve(bound, cluster(3), search=Search(mesh={"tp": 3}, tensor_modes="1d")), bound)
