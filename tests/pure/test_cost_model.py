"""The cost model's closed forms, its catalogue, and which link a mesh axis uses."""

import math
from itertools import pairwise

import pytest

from autopar.cluster import ClusterSpec
from autopar.cost_model import collectives, compute, memory
from autopar.cost_model.hardware import ALIASES, CATALOGUE, Device, Link, axis_links, crowding, device, levels, lookup
from autopar.errors import PlanError

PLAIN = Link(bandwidth=1e9, latency=1e-5, source="test")


# --- collectives -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 3, 4, 7, 8])
def test_sent_bytes_by_counting_messages(n: int) -> None:
    """A ring, message by message, on a value of n * n * 12 bytes."""
    size = n * n * 12
    shard = size // n
    ring = sum(shard for _ in range(n - 1))
    assert collectives.sent_bytes("all-gather", size, n) == pytest.approx(ring)
    assert collectives.sent_bytes("reduce-scatter", size, n) == pytest.approx(ring)
    assert collectives.sent_bytes("all-reduce", size, n) == pytest.approx(2 * ring)
    assert collectives.sent_bytes("all-to-all", size, n) == pytest.approx(sum(shard // n for _ in range(n - 1)))
    assert collectives.sent_bytes("permute", size, n) == pytest.approx(shard)
    assert collectives.sent_bytes("local", size, n) == 0


@pytest.mark.parametrize(
    ("p", "megatron", "ulysses"), [(4, 768, 192), (8, 896, None), (16, 960, None), (64, 1008, 15.75)]
)
def test_bytes_of_a_gpt_layer(p: int, megatron: float, ulysses: float | None) -> None:
    """The example of formulas.md: MiB per rank and layer, bf16, b=8 s=2048 h=4096."""
    t = 8 * 2048 * 4096 * 2
    # 1D: two all-reduces of T forward and two backward
    assert 4 * collectives.sent_bytes("all-reduce", t, p) == pytest.approx(megatron * 2**20)
    # with the sequence split each becomes a reduce-scatter and an all-gather: the same bytes
    split = collectives.sent_bytes("reduce-scatter", t, p) + collectives.sent_bytes("all-gather", t, p)
    assert 4 * split == pytest.approx(megatron * 2**20)
    if ulysses is not None:  # q, k, v and the output, forward and backward
        assert 8 * collectives.sent_bytes("all-to-all", t, p) == pytest.approx(ulysses * 2**20)


def test_data_parallel_and_zero_bytes() -> None:
    psi, n = 1000.0, 8
    reduce, gather, scatter = (
        collectives.sent_bytes(kind, psi, n) for kind in ("all-reduce", "all-gather", "reduce-scatter")
    )
    assert reduce == gather + scatter == pytest.approx(2 * (n - 1) / n * psi)
    assert 2 * gather + scatter == pytest.approx(3 * (n - 1) / n * psi)


@pytest.mark.parametrize("kind", collectives.KINDS)
def test_nothing_to_do_for_one_rank(kind: collectives.Kind) -> None:
    assert collectives.sent_bytes(kind, 1e9, 1) == 0
    assert collectives.seconds(kind, 1e9, 1, PLAIN) == 0


def test_steps_are_logarithmic() -> None:
    assert [collectives.steps("all-gather", n) for n in (2, 3, 4, 5, 8, 9)] == [1, 2, 2, 3, 3, 4]
    assert [collectives.steps("all-reduce", n) for n in (2, 8)] == [2, 6]
    assert collectives.steps("permute", 64) == 1


def test_seconds() -> None:
    assert collectives.seconds("all-reduce", 8e6, 4, PLAIN) == pytest.approx(4 * 1e-5 + 2 * 3 / 4 * 8e6 / 1e9)
    assert collectives.seconds("local", 8e6, 4, PLAIN) == 0
    # the efficiency scales the bandwidth, and a kind's own bandwidth replaces it
    slow = Link(1e9, 0, "test", efficiency=0.5, kind_bandwidth=(("all-to-all", 1e8),))
    assert collectives.seconds("all-gather", 4e6, 4, slow) == pytest.approx(3e6 / 5e8)
    assert collectives.seconds("all-to-all", 4e6, 4, slow) == pytest.approx(0.75e6 / 1e8)
    unlimited = Link(math.inf, 1e-6, "test")
    assert collectives.seconds("all-gather", 4e6, 4, unlimited) == pytest.approx(2e-6)


def test_latency_decides_small_and_bandwidth_large_messages() -> None:
    """One all-reduce equals a reduce-scatter and an all-gather: splitting a message costs latency, never bytes."""
    for size in (16.0, 1e9):
        whole = collectives.seconds("all-reduce", size, 8, PLAIN)
        parts = collectives.seconds("reduce-scatter", size, 8, PLAIN) + collectives.seconds(
            "all-gather", size, 8, PLAIN
        )
        assert whole == pytest.approx(parts)
        assert 2 * collectives.seconds("all-reduce", size / 2, 8, PLAIN) == pytest.approx(whole + 6 * PLAIN.latency)


def test_refuses_unknown_kinds_and_empty_groups() -> None:
    with pytest.raises(ValueError, match="no kind of collective"):
        collectives.sent_bytes("broadcast", 8, 2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least one rank"):
        collectives.seconds("all-gather", 8, 0, PLAIN)


# --- hardware --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", CATALOGUE)
def test_catalogue_is_plausible_and_sourced(kind: str) -> None:
    entry = CATALOGUE[kind]
    figures = entry.device
    assert figures.name == kind
    assert figures.source and entry.intra_node.source and entry.inter_node.source
    assert {"float64", "float32", "bfloat16", "float16"} <= set(figures.peak_flops)
    assert figures.peak_flops["float64"] <= figures.peak_flops["float32"] <= figures.peak_flops["bfloat16"]
    assert 2**30 <= figures.memory <= 2**38
    assert 0 < figures.gemm_efficiency <= 1 and 0 < figures.memory_efficiency <= 1
    assert 0 < figures.launch_overhead < 1e-4
    for link in (entry.intra_node, entry.inter_node):
        assert 1e9 <= link.bandwidth < figures.memory_bandwidth
        assert 0 < link.latency <= 1e-3 and 0 < link.efficiency <= 1
    if kind != "cpu":
        assert entry.inter_node.bandwidth <= entry.intra_node.bandwidth
        assert entry.inter_node.latency >= entry.intra_node.latency


def test_newer_generations_are_faster() -> None:
    line = [lookup(kind).device for kind in ("V100", "A100-40GB", "A100-80GB", "H100", "H200", "B200")]
    for old, new in pairwise(line):
        assert new.memory_bandwidth > old.memory_bandwidth
        assert new.peak_flops["bfloat16"] >= old.peak_flops["bfloat16"]


def test_lookup_by_alias_and_in_any_case() -> None:
    assert lookup("a100") is CATALOGUE["A100-80GB"]
    assert lookup("CPU") is CATALOGUE["cpu"]
    assert all(name in CATALOGUE for name in ALIASES.values())


def test_unknown_kind_lists_the_known_ones() -> None:
    for ask in (device, levels, lambda cluster: axis_links(cluster, (8,))):
        with pytest.raises(PlanError, match="no figures for devices of kind 'H900'") as caught:
            ask(ClusterSpec("8xH900"))
        assert all(kind in caught.value.expected for kind in CATALOGUE)


def test_overrides_replace_figures_and_their_efficiency() -> None:
    cluster = ClusterSpec(
        "2x8xH100",
        memory=1024,
        peak_flops=1e12,
        memory_bandwidth=2e9,
        launch_overhead=0,
        intra_node_bandwidth=5e9,
        inter_node_latency=1e-3,
    )
    figures = device(cluster)
    assert (figures.memory, figures.launch_overhead) == (1024, 0)
    assert compute.op_seconds(2e12, 1, "bfloat16", figures, gemm=True, shape=(64, 64, 64)) == pytest.approx(2)
    assert compute.op_seconds(1, 2e9, "bfloat16", figures, gemm=False) == pytest.approx(1)
    intra, inter = levels(cluster)
    catalogued = CATALOGUE["H100"]
    assert intra.attained("all-gather") == 5e9 and intra.latency == catalogued.intra_node.latency
    assert inter.latency == 1e-3 and inter.bandwidth == catalogued.inter_node.bandwidth
    assert catalogued.device.memory == 80 * 2**30


def crosses(cluster: ClusterSpec, sizes: tuple[int, ...], axis: int) -> bool:
    """Whether some group along an axis has ranks on two nodes, rank by rank, in every stage the mesh tiles into."""
    stride = math.prod(sizes[axis + 1 :])
    for rank in range(cluster.world_size):
        first = rank - rank // stride % sizes[axis] * stride
        group = [first + k * stride for k in range(sizes[axis])]
        if len({member // cluster.devices_per_node for member in group}) > 1:
            return True
    return False


@pytest.mark.parametrize("nodes", [1, 2, 3, 4])
@pytest.mark.parametrize("devices", [1, 2, 4, 6, 8])
def test_axis_links_by_enumeration(nodes: int, devices: int) -> None:
    cluster = ClusterSpec(nodes=nodes, devices_per_node=devices, device="H100")
    intra, inter = levels(cluster)
    world = cluster.world_size
    factors = [n for n in range(1, world + 1) if world % n == 0]
    meshes = [(a, b, c) for a in factors for b in factors for c in factors if world % (a * b * c) == 0]
    for sizes in meshes:
        expected = tuple(inter if crosses(cluster, sizes, axis) else intra for axis in range(3))
        assert axis_links(cluster, sizes) == expected, sizes


def test_axis_links_refuses_a_mesh_that_does_not_tile() -> None:
    with pytest.raises(PlanError, match="axes whose product divides 16"):
        axis_links(ClusterSpec("2x8xH100"), (3, 2))
    with pytest.raises(PlanError, match="0 x 2"):
        axis_links(ClusterSpec("2x8xH100"), (0, 2))


# --- compute ---------------------------------------------------------------------------------------------------------

TOY = Device(
    name="toy",
    peak_flops={"float32": 1e12, "float64": 5e11},
    vector_flops=1e11,
    memory=2**30,
    memory_bandwidth=1e11,
    launch_overhead=1e-6,
    source="test",
    gemm_efficiency=0.8,
    gemm_half_size=16,
    memory_efficiency=0.5,
    fresh_above=1e6,
    fresh_bandwidth=1e9,
)


def test_roofline_takes_the_larger_side() -> None:
    bound_by_flops = compute.op_seconds(8e11, 1e6, "float32", TOY, gemm=True)
    assert bound_by_flops == pytest.approx(1 + 1e-6)
    assert compute.op_seconds(8e8, 1e11, "float32", TOY, gemm=True) == pytest.approx(2 + 1e-6)
    assert compute.op_seconds(1e11, 8, "float32", TOY, gemm=False, launch=False) == pytest.approx(1)
    # float64 is half as fast both ways here
    assert compute.op_seconds(8e11, 1, "float64", TOY, gemm=True, launch=False) == pytest.approx(2)
    assert compute.op_seconds(1e11, 1, "float64", TOY, gemm=False, launch=False) == pytest.approx(2)


def test_thin_matmuls_are_inefficient() -> None:
    assert compute.gemm_efficiency(TOY, (16, 4096, 4096)) == pytest.approx(0.4)
    assert compute.gemm_efficiency(TOY, (4096, 4096, 4096)) == pytest.approx(0.8, rel=0.01)
    cut = [compute.op_seconds(1e9 / n, 1, "float32", TOY, gemm=True, shape=(512, 512 // n, 512)) for n in (1, 2, 4, 8)]
    assert all(1 < before / after < 2 for before, after in pairwise(cut))


def test_views_are_free_and_large_new_tensors_are_not() -> None:
    assert compute.op_seconds(0, 0, "float32", TOY, gemm=False) == 0
    plain = compute.op_seconds(1, 1e6, "float32", TOY, gemm=False)
    assert compute.op_seconds(1, 1e6, "float32", TOY, gemm=False, largest_new=1e6) == plain
    assert compute.op_seconds(1, 1e6, "float32", TOY, gemm=False, largest_new=2e6) == pytest.approx(plain + 2e-3)


def test_dtypes() -> None:
    torch = pytest.importorskip("torch")
    assert compute.peak_flops(TOY, torch.float64) == compute.peak_flops(TOY, "float64") == 5e11
    assert compute.peak_flops(TOY, torch.int64) == compute.peak_flops(TOY, torch.bool) == 1e12
    assert compute.peak_flops(TOY, torch.complex128) == 5e11
    with pytest.raises(PlanError, match="no figure for bfloat16 on toy"):
        compute.op_seconds(1, 1, torch.bfloat16, TOY, gemm=True)


def test_optimizer_step() -> None:
    fused = compute.optimizer_seconds(1e9, 10, "adamw", TOY, fused=True)
    assert fused == pytest.approx(28e9 / 5e10 + 10 * 1e-6)
    assert compute.optimizer_seconds(1e9, 10, "adamw", TOY) > 2 * fused
    with pytest.raises(PlanError, match="adamw"):
        compute.optimizer_seconds(1, 1, "lion", TOY)


# --- memory ----------------------------------------------------------------------------------------------------------


def on_rank(precision: str, n: int, *, stored: bool, held: bool, accumulated: bool) -> float:
    """Bytes per parameter of AdamW on each of n ranks, given which of the layouts are split."""
    sizes = memory.parameter_bytes("adamw", precision)
    return memory.bytes_on_rank(
        sizes,
        stored=1 / n if stored else 1,
        held=1 / n if held else 1,
        accumulated=1 / n if accumulated else 1,
        same_layout=stored == held,
    )


@pytest.mark.parametrize("n", [1, 2, 8, 64])
def test_zero_stages_in_mixed_precision(n: int) -> None:
    """arXiv 1910.02054, figure 1."""
    assert on_rank("bf16", n, stored=False, held=False, accumulated=False) == 16
    assert on_rank("bf16", n, stored=True, held=False, accumulated=False) == pytest.approx(4 + 12 / n)
    assert on_rank("bf16", n, stored=True, held=False, accumulated=True) == pytest.approx(2 + 14 / n)
    assert on_rank("bf16", n, stored=True, held=True, accumulated=True) == pytest.approx(16 / n)


def test_one_precision_holds_the_stored_weights() -> None:
    # weights, two moments, gradient
    assert on_rank("fp32", 4, stored=False, held=False, accumulated=False) == 16
    assert on_rank("fp32", 4, stored=True, held=True, accumulated=True) == pytest.approx(16 / 4)
    # a gathered copy beside the split weights
    assert on_rank("fp32", 4, stored=True, held=False, accumulated=False) == pytest.approx(12 / 4 + 4 + 4)
    assert on_rank("fp64", 4, stored=False, held=False, accumulated=False) == 32


@pytest.mark.parametrize(
    ("optimizer", "fp32", "bf16"), [("adam", 16, 16), ("sgd_momentum", 12, 12), ("sgd", 8, 8), ("none", 4, 2)]
)
def test_optimizers(optimizer: str, fp32: int, bf16: int) -> None:
    for precision, expected in (("fp32", fp32), ("bf16", bf16)):
        sizes = memory.parameter_bytes(optimizer, precision)
        assert memory.bytes_on_rank(sizes, stored=1, held=1, accumulated=1, same_layout=True) == expected


def test_unknown_optimizer_and_precision() -> None:
    with pytest.raises(PlanError, match="adamw, adam, sgd_momentum, sgd, none"):
        memory.parameter_bytes("lion", "fp32")
    with pytest.raises(PlanError, match="fp64, fp32, bf16, fp16"):
        memory.parameter_bytes("adamw", "int4")


def test_usable_memory() -> None:
    assert memory.usable_memory(TOY, reserve=0) == 2**30
    assert memory.usable_memory(TOY, reserve=0.25) == 3 * 2**28
    assert memory.usable_memory(TOY) < 2**30
    with pytest.raises(PlanError, match="0 <= reserve < 1"):
        memory.usable_memory(TOY, reserve=1)


def test_ranks_that_share_cores_have_a_part_of_them_each() -> None:
    alone, crowded = ClusterSpec("1x4xcpu"), ClusterSpec("1x4xcpu", cores=2)
    assert crowding(crowded) == 2
    for dtype, figure in device(alone).peak_flops.items():
        assert device(crowded).peak_flops[dtype] == figure / 2
    (before, _), (after, _) = levels(alone), levels(crowded)
    assert after.bandwidth == before.bandwidth / 2
    assert after.latency == before.latency * 4
