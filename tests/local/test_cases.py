"""Small models that broke somebody's parallel training; the right outcome of each is a test."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from equality import Prepared, assert_equals_one_process, forced, mesh_of, prepare, run_plan, sample
from models import Case
from refused import refused
from torch import Tensor, nn

from autopar import api
from autopar.cluster import ClusterSpec
from autopar.errors import RuntimeMismatch
from autopar.rules.analysis import contract
from autopar.runtime.dtensor import local_of
from autopar.runtime.kernels.dropout import dropout, keep_mask, step_key
from autopar.runtime.kernels.parts import Part
from autopar.runtime.module import ParallelModule


def mean_square(out: Tensor, batch: Any) -> Tensor:
    return out.square().mean()


# ------------------------------------------------------------------------------------------------ the models


def uneven() -> Case:
    """Hidden 5 and batch 5: on four ranks 2, 2, 1 and nothing."""
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    return Case(model, {"input": torch.randn(5, 6)}, mean_square)


class GroupedQueries(nn.Module):
    """Fewer heads of keys and values than ranks."""

    def __init__(self, width: int, heads: int, kv: int) -> None:
        super().__init__()
        self.heads, self.kv, each = heads, kv, width // heads
        self.q, self.o = nn.Linear(width, width), nn.Linear(width, width)
        self.k, self.v = nn.Linear(width, kv * each), nn.Linear(width, kv * each)

    def forward(self, x: Tensor) -> Tensor:
        def split(projection: nn.Linear, heads: int) -> Tensor:
            return projection(x).view(*x.shape[:2], heads, -1).transpose(1, 2)

        k, v = (split(p, self.kv) for p in (self.k, self.v))
        k = k.repeat_interleave(self.heads // self.kv, 1, output_size=self.heads)
        v = v.repeat_interleave(self.heads // self.kv, 1)
        out = F.scaled_dot_product_attention(split(self.q, self.heads), k, v, is_causal=True)
        return self.o(out.transpose(1, 2).flatten(2))


def grouped(width: int, heads: int, kv: int) -> Case:
    return Case(GroupedQueries(width, heads, kv), {"x": torch.randn(2, 6, width)}, mean_square)


class Fused(nn.Module):
    """Queries, keys and values from one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(24, 72), nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class TiedLM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(50, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(2))
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, ids: Tensor) -> Tensor:
        h = self.emb(ids)
        for block in self.blocks:
            h = h + block(h)
        return self.head(h)


def tied() -> Case:
    ids = torch.randint(0, 50, (4, 6))
    return Case(TiedLM(), {"ids": ids}, lambda out, b: F.cross_entropy(out.flatten(0, 1), b["ids"].flatten()))


class FewValid(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.e, self.h = nn.Embedding(20, 8), nn.Linear(8, 20)

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.h(self.e(ids)).flatten(0, 1)
        return {"loss": F.cross_entropy(logits, labels.flatten(), ignore_index=-100)}


def few_valid() -> Case:
    """Of 28 labels that count, four are in the first half of the batch."""
    ids = torch.randint(0, 20, (4, 12))
    labels = ids.clone()
    labels[0, 1:] = -100
    labels[1, 3:] = -100
    return Case(FewValid(), {"ids": ids, "labels": labels})


def large_bias() -> Case:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    nn.init.constant_(model[2].bias, 100.0)
    return Case(model, {"input": torch.randn(3, 8)}, lambda out, b: out.mean())


class NormBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n, self.a, self.b = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(F.gelu(self.a(self.n(x))))


def norms() -> Case:
    return Case(nn.Sequential(NormBlock(), NormBlock()), {"input": torch.randn(2, 8, 16)}, mean_square)


class PendingSum(nn.Module):
    """A scalar added to, a square and a maximum taken of what may be a pending sum."""

    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Linear(16, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.f(x)
        return (y + 10.0) * 0.5 + y * y - y.amax(-1, keepdim=True)


def pending_sum() -> Case:
    return Case(PendingSum(), {"x": torch.randn(3, 16)}, lambda out, b: out.mean())


def dropouts() -> Case:
    model = nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.5), nn.Linear(64, 16), nn.Dropout(0.5))
    return Case(model, {"input": torch.ones(4, 16)}, mean_square)


def batch_norm() -> Case:
    """Samples differ in mean, so that statistics of half a batch are far off."""
    model = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))
    x = torch.randn(8, 2, 4, 4) + torch.arange(8.0)[:, None, None, None]
    return Case(model, {"input": x}, mean_square)


class Window(nn.Module):
    """Attention within a window of three, over valid tokens only: not the causal mask that it contains."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor, valid: Tensor) -> Tensor:
        i = torch.arange(x.shape[1])
        mask = (i[:, None] >= i) & (i[:, None] - i < 3)
        mask = mask & valid[:, None, None, :] | torch.eye(x.shape[1], dtype=torch.bool)
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return self.o(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2))


def window() -> Case:
    valid = torch.ones(2, 8, dtype=torch.bool)
    valid[1, 6:] = False

    def loss(out: Tensor, batch: dict[str, Tensor]) -> Tensor:
        kept = batch["valid"].unsqueeze(-1).to(out.dtype)
        return (out.square() * kept).sum() / (kept.sum() * out.shape[-1])

    return Case(Window(), {"x": torch.randn(2, 8, 16), "valid": valid}, loss)


def padded_embedding(vocabulary: int = 10, padding: int = 7) -> Case:
    model = nn.Sequential(nn.Embedding(vocabulary, 4, padding_idx=padding), nn.Linear(4, 3))
    return Case(model, {"input": torch.tensor([[2, 7, 7, 9], [2, 0, 7, 5]])}, mean_square)


CASES: dict[str, Callable[[], Case]] = {
    "uneven": uneven,
    "kv 2 of 4": lambda: grouped(32, 4, 2),
    "kv 1 of 4": lambda: grouped(32, 4, 1),
    "kv 3 of 6": lambda: grouped(48, 6, 3),
    "fused": lambda: Case(Fused(), {"x": torch.randn(2, 5, 24)}, mean_square),
    "tied": tied,
    "few valid": few_valid,
    "large bias": large_bias,
    "norms": norms,
    "pending sum": pending_sum,
    "batch norm": batch_norm,
    "window": window,
    "padding 7": padded_embedding,
    "padding -1": lambda: padded_embedding(padding=-1),
    "padding 2 of 11": lambda: padded_embedding(11, 2),
}


def prepared_case(build: Callable[[], Case], exact: bool = True) -> Prepared:
    torch.manual_seed(0)
    case = build()
    batch = {k: v.double() if v.is_floating_point() else v for k, v in case.batch.items()}
    return prepare(Case(case.model.double().train(), batch, case.loss_fn), exact)


@pytest.fixture(scope="module", params=CASES)
def prepared(request: pytest.FixtureRequest) -> Iterator[Prepared]:
    yield prepared_case(CASES[request.param])


@pytest.mark.parametrize("sizes", [(2,), (4,), (2, 2)], ids=str)
def test_equals_one_process(prepared: Prepared, sizes: tuple[int, ...]) -> None:
    """The solver's plan and random ones: outputs, losses, gradients by name, norm, weights and buffers."""
    mesh = mesh_of(sizes)
    cluster = ClusterSpec(nodes=1, devices_per_node=mesh.size, device="cpu")
    assert_equals_one_process(prepared, api.solve(prepared.bound, cluster, mesh=mesh), "the solver's plan")
    for seed in range(3):
        assert_equals_one_process(prepared, sample(prepared.bound, sizes, seed), f"seed {seed}")


# ------------------------------------------------------------------------------------------------ forced layouts


FORCED: list[tuple[Callable[[], Case], tuple[int, ...], dict[str, tuple[str, ...]]]] = [
    # hidden 5 on four ranks, batch 5 on four, both on 2 x 2
    (uneven, (4,), {"linear": ("split n",), "tanh": ("split d1",), "linear_1": ("split k",)}),
    (uneven, (4,), dict.fromkeys(["linear", "linear_1"], ("split b0",)) | {"tanh": ("split d0",)}),
    (
        uneven,
        (2, 2),
        {"linear": ("split b0", "split n"), "tanh": ("split d0", "split d1"), "linear_1": ("split b0", "split k")},
    ),
    # the fused weight by heads: a third of its rows is queries
    (CASES["fused"], (2,), {"linear": ("split n at 3,24,1",), "linear_1": ("split k",)}),
    (CASES["fused"], (4,), {"linear": ("split n at 3,24,1",), "scaled_dot_product_attention": ("split h",)}),
    # the vocabulary of a tied weight, in both of its uses
    (tied, (2,), {"embedding": ("vocabulary v",), "cross_entropy_sum": ("vocabulary c",)}),
    # batch split with unequal numbers of labels that count
    (few_valid, (2,), {"cross_entropy_sum": ("split b",), "cross_entropy_count": ("split b0",)}),
    # columns, then rows: the bias of 100 is added once
    (large_bias, (2,), {"linear": ("split n",), "relu": ("split d1",), "linear_1": ("split k",)}),
    (large_bias, (4,), {"linear": ("split n",), "relu": ("split d1",), "linear_1": ("split k",)}),
    # the contraction split: only linear ops may keep the sum pending
    (pending_sum, (2,), {"linear": ("split k",)}),
    (pending_sum, (4,), {"linear": ("split k",), "mul": ("P 0",)}),
    # tokens split through norms
    (norms, (2,), dict.fromkeys(["layer_norm", "layer_norm_1"], ("split b1",))),
    (norms, (4,), dict.fromkeys(["layer_norm", "layer_norm_1"], ("parts n",))),
    # statistics of the whole batch, with the batch split
    (batch_norm, (2,), {"conv2d": ("split n",), "batch_norm": ("parts n",)}),
    (batch_norm, (4,), {"conv2d": ("split n",), "batch_norm": ("parts n",)}),
    # queries split: the mask is the given one, by global positions
    (window, (2,), {"scaled_dot_product_attention": ("split s",)}),
    (window, (4,), {"scaled_dot_product_attention": ("split s",)}),
    # the vocabulary split around the padding row
    (padded_embedding, (2,), {"embedding": ("vocabulary v",)}),
    (padded_embedding, (4,), {"embedding": ("vocabulary v",)}),
    (CASES["padding 2 of 11"], (4,), {"embedding": ("vocabulary v",)}),
]


@pytest.mark.parametrize(("build", "sizes", "choices"), FORCED)
def test_the_layout_that_broke_it(
    build: Callable[[], Case], sizes: tuple[int, ...], choices: dict[str, tuple[str, ...]]
) -> None:
    prepared = prepared_case(build)
    for seed in range(2):
        assert_equals_one_process(prepared, forced(prepared.bound, sizes, choices, seed), f"forced, seed {seed}")


# ------------------------------------------------------------------------------------------------ what to look at


def test_the_padding_row_keeps_its_value() -> None:
    """Row 7 has no gradient, its neighbours on the same rank have theirs."""
    prepared = prepared_case(padded_embedding)
    (run, _) = run_plan(prepared, forced(prepared.bound, (2,), {"embedding": ("vocabulary v",)}))
    norms = run.gradients["0.weight"].norm(dim=1)
    assert [r for r in range(10) if norms[r] > 0] == [0, 2, 5, 9]


def test_tied_weights_have_one_gradient_and_both_names() -> None:
    prepared = prepared_case(tied)
    (run, _) = run_plan(prepared, sample(prepared.bound, (2,), 1))
    assert [n for n in run.gradients if "emb" in n or "head" in n] == ["emb.weight"]
    assert torch.equal(run.state["emb.weight"], run.state["head.weight"])


def test_copies_of_a_weight_stay_identical_bit_for_bit() -> None:
    """Norms see only a rank's tokens, yet after five steps every rank holds the same norm weights."""
    prepared = prepared_case(norms)
    plan = forced(prepared.bound, (4,), dict.fromkeys(["layer_norm", "layer_norm_1"], ("split b1",)))

    def five_steps(module: ParallelModule, batch: dict[str, Tensor]) -> list[Tensor]:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for _ in range(5):
            module.forward_backward(batch)
            optimizer.step()
            optimizer.zero_grad()
        copies = [w for w in module.weights() if w.stored == ("I",)]
        return [local_of(module.get_parameter(w.names[0])).detach() for w in copies]

    first, *others = run_plan(prepared, plan, five_steps)
    assert first, "this plan keeps no weight whole"
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


# ------------------------------------------------------------------------------------------------ dropout and modes


def outputs_of(module: ParallelModule, batch: dict[str, Tensor]) -> list[Tensor]:
    """Outputs of two training steps and one more pass."""
    with torch.no_grad():
        return [module(**batch) for _ in range(3)]


def test_dropout_is_the_same_on_every_mesh_and_another_at_every_step() -> None:
    """Masks are functions of seed, step, op and global position; what is split is dropped as if it were whole."""
    prepared = prepared_case(dropouts, exact=False)
    one = outputs_of(api.build(prepared.case.model, prepared.bound, sample(prepared.bound, ())), prepared.case.batch)
    for sizes, seed in [((2,), 1), ((4,), 2), ((2, 2), 3), ((2, 2), 4)]:
        for found in run_plan(prepared, sample(prepared.bound, sizes, seed), outputs_of):
            torch.testing.assert_close(found, one, rtol=1e-12, atol=1e-14)
    assert not torch.equal(one[0] == 0, one[1] == 0) and not torch.equal(one[1] == 0, one[2] == 0)


def test_dropout_keeps_its_share_and_differs_by_op_seed_and_row() -> None:
    case = Case(nn.Sequential(nn.Dropout(0.3), nn.Dropout(0.3)).double(), {"input": torch.ones(200, 100).double()})
    bound = api.understand(case.model, case.batch, lambda out, batch: out.sum())

    def kept(seed: int) -> Tensor:
        return api.build(case.model, bound, sample(bound, ()), seed)(**case.batch) > 0

    both = kept(0)  # kept by both ops: 0.49 if they are independent, 0.7 if they drop the same
    assert abs(float(both.double().mean()) - 0.49) < 0.02
    assert torch.equal(both, kept(0)) and not torch.equal(both, kept(1))
    assert len({tuple(row) for row in both.tolist()}) == 200 and len({tuple(c) for c in both.T.tolist()}) == 100


def test_dropout_scales_what_it_keeps_and_its_gradient_alike() -> None:
    x = torch.randn(30, 40).double().requires_grad_()
    y = dropout(x, 0.25, step_key(0, 0), 0, dims=[Part(30), Part(40)])
    y.sum().backward()
    assert x.grad is not None
    kept = y != 0
    assert torch.equal(y, torch.where(kept, x * (1 / 0.75), 0.0))
    assert torch.equal(x.grad, kept.double() * (1 / 0.75))


@pytest.mark.parametrize("p", [0.01, 0.1, 0.3, 0.5, 0.7, 0.99])
def test_every_rate_is_kept(p: float) -> None:
    """Of 300,000 elements within five standard deviations, and as evenly over rows as chance is."""
    keep = keep_mask([torch.arange(300), torch.arange(1000)], p, step_key(1, 2), 3, torch.device("cpu")).double()
    deviation = (p * (1 - p)) ** 0.5
    assert abs(float(keep.mean()) - (1 - p)) < 5 * deviation / 300_000**0.5
    assert 0.8 < float(keep.mean(1).std()) / (deviation / 1000**0.5) < 1.2


@pytest.mark.parametrize("build", [dropouts, batch_norm])
def test_eval_and_train_work_after_capture(build: Callable[[], Case]) -> None:
    """eval() gives the user's own model in eval mode and leaves buffers alone; train() trains again."""
    prepared = prepared_case(build, exact=False)
    model, batch = prepared.case.model, prepared.case.batch
    expected = model.eval()(**batch).detach()
    model.train()

    def job(module: ParallelModule, batch: dict[str, Tensor]) -> tuple[Tensor, bool, bool]:
        before = [b.clone() for b in module.buffers()]
        out = module.eval()(**batch).detach()
        untouched = all(torch.equal(a, b) for a, b in zip(before, module.buffers(), strict=True))
        training = module.train()(**batch)
        return out, untouched, not torch.allclose(training, out)

    for out, untouched, differs in run_plan(prepared, sample(prepared.bound, (2, 2), 5), job):
        torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-14)
        assert untouched and differs


# ------------------------------------------------------------------------------------------------ other sizes


@pytest.mark.parametrize("rows", [5, 1, 20])
def test_another_batch_size_is_refused_with_its_number(rows: int) -> None:
    """Never silently the size of the example: it runs right, or says which size it was planned for."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 64, 5))
    case = Case(model, {"input": torch.randn(8, 3, 8, 8)}, mean_square)
    bound = api.understand(case.model, case.batch, case.loss_fn)
    module = api.build(case.model, bound, sample(bound, ()))
    with refused(
        RuntimeMismatch, "an input differs from the example batch", "expected: [8, 3, 8, 8]", f"got: [{rows}, 3, 8, 8]"
    ):
        module(input=torch.randn(rows, 3, 8, 8))


class Deep(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


@pytest.mark.slow
def test_capture_grows_linearly_with_depth() -> None:
    """200 layers: no recursion error, and a layer costs no more than three times what it costs among 40."""

    def seconds(layers: int) -> float:
        model = Deep(layers)
        start = time.process_time()
        bound = api.understand(model, {"x": torch.randn(2, 4, 8)}, mean_square)
        assert len(contract(bound, (2,)).operations) == 5 * layers + 3
        return (time.process_time() - start) / layers

    seconds(4)
    assert seconds(200) < 3 * seconds(40)
