"""Indexing, order, scans, pieces, complex numbers, contractions: every strategy that a rule offers, proven.

Sizes divide nothing, indices repeat and count from the end, and sums that are pending have terms of both signs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from equality import assert_equals_one_process, prepare, sample
from models import Case
from proving import captured, prove
from refused import refused
from torch import Tensor, nn

from autopar import api
from autopar.errors import AutoparError, CaptureError, RuleError
from autopar.rules.derive import axis_choices

aten = torch.ops.aten


def some(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.complex128)


def rows(below: int, *shape: int) -> Tensor:
    return torch.randint(0, below, shape)


def distinct(below: int, *shape: int) -> Tensor:
    """Different rows in each line of the last dimension but one."""
    return torch.rand(*shape[:-1], below).argsort(-1)[..., : shape[-1]]


def mask(*shape: int) -> Tensor:
    return torch.rand(shape) > 0.5


torch.manual_seed(0)

Proof = tuple[Callable[..., Any], tuple[Any, ...]]

LOOKUPS: dict[str, Proof] = {
    "index": (lambda x, i: x[i], (some(7, 5), rows(7, 3, 4) - 3)),
    "index together": (lambda x, i, j: x[:, i, j], (some(5, 7, 4, 3), rows(7, 6), rows(4, 5, 1))),
    "index apart": (lambda x, i, j: x[i, :, j], (some(5, 7, 4), rows(5, 6), rows(4, 6))),
    "index of one row": (lambda x, i: x[i], (some(1, 5), rows(1, 6))),
    "index_select": (lambda x, i: x.index_select(1, i), (some(5, 7, 3), rows(7, 10))),
    "index_select by a number": (lambda x, i: x.index_select(1, i), (some(5, 7, 3), torch.tensor(3))),
    "gather": (lambda x, i: x.gather(1, i), (some(5, 7, 3), rows(7, 5, 10, 3))),
    "gather of the first rows": (lambda x, i: x.gather(1, i), (some(5, 7, 3), rows(7, 4, 2, 3))),
    "take_along_dim": (lambda x, i: torch.take_along_dim(x, i, 1), (some(5, 7, 3), rows(7, 1, 10, 3))),
    "bags": (lambda w, i: F.embedding_bag(i, w, mode="sum"), (some(9, 4), rows(9, 5, 3))),
    "mean bags, one all padding": (
        lambda w, i: F.embedding_bag(i, w, mode="mean", padding_idx=2),
        (some(9, 4), torch.cat([rows(4, 5, 3), torch.full((1, 3), 2)])),
    ),
    "weighted bags": (
        lambda w, i, p: F.embedding_bag(i, w, mode="sum", per_sample_weights=p),
        (some(9, 4), rows(4, 5, 3), some(5, 3)),
    ),
    "largest of bags": (lambda w, i: F.embedding_bag(i, w, mode="max"), (some(9, 4), rows(9, 5, 3))),
    "bags of any size": (
        lambda w, i, o, p: F.embedding_bag(i, w, o, mode="sum", per_sample_weights=p),
        (some(9, 4), rows(4, 7), torch.tensor([0, 3, 3]), some(7)),
    ),
}

WRITES: dict[str, Proof] = {
    "scatter": (lambda x, i, s: x.scatter(1, i, s), (some(5, 7), distinct(7, 5, 4), some(5, 4))),
    "scatter a number": (lambda x, i: x.scatter(0, i, 2.5), (some(5, 7), rows(5, 3, 7))),
    "scatter into the first rows": (lambda x, i, s: x.scatter(1, i, s), (some(5, 7), distinct(7, 4, 3), some(4, 3))),
    "scatter_add": (lambda x, i, s: x.scatter_add(1, i, s), (some(5, 7), rows(7, 5, 10), some(5, 10))),
    "scatter_reduce, sum": (
        lambda x, i, s: x.scatter_reduce(1, i, s, "sum"),
        (some(5, 7), rows(7, 5, 10), some(5, 10)),
    ),
    "scatter_reduce, amax": (
        lambda x, i, s: x.scatter_reduce(1, i, s, "amax"),
        (some(5, 7), rows(7, 5, 10), some(5, 10)),
    ),
    "scatter_reduce, mean": (
        lambda x, i, s: x.scatter_reduce(1, i, s, "mean", include_self=False),
        (some(5, 7), rows(7, 5, 10), some(5, 10)),
    ),
    "index_add": (lambda x, i, s: x.index_add(0, i, s, alpha=1.5), (some(5, 7), rows(5, 10), some(10, 7))),
    "index_copy": (lambda x, i, s: x.index_copy(0, i, s), (some(5, 7), distinct(5, 3), some(3, 7))),
    "index_fill": (lambda x, i: x.index_fill(1, i, 0.5), (some(5, 7), distinct(7, 3))),
    "index_fill with a tensor": (lambda x, i, v: x.index_fill(1, i, v), (some(5, 7), distinct(7, 3), some())),
    "index_put": (
        lambda x, i, j, v: x.index_put((i, j), v),
        (some(5, 7, 3), distinct(5, 4), distinct(7, 4), some(4, 3)),
    ),
    "index_put, added": (
        lambda x, i, j, v: x.index_put((i, j), v, accumulate=True),
        (some(5, 7, 3), rows(5, 10), rows(7, 10), some(10, 3)),
    ),
    "index_put, one value added": (
        lambda x, i, v: x.index_put((i,), v, accumulate=True),
        (some(5, 7), rows(5, 10), some()),
    ),
    "index_put behind": (lambda x, i, v: aten.index_put(x, [None, i], v), (some(5, 7), distinct(7, 3), some(5, 3))),
    "index_put by a mask": (lambda x, m, v: x.index_put((m,), v), (some(5, 7, 3), mask(5, 7), some(3))),
    "masked_scatter": (lambda x, m, v: x.masked_scatter(m, v), (some(5, 7), mask(5, 7), some(40))),
    "select_scatter": (lambda x, y: torch.select_scatter(x, y, 1, 2), (some(10, 3), some(10))),
    "slice_scatter": (lambda x, y: torch.slice_scatter(x, y, 1, 5, 10), (some(4, 15), some(4, 5))),
    "slice_scatter by steps": (lambda x, y: x.slice_scatter(y, 1, 0, None, 3), (some(4, 15), some(4, 5))),
}

ORDER: dict[str, Proof] = {
    "sort": (lambda x: x.sort(1), (some(5, 7, 3),)),
    "stable sort": (lambda x: x.sort(dim=1, stable=True, descending=True), (some(5, 7, 3),)),
    "argsort": (lambda x: x.argsort(1), (some(5, 7, 3),)),
    "topk": (lambda x: x.topk(2), (some(5, 7),)),
    "topk of one": (lambda x: x.topk(1, 0), (some(5, 7),)),
    "kthvalue": (lambda x: x.kthvalue(2, 1, True), (some(5, 7),)),
    "max": (lambda x: x.max(1), (some(5, 7),)),
    "min": (lambda x: x.min(0, True), (some(5, 7),)),
    "median": (lambda x: x.median(1), (some(5, 7),)),
    "nanmedian": (lambda x: x.nanmedian(1), (some(5, 7),)),
    "argmax": (lambda x: x.argmax(), (some(5, 7),)),
    "argmin": (lambda x: x.argmin(1, True), (some(5, 7),)),
    "cummax": (lambda x: x.cummax(1), (some(5, 7),)),
    "cumprod": (lambda x: x.cumprod(1), (some(5, 7),)),
    "logcumsumexp": (lambda x: x.logcumsumexp(1), (some(5, 7),)),
    "cumsum": (lambda x: x.cumsum(1), (some(5, 12, 3),)),
    "cumsum of seven": (lambda x: x.cumsum(-1), (some(5, 7),)),
    "cumsum of a mask": (lambda x: x.cumsum(1), (mask(5, 7),)),
    "histogram": (lambda x: x.histc(4, -1, 1), (some(5, 7),)),
    "histogram of all": (lambda x: x.histc(4), (some(5, 7),)),
    "one_hot": (lambda x: F.one_hot(x, 6), (rows(6, 5, 7),)),
    "bucketize": (lambda x, b: torch.bucketize(x, b), (some(5, 7), torch.tensor([-1.0, 0.0, 1.0]).double())),
    "searchsorted": (lambda b, x: torch.searchsorted(b, x), (some(5, 6).sort(1)[0], some(5, 7))),
    "isin": (lambda x, b: torch.isin(x, b), (rows(9, 5, 7), rows(9, 3))),
    "diff": (lambda x: x.diff(dim=1), (some(5, 7),)),
}

PIECES: dict[str, Proof] = {
    "cat": (lambda x, y: torch.cat([x, y, x], 1), (some(5, 4), some(5, 8))),
    "cat of 7 and 3": (lambda x, y: torch.cat([x, y], 1), (some(5, 7), some(5, 3))),
    "queries, keys and values": (lambda x: x.split([12, 6, 6], 1), (some(5, 24),)),
    "split with an empty part": (lambda x: x.split([3, 0, 5], 1), (some(5, 8),)),
    "tensor_split": (lambda x: x.tensor_split(3, 1), (some(5, 8),)),
    "slice": (lambda x: x[:, 5:10], (some(5, 15),)),
    "halves turned": (lambda x: torch.cat([-x[..., 5:], x[..., :5]], -1), (some(5, 10),)),
    "every third": (lambda x: x[:, 1::3], (some(5, 15),)),
    "all but the last": (lambda x: x[:, :-1], (some(5, 15),)),
    "pad": (lambda x: F.pad(x, (5, 0, 0, 0)), (some(5, 10),)),
    "pad and cut": (lambda x: F.pad(x, (-1, 2, 1, 0)), (some(5, 10),)),
    "pad with a number": (lambda x: F.pad(x, (5, 5), value=2.0), (some(5, 10),)),
    "reflect": (lambda x: F.pad(x, (2, 1), mode="reflect"), (some(5, 10),)),
    "roll": (lambda x: x.roll((5, -3), (0, 1)), (some(10, 12),)),
    "flip": (lambda x: x.flip(1), (some(10, 3),)),
    "unbind": (lambda x: x.unbind(1), (some(10, 3),)),
    "stack": (lambda x, y: torch.stack([x, y], -1).flatten(-2), (some(10, 3), some(10, 3))),
    "repeat": (lambda x: x.repeat(2, 3, 1), (some(5, 7),)),
    "repeat of nothing": (lambda x: x.repeat(2, 3), (some(0),)),
    "tril": (lambda x: x.tril(1), (some(3, 5, 7),)),
    "diagonal": (lambda x: x.diagonal(1, 0, 2), (some(5, 3, 7),)),
    "windows": (lambda x: x.unfold(1, 3, 2), (some(5, 7),)),
    "windows side by side": (lambda x: x.unfold(1, 3, 3), (some(5, 12),)),
    "im2col": (lambda x: F.unfold(x, 3, padding=1, stride=2), (some(3, 4, 5, 6),)),
    "im2col of one": (lambda x: F.unfold(x, 3), (some(4, 5, 6),)),
    "col2im": (lambda x: F.fold(x, (5, 6), 3, padding=1), (some(3, 36, 30),)),
    "meshgrid": (lambda x, y: torch.meshgrid(x, y, indexing="xy"), (some(5), some(7))),
    "movedim": (lambda x: x.movedim(0, 2).mT, (some(3, 5, 7),)),
    "like another": (lambda x, y: x.expand_as(y) * y.reshape_as(y.T).T, (some(5, 1), some(5, 7))),
}

NUMBERS: dict[str, Proof] = {
    "where, or zero": (lambda x, m: torch.where(m, x, 0.0), (some(5, 7), mask(5, 7))),
    "where, or a number": (lambda x, m: torch.where(m, 1.5, x), (some(5, 7), mask(5, 7))),
    "masked_fill with a tensor": (lambda x, m, v: x.masked_fill(m, v), (some(5, 7), mask(5, 7), some())),
    "floor_divide": (lambda x: x // 3, (rows(20, 5, 7),)),
    "rsub": (lambda x, y: torch.rsub(x, y, alpha=2), (some(5, 7), some(7))),
    "bits": (lambda x, y: (x & y) | (x ^ 3), (rows(20, 5, 7), rows(20, 7))),
    "likes": (lambda x: x + torch.zeros_like(x) + x.new_ones(7) + torch.full_like(x, 2.0), (some(5, 7),)),
    "filled": (lambda x, v: x * torch.empty_like(x).fill_(3.0) + torch.zeros_like(x).fill_(v), (some(5, 7), some())),
    "rotary": (
        lambda x, f: torch.view_as_real(torch.view_as_complex(x.reshape(5, 7, 3, 2)) * f).flatten(2),
        (some(5, 7, 6), numbers(7, 3)),
    ),
    "polar": (lambda r, a: torch.view_as_real(torch.polar(r, a)), (some(5, 7).abs(), some(7))),
    "parts of complex numbers": (lambda z: z.real * z.conj().imag + z.abs(), (numbers(5, 7),)),
    "complex of two": (lambda x, y: torch.complex(x, y), (some(5, 7), some(5, 7))),
    "fft": (lambda x: torch.fft.fftn(x, dim=(1, 2)).real, (some(5, 7, 4),)),
    "rfft": (lambda x: torch.fft.irfft(torch.fft.rfft(x, dim=1) * 2, n=8, dim=1), (some(5, 7, 4),)),
    "einsum": (lambda x, y: torch.einsum("bik,bjk->bij", x, y), (some(3, 5, 7), some(3, 4, 7))),
    "einsum of three": (
        lambda x, y, z: torch.einsum("...i,ij,j->...", x, y, z),
        (some(3, 5, 7), some(7, 4), some(4)),
    ),
    "einsum without arrow": (lambda x, y: torch.einsum("ij,kj", x, y), (some(5, 7), some(3, 7))),
    "einsum, broadcast": (
        lambda x, y: torch.einsum("...ij,...jk->...ik", x, y),
        (some(3, 1, 5, 7), some(2, 7, 4)),
    ),
    "baddbmm": (
        lambda c, x, y: torch.baddbmm(c, x, y, beta=0.5, alpha=2),
        (some(3, 1, 4), some(3, 5, 7), some(3, 7, 4)),
    ),
    "addbmm": (lambda c, x, y: torch.addbmm(c, x, y, beta=0.5), (some(5, 4), some(3, 5, 7), some(3, 7, 4))),
    "addmm": (lambda c, x, y: torch.addmm(c, x, y, beta=0.5, alpha=2), (some(5, 1), some(5, 7), some(7, 4))),
    "addmm, one number added": (lambda c, x, y: torch.addmm(c, x, y), (some(1), some(5, 7), some(7, 4))),
    "addmv, one number added": (lambda c, x, y: torch.addmv(c, x, y), (some(1), some(5, 10), some(10))),
    "addmv": (lambda c, x, y: torch.addmv(c, x, y, beta=0.5), (some(5), some(5, 7), some(7))),
    "dot and mv": (lambda a, x, y: torch.mv(a, x) * torch.dot(x, y), (some(5, 7), some(7), some(7))),
    "matmul with a vector": (lambda x, y: x @ y, (some(3, 5, 7), some(7))),
    "matmul of a vector": (lambda x, y: x @ y, (some(7), some(3, 7, 5))),
    "outer and inner": (lambda x, y, z: torch.inner(torch.outer(x, y), z), (some(5), some(7), some(4, 7))),
    "tensordot": (lambda x, y: torch.tensordot(x, y, dims=([1, 2], [0, 1])), (some(3, 4, 7), some(4, 7, 2))),
}

PROOFS = {**LOOKUPS, **WRITES, **ORDER, **PIECES, **NUMBERS}


@pytest.mark.parametrize("name", PROOFS)
def test_every_strategy_is_right(name: str) -> None:
    prove(*PROOFS[name]).check()


def test_products_by_expert() -> None:
    """Rows, experts and widths split, an expert without rows; by Hugging Face's op, and by torch's where it runs."""
    import transformers.integrations.moe  # noqa: F401 - which makes the op

    ends = torch.tensor([2, 2, 7, 9, 10], dtype=torch.int32)
    prove(torch.ops.transformers.grouped_mm_fallback.default, (some(10, 6), some(5, 6, 7), ends)).check()
    given = (some(10, 8).float(), some(5, 8, 12).float(), ends)
    try:
        aten._grouped_mm.default(*given)
    except RuntimeError:
        pytest.skip("this torch has it for bfloat16 only")
    prove(aten._grouped_mm.default, given).check()


@pytest.mark.parametrize(
    ("name", "offered"),
    [
        ("index together", {"split d0", "split d3", "split b0", "split b1", "rows i1", "rows i2", "P 0"}),
        ("index_put, added", {"split d2", "split b0", "rows i0", "rows i1", "P 0,3"}),
        ("gather", {"split d0", "split d2", "split i", "rows v", "P 0"}),
        ("scatter", {"split d0", "rows v"}),
        ("scatter_add", {"split d0", "split i", "rows v", "P 0,2"}),
        ("topk", {"split d0"}),
        ("cumsum", {"split d0", "split d2", "parts d1", "P 0"}),
        ("histogram", {"split d0", "split d1"}),
        ("histogram of all", set()),
        ("cat", {"split d0", "split n1", "P 0,1,2"}),
        ("cat of 7 and 3", {"split d0", "P 0,1"}),
        ("queries, keys and values", {"split d0", "split n1", "P 0"}),
        ("every third", {"split d0", "split n1", "P 0"}),
        ("masked_scatter", {"P 0,2"}),
        ("einsum", {"split b", "split i", "split j", "split k", "P 0", "P 1"}),
        ("windows side by side", {"split d0", "split w", "P 0"}),
    ],
)
def test_what_is_offered(name: str, offered: set[str]) -> None:
    """Plain cuts on two ranks, beside whole values."""
    op = captured(*PROOFS[name]).calls[-1].op
    found = {str(c) for c in axis_choices(op.type, {}, 2)} - {"I", "R"}
    assert found == offered


# ------------------------------------------------------------------------------------------------ in place


class Small(nn.Module):
    """A linear layer from 6 to 8, and a forward that the case gives."""

    def __init__(self, forward: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(6, 8)
        self.run = forward

    def forward(self, x: Tensor, i: Tensor) -> Tensor:
        return self.run(self.linear(x), i)


def columns(y: Tensor, i: Tensor) -> Tensor:
    out = y.clone()
    out[:, 2] = y[:, 3] * 2
    out[1] = 0
    out[:, 4:] = y[:, :4]
    out[:, ::2] *= 3
    return out


def masks(y: Tensor, i: Tensor) -> Tensor:
    out = y * 1
    out[i > 4] = 0.5
    return out.masked_fill_(i < 2, 2.0) * y


def unary(y: Tensor, i: Tensor) -> Tensor:
    out = (y * 1).add_(1).mul_(2).clamp_(-1, 3).sigmoid_().tril_().unsqueeze_(1).transpose_(0, 1).cumsum_(2)
    return torch.zeros_like(out).copy_(out)


def writes(y: Tensor, i: Tensor) -> Tensor:
    a = torch.zeros_like(y).scatter_(1, i[:, :3], 1.0) * y
    b = torch.zeros_like(y).scatter_add_(1, i[:, :4], y[:, 2:6])
    c = torch.zeros(8, 8, dtype=y.dtype)
    c.index_put_((i[:, 0],), y, accumulate=True)
    c.index_add_(0, i[:, 1], y)
    return a + b + c[:5]


def made_empty(y: Tensor, i: Tensor) -> Tensor:
    out = torch.empty_like(y)
    out[:, :3] = y[:, :3]
    out[:, 3:] = 1
    more = y.new_empty(5, 2).zero_()
    more += y[:, :2]
    return torch.cat([out, more], 1)


@pytest.mark.parametrize("forward", [columns, masks, unary, writes, made_empty], ids=lambda f: f.__name__)
def test_writing_in_place(forward: Callable[..., Tensor]) -> None:
    """Any op that writes in place has a twin that does not: the twin's rule holds."""
    batch = {"x": some(5, 6), "i": rows(8, 5, 8)}

    def loss(out: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return (out * torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view(out.shape)).square().mean()

    prepared = prepare(Case(Small(forward).double(), batch, loss))
    for sizes, seed in [((2,), 0), ((3,), 1), ((2, 2), 2), ((2, 2), 3)]:
        assert_equals_one_process(prepared, sample(prepared.bound, sizes, seed), f"seed {seed}")


# ------------------------------------------------------------------------------------------------ experts


def experts(kind: str, implementation: str, **options: Any) -> Case:
    """Two layers of a mixture of five or six experts."""
    import transformers

    config = getattr(transformers, f"{kind}Config")(
        vocab_size=53,
        hidden_size=12,
        intermediate_size=10,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=3,
        pad_token_id=0,
        use_cache=False,
        num_experts_per_tok=2,
        experts_implementation=implementation,
        **options,
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    ids = torch.randint(3, 53, (3, 5))
    return Case(model.double().train(), {"input_ids": ids, "labels": ids.clone()})


EXPERTS: dict[str, Callable[[], Case]] = {
    "batched": lambda: experts("Mixtral", "batched_mm", num_local_experts=5, head_dim=4, output_router_logits=True),
    "grouped": lambda: experts("Mixtral", "grouped_mm", num_local_experts=5, head_dim=4),
    "groups of experts": lambda: experts(
        "DeepseekV3",
        "batched_mm",
        n_routed_experts=6,
        n_group=3,
        topk_group=2,
        n_shared_experts=1,
        moe_intermediate_size=6,
        first_k_dense_replace=1,
        q_lora_rank=6,
        kv_lora_rank=6,
        qk_nope_head_dim=4,
        qk_rope_head_dim=2,
        v_head_dim=4,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPERTS)
def test_mixtures_of_experts(name: str) -> None:
    prepared = prepare(EXPERTS[name]())
    for sizes, seed in [((2,), 0), ((3,), 1), ((2, 2), 2), ((2, 2), 3)]:
        assert_equals_one_process(prepared, sample(prepared.bound, sizes, seed), f"seed {seed}")


# ------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("forward", "kind", "says"),
    [
        (lambda y, i: y[i > 3], CaptureError, "the size of a tensor depends on values"),
        (lambda y, i: y.masked_select(i > 3), CaptureError, "the size of a tensor depends on values"),
        (lambda y, i: (i > 3).nonzero() * y.sum(), CaptureError, "the size of a tensor depends on values"),
        (lambda y, i: y * torch.bincount(i[0], minlength=8), CaptureError, "the size of a tensor depends on values"),
        (lambda y, i: y * i[0, 0].item(), RuleError, "a number that depends on the values"),
        (lambda y, i: y[: int(i[0, 0])], CaptureError, "torch.export cannot capture"),
        (lambda y, i: torch.einsum("ii->i", y[:, :5]), RuleError, "einsum over a diagonal has no rule"),
        (
            lambda y, i: y.scatter(1, i[:, :3], y),
            RuleError,
            "torch has no gradient of a scatter whose source is larger",
        ),
        (lambda y, i: y.index_put((i > 3,), y[0, :1].expand(3)), RuleError, "an index by a mask has no rule"),
        (lambda y, i: y.gather(1, i, sparse_grad=True), RuleError, "gather with sparse gradients"),
        (
            lambda y, i: F.embedding_bag(i, y, scale_grad_by_freq=True),
            CaptureError,
            "embedding_bag with scale_grad_by_freq has no rule",
        ),
        (lambda y, i: torch.as_strided(y, (3, 4), (8, 2)), RuleError, "no rule for aten.as_strided.default"),
    ],
)
def test_refusals_name_the_place(forward: Callable[..., Tensor], kind: type[AutoparError], says: str) -> None:
    """What depends on values, or has no rule, is refused before launch, with the line of the model."""
    batch = {"x": torch.randn(5, 6), "i": rows(5, 5, 8)}
    with refused(kind, says, "test_indexing.py:"):
        api.understand(Small(forward), batch, lambda out, batch: out.sum())
