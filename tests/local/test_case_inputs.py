"""Small models that broke somebody's parallel training: what goes in and comes out, data types, several losses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from equality import Prepared, adamw, assert_equals_one_process, mesh_of, prepare, run_plan, sample
from models import Case
from refused import refused
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autopar import api
from autopar.cluster import ClusterSpec
from autopar.errors import CaptureError
from autopar.runtime.engine import Engine
from autopar.runtime.module import ParallelModule

NO_RUN: Any = None  # where no reference is compared with
MESHES = [(2,), (4,), (2, 2)]


def mean_square(out: Any, batch: Any) -> Tensor:
    return out.square().mean()


class Scaled(nn.Module):
    """Parameters of one element, with a dimension and without."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.gain = nn.Linear(16, 1), nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * self.fc(x)


class Rope(nn.Module):
    """Positions as a complex table, of a sequence that divides by nothing."""

    def __init__(self, width: int = 8, tokens: int = 7) -> None:
        super().__init__()
        self.n, self.q, self.o = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)
        angle = torch.arange(tokens)[:, None] / 10.0 ** torch.arange(width // 2)
        self.register_buffer("cis", torch.polar(torch.ones_like(angle), angle).to(torch.complex128), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        z = torch.view_as_complex(self.q(self.n(x)).unflatten(-1, (-1, 2)).contiguous())
        return x + self.o(torch.view_as_real(z * self.cis[: x.shape[1]]).flatten(-2))


class Several(nn.Module):
    """Masks of bool, counts, None and keywords."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor, *, keep: Tensor, scale: Tensor | None = None, labels: Tensor) -> dict[str, Tensor]:
        h = self.a(x).masked_fill(~keep[..., None], 0.0)
        h = self.b(h) + torch.arange(x.shape[1])[None, :, None].to(h.dtype)
        y = self.c(h) if scale is None else self.c(h) * scale
        return {"y": y, "n": keep.sum(), "loss": (y * keep[..., None]).sub(labels).square().mean()}


def several(**more: Any) -> Case:
    keep = torch.tensor([[True, False, True, True, False], [False, True, True, False, True]])
    return Case(Several(), {"x": torch.randn(2, 5, 8), "keep": keep, "labels": torch.randn(2, 5, 8)} | more)


class LowRank(nn.Module):
    """Frozen weights beside trained ones, of one module too."""

    def __init__(self, width: int = 12, rank: int = 2) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.A, self.B = nn.Parameter(torch.randn(rank, width)), nn.Parameter(torch.randn(width, rank))
        self.n = nn.LayerNorm(width)
        self.n.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.base(self.n(x)) + x @ self.A.T @ self.B.T


class Types(nn.Module):
    """Buffers of bool and of integers, and a weight that is an integer."""

    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Linear(8, 8)
        self.register_buffer("gate", torch.arange(8) % 3 == 0)
        self.register_buffer("table", torch.arange(8))
        self.step = nn.Parameter(torch.tensor([3]), requires_grad=False)

    def forward(self, x: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
        y = self.f(x) * self.gate + self.table + self.step
        return torch.where(keep[..., None], y, 0.0), keep.any(0)


def types() -> Case:
    batch = {"x": torch.randn(5, 8), "keep": torch.tensor([True, False, True, True, False])}
    return Case(Types(), batch, lambda out, b: out[0].square().mean())


class Experts(nn.Module):
    """One expert of five for each token, and how evenly they are used: a product of two means over the batch."""

    def __init__(self, width: int = 8, experts: int = 5) -> None:
        super().__init__()
        self.r, self.w = nn.Linear(width, experts), nn.Parameter(torch.randn(experts, width, width) * 0.2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        p = self.r(x).softmax(-1)
        top, i = p.max(-1)
        y = torch.einsum("btd,btde->bte", x, self.w[i]) * top[..., None]
        used = F.one_hot(i, p.shape[-1]).double().mean((0, 1))
        return x + y, p.shape[-1] * (used * p.mean((0, 1))).sum()


class Balanced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.m = nn.ModuleList(Experts() for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        balance = torch.zeros(())
        for m in self.m:
            x, a = m(x)
            balance = balance + a
        return x, balance


def balanced(weight: float = 0.1) -> Case:
    return Case(Balanced(), {"x": torch.randn(3, 5, 8)}, lambda out, b: out[0].square().mean() + weight * out[1])


class Grid(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.n, self.b = nn.Linear(12, 24), nn.LayerNorm(24), nn.Linear(24, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.n(F.gelu(self.a(x))))


def labels_outside() -> Case:
    """Labels that the loss takes from around it, not from the batch."""
    y = torch.tensor([3, 1, 9, 0, 3, 7])
    return Case(Grid(), {"x": torch.randn(6, 12)}, lambda out, b: F.cross_entropy(out, y))


def stem() -> Case:
    """A first convolution whose input needs no gradient."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 7, stride=2, padding=3, bias=False),
        nn.ReLU(),
        nn.Conv2d(8, 6, 3, padding=1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, 5),
    )
    return Case(model, {"input": torch.randn(5, 3, 15, 15)}, mean_square)


@dataclass
class Out:
    logits: Tensor
    aux: tuple[Tensor, None]


@dataclass
class Unregistered(Out):
    pass


torch.export.register_dataclass(Out)


class Nested(nn.Module):
    """Tensors inside dicts go in, and tensors inside a dataclass come out."""

    def __init__(self, kind: type[Out] = Out) -> None:
        super().__init__()
        self.kind, self.e, self.p, self.h = kind, nn.Embedding(30, 8), nn.Linear(4, 8), nn.Linear(8, 30)

    def forward(self, feats: dict[str, Any], extra: Tensor | None = None) -> Out:
        z = self.e(feats["ids"]) + self.p(feats["num"]["x"])
        return self.kind(self.h(z), (z.mean(), None))


def nested(kind: type[Out] = Out) -> Case:
    batch: dict[str, Any] = {"feats": {"ids": torch.randint(0, 30, (5, 3)), "num": {"x": torch.randn(5, 3, 4)}}}
    return Case(Nested(kind), batch, lambda out, b: out.logits.square().mean() + out.aux[0])


CASES: dict[str, Callable[[], Case]] = {
    "tiny weights": lambda: Case(Scaled(), {"x": torch.randn(8, 16)}, mean_square),
    "complex positions": lambda: Case(Rope(), {"x": torch.randn(2, 7, 8)}, mean_square),
    "masks and keywords": several,
    "an optional tensor": lambda: several(scale=torch.randn(8)),
    "frozen weights": lambda: Case(nn.Sequential(LowRank(), LowRank()), {"input": torch.randn(6, 12)}, mean_square),
    "bool and integers": types,
    "balance of experts": balanced,
    "labels outside": labels_outside,
    "stem": stem,
    "nested": nested,
}


@pytest.mark.parametrize("name", CASES)
def test_equals_one_process(name: str) -> None:
    """The solver's plan and two random ones, on each mesh."""
    torch.manual_seed(0)
    case = CASES[name]()
    batch = pytree.tree_map(lambda v: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v, case.batch)
    prepared = prepare(Case(case.model.double().train(), batch, case.loss_fn))
    for sizes in MESHES:
        mesh = mesh_of(sizes)
        cluster = ClusterSpec(nodes=1, devices_per_node=mesh.size, device="cpu", intra_node_latency=0)
        assert_equals_one_process(prepared, api.solve(prepared.bound, cluster, mesh=mesh), "the solver's plan")
        for seed in range(2):
            assert_equals_one_process(prepared, sample(prepared.bound, sizes, seed), f"seed {seed}")


def test_outputs_come_back_as_the_model_returns_them() -> None:
    """A dataclass with its None, a dict with its integers; every leaf whole and of its own type on every rank."""
    bound = api.understand((case := nested()).model, case.batch, case.loss_fn)
    expected = case.model(**case.batch)

    def job(module: ParallelModule, batch: Any) -> Any:
        return module(**batch)

    for out in run_plan(Prepared(case, bound, NO_RUN), sample(bound, (2, 2), 3), job):
        assert type(out) is Out and out.aux[1] is None
        torch.testing.assert_close((out.logits, out.aux[0]), (expected.logits, expected.aux[0]))
    bound = api.understand((case := several()).model, case.batch)
    for out in run_plan(Prepared(case, bound, NO_RUN), sample(bound, (2, 2), 3), job):
        assert list(out) == ["y", "n", "loss"] and out["n"].dtype is torch.int64 and int(out["n"]) == 6


def test_a_class_that_torch_does_not_know_is_refused() -> None:
    case = nested(Unregistered)
    with refused(CaptureError, "torch.export cannot capture Nested", "Unregistered", "register"):
        api.understand(case.model, case.batch, case.loss_fn)


def test_bool_and_integers_keep_their_types() -> None:
    """No buffer and no weight is cast, averaged or given a gradient."""
    case = types()
    bound = api.understand(case.model, case.batch, case.loss_fn)

    def job(module: ParallelModule, batch: Any) -> Any:
        Engine(module, adamw).step(batch)
        return module.full_state_dict(), module.full_gradients()

    for state, gradients in run_plan(Prepared(case, bound, NO_RUN), sample(bound, (4,), 1), job):
        for name in ("gate", "table", "step"):
            assert torch.equal(state[name], case.model.state_dict()[name])
            assert state[name].dtype is case.model.state_dict()[name].dtype
        assert set(gradients) == {"f.weight", "f.bias"}


def test_the_balance_of_experts_reaches_the_router() -> None:
    """Its gradient is another one without the second loss."""

    def router(weight: float) -> Tensor:
        torch.manual_seed(0)
        case = balanced(weight)
        bound = api.understand(case.model, case.batch, case.loss_fn)

        def job(module: ParallelModule, batch: Any) -> Tensor:
            module.forward_backward(batch)
            return module.full_gradients()["m.0.r.weight"]

        return run_plan(Prepared(case, bound, NO_RUN), sample(bound, (2,), 0), job)[0]

    assert not torch.allclose(router(0.1), router(0.0), rtol=1e-3)
