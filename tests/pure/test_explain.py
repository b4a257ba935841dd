"""explain(): golden text of a plan made by hand, and what must hold of any plan's text."""

import msgspec
import pytest
import torch
from torch import nn

import autopar
from autopar.explain.quantities import format_bytes, format_seconds
from autopar.explain.table import WIDTH, spanned
from autopar.explain.text import explain, storage_words
from autopar.plan import Fingerprints, OpDecision, ParameterDecision, Plan, Predicted, Solver
from autopar.solver.search import Search


def row(
    module: str, op: str, layout: str, time: float, communication: str = "-", nbytes: int = 0, count: int = 1
) -> dict:
    source, target = layout.split(" -> ")
    return {
        "module": module,
        "op": op,
        "in": source,
        "out": target,
        "time": repr(time),
        "communication": communication,
        "bytes": str(nbytes),
        "count": str(count),
    }


TABLE = (
    row("transformer.wte", "embedding", "dp:S0 -> dp:S0 tp:P", 1e-3, "all-reduce", 4 << 20),
    row("transformer.h.0.ln_1", "layer_norm", "dp:S0 -> dp:S0", 1e-3, "-", 1000, 12),
    row("transformer.h.0.attn.q_proj", "linear", "dp:S0 tp:R -> dp:S0 tp:S2", 3e-3, "-", 9 << 20, 12),
    row("transformer.h.0.attn.k_proj", "linear_1", "dp:S0 tp:R -> dp:S0 tp:S2", 1e-3, "-", 3 << 20, 12),
    row("transformer.h.0.attn.v_proj", "linear_2", "dp:S0 tp:R -> dp:S0 tp:S2", 1e-3, "-", 3 << 20, 12),
    row("transformer.h.0.attn", "view", "dp:S0 tp:S1 -> dp:S0 tp:S1", 2e-6, "-", 0, 12),
    row("transformer.h.0.attn", "attention", "dp:S0 tp:S1 -> dp:S0 tp:S1", 2e-3, "-", 0, 12),
    row("transformer.h.0.attn", "mul_1", "dp:S0 tp:S1 -> dp:S0 tp:S2", 1e-3, "-", 0, 12),
    row("transformer.h.0.act", "pow_1", "dp:S0 tp:S0 -> dp:S0 tp:S0", 1e-3, "-", 0, 12),
    row("transformer.h.0.act", "tanh", "dp:S0 tp:S0 -> dp:S0 tp:S0", 1e-3, "-", 0, 12),
    row(
        "transformer.h.0.attn.o_proj",
        "linear_3",
        "dp:S0 tp:S2(3,768,1) -> dp:S0 tp:P",
        1.2e-3,
        "reduce-scatter",
        9 << 20,
        12,
    ),
    row("transformer.h.1.ln_1", "layer_norm", "dp:S0 -> dp:S0", 1e-3, "-", 1000, 12),
    row("lm_head", "linear", "dp:S0 -> dp:S0 tp:S2", 1e-2),
)
DATA_PARALLEL = ParameterDecision("w", "I", "I", "dp:P", final=("dp:P > dp:I",))
ZERO_1 = ParameterDecision(
    "w", "dp:S1 tp:S0", "tp:S0", "dp:P tp:S0", gather=("dp:S1 tp:S0 > dp:I",), final=("dp:P tp:S0 > dp:S1",)
)
ZERO_2 = ParameterDecision("w", "dp:S0", "I", "dp:S0", gather=("dp:S0 > dp:I",), reduce=("dp:P > dp:S0",))
ZERO_3 = ParameterDecision(
    "w", "dp:S0 tp:S1", "dp:S0 tp:S1", "dp:S0 tp:S1", use=("dp:S0 tp:S1 > dp:I",), reduce=("dp:P tp:S1 > dp:S0",)
)
SCATTERED = ParameterDecision(
    "w", "I", "I", "dp:P tp:P", final=("dp:P tp:P > dp:S1", "dp:S1 > dp:I", "dp:S1 tp:P > tp:I")
)
FROZEN = ParameterDecision("w", "I", "I", "I")


def named(decision: ParameterDecision, name: str) -> ParameterDecision:
    return msgspec.structs.replace(decision, name=name)


PLAN = Plan(
    1,
    "GPT2LMHeadModel",
    "1x4xcpu",
    (("dp", 2), ("tp", 2)),
    Fingerprints("a" * 12, "b" * 12, "c" * 12),
    (OpDecision("linear", ("split b", "R")), OpDecision("add_1", ("I", "P 0,1"))),
    (),
    (
        named(ZERO_1, "transformer.wte.weight"),
        named(DATA_PARALLEL, "transformer.h.0.ln_1.weight"),
        named(DATA_PARALLEL, "transformer.h.0.ln_1.bias"),
        named(ZERO_3, "transformer.h.0.attn.o_proj.weight"),
    ),
    Predicted(
        0.412,
        0.331,
        0.081,
        6.12 * 2**30,
        9.7e7,
        {
            "forward": 0.11,
            "backward": 0.21,
            "optimizer": 0.011,
            "activations": 0.06,
            "weights": 0.021,
            "weights hidden": 0.03,
            "memory: weights": 1.12 * 2**30,
            "memory: activations": 5.0 * 2**30,
        },
    ),
    Solver("optimal", 0.412, 0.412, 0.0, 0.8),
    {"layer_norm": 12},
    (
        "kinds: dp: data parallel, ZeRO-1; tp: tensor 1D",
        "why not tp:R for o_proj?  +41 ms: loses the split of a 32 MiB weight, adds one all-gather on tp",
    ),
    TABLE,
)

GOLDEN = """\
Plan 3c70c3  GPT2LMHeadModel on 4x cpu as dp=2 tp=2   optimal, gap 0.00 %   solved in 0.8 s
step 412 ms = compute 331 + exposed communication 81      peak 6.12 of 8 GiB on rank 0
  compute = forward 110 + backward 210 + optimizer 11 ms
  communication = activations 60 + weights 21 ms (92.5 MiB sent per rank, 30 ms more hidden)
  memory = activations 5 + weights 1.12 GiB
kinds: dp: data parallel, ZeRO-1; tp: tensor 1D

module             layout in -> out            time    communication   bytes/rank
transformer.wte    dp:S0 -> dp:S0 tp:P         1 ms    all-reduce      4 MiB
transformer.h.0-11 (12 alike)                  158 ms
  ln_1             dp:S0 -> dp:S0              1 ms    -               1000 B
  attn.q,k,v_proj  dp:S0 tp:R -> dp:S0 tp:S2   5 ms    -               15 MiB
  attn attention   dp:S0 tp:S1 -> dp:S0 tp:S1  2 ms    -               -
  attn mul         dp:S0 tp:S1 -> dp:S0 tp:S2  1 ms    -               -
  act              dp:S0 tp:S0 -> dp:S0 tp:S0  2 ms    -               -
  attn.o_proj      dp:S0 tp:S2(3,768,1)        1.2 ms  reduce-scatter  9 MiB
                   -> dp:S0 tp:P
  1.ln_1           dp:S0 -> dp:S0              1 ms    -               1000 B
  1 small op                                   2 us
lm_head            dp:S0 -> dp:S0 tp:S2        10 ms   -               -

parameters
  sharded over dp, gathered once a step, gradients reduce-scattered once a step (ZeRO-1); split over
  tp as it is used
    transformer.wte.weight
  replicated over dp, gradients all-reduced once a step (data parallel); replicated over tp
    transformer.h.0-11.ln_1.weight, transformer.h.0-11.ln_1.bias
  sharded over dp, gathered at each use (ZeRO-3); split over tp as it is used
    transformer.h.0-11.attn.o_proj.weight

why not tp:R for o_proj?  +41 ms: loses the split of a 32 MiB weight, adds one all-gather on tp
"""


def bare(plan: Plan) -> Plan:
    """Without what a solver adds."""
    return msgspec.structs.replace(plan, table=(), predicted=Predicted(), solver=Solver(), notes=(), blocks={})


def test_golden() -> None:
    assert explain(PLAN) == GOLDEN
    from_file = explain(Plan.from_json(PLAN.to_json()))  # a file does not tell how long the search took
    assert PLAN.explain().replace("   solved in 0.8 s", "") == from_file


def test_without_prices() -> None:
    lines = explain(bare(PLAN)).splitlines()
    assert lines[0].endswith("on 4x cpu as dp=2 tp=2   legal, not optimised")
    assert lines[1].startswith("nothing is priced")
    assert lines[3:6] == ["op      on dp    on tp", "linear  split b  R", "add_1   I        P 0,1"]


@pytest.mark.parametrize(
    ("solver", "words"),
    [
        (Solver("optimal", 1.0, 0.998, 0.002, 3.21), "optimal, gap 0.20 %   solved in 3.2 s"),
        (Solver("time_limit", 1.0, 0.9, 0.1, 60.0), "best within the time limit, gap 10.00 %   solved in 60.0 s"),
        (Solver("heuristic", 1.0, 0.9, 0.1, 0.5), "heuristic, gap 10.00 %   solved in 0.5 s"),
        (Solver("heuristic", 1.0, 0.0, 0.0, 0.5), "heuristic, not bounded   solved in 0.5 s"),
    ],
)
def test_status(solver: Solver, words: str) -> None:
    text = explain(msgspec.structs.replace(PLAN, solver=solver, model="M"))
    assert text.splitlines()[0].endswith(words)
    assert ("optimal" in text.splitlines()[0]) == (solver.status == "optimal")


@pytest.mark.parametrize(
    ("decision", "words"),
    [
        (DATA_PARALLEL, "replicated over dp, gradients all-reduced once a step (data parallel); replicated over tp"),
        (
            ZERO_1,
            "sharded over dp, gathered once a step, gradients reduce-scattered once a step (ZeRO-1); "
            "split over tp as it is used",
        ),
        (
            ZERO_2,
            "sharded over dp, gathered once a step, gradients reduce-scattered at each use (ZeRO-2); "
            "replicated over tp",
        ),
        (ZERO_3, "sharded over dp, gathered at each use (ZeRO-3); split over tp as it is used"),
        (SCATTERED, "replicated over dp and tp, gradients all-reduced once a step (data parallel)"),
        (FROZEN, "replicated over dp and tp"),
    ],
)
def test_storage_in_words(decision: ParameterDecision, words: str) -> None:
    assert storage_words(decision, ("dp", "tp")) == words


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 ms"), (8.6e-5, "86 us"), (3.1e-3, "3.1 ms"), (0.41249, "412 ms"), (4.14, "4.14 s"), (2.6e-8, "0.03 us")],
)
def test_seconds(value: float, text: str) -> None:
    assert format_seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (12, "12 B"), (96 << 20, "96 MiB"), (1.5 * 2**30, "1.5 GiB"), (5e15, "4547 TiB"), (1023, "1023 B")],
)
def test_bytes(value: float, text: str) -> None:
    assert format_bytes(value) == text


def test_blocks_are_written_once() -> None:
    assert spanned("layers.0.attn", 32) == "layers.0-31.attn"
    assert spanned("layers.3", 1) == "layers.3"
    assert spanned("head", 3) == "head"
    other = [row("decoder.0.ff", "linear", "dp:S0 -> dp:S0", 1e-3, "-", 8, 12)]
    text = explain(msgspec.structs.replace(PLAN, table=(*TABLE[:-1], *other)))
    assert "transformer.h.0-11 (12 alike)" in text
    assert "decoder.0-11 (12 alike)" in text


def test_wide_cells_are_wrapped() -> None:
    layout = "x:S0(3,1024,1) y:S1 z:S2(16,128,1)"
    deep = "model.language_model.decoder.blocks.layers.7.feed_forward.experts.gate_and_up_projection"
    sent = "all-gather on x, all-to-all on y, reduce-scatter on z"
    table = (row(deep, "linear", f"{layout} -> {layout}", 1.0, sent, 10**12, 1),)
    plan = msgspec.structs.replace(
        PLAN, table=table, notes=("words " * 60,), cluster="2x8xH100 memory=1000 launch_overhead=0.0"
    )
    lines = explain(plan).splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert any("gate_and_up_projection" in line for line in lines)
    assert "on 2x8x H100 as" in lines[0]


def test_notes() -> None:
    comparisons = ("data parallel would take +3.4 ms", "all invariant would take +2 s, and does not fit by 3 GiB")
    text = explain(msgspec.structs.replace(PLAN, notes=comparisons))
    assert text.endswith("\n\nwhy not otherwise\n  " + "\n  ".join(comparisons) + "\n")


def test_rows_may_be_damaged() -> None:
    text = explain(msgspec.structs.replace(PLAN, table=({"module": "m", "time": "soon", "bytes": "nan", "count": ""},)))
    assert "\nm " in text


@pytest.mark.parametrize("seed", range(8))
def test_random_plans(seed: int, tmp_path) -> None:
    model = nn.Sequential(nn.Linear(10, 13), nn.GELU(), nn.LayerNorm(13), nn.Linear(13, 7))

    def make() -> Plan:
        return autopar.random_plan(
            model,
            "4xcpu",
            (torch.zeros(5, 10),),
            seed,
            loss_fn=lambda out, _: (out**2).mean(),
            search=Search(mesh={"x": 2, "y": 2}),
        )

    plan = make()
    text = plan.explain()
    assert make().explain() == text
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").explain() == text
    lines = text.splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert lines[0] == f"Plan {plan.id}  Sequential on 4x cpu as x=2 y=2   legal, not optimised"
    for name, _ in model.named_parameters():
        assert name in text or "more" in text
    for op in plan.ops:
        assert any(line.startswith(f"{op.name} ") for line in lines)
