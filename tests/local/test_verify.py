"""autopar.verify: right plans pass all checks, wrong modules are told apart, and its figures are the closed forms."""

from __future__ import annotations

import dataclasses
import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from damage import damaged, every_damage
from equality import forced, mesh_of, sample, widened
from generator import build, generate
from models import MODELS, Case, cross_attention, mlp
from typer.testing import CliRunner, Result

import autopar
from autopar import api, cli
from autopar.errors import AutoparError, PlanError, RuntimeMismatch
from autopar.layout import I, Mesh, P, R, S, Split, canonical, local_split, parse_layout
from autopar.passes.fold import expand
from autopar.passes.resolve import Resolved, resolve
from autopar.plan import Plan
from autopar.rules.analysis import Bound
from autopar.runtime.collectives import Axis, Step
from autopar.solver.search import Search
from autopar.testing import run_local
from autopar.verify import check_graphs, check_public
from autopar.verify.moves import Mistyped, advance, shard_of
from autopar.verify.parting import assemble
from autopar.verify.report import Finding, Report
from autopar.verify.subject import rank_graph
from autopar.verify.traffic import planned
from autopar.verify.trial import install

MESHES: dict[str, dict[str, int]] = {"2": {"x": 2}, "3": {"x": 3}, "2x2": {"x": 2, "y": 2}}


def plan_of(case: Case, mesh: dict[str, int], seed: int) -> Plan:
    world = torch.tensor(list(mesh.values())).prod().item()
    cluster = f"1x{world}xcpu"
    return autopar.random_plan(case.model, cluster, case.batch, seed, loss_fn=case.loss_fn, search=Search(mesh=mesh))


def resolved_of(bound: Bound, plan: Plan) -> Resolved:
    return resolve(plan, bound, *expand(plan, bound))


# ------------------------------------------------------------------------------------------------ right plans


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("mlp", "2"),
        ("mlp", "3"),
        ("mlp", "2x2"),
        ("gpt2-padded-dropout", "2"),
        ("llama-padded", "2x2"),
        ("resnet", "2"),
    ],
)
def test_random_plans_pass_every_check(name: str, mesh: str) -> None:
    case = MODELS[name]()
    report = autopar.verify_plan(plan_of(case, MESHES[mesh], 1), case.model, case.batch, loss_fn=case.loss_fn)
    assert report.ok, str(report)
    assert set(report.left_out) <= {"the model itself"}  # which draws random numbers
    assert report.counts["ranks that ran a step"] == Mesh.of(MESHES[mesh]).size
    assert "verified" in str(report)


def test_a_float32_model_is_verified_in_float64_and_against_itself() -> None:
    case = mlp()
    model, batch = case.model.float(), {k: v.float() for k, v in case.batch.items()}
    plan = plan_of(Case(model, batch, case.loss_fn), {"x": 2}, 0)
    report = autopar.verify_plan(plan, model, batch, loss_fn=case.loss_fn)
    assert report.ok and not report.left_out, str(report)
    assert next(model.parameters()).dtype is torch.float32


def test_rounding_of_a_gradient_that_is_zero_is_no_finding() -> None:
    """The bias of keys moves all scores of a row alike: in float32 its gradient is not zero, but nearly."""
    case = cross_attention()
    model = case.model.float()
    batch = {k: v.float() if v.is_floating_point() else v for k, v in case.batch.items()}
    plan = plan_of(Case(model, batch, case.loss_fn), {"x": 1}, 0)
    report = autopar.verify_plan(plan, model, batch, loss_fn=case.loss_fn)
    assert report.ok and not report.left_out, str(report)


def run(*words: object) -> Result:
    return CliRunner().invoke(cli.app, [str(w) for w in words])


@pytest.fixture
def llama_file(tmp_path: Path) -> Path:
    """A configuration of a small Llama; such a model is built without values."""
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 53, "hidden_size": 16}
    config |= {"intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**config, "max_position_embeddings": 16}))
    return path


def test_the_command_runs_a_step_of_a_model_without_values(llama_file: Path) -> None:
    model, plan = f"hf:{llama_file}", llama_file.with_name("plan.json")
    sizes = ("--batch", 4, "--seq", 7)
    made = run("plan", model, "-c", "1x2xcpu", "--mesh", "x=2", "--time-limit", 5, "-o", plan, *sizes)
    assert made.exit_code == 0, made.output
    verified = run("verify", plan, model, *sizes)
    assert verified.exit_code == 0, verified.output
    assert "verified" in verified.output and "whose values are invented" in verified.output
    assert "left out: step: not asked for" in run("verify", plan, model, *sizes, "--no-step").output
    other = run("verify", plan, model, "--batch", 2, "--seq", 7)
    assert other.exit_code == 2 and "another model or batch" in other.output


def test_the_command_fails_where_something_is_found(llama_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, plan = f"hf:{llama_file}", llama_file.with_name("plan.json")
    sizes = ("--batch", 4, "--seq", 7)
    assert run("plan", model, "-c", "1x2xcpu", "--time-limit", 5, "-o", plan, *sizes).exit_code == 0
    found = Report("plan", (Finding("types", "a sum is pending", "layers.0.mlp"),))
    monkeypatch.setattr(sys.modules["autopar.verify"], "verify_plan", lambda *_, **__: found)
    failed = run("verify", plan, model, *sizes)
    assert failed.exit_code == 1 and "types: a sum is pending" in failed.output and "layers.0.mlp" in failed.output


def test_a_plan_of_another_model_is_refused() -> None:
    case, other = mlp(), MODELS["resnet"]()
    with pytest.raises(PlanError, match="another model"):
        autopar.verify_plan(plan_of(case, {"x": 2}, 0), other.model, other.batch, loss_fn=other.loss_fn)


@pytest.mark.slow
def test_random_plans_of_random_models_pass_without_running() -> None:
    pytest.importorskip("spmd_types")
    looked_at = 0
    for seed in range(60):
        try:
            bound = widened(build(generate(random.Random(seed))))[1]()
        except AutoparError:
            continue  # refused, with a reason
        for sizes in ((2,), (3,), (2, 2), (2, 2, 2)):
            resolved = resolved_of(bound, sample(bound, sizes, seed))
            ranks = [rank_graph(resolved, at) for at in resolved.mesh.all_coordinates()]
            found = check_graphs(bound, resolved, ranks)[0] + check_public(resolved, ranks[0])[0]
            assert not found, f"seed {seed} on {sizes}: {found[0]}"
            looked_at += 1
    assert looked_at > 200


# ------------------------------------------------------------------------------------------------ live modules


def live(case: Case, plan: Plan, change: Any = None) -> list[autopar.Report]:
    cluster = f"1x{plan.world_size}xcpu"

    def job(rank: int) -> autopar.Report:
        module = autopar.parallelize(case.model, cluster, case.batch, plan=plan, loss_fn=case.loss_fn)
        if change is not None:
            change(module)
        before = module.full_state_dict()
        report = autopar.verify(module)
        assert all(torch.equal(before[n], v) for n, v in module.full_state_dict().items())
        assert all(p.grad is None for p in module.parameters())
        return report

    return run_local(job, plan.world_size)


def test_a_live_module_is_verified_on_every_rank() -> None:
    case = mlp()
    for report in live(case, plan_of(case, {"x": 2, "y": 2}, 1)):
        assert report.ok and report.counts["ranks that ran a step"] == 4, str(report)
        report.raise_if_failed()


def test_a_damaged_live_module_is_found() -> None:
    case = mlp()
    plan = plan_of(case, {"x": 2, "y": 2}, 1)
    bound = api.understand(case.model, case.batch, case.loss_fn)
    resolved = resolved_of(bound, plan)
    graphs = {at: rank_graph(resolved, at) for at in resolved.mesh.all_coordinates()}
    names = {node: p.name for node, p in bound.program.parameters.items()}
    dropped = next(d for d in every_damage(graphs, names) if d.kind == "dropped")
    wrong = damaged(graphs, dropped)
    for report in live(case, plan, lambda module: install(module, wrong[module.coordinates])):
        assert not report.ok
        first = report.findings[0]
        assert first.check == "types" and any(w in first.where for w in dropped.where), str(report)
        with pytest.raises(RuntimeMismatch):
            report.raise_if_failed()


def test_an_axis_in_a_wrong_group_is_found() -> None:
    case = mlp()

    def swap(module: Any) -> None:
        x, y = module.axes()
        module._axes["x"] = dataclasses.replace(x, group=y.group)

    # a plan whose weights have shards of one size, which can be gathered in the wrong group, too
    reports = live(case, plan_of(case, {"x": 2, "y": 2}, 0), swap)
    assert all("joins other ranks" in r.findings[0].what for r in reports)


# ------------------------------------------------------------------------------------------------ closed forms


def bytes_of(bound: Bound, plan: Plan) -> dict[tuple[str, str], float]:
    """{(direction, kind): bytes} of rank 0, of a plan that passes."""
    resolved = resolved_of(bound, plan)
    rank = rank_graph(resolved, (0,) * len(plan.axes))
    findings, _ = check_graphs(bound, resolved, [rank])
    assert not findings
    out: dict[tuple[str, str], float] = {}
    for transfer, times in planned(resolved, rank.at, False).items():
        key = (transfer.direction, transfer.kind)
        out[key] = out.get(key, 0.0) + times * transfer.nbytes
    return out


def test_column_and_row_linears_send_the_closed_form() -> None:
    """Megatron's pair of linears: one all-reduce of the output forward, one of the input's gradient backward."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 12), torch.nn.ReLU(), torch.nn.Linear(12, 8), torch.nn.Tanh())
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), model).double()
    batch = (torch.randn(6, 8).double(),)
    bound = api.understand(model, batch, lambda out, batch: out.square().sum())
    linears = [op for op in bound.operations if "linear" in str(op.node.target)]
    p = 4
    choices = {op.name: ("I",) for op in bound.operations}
    choices |= {linears[1].name: ("split n",), linears[2].name: ("split k",)}
    choices |= {op.name: ("split d1",) for op in bound.operations if "relu" in str(op.node.target)}
    plan = forced(bound, (p,), choices)
    sent = bytes_of(bound, plan)
    closed = pytest.approx(2 * (p - 1) / p * 6 * 8 * 8)  # of the elements of the output, and of the input, in bytes
    assert sent["forward", "all-reduce"] == closed
    resolved = resolved_of(bound, plan)
    backward = [t for t in planned(resolved, (0,), False) if t.direction == "backward"]
    assert sum(t.nbytes for t in backward if t.value not in bound.program.parameters) == closed


def test_data_parallel_sends_every_gradient_once() -> None:
    case = mlp()
    bound = widened(case)[1]()
    plan = autopar.plan(
        case.model, "1x4xcpu", case.batch, loss_fn=case.loss_fn, search=Search(mesh={"dp": 4}, zero=0), time_limit=10
    )
    sent = bytes_of(bound, plan)
    gradients = 8 * sum(p.numel() for p in case.model.parameters())
    if any("split" in c for op in plan.ops for c in op.choices):
        assert sent["backward", "all-reduce"] <= 2 * 3 / 4 * gradients
    else:
        assert not sent


# ------------------------------------------------------------------------------------------------ parts


@pytest.mark.parametrize("text", ["x:S0", "x:S1(3,4,1)", "x:S0 y:S0(2,5,1)", "y:S0 x:S0(2,5,1)", "x:S1 y:S1(2,6,1)"])
def test_a_cut_is_read_back_from_what_every_rank_sees(text: str) -> None:
    mesh, shape = mesh_of((2, 2)), (10, 12)
    layout = parse_layout(text, mesh.axes, shape)
    for at in mesh.all_coordinates():
        for axis, state in enumerate(layout):
            if isinstance(state, S):
                split = local_split(shape, layout, axis, state, mesh.sizes, at)
                bare = (*layout[:axis], I, *layout[axis + 1 :])
                assert shard_of(split, axis, bare, shape, mesh, at) == canonical(state, mesh.sizes[axis])


def test_a_conversion_must_start_where_the_value_is() -> None:
    mesh = mesh_of((2, 2))
    axis = Axis("x", 2, 0)
    half = Split(0, 1, 2, 5)
    assert advance((P, R), Step(axis, P, I), (10,), mesh, (0, 0), True) == (I, R)
    assert advance((I, R), Step(axis, R, half), (10,), mesh, (0, 0), False) == (S(0, 1, 10, 1), R)
    for layout, step in (
        ((I, R), Step(axis, R, half)),  # with a gradient I is not R
        ((P, R), Step(Axis("y", 2, 0), P, I)),
        ((I, R), Step(axis, I, Split(1, 1, 2, 5))),
        ((I, R), Step(axis, I, Split(0, 3, 2, 5))),
        ((P, R), Step(Axis("z", 2, 0), P, I)),
    ):
        with pytest.raises(Mistyped):
            advance(layout, step, (10,), mesh, (0, 0), True)


def test_parts_are_assembled_by_their_layout() -> None:
    mesh, whole = mesh_of((2, 2)), torch.arange(70.0).reshape(10, 7)
    layout = parse_layout("x:S1 y:P", mesh.axes, (10, 7))
    parts = {(i, j): whole[:, 4 * i : 4 * i + 4] * (2.0 if j else -1.0) for i in range(2) for j in range(2)}
    assert torch.equal(assemble(parts, (10, 7), layout, mesh), whole)  # type: ignore[arg-type]
    assert assemble({**parts, (1, 1): whole[:, 4:6]}, (10, 7), layout, mesh) is None
    same = parse_layout("y:S0", mesh.axes, (10, 7))
    parts = {(i, j): whole[5 * j : 5 * j + 5] + (i * j) for i in range(2) for j in range(2)}
    assert assemble(parts, (10, 7), same, mesh) is None  # replicas that differ


def test_the_hook_of_conversions_says_what_they_compute() -> None:
    """spmd_types' own check of a hook against its kernel, on simulated ranks."""
    pytest.importorskip("spmd_types")
    from hook import check_hooks

    assert check_hooks() == 11
