"""Each rewrite of normalisation, as its docstring draws it: before --> after, and the values stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import MODELS, bert
from torch import Tensor, fx, nn

from autopar.capture import capture
from autopar.passes.constants import run_prelude
from autopar.passes.normalize import normalize
from autopar.program import Program, call_arguments, is_tensor, shape_of, target_name


class Apply(nn.Module):
    """A function of the input and of one weight, as a model."""

    def __init__(self, function: Callable[..., Tensor], *shape: int) -> None:
        super().__init__()
        self.function = function
        self.w = nn.Parameter(torch.randn(shape) if shape else torch.tensor(1.0))
        self.register_buffer("table", torch.arange(16.0).reshape(4, 4))

    def forward(self, **inputs: Tensor) -> Tensor:
        return self.function(w=self.w, table=self.table, **inputs)


def program_of(function: Callable[..., Tensor], *shape: int, **inputs: Tensor) -> tuple[Program, nn.Module]:
    """The normalised program of ``function``, which is its own output and, summed, its loss."""
    torch.manual_seed(0)
    model = Apply(function, *shape)
    program = capture(model, inputs, lambda out, batch: out.sum())
    return normalize(program, dict(model.named_buffers())), model


def written(program: Program) -> list[str]:
    """The graph as lines ``name = op(arguments)``, without namespaces; the loss's sum left out."""
    lines = []
    for node in program.graph.nodes:
        if node.op == "call_function" and node.name != program.loss:
            given = [*map(_text, node.args), *(f"{k}={_text(v)}" for k, v in node.kwargs.items() if k != "dims")]
            name = target_name(node).removeprefix("aten.").removeprefix("autopar.")
            lines.append(f"{node.name} = {name.removesuffix('.default')}({', '.join(given)})")
    return lines


def _text(value: Any) -> str:
    if isinstance(value, fx.Node):
        return value.name.removeprefix("kwargs_").removeprefix("p_model_").removeprefix("b_model_")
    return "[" + ", ".join(map(_text, value)) + "]" if isinstance(value, (list, tuple)) else str(value)


def run(program: Program, model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """The normalised graph, executed: its first output."""
    constants = run_prelude(program, dict(model.named_buffers()))
    weights = {k: model.get_parameter(p.name) for k, p in program.parameters.items()}
    buffers = {k: model.get_buffer(n) for k, n in program.buffers.items()}
    leaves = dict(zip(program.inputs, inputs.values(), strict=True))
    values: dict[fx.Node, Any] = {}
    for node in program.graph.nodes:
        if node.op == "placeholder":
            values[node] = {**constants, **weights, **buffers, **leaves}.get(node.name)
        else:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: values[n])
            values[node] = node.target(*args, **kwargs)
    return values[program.node(program.outputs[0])]


X = torch.arange(40.0).reshape(2, 4, 5) / 40
LABELS = torch.tensor([[1, 2, -100, 0], [-100, 3, 3, 4]])

REWRITES: dict[str, tuple[Callable[..., Tensor], tuple[int, ...], dict[str, Tensor], list[str]]] = {
    "a linear on flattened rows keeps its dimensions": (
        lambda x, w, table: torch.addmm(w[0], x.view(-1, 5), w).view(2, 4, 5),
        (5, 5),
        {"x": X},
        ["select = select.int(w, 0, 0)", "t_default = t(w)", "linear_default = linear(x, t_default, select)"],
    ),
    "a matmul with a transposed weight is a linear": (
        lambda x, w, table: x.view(-1, 5).mm(w.t()).view(2, 4, 3),
        (3, 5),
        {"x": X},
        ["linear_default = linear(x, w, None)"],
    ),
    "a mean is a sum divided by a number": (
        lambda x, w, table: (x * w).mean((1, 2), keepdim=True),
        (),
        {"x": X},
        [
            "mul = mul.Tensor(x, w)",
            "sum_dim_int_list = sum.dim_IntList(mul, [1, 2], True)",
            "div_tensor = div.Tensor(sum_dim_int_list, 20)",
        ],
    ),
    "a mean cross entropy is a sum divided by a count": (
        lambda x, labels, w, table: F.cross_entropy((x * w).flatten(0, 1), labels.flatten()),
        (),
        {"x": X, "labels": LABELS},
        [
            "mul = mul.Tensor(x, w)",
            "flatten = flatten.using_ints(mul, 0, 1)",
            "flatten_1 = flatten.using_ints(labels)",
            "cross_entropy_sum = cross_entropy_sum(flatten, flatten_1, -100, 0.0)",
            "cross_entropy_count = cross_entropy_count(flatten_1, -100, torch.float32)",
            "div_tensor = div.Tensor(cross_entropy_sum, cross_entropy_count)",
        ],
    ),
    "a mean squared error is a sum divided by a number": (
        lambda x, y, w, table: F.mse_loss(x * w, y),
        (),
        {"x": X, "y": X.flip(0)},
        [
            "mul = mul.Tensor(x, w)",
            "sub = sub.Tensor(mul, y)",
            "square = square(sub)",
            "sum_dim_int_list = sum.dim_IntList(square, [0, 1, 2], False)",
            "div_tensor = div.Tensor(sum_dim_int_list, 40)",
        ],
    ),
    "identities vanish": (
        lambda x, w, table: (x.contiguous().to(torch.float32).view(2, 4, 5).clone() * w).expand(2, 4, 5),
        (),
        {"x": X},
        ["mul = mul.Tensor(x, w)"],
    ),
    "a causal mask is the causal flag": (
        lambda x, w, table: F.scaled_dot_product_attention(
            *[(x * w).unsqueeze(1)] * 3, attn_mask=torch.ones(4, 4, dtype=torch.bool).tril().expand(2, 1, 4, 4)
        ),
        (),
        {"x": X},
        [
            "mul = mul.Tensor(x, w)",
            "unsqueeze = unsqueeze(mul, 1)",
            "attention = attention(unsqueeze, unsqueeze, unsqueeze, None, True, None, 0.0, rng, 0)",
        ],
    ),
    "indexing by aranges is a view": (
        lambda x, w, table: x[torch.arange(2)[:, None, None, None], torch.arange(4)[:, None], torch.arange(5)] * w,
        (),
        {"x": X},
        ["view_default = view(x, [2, 1, 4, 5])", "mul = mul.Tensor(view_default, w)"],
    ),
    "what depends on no input is a constant": (
        lambda x, w, table: x.sum(2) * (table * 2 + torch.arange(4)).cos()[0] * w,
        (),
        {"x": X},
        ["sum_1 = sum.dim_IntList(x, [2])", "mul_1 = mul.Tensor(sum_1, c_select)", "mul_2 = mul.Tensor(mul_1, w)"],
    ),
    "slices that are all of a tensor are a split": (
        lambda x, w, table: torch.cat([-x[..., 3:], x[..., :3], x[..., 5:]], -1) * w,
        (),
        {"x": X},
        [
            "split_with_sizes_default = split_with_sizes(x, [3, 2], 2)",
            "getitem = operator.getitem(split_with_sizes_default, 0)",
            "getitem_1 = operator.getitem(split_with_sizes_default, 1)",
            "neg = neg(getitem_1)",
            "cat = cat([neg, getitem], -1)",
            "mul = mul.Tensor(cat, w)",
        ],
    ),
    "slices of slices are splits of splits": (
        lambda x, w, table: (
            torch.cat([s[..., k:j] for s in (x[..., 2:], x[..., :2]) for k, j in ((1, 9), (0, 1))], -1) * w
        ),
        (),
        {"x": X},
        [
            "split_with_sizes_default = split_with_sizes(x, [2, 3], 2)",
            "getitem = operator.getitem(split_with_sizes_default, 0)",
            "getitem_1 = operator.getitem(split_with_sizes_default, 1)",
            "split_with_sizes_default_1 = split_with_sizes(getitem_1, [1, 2], 2)",
            "getitem_2 = operator.getitem(split_with_sizes_default_1, 0)",
            "getitem_3 = operator.getitem(split_with_sizes_default_1, 1)",
            "split_with_sizes_default_2 = split_with_sizes(getitem, [1, 1], 2)",
            "getitem_4 = operator.getitem(split_with_sizes_default_2, 0)",
            "getitem_5 = operator.getitem(split_with_sizes_default_2, 1)",
            "cat = cat([getitem_3, getitem_2, getitem_5, getitem_4], -1)",
            "mul = mul.Tensor(cat, w)",
        ],
    ),
    "an op that torch makes of others is taken apart": (
        lambda x, w, table: (x * w).diff(dim=1),
        (),
        {"x": X},
        [
            "mul = mul.Tensor(x, w)",
            "slice_1 = slice.Tensor(mul, 1, 0, 3)",
            "slice_2 = slice.Tensor(mul, 1, 1, 4)",
            "sub = sub.Tensor(slice_2, slice_1)",
        ],
    ),
    "what is like a tensor is a constant": (
        lambda x, w, table: torch.full_like(x, 2.0) * w,
        (),
        {"x": X},
        ["expand_default_1 = expand(c_expand_default, [2, 4, 5])", "mul = mul.Tensor(expand_default_1, w)"],
    ),
    "a write by a mask is a choice": (
        lambda x, w, table: torch.index_put(x * w, (x > 0.5,), w),
        (),
        {"x": X},
        ["mul = mul.Tensor(x, w)", "gt = gt.Scalar(x, 0.5)", "where_self = where.self(gt, w, mul)"],
    ),
    "bags of one size are rows": (
        lambda i, w, table: F.embedding_bag(i, w, mode="mean"),
        (6, 3),
        {"i": torch.tensor([[1, 2], [3, 5]])},
        [
            "reshape = reshape(i, [-1])",
            "view_default = view(reshape, [2, 2])",
            "embedding_default = embedding(w, view_default)",
            "sum_dim_int_list = sum.dim_IntList(embedding_default, [1])",
            "div_tensor = div.Tensor(sum_dim_int_list, 2)",
        ],
    ),
}


@pytest.mark.parametrize("name", REWRITES)
def test_before_and_after(name: str) -> None:
    """The graph reads as drawn, and gives what the model gives."""
    function, shape, inputs, after = REWRITES[name]
    program, model = program_of(function, *shape, **inputs)
    assert written(program) == after
    torch.testing.assert_close(run(program, model, inputs), model(**inputs), rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------------------------------------ constants


def test_constants_are_computed_once_by_the_prelude() -> None:
    program, model = program_of(*REWRITES["what depends on no input is a constant"][:1], x=X)
    assert list(program.constants) == ["c_select"]
    assert program.prelude is not None and "table" in str(program.prelude)
    values = run_prelude(program, dict(model.named_buffers()))
    assert torch.equal(values["c_select"], (torch.arange(4.0) * 2 + torch.arange(4)).cos())


def test_a_constant_is_kept_without_the_dimensions_along_which_it_does_not_vary() -> None:
    """A mask that was expanded over batch and heads is stored once."""
    program, model = program_of(lambda x, w, table: x * w + table[:, :1].expand(2, 4, 5), x=X)
    (constant,) = program.constants
    assert shape_of(program.node(constant)) == (1, 4, 1)
    torch.testing.assert_close(run(program, model, {"x": X}), model(x=X))


def test_what_depends_on_a_buffer_that_changes_is_no_constant() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(()))
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.seen += 1
            return x * self.w * self.seen

    model = Counts()
    program = normalize(capture(model, (X,), lambda out, batch: out.sum()), dict(model.named_buffers()))
    assert not program.constants and list(program.mutations) == ["seen"]


# ------------------------------------------------------------------------------------------------ whole models


def normalized(name: str) -> Program:
    case = MODELS[name]()
    return normalize(capture(case.model, case.batch, case.loss_fn), dict(case.model.named_buffers()))


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_hugging_faces_causal_mask_is_recognised(name: str) -> None:
    """No mask of [B, 1, S, S] is left, nor any of the dozen ops that made it."""
    program = normalized(name)
    attentions = [n for n in program.graph.nodes if target_name(n) == "autopar.attention"]
    assert len(attentions) == 2 and all(n.args[3] is None and n.args[4] is True for n in attentions)
    assert not {"aten.arange.default", "aten.le.Tensor", "aten.index.Tensor"} & set(
        map(target_name, program.graph.nodes)
    )


@pytest.mark.parametrize("name", ["gpt2-padded-dropout", "llama-padded", "bert"])
def test_a_padding_mask_splits_by_batch_like_everything_else(name: str) -> None:
    """Its indexing by constants became a view, and what it is combined with is kept without the batch."""
    program = normalized(name)
    assert "aten.index.Tensor" not in set(map(target_name, program.graph.nodes))
    sizes = [shape_of(program.node(c)) for c in program.constants if is_tensor(program.node(c))]
    assert all(len(s) < 4 or s[0] == 1 for s in sizes), sizes


def test_random_ops_are_numbered() -> None:
    """The salt of each is its place, so that no two of them draw the same mask."""
    salts = []
    for node in normalized("gpt2-padded-dropout").graph.nodes:
        if target_name(node) in ("autopar.dropout", "autopar.attention"):
            salts.append(node.args[-1])
    assert len(salts) == 4 and sorted(set(salts)) == sorted(salts)  # type: ignore[type-var]


def test_batch_norm_returns_its_statistics() -> None:
    """``_native_batch_norm_legit_functional`` --> ``autopar.batch_norm``; running statistics are outputs."""
    program = normalized("resnet")
    norms = [n for n in program.graph.nodes if target_name(n) == "autopar.batch_norm"]
    assert len(norms) == 6
    assert sum("running" in b for b in program.mutations) == 12 and len(program.mutations) == 18


def test_a_mask_that_hides_nothing_is_no_causal_mask() -> None:
    """BERT without padding: the mask is all true, and cut to size 1 it looks like the corner of a triangle."""
    case = bert(padded=False)
    program = normalize(capture(case.model, case.batch), dict(case.model.named_buffers()))
    attention = [n for n in program.graph.nodes if n.op == "call_function" and "attention" in str(n.target)]
    assert attention and all(n.args[3:4] in ((), (None,)) for n in attention)
    assert not any(call_arguments(n).get("is_causal") for n in attention)
