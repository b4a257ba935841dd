"""Mixtures of experts: recognised, proven, equal to one process on any split, and split by experts where that pays."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
import torch
import torch.nn.functional as F
import written
from calls import captured
from equality import (
    Prepared,
    Run,
    assert_equal_runs,
    assert_equals_one_process,
    forced,
    mesh_of,
    prepare,
    run_plan,
    train,
)
from models import Case, Mixture, gated, language_model, mixtral, mixture
from proving import prove_call
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar import api
from autopar.cluster import ClusterSpec
from autopar.layout import Mesh
from autopar.passes.emit import emit
from autopar.passes.fold import expand, fold
from autopar.passes.resolve import resolve
from autopar.program import target_name
from autopar.rules.analysis import Bound, Operation, contract
from autopar.rules.derive import Choice, apply, axis_choices, splittable
from autopar.runtime.collectives import Axis
from autopar.runtime.dtensor import runtime_axes
from autopar.runtime.kernels.experts import experts, experts_exchange, experts_parts
from autopar.runtime.kernels.grouped import grouped_mm_fallback_parts
from autopar.runtime.kernels.parts import AxisCut, Part
from autopar.runtime.mode import Compiled
from autopar.runtime.module import ParallelModule
from autopar.solver.price import price
from autopar.solver.prices import prices
from autopar.testing import run_local
from autopar.verify.wire import counted

EXPERTS = "autopar.experts"
GATED: list[Any] = [
    ("linear", ("%0", 0, False), {}),
    ("piece", ("%1", 0, 2, False), {}),
    ("aten.silu.default", ("%2",), {}),
    ("piece", ("%1", 1, 2, False), {}),
    ("aten.mul.Tensor", ("%3", "%4"), {}),
    ("linear", ("%5", 1, False), {}),
]


def mixtures(bound: Bound) -> list[Operation]:
    return [op for op in bound.operations if target_name(op.node) == EXPERTS]


def split(prepared: Prepared, sizes: tuple[int, ...], *choices: str, seed: int = 0) -> None:
    """Every block's experts make these choices, one per axis, and all else is random: nothing changes."""
    plan = forced(prepared.bound, sizes, {op.name: choices for op in mixtures(prepared.bound)}, seed)
    assert_equals_one_process(prepared, plan, ", ".join(choices))


# ------------------------------------------------------------------------------------------------ rules


@pytest.mark.parametrize("index", range(len(written.mixtures())))
def test_every_split_of_experts_is_proven(index: int) -> None:
    """Cuts of all kinds, uneven and empty ones, of rows, experts and widths, with experts that have no rows."""
    (call,) = captured(*written.mixtures()[index]).calls
    report = prove_call(call, [(2,), (3,), (4,), (2, 2)])
    report.check()
    kinds = [c.kind for c in axis_choices(call.op.type, {}, 2)]
    assert report.checked[EXPERTS] > 20 and kinds.count("exchange") == kinds.count("parts") == (index < 5)


# ------------------------------------------------------------------------------------------------ one process


MODELS: dict[str, Callable[[], Case]] = {
    "batched": mixtral,
    "grouped": lambda: mixtral("grouped_mm"),
    "three": lambda: mixtral(experts=3),
    "padded": lambda: mixtral(experts=5, padded=True, output_router_logits=True),
    "idle": lambda: idle(mixtral(experts=6)),
}


def idle(case: Case) -> Case:
    """Routers of which two pairs of rows are opposite: of logits a, -a, b, -b, 0, 0 the largest two are never 0."""
    with torch.no_grad():
        for name, weight in case.model.named_parameters():
            if name.endswith("mlp.gate.weight"):
                weight[1], weight[3], weight[4:] = -weight[0], -weight[2], 0
    return case


@pytest.fixture(scope="module")
def prepared() -> Callable[[str], Prepared]:
    """Each model once, with the run of one process."""
    known: dict[str, Prepared] = {}

    def of(name: str) -> Prepared:
        if name not in known:
            known[name] = prepare(MODELS[name]())
        return known[name]

    return of


@pytest.mark.parametrize(
    ("name", "sizes", "choices"),
    [
        ("batched", (2,), ("parts e",)),
        ("batched", (4,), ("parts e",)),
        ("batched", (2,), ("exchange s with e",)),
        ("batched", (4,), ("exchange s with e",)),
        pytest.param("batched", (2,), ("exchange s at 1,5,14 with e",), marks=pytest.mark.slow),  # a batch of five
        ("batched", (2, 2), ("exchange s with e", "split s at 2,35,1")),
        pytest.param("batched", (2, 2), ("split s", "exchange s at 2,5,7 with e"), marks=pytest.mark.slow),
        ("batched", (2, 2), ("exchange s with e", "split i")),
        pytest.param("batched", (2, 2), ("split i", "parts e"), marks=pytest.mark.slow),
        ("batched", (2, 2), ("parts e", "parts e at 2,2,1")),
        ("batched", (3,), ("exchange s with e",)),  # two, two and no experts
        ("batched", (3,), ("parts e",)),
        pytest.param("grouped", (2,), ("parts e",), marks=pytest.mark.slow),
        pytest.param("grouped", (4,), ("exchange s with e",), marks=pytest.mark.slow),
        ("grouped", (2, 2), ("exchange s with e at 2,2,1", "split s at 2,35,1")),
        ("three", (2,), ("parts e",)),
        pytest.param("three", (2,), ("exchange s at 1,35,2 with e",), marks=pytest.mark.slow),
        pytest.param("three", (4,), ("exchange s with e",), marks=pytest.mark.slow),
        ("padded", (2,), ("exchange s with e",)),
        pytest.param("padded", (2, 2), ("parts e", "split i"), marks=pytest.mark.slow),
        ("idle", (3,), ("exchange s with e",)),  # one rank has no rows
        ("idle", (3,), ("parts e",)),
        pytest.param("idle", (2,), ("exchange s with e at 3,2,1",), marks=pytest.mark.slow),
    ],
)
def test_experts_equal_one_process(
    prepared: Callable[[str], Prepared], name: str, sizes: tuple[int, ...], choices: tuple[str, ...]
) -> None:
    """Loss, outputs, every gradient, the norm, and weights after three steps."""
    split(prepared(name), sizes, *choices)


def test_the_idle_experts_are_idle(prepared: Callable[[str], Prepared]) -> None:
    gradients = prepared("idle").reference.gradients
    (gate_up,) = (g for n, g in gradients.items() if n.endswith("gate_up_proj"))
    assert not gate_up[4:].any() and all(g.any() for g in gate_up[:4])


@pytest.mark.slow
def test_blocks_of_two_layers_equal_one_process() -> None:
    split(prepare(mixtral(layers=2)), (2,), "exchange s with e", seed=3)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("sizes", [(2,), (3,), (2, 2), (2, 2, 2)], ids=str)
def test_many_more_random_plans_equal_one_process(
    prepared: Callable[[str], Prepared], name: str, sizes: tuple[int, ...]
) -> None:
    for seed in range(20):
        plan = forced(prepared(name).bound, sizes, {}, seed)
        assert_equals_one_process(prepared(name), plan, f"seed {seed}")


# ------------------------------------------------------------------------------------------------ recognised


def ops_of(case: Case) -> list[str]:
    return [target_name(op.node) for op in api.understand(case.model, case.batch).operations]


SMALL = {
    "vocab_size": 53,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
    "use_cache": False,
    "num_experts_per_tok": 2,
}


def qwen(implementation: str) -> Case:
    """Beside the experts of a token one for all."""
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    more = {"moe_intermediate_size": 10, "shared_expert_intermediate_size": 14, "num_experts": 4}
    config = Qwen2MoeConfig(**SMALL, **more, decoder_sparse_step=1)
    config._experts_implementation = implementation
    return language_model(Qwen2MoeForCausalLM, config, False)


def gpt_oss(implementation: str) -> Case:
    """Biases, matrices that are transposed, gate and up by turns."""
    from transformers import GptOssConfig, GptOssForCausalLM

    config = GptOssConfig(**SMALL, head_dim=4, intermediate_size=10, num_local_experts=4, attn_implementation="eager")
    config._experts_implementation = implementation
    torch.manual_seed(0)
    ids = torch.randint(0, 53, (3, 5))
    model = GptOssForCausalLM(config).double().train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return Case(model, {"input_ids": ids, "labels": ids.clone()})


@pytest.mark.parametrize(
    ("make", "implementation"),
    [
        (mixtral, "batched_mm"),
        (qwen, "grouped_mm"),
        (gpt_oss, "batched_mm"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((mixtral, "grouped_mm"), (qwen, "batched_mm"), (gpt_oss, "grouped_mm"))
        ),
    ],
)
def test_hugging_faces_experts_are_one_op(make: Callable[[str], Case], implementation: str) -> None:
    ops = ops_of(make(implementation))
    assert ops.count(EXPERTS) == 1
    assert not {"aten.sort.default", "aten.histc.default", "aten.cumsum.default"} & set(ops)
    assert not any("grouped" in op or "bmm" in op for op in ops)


@pytest.mark.parametrize(
    ("make", "implementation"),
    [pytest.param(qwen, "batched_mm", marks=pytest.mark.slow), (gpt_oss, "grouped_mm")],
)
def test_other_mixtures_equal_one_process(make: Callable[[str], Case], implementation: str) -> None:
    model = prepare(make(implementation))
    split(model, (2,), "exchange s with e")
    split(model, (2, 2), "parts e", "split i")


def seen_from_outside(x: Tensor, ids: Tensor, up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
    h = torch.bmm(up[ids], x.unsqueeze(-1)).squeeze(-1).tanh()
    return torch.bmm(down[ids], h[:, :5].unsqueeze(-1)).squeeze(-1), h


def over_rows(x: Tensor, ids: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """The activation is not row by row."""
    h = torch.bmm(up[ids], x.unsqueeze(-1)).squeeze(-1).softmax(0)
    return torch.bmm(down[ids], h[:, :5].unsqueeze(-1)).squeeze(-1)


def other_experts(x: Tensor, ids: Tensor, up: Tensor, down: Tensor) -> Tensor:
    a, b = torch.bmm(up[ids], x.unsqueeze(-1)).squeeze(-1).chunk(2, -1)
    return torch.bmm(down[ids.flip(0)], (F.silu(a) * b).unsqueeze(-1)).squeeze(-1)


@pytest.mark.parametrize(
    ("function", "found"), [(gated, 1), (seen_from_outside, 0), (over_rows, 0), (other_experts, 0)]
)
def test_only_what_is_row_by_row_is_taken(function: Callable[..., Any], found: int) -> None:
    torch.manual_seed(0)
    weights = torch.randn(4, 10, 6).double(), torch.randn(4, 6, 5).double()
    made = captured(function, (torch.randn(7, 6).double(), torch.tensor([3, 0, 0, 3, 2, 0, -1]), *weights))
    assert not made.differs and not made.refused
    assert [c.name for c in made.calls].count(EXPERTS) == found


def test_experts_that_there_are_not() -> None:
    """An index would be refused; rows that a grouped product leaves out are zero."""
    x, weights = torch.randn(3, 5), [torch.randn(2, 6, 5)]
    body, ids = [("linear", ("%0", 0, False), {})], torch.tensor([1, 2, 0])
    with pytest.raises(IndexError, match="expert 2 of a row is not one of 2"):
        experts(x, ids, weights, body)
    out = experts(x, ids, weights, body, True)
    torch.testing.assert_close(out, torch.stack([weights[0][1] @ x[0], torch.zeros(6), weights[0][0] @ x[2]]))


@pytest.mark.parametrize("rank", range(3))
def test_a_rank_keeps_every_weight_once(rank: int) -> None:
    """Whatever experts and rows it has, none perhaps: a gathered weight is gathered again where autograd asks for it,
    and ranks that ask for it more or less often than others would wait for each other."""
    import transformers.integrations.moe  # noqa: F401  # registers its op

    part = Part(4, (AxisCut(Axis("x", 3, rank), 1, 4, 1),))
    x, ids = torch.randn(7, 5, requires_grad=True), torch.tensor([0, 0, 0, 1, 1, 1, 3])
    up, down = (torch.randn(4, *shape).split([2, 2, 0])[rank].requires_grad_() for shape in ((10, 5), (6, 5)))
    kept: list[int] = []

    def pack(saved: Tensor) -> Tensor:
        kept.append(saved.untyped_storage()._cdata)
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        experts_parts(x, ids, [up, down], GATED, parts={"e": part})
        grouped = up.transpose(1, 2)
        ends = torch.tensor([3, 6, 6, 7], dtype=torch.int32)
        grouped_mm_fallback_parts(x, grouped, ends, parts={"s": Part(7), "e": part, "k": Part(5), "n": Part(10)})
    assert kept.count(up.untyped_storage()._cdata) == 2 and kept.count(down.untyped_storage()._cdata) == 1


# ------------------------------------------------------------------------------------------------ bytes


@dataclass(frozen=True)
class OnAxes:
    """What the counter of bytes asks of a module."""

    live: tuple[Axis, ...]

    def axes(self) -> tuple[Axis, ...]:
        return self.live


@pytest.mark.parametrize("n", [2, 4])
def test_an_exchange_sends_what_theory_says(n: int) -> None:
    """Every expert has as many rows of each rank: (n-1)/n of a rank's rows go out, and the same come back, twice."""
    rows, width, count = 8 * n, 6, 2 * n
    torch.manual_seed(0)
    weights = [torch.randn(count, 10, width).double(), torch.randn(count, width, 5).double()]
    x = torch.randn(n, rows, width).double()

    def rank_main(rank: int) -> list[float]:
        mesh = Mesh(("x",), (n,))
        (axis,) = runtime_axes(mesh, init_device_mesh("cpu", (n,), mesh_dim_names=("x",)), (rank,))
        part = Part(count, (AxisCut(axis, 1, count, 1),))
        held = [w.chunk(n)[rank].clone().requires_grad_() for w in weights]
        mine, sent = x[rank].clone().requires_grad_(), []
        with counted() as of:
            out = experts_exchange(
                mine, torch.arange(rows) % count, held, GATED, parts={"s": Part(n * rows)}, pairs={"s": part}
            )
            sent.append(of(OnAxes((axis,)))["x"])  # type: ignore[arg-type]
            out.sum().backward()
            sent.append(of(OnAxes((axis,)))["x"] - sent[0])  # type: ignore[arg-type]
        return sent

    moved = (n - 1) / n * rows * width * 8
    for forward, backward in run_local(rank_main, n):
        assert forward == 2 * moved + (n - 1) / n * count * 8
        assert backward == 2 * moved


@pytest.mark.parametrize("n", [2, 4])
def test_the_emitted_ledger_is_the_closed_form(n: int) -> None:
    """T tokens, two experts each, of width H: (n-1)/n * 2 T H / n elements there and back, forward and backward."""
    case = mixtral(experts=4)
    bound = api.understand(case.model, {k: v[:4] for k, v in case.batch.items()})
    (op,) = mixtures(bound)
    plan = forced(bound, (n,), {op.name: ("exchange s with e",)})
    emitted = emit(resolve(plan, bound, *expand(plan, bound)), (0,), outputs=False)
    own = [c for c in emitted.conversions if c.name.startswith("experts")]
    assert {c.kind for c in own} == {"all-to-all"} and {c.axis for c in own} == {"x"}
    moved = (n - 1) / n * (2 * 28 * 16 / n) * 8
    assert sum(c.forward_bytes for c in own) == pytest.approx(2 * moved + (n - 1) / n * 4 * 8)
    assert sum(c.backward_bytes for c in own) == pytest.approx(2 * moved)


# ------------------------------------------------------------------------------------------------ the solver


def planned_mixture(tokens: int, width: int = 32, inner: int = 48) -> Bound:
    with torch.device("meta"):
        model, x = Mixture(width, inner).train(), torch.empty(tokens, width)
    return api.understand(model, {"x": x}, lambda out, batch: (out * out).mean())


def machines(**figures: float) -> ClusterSpec:
    """Four ranks of which only the links take time."""
    free = {"peak_flops": 1e10, "memory_bandwidth": 1e30, "launch_overhead": 0.0, "intra_node_latency": 0.0}
    return ClusterSpec(nodes=1, devices_per_node=4, device="cpu", **{**free, "intra_node_bandwidth": 1e9, **figures})  # type: ignore[arg-type]


@pytest.mark.parametrize(("tokens", "choice"), [(572, "exchange s with e"), (576, "split s")])
def test_experts_are_split_up_to_the_number_of_tokens_where_theory_says(tokens: int, choice: str) -> None:
    """Rows that go to experts and back, 4 (n-1)/n * 2 T H / n numbers, against gradients of all experts' weights,
    2 (n-1)/n * 3 E I H: equal at T = 3 E I n / 4 = 576, less what the numbers of rows cost that are exchanged too."""
    bound = planned_mixture(tokens)
    plan = api.solve(bound, machines(), mesh=mesh_of((4,)), gap=0.0)
    (op,) = mixtures(bound)
    chosen = next(o.choices for o in plan.ops if o.name == op.name)
    assert chosen[0].split(" at ")[0].startswith(choice), chosen


def test_a_mixture_of_experts_is_split_by_data_and_experts() -> None:
    """Hugging Face's Mixtral on eight devices: tokens by batch, experts by rank, rows on their way between."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=1024,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=8,
        num_local_experts=8,
        use_cache=False,
    )
    config._experts_implementation = "batched_mm"
    with torch.device("meta"):
        model, ids = MixtralForCausalLM(config).train(), torch.zeros(8, 128, dtype=torch.long)
    bound = api.understand(model, {"input_ids": ids, "labels": ids})
    mesh, cluster = Mesh(("x",), (8,)), ClusterSpec("1x8xH100")
    plan = api.solve(bound, cluster, mesh=mesh, precision="bf16")
    stored = {p.name: p.stored for p in plan.parameters}
    assert {o.choices for o in plan.ops if o.name.startswith("experts")} == {("exchange s with e",)}
    assert {s for n, s in stored.items() if ".experts." in n} == {"x:S0"}
    assert {o.choices for o in plan.ops if o.name.startswith("topk")} == {("split d0",)}

    analysis, known = contract(bound, mesh.sizes), prices(cluster, mesh.sizes, precision="bf16")
    again = price(plan, bound, analysis, fold(bound), known)
    assert again.predicted == plan.predicted and again.objective == plan.solver.objective


def test_memory_knows_what_experts_keep_inside() -> None:
    """Rows sorted, gate and up in one, the activation of gate, its product with up: of rows that a rank computes."""
    bound = planned_mixture(576)
    (op,) = mixtures(bound)
    known = prices(machines(), (4,))
    ins, outs = ([bound.values[v] for v in names] for names in (op.inputs, op.outputs))
    kept = 2 * 576 * (32 + 2 * 48 + 48 + 48) * 4
    for choice, share in (("I", 1), ("parts e", 4), ("exchange s with e", 4), ("split s", 4)):
        kind, factor = [*choice.split(), ""][:2]
        cuts = {f: (1, n, 1) for f, n in op.rule.sizes.items()}
        strategy = apply(op.type, [made(kind, factor, cuts, choice)], (4,))
        assert strategy is not None
        assert known.op(op, strategy, ins, outs).inside == pytest.approx(kept / share)


def made(kind: str, factor: str, cuts: Mapping[str, tuple[int, int, int]], text: str) -> Choice:
    from autopar.rules.factors import Cut

    if not factor:
        return Choice(kind)
    partner = ("e", Cut(*cuts["e"])) if "with" in text else None
    return Choice(kind, factor, Cut(*cuts[factor]), partner=partner)


def test_what_experts_can_be_split_by() -> None:
    (op,) = mixtures(planned_mixture(8))
    assert splittable(op.rule) == [
        ("split", "s"),
        ("split", "i"),
        ("split", "o"),
        ("parts", "e"),
        ("exchange", "s"),
    ]
    assert op.rule.sums == {"i"} and math.isclose(
        sum(c * math.prod(op.rule.sizes[f] for f in fs) for c, fs in op.rule.flops), 2 * 16 * (96 * 32 + 48 * 32)
    )


# ------------------------------------------------------------------------------------------------ verified


@pytest.mark.parametrize(
    ("sizes", "choices"),
    [
        pytest.param((2,), ("parts e",), marks=pytest.mark.slow),
        ((3,), ("exchange s with e",)),
        pytest.param((2, 2), ("exchange s with e", "split s at 2,35,1"), marks=pytest.mark.slow),
        ((2, 2), ("exchange s with e", "split i")),
    ],
)
def test_plans_with_experts_are_verified(sizes: tuple[int, ...], choices: tuple[str, ...]) -> None:
    case = mixtral()
    bound = api.understand(case.model, case.batch)
    plan = forced(bound, sizes, {op.name: choices for op in mixtures(bound)})
    cluster = ClusterSpec(nodes=1, devices_per_node=math.prod(sizes), device="cpu")
    plan = msgspec.structs.replace(plan, fingerprints=api.fingerprints(bound.program, cluster))
    report = autopar.verify_plan(plan, case.model, case.batch)
    assert report.ok, str(report)
    assert ("experts_parts" if choices[0] == "parts e" else "experts_exchange") in str(report)


@pytest.mark.parametrize("choices", [("parts e",), ("exchange s with e",)])
def test_the_printed_program_runs_experts(choices: tuple[str, ...]) -> None:
    """Three ranks, the last without experts: each runs the function that the printed file has for it."""
    model = prepare(mixture())
    plan = forced(model.bound, (3,), {op.name: choices for op in mixtures(model.bound)})

    def job(module: ParallelModule, batch: Any) -> Run:
        printed: dict[str, Any] = {"__name__": "printed"}
        exec(compile(module.code, "printed", "exec"), printed)
        (at,) = module.coordinates
        function = printed["FORWARD"][(printed["CLASSES"][0][at],)]
        mode, asked = module.planned, []
        emitted = mode.compile_graph
        given = emitted(False)

        def compile_graph(outputs: bool) -> Compiled:
            asked.append(outputs)
            return emitted(True) if outputs else Compiled(function, given.inputs, given.uses)

        mode.compile_graph = compile_graph
        run = train(module, batch)
        assert False in asked and "experts_" in module.code
        return run

    for run in run_plan(model, plan, job):
        assert_equal_runs(run, model.reference)
