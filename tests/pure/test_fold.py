"""Folding: which blocks are found, and that a plan of representatives reaches every member."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor, nn

from autopar.capture import capture
from autopar.cluster import ClusterSpec
from autopar.layout import Mesh
from autopar.passes.fold import edges, expand, fold
from autopar.passes.normalize import normalize
from autopar.rules.analysis import Bound, bind_program, contract
from autopar.solver import milp
from autopar.solver.ilp import solve
from autopar.solver.model import formulate
from autopar.solver.prices import prices
from autopar.solver.space import build


def bind(model: nn.Module, batch: dict[str, Tensor], loss=lambda out, batch: out.square().mean()) -> Bound:  # type: ignore[no-untyped-def]
    program = capture(model, batch, loss)
    return bind_program(normalize(program, dict(model.named_buffers())))


def block(inner: int, width: int = 8) -> nn.Module:
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width))


class Residual(nn.Module):
    """A chain of blocks, each added to what goes in; a linear before them."""

    def __init__(self, inner: list[int]) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(block(n) for n in inner)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for f in self.blocks:
            x = x + f(x)
        return x


def batch() -> dict[str, Tensor]:
    return {"x": torch.randn(4, 8)}


def test_equal_blocks_are_one() -> None:
    folding = fold(bind(Residual([16] * 12), batch()))
    assert list(folding.blocks.values()) == [12]
    assert len(set(folding.ops.values())) == len([n for n in folding.counts.values() if n == 12]) + list(
        folding.counts.values()
    ).count(1)
    assert folding.values["p_model_blocks_7_1_weight"] == "p_model_blocks_0_1_weight"
    assert folding.values["p_model_embed_weight"] == "p_model_embed_weight"


def test_the_edge_into_the_first_block_and_that_out_of_the_last_are_kept() -> None:
    bound = bind(Residual([16] * 12), batch())
    folding = fold(bound)
    found = edges(contract(bound, (2,)), folding)
    last = next(op.outputs[0] for op in reversed(bound.operations) if op.name in folding.ops and "add" in op.name)
    between = [e for e in found if e.representative == folding.values[last]]
    assert sorted(e.count for e in between) == [1, 11]


def test_every_fifth_block_is_another_kind() -> None:
    inner = [24 if k % 5 == 4 else 16 for k in range(50)]
    folding = fold(bind(Residual(inner), batch()))
    assert len(set(folding.ops.values())) <= 5 * 5 + 10


def test_two_regions() -> None:
    folding = fold(bind(Residual([16] * 8 + [24] * 6), batch()))
    assert sorted(folding.blocks.values()) in ([6, 8], [5, 8], [6, 7])


@pytest.mark.parametrize("fifth", [16, 24])
def test_time_grows_with_the_number_of_layers_only(fifth: int) -> None:
    def seconds(layers: int) -> float:
        bound = bind(Residual([fifth if k % 5 == 4 else 16 for k in range(layers)]), batch())
        taken = []
        for _ in range(3):
            start = time.process_time()
            fold(bound)
            taken.append(time.process_time() - start)
        return min(taken)

    assert seconds(120) < 12 * seconds(30)


class Shared(nn.Module):
    """Blocks that share one weight, and take a mask that all of them share."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ModuleList(nn.Linear(8, 8) for _ in range(12))
        self.second = nn.Linear(8, 8)
        self.register_buffer("mask", torch.rand(8))

    def forward(self, x: Tensor) -> Tensor:
        for f in self.first:
            x = x + self.mask * self.second(torch.relu(f(x)))
        return x


def test_what_all_blocks_share_is_one_value() -> None:
    bound = bind(Shared(), batch())
    folding = fold(bound)
    uses = {e.name: e.uses for e in edges(contract(bound, (2,)), folding)}
    assert max(folding.blocks.values()) >= 11
    assert sum(u.count for u in uses["p_model_second_weight"]) == 12


def test_a_chain_of_linears_is_folded_in_pairs() -> None:
    """One choice for every linear would forbid to split by column and by row in turn."""
    layers = [m for _ in range(20) for m in (nn.Linear(8, 8), nn.ReLU())]
    folding = fold(bind(nn.Sequential(*layers), {"input": torch.randn(4, 8)}))
    assert list(folding.blocks.values()) == [9]  # the first linear's input has no gradient


def test_small_programs_are_not_folded() -> None:
    assert not fold(bind(Residual([16] * 3), batch())).blocks


def test_expanding_reaches_every_op_value_and_weight() -> None:
    bound = bind(Residual([16] * 12), batch())
    mesh = Mesh(("dp", "tp"), (2, 2))
    plan = solve(bound, ClusterSpec("4xH100"), mesh=mesh)
    assert plan.blocks
    expanded = expand(plan, bound)
    assert set(expanded.choices) == {op.name for op in contract(bound, mesh.sizes).operations}
    assert set(expanded.parameters) == {p.name for p in bound.program.parameters.values()}
    kinds = {d.stored for n, d in expanded.parameters.items() if n.endswith(".1.weight")}
    assert len(kinds) == 1


def test_a_pin_on_one_block_tells_it_from_the_others() -> None:
    bound = bind(Residual([16] * 8), batch())
    mesh = Mesh(("d",), (4,))
    cluster = ClusterSpec("4xH100 launch_overhead=0.0 intra_node_latency=0.0 memory_bandwidth=1e9")
    folded = solve(bound, cluster, mesh=mesh, gap=0.0)
    assert folded.blocks
    pinned = solve(bound, cluster, mesh=mesh, gap=0.0, pins={"blocks.0.3.weight": "d:R"})
    assert not pinned.blocks
    assert len(pinned.ops) == len(contract(bound, mesh.sizes).operations)


def test_a_folded_plan_is_near_to_one_without_folding() -> None:
    bound = bind(Residual([16] * 8), batch())
    mesh = Mesh(("d",), (4,))
    cluster = ClusterSpec("4xH100 launch_overhead=0.0 intra_node_latency=0.0 memory_bandwidth=1e9")
    folded = solve(bound, cluster, mesh=mesh, gap=0.0)
    analysis = contract(bound, mesh.sizes)
    space = build(analysis, fold(bound, repeat=False), mesh, prices(cluster, mesh.sizes))
    problem, columns = formulate(space)
    free = milp.solve(problem).objective / columns.second
    assert free * (1 - 1e-5) <= folded.predicted.step_time <= free * 1.01
