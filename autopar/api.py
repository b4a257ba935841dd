"""The recipe: a model, a cluster and a batch become a plan, and a plan becomes a module."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autopar import capture as capturing
from autopar.capture.twin import weightless
from autopar.cluster import ClusterSpec
from autopar.cost_model.profiler import Profile
from autopar.errors import AutoparError, CaptureError, PlanError, RuntimeMismatch
from autopar.layout import Mesh
from autopar.passes.constants import run_prelude
from autopar.passes.emit import emit
from autopar.passes.fold import expand
from autopar.passes.normalize import normalize
from autopar.passes.resolve import Resolved, follow, resolve
from autopar.plan import Fingerprints, Plan
from autopar.program import Program, fingerprint
from autopar.rules.analysis import Bound, bind_program
from autopar.rules.registry import rules_fingerprint
from autopar.runtime.dtensor import runtime_axes, steps
from autopar.runtime.mode import Compiled, Mode, Signature
from autopar.runtime.module import ParallelModule, Weight
from autopar.solver.ilp import solve
from autopar.solver.sample import random_decisions
from autopar.solver.search import Search

_TRACING = threading.Lock()  # torch traces one graph at a time, and ranks may be threads


def plan(
    model: nn.Module,
    cluster: ClusterSpec | str,
    example_inputs: Any = None,
    *,
    loss_fn: capturing.LossFn | None = None,
    optimizer: str = "adamw",
    precision: str = "fp32",
    memory_limit: float | None = None,
    search: Search | None = None,
    pins: Mapping[str, str] | None = None,
    time_limit: float = 60,
    profile: Profile | None = None,
    progress: Callable[[str], None] | None = None,
) -> Plan:
    """The fastest plan found for training ``model`` on ``cluster``.

    example_inputs: one *global* batch; a dict is keyword arguments, a tuple positional ones.  loss_fn(outputs, batch)
    returns the scalar loss; without one ``outputs.loss`` is taken, and without that the plan is for inference.
    memory_limit: bytes per device.  pins: {glob of parameter or module names: layout}.  time_limit: seconds.
    profile: what `autopar.profile` measured, which goes before the catalogue's figures.

    Raises CaptureError, RuleError, PlanError, InfeasiblePlan.
    """
    cluster = as_cluster(cluster)
    bound = understand(model, example_inputs, loss_fn)
    return solve(
        bound,
        cluster,
        search=search,
        pins=pins,
        optimizer=optimizer,
        precision=precision,
        memory_limit=memory_limit,
        time_limit=time_limit,
        profile=profile,
        model_name=type(model).__name__,
        progress=progress,
    )


def parallelize(
    model: nn.Module,
    cluster: ClusterSpec | str,
    example_inputs: Any = None,
    *,
    plan: Plan | None = None,
    loss_fn: capturing.LossFn | None = None,
    seed: int = 0,
    **options: Any,
) -> ParallelModule:
    """A module that trains ``model`` on ``cluster`` by ``plan``, or by the one that `plan` finds with ``options``.

    Every rank calls it with the same model and batch; weights are cut from ``model``, which must hold the same values
    on every rank.  seed: of dropout.  Raises what `plan` raises, and RuntimeMismatch where plan, program and processes
    do not belong together.
    """
    cluster = as_cluster(cluster)
    if options.get("precision", "fp32") != "fp32":
        raise PlanError(
            "mixed precision can be planned for, but not run yet",
            where="autopar.parallelize",
            expected="precision='fp32', which runs every weight in its own dtype",
            got=repr(options["precision"]),
            hint="model.to(torch.bfloat16) trains in that dtype; autopar.plan(precision=...) prices mixed precision",
        )
    bound = understand(model, example_inputs, loss_fn)
    if plan is None:
        plan = agreed(lambda: solve(bound, cluster, model_name=type(model).__name__, **options))
    check_plan(plan, bound, cluster)
    evaluation = in_evaluation(model, example_inputs, loss_fn) if model.training else None
    return build(model, bound, plan, seed, example_inputs, evaluation)


def random_plan(
    model: nn.Module,
    cluster: ClusterSpec | str,
    example_inputs: Any = None,
    seed: int = 0,
    *,
    loss_fn: capturing.LossFn | None = None,
    search: Search | None = None,
) -> Plan:
    """Any legal plan, the same for the same seed: to test that plans do not change the mathematics."""
    cluster = as_cluster(cluster)
    bound = understand(model, example_inputs, loss_fn)
    world = cluster.world_size
    mesh = search.meshes(world)[0] if search is not None and search.mesh else Mesh(("x",), (world,))
    return random_decisions(bound, mesh, fingerprints(bound.program, cluster), seed, type(model).__name__, str(cluster))


# ------------------------------------------------------------------------------------------------ the steps


def as_cluster(cluster: ClusterSpec | str) -> ClusterSpec:
    return ClusterSpec(cluster) if isinstance(cluster, str) else cluster


def understand(model: nn.Module, example_inputs: Any = None, loss_fn: capturing.LossFn | None = None) -> Bound:
    """Capture, normalise, and bind a rule to every op."""
    with _TRACING:
        program = capturing.capture(model, example_inputs, loss_fn)
        return bind_program(normalize(program, dict(model.named_buffers())))


def agreed(make: Callable[[], Plan]) -> Plan:
    """The plan that rank 0 makes, on every rank: two searches under a time limit need not end alike.

    Where rank 0 raises, every rank raises the same error.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return make()
    made: Plan | AutoparError | None = None
    if dist.get_rank() == 0:
        try:
            made = make()
        except AutoparError as error:
            made = error
    message: list[Any] = [made.to_json() if isinstance(made, Plan) else made]
    dist.broadcast_object_list(message, src=0)
    if isinstance(message[0], AutoparError):
        raise message[0]
    return made if isinstance(made, Plan) else Plan.from_json(message[0], where="the plan of rank 0")


def fingerprints(program: Program, cluster: ClusterSpec) -> Fingerprints:
    return Fingerprints(fingerprint(program), cluster.fingerprint, rules_fingerprint())


def check_plan(plan: Plan, bound: Bound, cluster: ClusterSpec | None) -> None:
    """Raise PlanError where a plan was made for something else; without ``cluster`` for another model or rules."""
    made, where = plan.fingerprints, plan.fingerprints.cluster if cluster is None else cluster.fingerprint
    for what, theirs, ours, hint in (
        ("model or batch", made.graph, fingerprint(bound.program), "plan again for this model and this batch size"),
        ("cluster", made.cluster, where, "plan again for this cluster"),
        ("set of rules", made.rules, rules_fingerprint(), "plan again with this version and these rules"),
    ):
        if theirs != ours:
            raise PlanError(
                f"the plan is for another {what}", where=f"plan {plan.id}", expected=theirs, got=ours, hint=hint
            )
    if cluster is not None and plan.world_size != cluster.world_size:
        raise PlanError(
            "the plan's mesh does not fill the cluster",
            where=f"plan {plan.id}",
            expected=f"{plan.world_size} devices ({plan.device_mesh})",
            got=f"{cluster.world_size} devices ({cluster})",
        )


@dataclass(frozen=True, slots=True)
class Origin:
    """What a module was compiled from; batch: the example that its program was captured on, if one was given."""

    bound: Bound
    resolved: Resolved
    batch: Any


def in_evaluation(
    model: nn.Module, example_inputs: Any, loss_fn: capturing.LossFn | None = None
) -> Callable[[], Bound]:
    """Captures ``model`` in evaluation mode when it is called; keeps what that takes, but none of the weights.

    A model that cannot be copied is refused then, not now.
    """
    buffers = {n: b.detach().clone() for n, b in model.named_buffers()}
    batch = capturing.default_inputs(model) if example_inputs is None else example_inputs
    try:
        with _TRACING:
            twin, batch = weightless(model, batch)
    except CaptureError as error:
        refusal = error

        def refuse() -> Bound:
            raise refusal

        return refuse

    def understand_twin() -> Bound:
        with _TRACING:
            return bind_program(normalize(capturing.capture(twin.eval(), batch, loss_fn), buffers))

    return understand_twin


def build(
    model: nn.Module,
    bound: Bound,
    plan: Plan,
    seed: int = 0,
    batch: Any = None,
    evaluation: Callable[[], Bound] | None = None,
) -> ParallelModule:
    """Emit this rank's graphs and cut this rank's weights."""
    program, mesh = bound.program, plan.device_mesh
    device_mesh, rank = device_mesh_of(plan, mesh)
    resolved = resolve(plan, bound, *expand(plan, bound))
    at = mesh.coordinates(rank)
    axes = runtime_axes(mesh, device_mesh, at)

    def mode_of(bound: Bound, resolved: Resolved, free: bool = False) -> Mode:
        def compile_graph(outputs: bool) -> Compiled:
            emitted = emit(resolved, at, outputs, free)
            return Compiled(fx.GraphModule(nn.Module(), emitted.graph), emitted.inputs, emitted.uses)

        return Mode(signature_of(bound), partial(run_prelude, bound.program), compile_graph)

    def evaluated() -> Mode:
        assert evaluation is not None
        found = evaluation()
        return mode_of(found, follow(resolved, found), free=True)

    def print_code() -> str:
        from autopar.passes.code import print_program

        return print_program(plan, resolved, program, rank)

    state = dict(model.named_parameters(remove_duplicate=False))
    persistent = set(model.state_dict())
    buffers = {n: (b, n in persistent) for n, b in model.named_buffers(remove_duplicate=False)}
    for name, tensor in [*state.items(), *((n, b) for n, (b, _) in buffers.items())]:
        if tensor.is_meta:
            raise RuntimeMismatch(
                "the model has no values to train",
                where=name,
                expected="a tensor with data",
                got="a meta tensor",
                hint="autopar.plan() works on meta tensors; give parallelize() a model with weights",
            )
    return ParallelModule(
        plan,
        mesh,
        weights_of(resolved, at, axes),
        state,
        buffers,
        mode_of(bound, resolved),
        print_code,
        device_mesh,
        rank,
        seed,
        model.training,
        None if evaluation is None else evaluated,
        Origin(bound, resolved, batch),
    )


def device_mesh_of(plan: Plan, mesh: Mesh) -> tuple[DeviceMesh | None, int]:
    """The processes as the plan's mesh, and this process's rank; no mesh on one process.

    Raises RuntimeMismatch where the number of processes is not the plan's, and where ranks hold unequal plans.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    if world != mesh.size:
        raise RuntimeMismatch(
            "the plan is for another number of processes",
            where=f"plan {plan.id}",
            expected=f"{mesh.size} ({mesh})",
            got=f"{world}" + ("" if dist.is_initialized() else ", torch.distributed is not initialized"),
            hint=f"torchrun --nproc-per-node {mesh.size} your_script.py, and init_process_group() before parallelize()",
        )
    if world == 1:
        return None, 0
    plans: list[Any] = [None] * world
    dist.all_gather_object(plans, plan.id)
    if len(set(plans)) > 1:
        raise RuntimeMismatch(
            "ranks hold unequal plans",
            expected=plans[0],
            got=", ".join(sorted(set(plans))),
            hint="save the plan on one rank and load it on all",
        )
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    return init_device_mesh(device, mesh.sizes, mesh_dim_names=mesh.axes), dist.get_rank()


def weights_of(resolved: Resolved, at: tuple[int, ...], axes: Any) -> tuple[Weight, ...]:
    program, mesh = resolved.analysis.program, resolved.mesh
    out = []
    for node, parameter in program.parameters.items():
        where = resolved.parameters[node]
        gather, final = (steps(m, parameter.shape, mesh, at, axes) for m in (where.gather, where.final))
        trained = resolved.analysis.values[node].differentiable
        out.append(
            Weight(
                parameter.names,
                node,
                parameter.shape,
                where.stored,
                where.held,
                where.accumulated,
                gather,
                final,
                parameter.requires_grad if program.loss is None else trained,
            )
        )
    return tuple(out)


def signature_of(bound: Bound) -> Signature:
    program = bound.program
    shapes = {n: (bound.values[n].shape, bound.values[n].dtype) for n in program.inputs}
    return Signature(
        lambda args, kwargs: capturing.flatten_batch(program, args, kwargs),
        dict(program.inputs),
        shapes,
        dict(program.input_literals),
        program.out_spec,
        tuple(program.mutations),
        dict(program.buffers),
        {node: p.name for node, p in program.parameters.items()},
        program.loss is not None,
    )
