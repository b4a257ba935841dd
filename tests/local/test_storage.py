"""How weights are kept: DTensors under their own names, gathered copies that do not outlive their use, one norm."""

from __future__ import annotations

import gc

import models
import msgspec
import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

import autopar
from autopar.errors import PlanError, RuntimeMismatch
from autopar.layout import I, Layout, Mesh, S, canonical
from autopar.plan import Plan
from autopar.runtime.dtensor import from_placements, local_of, placements, runtime_axes, take_local, wrap
from autopar.runtime.module import ParallelModule
from autopar.solver.storage import storable
from autopar.testing import run_local


def cut(dim: int, m: int, size: int, n: int) -> S:
    shard = canonical(S(dim, m, size // m, 1), n)
    assert isinstance(shard, S)
    return shard


STORED: list[tuple[tuple[int, int], Layout]] = [
    ((10, 7), (cut(0, 1, 10, 2), I)),
    ((10, 7), (I, cut(1, 1, 7, 2))),
    ((10, 7), (cut(0, 1, 10, 2), cut(1, 1, 7, 2))),
    ((12, 5), (cut(0, 1, 12, 2), cut(0, 2, 12, 2))),
    ((10, 5), (cut(0, 1, 10, 2), cut(0, 2, 10, 2))),  # 5 rows on 2: the last cut does not divide
    ((12, 5), (I, cut(0, 3, 12, 2))),  # a fused QKV: once in each of three groups
    ((12, 5), (cut(0, 2, 12, 2), cut(0, 1, 12, 2))),  # inside what the next axis cuts
    ((24, 5), (cut(0, 1, 24, 2), cut(0, 6, 24, 2))),  # in three groups of what the first axis cuts
    ((1, 5), (cut(0, 1, 1, 2), I)),  # one rank holds nothing
]


@pytest.mark.parametrize(("shape", "layout"), STORED, ids=lambda v: str(v))
def test_a_stored_layout_is_a_dtensor(shape: tuple[int, int], layout: Layout) -> None:
    """Our shards are those that torch makes of the same placements, and torch makes the whole tensor of ours."""
    mesh = Mesh(("x", "y"), (2, 2))
    whole = torch.arange(float(shape[0] * shape[1])).reshape(shape)

    def rank_main(rank: int) -> None:
        device_mesh = init_device_mesh("cpu", mesh.sizes, mesh_dim_names=mesh.axes)
        at = mesh.coordinates(rank)
        local = take_local(whole, layout, mesh, at, runtime_axes(mesh, device_mesh, at))
        ours = wrap(local, layout, shape, mesh, device_mesh)
        assert isinstance(ours, DTensor)
        torch.testing.assert_close(ours.full_tensor(), whole, rtol=0, atol=0)
        given = placements(layout, mesh.sizes)
        assert from_placements(shape, given, mesh.sizes) == layout
        if not any(isinstance(s, S) and s.m == 3 for s in layout):
            theirs = distribute_tensor(whole, device_mesh, given)
            torch.testing.assert_close(local, local_of(theirs), rtol=0, atol=0)

    run_local(rank_main, 4)


def test_what_no_dtensor_can_be_is_not_stored_so() -> None:
    """In groups that are not the next axis' own; in groups on both axes; unevenly in groups."""
    assert all(storable(shape, layout, (2, 2)) for shape, layout in STORED)
    for shape, layout in (
        ((24,), (cut(0, 6, 24, 2), cut(0, 1, 24, 2))),
        ((24,), (cut(0, 3, 24, 2), cut(0, 6, 24, 2))),
        ((15,), (cut(0, 3, 15, 2), I)),
    ):
        assert not storable(shape, layout, (2, 2)), layout


def zero3(case: models.Case, world: int) -> tuple[Plan, autopar.ClusterSpec]:
    cluster = autopar.ClusterSpec(nodes=1, devices_per_node=world, device="H100")
    search = autopar.Search(mesh={"dp": world}, zero=3)
    return autopar.plan(case.model, cluster, case.batch, loss_fn=case.loss_fn, search=search), cluster


def test_gathered_weights_do_not_live_until_backward() -> None:
    """ZeRO-3: after forward nothing holds a gathered weight, though autograd needs it; gradients stay right."""
    case = models.gpt2()
    plan, _ = zero3(case, 2)
    assert any(p.use for p in plan.parameters), "nothing is gathered at its use"
    bound = autopar.api.understand(case.model, case.batch, case.loss_fn)

    def rank_main(rank: int) -> tuple[int, int, dict[str, Tensor]]:
        module = autopar.api.build(case.model, bound, plan)
        loss = module.loss(case.batch)
        gc.collect()
        gathered = list(module._gradients._gathered.values())
        alive = sum(reference() is not None for reference, _, _ in gathered)
        loss.backward()
        return len(gathered), alive, module.full_gradients()

    count, alive, gradients = run_local(rank_main, 2)[0]
    assert count > 8 and alive == 0, f"{alive} of {count} gathered weights are alive after forward"
    case.model(**case.batch).loss.backward()
    for name, parameter in case.model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-5, atol=1e-7)


def test_shards_are_all_that_a_rank_keeps() -> None:
    """The bytes of parameters on a rank under ZeRO-3 are about half of the model's on 2 ranks."""
    case = models.gpt2()
    plan, _ = zero3(case, 2)
    bound = autopar.api.understand(case.model, case.batch, case.loss_fn)
    sizes = run_local(
        lambda rank: sum(local_of(p).numel() for p in autopar.api.build(case.model, bound, plan).parameters()), 2
    )
    total = sum(p.numel() for p in case.model.parameters())
    assert max(sizes) < 0.6 * total <= sum(sizes)


def test_names_are_the_models_own() -> None:
    case = models.gpt2()
    plan, _ = zero3(case, 2)
    bound = autopar.api.understand(case.model, case.batch, case.loss_fn)

    def rank_main(rank: int) -> tuple[list[str], dict[str, torch.Tensor]]:
        module = autopar.api.build(case.model, bound, plan)
        return list(module.state_dict()), module.full_state_dict()

    names, whole = run_local(rank_main, 2)[0]
    assert set(names) == set(case.model.state_dict())
    for name, value in case.model.state_dict().items():
        torch.testing.assert_close(whole[name], value, rtol=0, atol=0)


def test_too_few_processes_are_refused_with_how_to_launch() -> None:
    case = models.mlp()
    plan, cluster = zero3(case, 4)
    with pytest.raises(RuntimeMismatch, match="another number of processes") as caught:
        autopar.parallelize(case.model, cluster, case.batch, loss_fn=case.loss_fn, plan=plan)
    assert "torchrun --nproc-per-node 4" in str(caught.value)
    bound = autopar.api.understand(case.model, case.batch, case.loss_fn)
    with pytest.raises(RuntimeMismatch, match="another number of processes"):
        run_local(lambda rank: autopar.api.build(case.model, bound, plan), 2)


def test_unequal_plans_are_refused_on_every_rank() -> None:
    case = models.mlp()
    cluster = autopar.ClusterSpec(nodes=1, devices_per_node=2, device="cpu")
    plans = [autopar.random_plan(case.model, cluster, case.batch, seed, loss_fn=case.loss_fn) for seed in (0, 1)]
    bound = autopar.api.understand(case.model, case.batch, case.loss_fn)

    def rank_main(rank: int) -> str:
        with pytest.raises(RuntimeMismatch, match="unequal plans") as caught:
            autopar.api.build(case.model, bound, plans[rank])
        return str(caught.value)

    for message in run_local(rank_main, 2):
        assert plans[0].id in message and plans[1].id in message


def test_another_batch_is_refused_with_its_numbers() -> None:
    case = models.gpt2()
    cluster = autopar.ClusterSpec(nodes=1, devices_per_node=1, device="cpu")
    module: ParallelModule = autopar.parallelize(case.model, cluster, case.batch)
    with pytest.raises(RuntimeMismatch, match="differs from the example batch") as caught:
        module.forward_backward({k: v[:3] for k, v in case.batch.items()})
    assert "[5, 7]" in str(caught.value) and "[3, 7]" in str(caught.value)


def test_mixed_precision_is_refused_rather_than_ignored() -> None:
    case = models.mlp()
    with pytest.raises(PlanError, match="not run yet"):
        autopar.parallelize(case.model, "1xcpu", case.batch, loss_fn=case.loss_fn, precision="bf16")


def test_moves_of_a_weight_are_a_set_not_a_sequence() -> None:
    """A gradient reduced over two axes in three steps: the plan lists the moves in any order."""
    case = models.gpt2()
    cluster = autopar.ClusterSpec(nodes=1, devices_per_node=4, device="cpu")
    bound = autopar.api.understand(case.model, case.batch)
    case.model(**case.batch).loss.backward()
    seen = 0
    for seed in range(12):
        plan = autopar.random_plan(case.model, cluster, case.batch, seed, search=autopar.Search(mesh={"x": 2, "y": 2}))
        turned = [
            msgspec.structs.replace(p, final=tuple(reversed(p.final)), gather=tuple(reversed(p.gather)))
            for p in plan.parameters
        ]
        seen += sum(len(p.final) > 1 for p in turned)
        plan = msgspec.structs.replace(plan, parameters=tuple(turned))

        def gradients(rank: int, plan: Plan = plan) -> dict[str, Tensor]:
            module = autopar.api.build(case.model, bound, plan)
            module.forward_backward(case.batch)
            return module.full_gradients()

        for name, grad in run_local(gradients, 4)[0].items():
            expected = case.model.get_parameter(name).grad
            torch.testing.assert_close(grad, expected, rtol=1e-5, atol=1e-7)
        if seen > 20 and seed >= 3:
            break
    assert seen > 20
