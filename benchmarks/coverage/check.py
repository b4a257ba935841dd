"""One model against autopar: exported by torch, planned, emitted, and one step compared with eager PyTorch."""

from __future__ import annotations

import contextlib
import copy
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
from hugging_face import Made
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from autopar import api
from autopar.capture import find_loss
from autopar.cluster import ClusterSpec
from autopar.errors import AutoparError, RuleError
from autopar.layout import Mesh
from autopar.modes import describe
from autopar.passes.normalize import normalize
from autopar.plan import Plan
from autopar.rules.analysis import Bound, bind_program
from autopar.rules.registry import rule_for
from autopar.runtime.module import ParallelModule
from autopar.solver.sample import random_decisions
from autopar.testing import run_local

MESHES = {"2": (2,), "2x2": (2, 2)}

Step = tuple[Tensor, list[Tensor], dict[str, Tensor]]  # loss, tensors among the outputs, gradients by name


class InFloat64(TorchFunctionMode):
    """Runs what asks for float32 in float64.

    transformers casts losses, norms and rotary tables to float32 inside float64 models: with that left in, no
    comparison is exact.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map(lambda v: torch.float64 if v is torch.float32 else v, (args, kwargs or {}))
        return (torch.Tensor.double if func is torch.Tensor.float else func)(*args, **kwargs)


@contextlib.contextmanager
def in_float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        with InFloat64():
            yield
    finally:
        torch.set_default_dtype(torch.float32)


def prepare(made: Made) -> Made:
    """In float64 and training mode, nothing dropped, every weight distinct."""
    torch.manual_seed(1)
    model = made.model.double().train()
    for module in model.modules():
        for key, value in vars(module).items():
            if "drop" in key and isinstance(value, float) and not isinstance(value, bool):
                setattr(module, key, 0.0)
        if isinstance(module, torch.nn.modules.dropout._DropoutNd):
            module.p = 0.0
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    wide = {k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in made.batch.items()}
    return Made(model, wide, made.loss_fn)


# ------------------------------------------------------------------------------------------------ one step


def tensors(outputs: Any) -> list[Tensor]:
    return [x.detach() for x in pytree.tree_leaves(outputs) if isinstance(x, Tensor)]


def eager(made: Made) -> Step:
    """One step of plain PyTorch, on a copy: buffers stay as they were."""
    model = copy.deepcopy(made.model)
    inputs = {k: v for k, v in made.batch.items() if made.loss_fn is None or k != "labels"}
    outputs = model(**inputs)
    loss = find_loss(outputs) if made.loss_fn is None else made.loss_fn(outputs, made.batch)
    loss.backward()
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in trained.items()}
    return loss.detach(), tensors(outputs), gradients


def parallel(module: ParallelModule, batch: Any) -> Step:
    with torch.no_grad():
        outputs = tensors(module(**batch))
    return module.forward_backward(batch).detach(), outputs, module.full_gradients()


def run_plan(made: Made, bound: Bound, plan: Plan) -> list[Step]:
    """One step of every rank, on ranks as threads."""
    return run_local(lambda rank: parallel(api.build(made.model, bound, plan), made.batch), plan.world_size)


def difference(found: Step, expected: Step, rtol: float, gradients: float) -> str:
    """What differs by more than ``rtol`` (``gradients``: of gradients), relative to the largest entry; or nothing."""
    largest = max([float(g.abs().max()) for g in expected[2].values() if g.numel()], default=0.0)

    def differs(what: str, a: Tensor, b: Tensor, rtol: float, floor: float) -> str:
        if a.shape != b.shape:
            return f"{what}: shape {list(a.shape)}, expected {list(b.shape)}"
        if a.numel() == 0:
            return ""
        if not a.is_floating_point():
            return "" if torch.equal(a, b.to(a.dtype)) else f"{what}: unequal integers"
        a, b = a.double(), b.double()
        same = (a == b) | (a.isnan() & b.isnan())
        gap = torch.where(same, 0.0, (a - b).abs())
        finite = torch.where(b.isfinite(), b, 0.0)
        bound = rtol * max(float(finite.abs().max()), floor)
        worst = float(gap.max())
        return "" if worst <= bound else f"{what}: off by {worst:.1e}, largest entry {float(finite.abs().max()):.1e}"

    if len(found[1]) != len(expected[1]):
        return f"{len(found[1])} outputs, expected {len(expected[1])}"
    if found[2].keys() != expected[2].keys():
        return f"gradients of other weights: {sorted(found[2].keys() ^ expected[2].keys())[:5]}"
    gaps = [differs("loss", found[0], expected[0], rtol, 0.0)]
    gaps += [
        differs(f"output {i}", a, b, rtol, 1e-3) for i, (a, b) in enumerate(zip(found[1], expected[1], strict=True))
    ]
    gaps += [differs(f"gradient of {n}", found[2][n], g, gradients, 1e-3 * largest) for n, g in expected[2].items()]
    gaps = [g for g in gaps if g]
    return "" if not gaps else f"{gaps[0]}" + (f" and {len(gaps) - 1} more" if len(gaps) > 1 else "")


# ------------------------------------------------------------------------------------------------ one model


def plans(bound: Bound, sizes: tuple[int, ...], random: bool) -> dict[str, Callable[[], Plan]]:
    """The solver's plan, and where ``random`` one in which every decision is made at random.

    The cluster has slow devices and fast links: on any other, models so tiny are best replicated.
    """
    mesh = Mesh(("x", "y")[: len(sizes)], sizes)
    cluster = ClusterSpec(
        nodes=1,
        devices_per_node=mesh.size,
        device="H100",
        peak_flops=1e9,
        memory_bandwidth=1e9,
        launch_overhead=0,
        intra_node_bandwidth=1e12,
        intra_node_latency=0,
    )
    prints = api.fingerprints(bound.program, cluster)
    found: dict[str, Callable[[], Plan]] = {"solved": lambda: api.solve(bound, cluster, mesh=mesh)}
    return found | {"random": lambda: random_decisions(bound, mesh, prints, 0)} if random else found


def check(make: Callable[[], Made]) -> dict[str, Any]:
    """What became of a model: ``status``, its ``reason``, and seconds by step.

    unexportable   torch.export refuses it
    refused        autopar refuses it, ``reason`` says why, ``causes`` every reason
    equal, wrong   one step by every plan against eager
    error          anything else
    """
    result: dict[str, Any] = {"seconds": {}}

    @contextlib.contextmanager
    def step(name: str) -> Iterator[None]:
        result["step"] = name
        start = time.perf_counter()
        try:
            yield
        finally:
            seconds = result["seconds"].get(name, 0.0) + time.perf_counter() - start
            result["seconds"][name] = round(seconds, 2)

    def ended(status: str, reason: str = "", **more: Any) -> dict[str, Any]:
        return result | {"status": status, "reason": reason} | more

    try:
        with step("make"):
            made = prepare(make())
        with step("eager"):
            unmodified = eager(made)
            with in_float64():
                exact = eager(made)
        with step("export"):
            try:
                inputs = {k: v for k, v in made.batch.items() if made.loss_fn is None or k != "labels"}
                torch.export.export(copy.deepcopy(made.model), (), inputs, strict=False)
                result["exported"] = True
            except Exception as error:
                result["exported"] = False
                result["export_error"] = f"{type(error).__name__}: {str(error).strip()[:300]}"
        bounds: dict[str, Bound] = {}
        try:
            with step("capture"):
                bounds["unmodified"] = understand(made)
                with in_float64():
                    bounds["exact"] = understand(made)
        except Missing as error:
            return ended("refused", error.causes[0], causes=error.causes)
        except AutoparError as error:
            if not result["exported"] and "torch.export cannot capture" in error.what:
                return ended("unexportable", result["export_error"])
            return ended("refused", cause(error), causes=[cause(error)], text=str(error))
        result["exported"] = True
        for size, sizes in MESHES.items():
            for kind, bound in bounds.items():
                for how, make_plan in plans(bound, sizes, random=kind == "exact").items():
                    with step(f"plan {size}"):
                        plan = make_plan()
                    if how == "solved":
                        result[f"plan {size}"] = describe(plan, bound)
                    with step(f"run {size}"):
                        runs = run_plan(made, bound, plan)
                    for rank, run in enumerate(runs):
                        gap = difference(run, unmodified, 1e-6, 1e-5)
                        if not gap and kind == "exact":
                            gap = difference(run, exact, 1e-10, 1e-10)
                        if gap:
                            return ended("wrong", gap, where=f"mesh {size}, {how} plan, {kind}, rank {rank}")
        return ended("equal")
    except AutoparError as error:
        return ended("refused", cause(error), causes=[cause(error)], text=str(error))
    except Exception as error:
        text = "".join(traceback.format_exception(error))
        return ended("error", f"{type(error).__name__}: {str(error).strip()[:300]}", traceback=text[-6000:])


def cause(error: AutoparError) -> str:
    """An error without its place, so that equal causes are counted as one."""
    return f"{error.what}: {error.got}" if error.got and error.got != "none" else error.what


class Missing(Exception):
    """Ops without a rule, each named once."""

    def __init__(self, causes: list[str]) -> None:
        super().__init__(", ".join(causes))
        self.causes = causes


def understand(made: Made) -> Bound:
    """As `api.understand`; raises Missing with every op that is refused, not only the first."""
    program = api.capturing.capture(made.model, made.batch, made.loss_fn)
    program = normalize(program, dict(made.model.named_buffers()))
    causes: dict[str, None] = {}
    for node in program.graph.nodes:
        if node.op == "call_function" and getattr(node.target, "__name__", "") != "getitem":
            try:
                rule_for(node)
            except RuleError as error:
                causes[cause(error)] = None
    if causes:
        raise Missing(list(causes))
    return bind_program(program)
