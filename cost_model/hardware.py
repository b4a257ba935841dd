"""The catalogue: what kinds of devices and links can do, each figure with its source.

Peaks are dense (no structured sparsity) and for one device as one rank sees it.  ``float32`` is the rate of an ordinary
float32 matmul, without TF32, as is torch's default; ``tf32`` is listed apart.  Bandwidths are bytes per second; of
links, per device and per direction (vendors quote the sum of both directions).  What of a datasheet's figure is reached
in practice stands beside it as an efficiency; figures that were measured have efficiency 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from autopar.cluster import ClusterSpec
from autopar.errors import PlanError

GB = 10**9
GIB = 2**30
MICROSECOND = 1e-6


@dataclass(frozen=True, slots=True)
class Device:
    """One kind of device.

    name               as in the catalogue
    peak_flops         dense matmul FLOP/s by dtype name ("float32", "bfloat16", ...)
    vector_flops       float32 operations per second outside matmuls (one fused multiply-add is one operation)
    memory             bytes
    memory_bandwidth   bytes per second of main memory
    launch_overhead    seconds that an op costs however small it is
    source             where the figures are from
    gemm_efficiency    part of ``peak_flops`` that a large matmul reaches
    gemm_half_size     a matmul whose smallest dimension is this reaches half of that
    memory_efficiency  part of ``memory_bandwidth`` that a large pointwise op reaches
    fresh_above        a new tensor of more bytes than this is new memory from the operating system (inf: allocations
                       are reused whatever their size, as by CUDA's caching allocator)
    fresh_bandwidth    bytes per second at which such memory is made available
    overlap            part of compute behind which communication in the background hides, 0 to 1
    """

    name: str
    peak_flops: Mapping[str, float] = field(hash=False)
    vector_flops: float
    memory: int
    memory_bandwidth: float
    launch_overhead: float
    source: str
    gemm_efficiency: float = 1.0
    gemm_half_size: float = 0.0
    memory_efficiency: float = 1.0
    fresh_above: float = math.inf
    fresh_bandwidth: float = math.inf
    overlap: float = 0.0


@dataclass(frozen=True, slots=True)
class Link:
    """What joins the devices of one level of the network.

    bandwidth        bytes per second that a device can send while it receives as many
    latency          seconds per step of a collective (see ``collectives.steps``)
    source           where the figures are from
    efficiency       part of ``bandwidth`` that large collectives reach
    kind_bandwidth   attained bytes sent per second by kind of collective, where a kind differs
    """

    bandwidth: float
    latency: float
    source: str
    efficiency: float = 1.0
    kind_bandwidth: tuple[tuple[str, float], ...] = ()

    def attained(self, kind: str) -> float:
        """Bytes per second that a rank sends in a large collective of this kind."""
        return dict(self.kind_bandwidth).get(kind, self.bandwidth * self.efficiency)


@dataclass(frozen=True, slots=True)
class Entry:
    """A kind of device with the links it usually comes with."""

    device: Device
    intra_node: Link
    inter_node: Link


def _gpu(
    name: str,
    intra_node: Link,
    inter_node: Link,
    *,
    tflops: Mapping[str, float],
    vector_tflops: float,
    memory_gib: float,
    memory_gb_s: float,
    matmul_efficiency: float,
    source: str,
) -> Entry:
    """A GPU from its datasheet's units.

    The overhead and the efficiencies are estimates: 5 us from one kernel to the next in eager torch, 85 % of the memory
    bandwidth, half the matmul rate where a dimension is as small as half of the usual 128-wide tile.
    """
    figures = Device(
        name=name,
        peak_flops={dtype: rate * 1e12 for dtype, rate in tflops.items()},
        vector_flops=vector_tflops * 1e12 / 2,
        memory=int(memory_gib * GIB),
        memory_bandwidth=memory_gb_s * GB,
        launch_overhead=5 * MICROSECOND,
        source=source,
        gemm_efficiency=matmul_efficiency,
        gemm_half_size=64,
        memory_efficiency=0.85,
    )
    return Entry(figures, intra_node, inter_node)


# Latencies per step of a collective are the order of what nccl-tests shows for small messages; they are not in any
# datasheet.  80 % of a link's raw rate is what large NCCL rings reach.
def _nvlink(total_gb_s: float, generation: str) -> Link:
    """NVLink of ``total_gb_s`` per device, both directions together."""
    return Link(total_gb_s / 2 * GB, 4 * MICROSECOND, f"{generation}, {total_gb_s:g} GB/s per GPU both ways", 0.8)


def _pcie(gb_s: float, source: str) -> Link:
    """PCI Express of ``gb_s`` per direction."""
    return Link(gb_s * GB, 8 * MICROSECOND, source, 0.8)


def _network(gbit_s: float, source: str) -> Link:
    """A network of ``gbit_s`` per device."""
    return Link(gbit_s / 8 * GB, 10 * MICROSECOND, source, 0.8)


_PCIE4 = _pcie(32, "PCIe 4.0 x16, 64 GB/s both ways")
_PCIE5 = _pcie(64, "PCIe 5.0 x16, 128 GB/s both ways")

# The efficiency of large matmuls is the best rate that stas00/ml-engineering (compute/accelerator/README.md, "MAMF")
# found over the peak, where that table has the device; else 0.8 (NVIDIA) or 0.5 (AMD), like its neighbours there.
_A100_TFLOPS = {"float64": 19.5, "float32": 19.5, "tf32": 156, "bfloat16": 312, "float16": 312}
_H100_TFLOPS = {"float64": 67, "float32": 67, "tf32": 494.7, "bfloat16": 989.4, "float16": 989.4}

_GPUS = (
    _gpu(
        "V100",
        _nvlink(300, "NVLink 2 (V100 datasheet)"),
        _network(50, "DGX-1 with V100: 4 x 100 Gb/s InfiniBand for 8 GPUs"),
        # no bf16 tensor cores: bf16 matmuls run at the float32 rate
        tflops={"float64": 7.8, "float32": 15.7, "bfloat16": 15.7, "float16": 125},
        vector_tflops=15.7,
        memory_gib=32,
        memory_gb_s=900,
        matmul_efficiency=0.8,
        source="NVIDIA V100 datasheet (Jan 2020), SXM2 32 GB",
    ),
    _gpu(
        "A100-40GB",
        _nvlink(600, "NVLink 3 (A100 datasheet)"),
        _network(200, "DGX A100: 8 x 200 Gb/s InfiniBand for 8 GPUs"),
        tflops=_A100_TFLOPS,
        vector_tflops=19.5,
        memory_gib=40,
        memory_gb_s=1555,
        matmul_efficiency=0.87,
        source="NVIDIA A100 datasheet (Jun 2021), SXM4 40 GB",
    ),
    _gpu(
        "A100-80GB",
        _nvlink(600, "NVLink 3 (A100 datasheet)"),
        _network(200, "DGX A100: 8 x 200 Gb/s InfiniBand for 8 GPUs"),
        tflops=_A100_TFLOPS,
        vector_tflops=19.5,
        memory_gib=80,
        memory_gb_s=2039,
        matmul_efficiency=0.87,
        source="NVIDIA A100 datasheet (Jun 2021), SXM4 80 GB",
    ),
    _gpu(
        "A100-PCIe",
        _PCIE4,
        _network(100, "assumed: 2 x 200 Gb/s for 4 GPUs"),
        tflops=_A100_TFLOPS,
        vector_tflops=19.5,
        memory_gib=80,
        memory_gb_s=1935,
        matmul_efficiency=0.81,
        source="NVIDIA A100 datasheet (Jun 2021), PCIe 80 GB",
    ),
    _gpu(
        "H100",
        _nvlink(900, "NVLink 4 (H100 datasheet)"),
        _network(400, "DGX H100: 8 x 400 Gb/s InfiniBand for 8 GPUs"),
        tflops=_H100_TFLOPS,
        vector_tflops=67,
        memory_gib=80,
        memory_gb_s=3350,
        matmul_efficiency=0.8,
        source="NVIDIA H100 datasheet, SXM5 80 GB (its tensor figures are with sparsity: halved here)",
    ),
    _gpu(
        "H100-PCIe",
        _PCIE5,
        _network(200, "assumed: 4 x 400 Gb/s for 8 GPUs"),
        tflops={"float64": 51, "float32": 51, "tf32": 378, "bfloat16": 756, "float16": 756},
        vector_tflops=51,
        memory_gib=80,
        memory_gb_s=2000,
        matmul_efficiency=0.8,
        source="NVIDIA H100 datasheet, PCIe 80 GB (its tensor figures are with sparsity: halved here)",
    ),
    _gpu(
        "H200",
        _nvlink(900, "NVLink 4 (H200 datasheet)"),
        _network(400, "DGX H200: 8 x 400 Gb/s InfiniBand for 8 GPUs"),
        tflops=_H100_TFLOPS,
        vector_tflops=67,
        memory_gib=140,
        memory_gb_s=4800,
        matmul_efficiency=0.8,
        source="NVIDIA H200 datasheet, SXM5 141 GB (drivers report 140 GiB; tensor figures halved as for H100)",
    ),
    _gpu(
        "B200",
        _nvlink(1800, "NVLink 5 (HGX B200 datasheet)"),
        _network(400, "DGX B200: 8 x 400 Gb/s InfiniBand for 8 GPUs"),
        tflops={"float64": 40, "float32": 80, "tf32": 1100, "bfloat16": 2250, "float16": 2250},
        vector_tflops=80,
        memory_gib=178,
        memory_gb_s=8000,
        matmul_efficiency=0.78,
        source="NVIDIA Blackwell architecture brief, HGX B200 1000 W (180 GB; drivers report 178 GiB)",
    ),
    _gpu(
        "L4",
        _PCIE4,
        _network(12.5, "Google Cloud g2-standard-96: 100 Gb/s for 8 GPUs"),
        tflops={"float64": 0.49, "float32": 30.3, "tf32": 60, "bfloat16": 121, "float16": 121},
        vector_tflops=30.3,
        memory_gib=24,
        memory_gb_s=300,
        matmul_efficiency=0.8,
        source="NVIDIA L4 datasheet (its tensor figures are with sparsity: halved here)",
    ),
    _gpu(
        "L40S",
        _PCIE4,
        _network(50, "AWS g6e.48xlarge: 400 Gb/s for 8 GPUs"),
        tflops={"float64": 1.43, "float32": 91.6, "tf32": 183, "bfloat16": 362, "float16": 362},
        vector_tflops=91.6,
        memory_gib=48,
        memory_gb_s=864,
        matmul_efficiency=0.8,
        source="NVIDIA L40S datasheet, dense figures",
    ),
    _gpu(
        "RTX4090",
        _pcie(16, "PCIe 4.0 x16, halved: no peer-to-peer, so that data goes through host memory"),
        _network(10, "assumed: 10 Gb/s Ethernet per GPU"),
        tflops={"float64": 1.29, "float32": 82.6, "tf32": 82.6, "bfloat16": 165.2, "float16": 165.2},
        vector_tflops=82.6,
        memory_gib=24,
        memory_gb_s=1008,
        matmul_efficiency=0.8,
        source="NVIDIA Ada GPU architecture whitepaper, RTX 4090, dense, float32 accumulation",
    ),
    _gpu(
        "MI250X",
        _pcie(50, "Infinity Fabric between packages: one 50 GB/s link per direction (Frontier node diagram)"),
        _network(100, "Frontier: 4 x 200 Gb/s Slingshot for 8 dies"),
        # one rank drives one of the two dies of a package: half of the datasheet's figures
        tflops={"float64": 47.85, "float32": 47.85, "bfloat16": 191.5, "float16": 191.5},
        vector_tflops=23.95,
        memory_gib=64,
        memory_gb_s=1638,
        matmul_efficiency=0.5,
        source="AMD Instinct MI250X datasheet, per die, matrix figures",
    ),
    _gpu(
        "MI300X",
        Link(448 * GB, 4 * MICROSECOND, "Infinity Fabric, 7 links of 64 GB/s per direction (MI300X datasheet)", 0.8),
        _network(400, "8 x 400 Gb/s for 8 GPUs, as in vendors' MI300X servers"),
        tflops={"float64": 163.4, "float32": 163.4, "tf32": 653.7, "bfloat16": 1307.4, "float16": 1307.4},
        vector_tflops=163.4,
        memory_gib=192,
        memory_gb_s=5300,
        matmul_efficiency=0.51,
        source="AMD Instinct MI300X datasheet, matrix figures",
    ),
)

# Measured: two single-threaded processes at once on a 2-core x86 server (AMD EPYC, AVX-512, 1 MiB of L2 a core, 32 MiB
# of L3), torch 2.13, OMP_NUM_THREADS=1, gloo over loopback; medians.  A rank is taken to have a core to itself.
# - peak_flops: F.linear of 256x1024x4096 and its like (float32 105 to 110, float64 57 to 61, bfloat16 470 GFLOP/s);
#   64^3 reaches 0.72 and 16x1024x1024 0.78 of that, which gives the half size.
# - memory_bandwidth: adding tensors of 16 MiB. In the cache it is 80 to 100 GB/s, at 64 MiB 26.
# - AdamW: 2.0 ns per parameter as a loop of ops (80 bytes of traffic), 0.75 ns with fused=True (28 bytes).
# - launch_overhead: from 1.9 us (mul) to 3.1 us (linear) per op of a forward and backward pass over tiny tensors.
# - fresh memory: glibc takes tensors above 32 MiB (DEFAULT_MMAP_THRESHOLD_MAX) from the kernel each time: 0.35 ns/byte.
# - link: all-reduce by gloo, all-gather as one broadcast per rank or as sends and receives into the output,
#   reduce-scatter as an all-to-all and a local sum, from 64 B to 64 MiB; bytes as in collectives.py.  Medians of three
#   runs agree within 25 %.  torch's own all_gather_into_tensor and reduce_scatter_tensor are slower on gloo: 1.15 and
#   0.6 GB/s sent at 16 MiB, 0.62 and 0.48 GB/s at 64 MiB.
_CPU = Entry(
    Device(
        name="cpu",
        peak_flops={"float64": 6.0e10, "float32": 1.09e11, "bfloat16": 4.7e11, "float16": 2.6e10},
        vector_flops=4.0e10,
        memory=8 * GIB,
        memory_bandwidth=36 * GB,
        launch_overhead=2.5 * MICROSECOND,
        source="measured, one thread of a 2-core x86 server; memory: assumed",
        gemm_half_size=4,
        fresh_above=32 * 2**20,
        fresh_bandwidth=2.85 * GB,
    ),
    Link(
        1.7 * GB,
        # 140 us in a loop of nothing else; between the ops of a training step, where ranks drift apart and gloo's
        # thread must be woken, 24 collectives of 1 MiB were seen to add 65 ms
        1000 * MICROSECOND,
        "measured, gloo over loopback, two processes, inside training steps",
        kind_bandwidth=(("reduce-scatter", 1.3 * GB),),
    ),
    replace(_network(10, "assumed: 10 Gb/s Ethernet per rank"), latency=1000 * MICROSECOND),
)

CATALOGUE: Mapping[str, Entry] = {entry.device.name: entry for entry in (*_GPUS, _CPU)}
ALIASES: Mapping[str, str] = {"A100": "A100-80GB", "A100-SXM": "A100-80GB", "H100-SXM": "H100", "H100-80GB": "H100"}


def lookup(kind: str) -> Entry:
    """The catalogue's entry for a kind of device, by name or alias, in any case.

    Raises PlanError for an unknown kind, with the known ones.
    """
    folded = {name.lower(): entry for name, entry in CATALOGUE.items()}
    folded |= {alias.lower(): CATALOGUE[name] for alias, name in ALIASES.items()}
    if kind.lower() not in folded:
        raise PlanError(
            f"no figures for devices of kind {kind!r}",
            where="autopar.cost_model.hardware",
            expected="one of " + ", ".join(CATALOGUE),
            got=kind,
            hint="name the most similar kind and override what differs, e.g. ClusterSpec('8xA100 memory=51539607552')",
        )
    return folded[kind.lower()]


def device(cluster: ClusterSpec) -> Device:
    """The cluster's kind of device, with the cluster's overrides.  Raises PlanError for an unknown kind."""
    result = lookup(cluster.device).device
    if cluster.memory is not None:
        result = replace(result, memory=cluster.memory)
    if cluster.memory_bandwidth is not None:
        bandwidth = cluster.memory_bandwidth
        result = replace(result, memory_bandwidth=bandwidth, memory_efficiency=1.0, fresh_bandwidth=math.inf)
    if cluster.peak_flops is not None:
        peaks = dict.fromkeys(result.peak_flops, cluster.peak_flops)
        result = replace(result, peak_flops=peaks, gemm_efficiency=1.0, gemm_half_size=0.0)
    if cluster.launch_overhead is not None:
        result = replace(result, launch_overhead=cluster.launch_overhead)
    if cluster.overlap is not None:
        result = replace(result, overlap=cluster.overlap)
    share = crowding(cluster)
    if share > 1:
        result = replace(
            result,
            peak_flops={dtype: figure / share for dtype, figure in result.peak_flops.items()},
            vector_flops=result.vector_flops / share,
            memory_bandwidth=result.memory_bandwidth / share,
            launch_overhead=result.launch_overhead * share,
        )
    return result


def crowding(cluster: ClusterSpec) -> float:
    """Ranks per core where ranks share cores, else 1."""
    return 1.0 if cluster.cores is None else max(1.0, cluster.devices_per_node / cluster.cores)


def levels(cluster: ClusterSpec) -> tuple[Link, Link]:
    """The links within a node and between nodes, with the cluster's overrides.  Raises as ``lookup`` does."""
    entry = lookup(cluster.device)
    share = crowding(cluster)
    # A rank that waits for one that is not running waits for the scheduler: with two ranks a core, one step of a gloo
    # collective was seen to take 1.5 to 20 times longer.
    intra = replace(
        entry.intra_node, bandwidth=entry.intra_node.bandwidth / share, latency=entry.intra_node.latency * share**2
    )
    return (
        _overridden(intra, cluster.intra_node_bandwidth, cluster.intra_node_latency),
        _overridden(entry.inter_node, cluster.inter_node_bandwidth, cluster.inter_node_latency),
    )


def axis_links(cluster: ClusterSpec, mesh_sizes: Sequence[int]) -> tuple[Link, ...]:
    """For each axis of a mesh, the slowest link that a collective along it uses.

    Ranks are numbered row-major, the last axis fastest, node by node.  The mesh may be one pipeline stage: an equal,
    contiguous part of the cluster.  An axis whose groups all lie within a node has the node's link.  Any other has the
    link between nodes, without sharing: every device has its own part of the network (the catalogue counts it so),
    and a ring crosses the border of a node once in each direction per group.

    Raises PlanError for an unknown kind and for a mesh that does not tile the cluster.
    """
    size = math.prod(mesh_sizes)
    if any(n < 1 for n in mesh_sizes) or cluster.world_size % size:
        raise PlanError(
            "the mesh does not fit the cluster",
            where=str(cluster),
            expected=f"axes whose product divides {cluster.world_size}",
            got=" x ".join(map(str, mesh_sizes)),
        )
    intra, inter = levels(cluster)
    links = []
    extent = size
    for n in mesh_sizes:
        # The groups of this axis tile blocks of `extent` consecutive ranks.  Where the border of a node cuts a block,
        # some group has ranks on both sides of it.
        within = n == 1 or cluster.nodes == 1 or cluster.devices_per_node % extent == 0
        links.append(intra if within else inter)
        extent //= n
    return tuple(links)


def _overridden(link: Link, bandwidth: float | None, latency: float | None) -> Link:
    if bandwidth is not None:
        link = replace(link, bandwidth=bandwidth, efficiency=1.0, kind_bandwidth=())
    if latency is not None:
        link = replace(link, latency=latency)
    return link
