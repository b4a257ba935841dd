"""What follows from a rule: strategies, cut points through the graph, views by common refinement."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar import api
from autopar.layout import I, Layout, P, R, S
from autopar.program import target_name
from autopar.rules.analysis import Analysis, Operation, contract
from autopar.rules.derive import Choice, OpType, apply, axis_choices, parse_choice, strategies
from autopar.rules.factors import Cut, common_refinement, relabel
from autopar.rules.notation import Algorithm, bind, define
from autopar.rules.work import local_flops


def op_type(signature: str, shapes: dict[str, tuple[int, ...]], out: tuple[int, ...], **roles: str) -> OpType:
    """A rule bound to shapes, every tensor differentiable."""
    rule = bind(define("my.op", signature, args=" ".join(shapes), **roles), shapes, [out])
    flags = (True,) * len(shapes)
    return OpType(rule, tuple(shapes.values()), (out,), flags, (True,), flags)


LINEAR = op_type(
    "... k, n k, n -> ... n",
    {"x": (5, 12), "w": (10, 12), "b": (10,)},
    (5, 10),
    form="x*w + b",
    sum="k",
    flops="2 ... k n",
)
X, W = S(0, 1, 5, 1), S(0, 1, 10, 1)  # rows of x, of w


def on_one_axis(op: OpType, n: int = 2) -> dict[str, tuple[Layout, Layout]]:
    """Choice -> (states of the inputs, states of the outputs)."""
    out = {}
    for choice in axis_choices(op, {}, n):
        found = apply(op, [choice], (n,))
        assert found is not None
        out[str(choice)] = tuple(s for (s,) in found.ins), tuple(s for (s,) in found.outs)
    return out


# ------------------------------------------------------------------------------------------------ one op, one axis


def test_strategies_of_linear() -> None:
    """Every one, and no other: a bias is added once, so where rows are summed it is itself a term of the sum."""
    assert on_one_axis(LINEAR) == {
        "I": ((I, I, I), (I,)),
        "R": ((R, R, R), (R,)),
        "split b0": ((X, R, R), (X,)),
        "split k": ((S(1, 1, 12, 1), S(1, 1, 12, 1), P), (P,)),
        "split n": ((R, W, W), (S(1, 1, 10, 1),)),
        "P 0,2": ((P, R, P), (P,)),
        "P 1,2": ((R, P, P), (P,)),
    }


def test_an_op_that_is_not_linear_takes_no_pending_sum() -> None:
    assert set(on_one_axis(op_type("a b -> a b", {"x": (4, 6)}, (4, 6)))) == {"I", "R", "split a", "split b"}


def test_a_sum_is_linear_in_all_of_its_terms_together() -> None:
    add = op_type("a, a -> a", {"x": (4,), "y": (4,)}, (4,), form="x + y")
    assert [c for c in on_one_axis(add) if c[0] == "P"] == ["P 0,1"]


def test_what_has_no_gradient_is_invariant_where_it_is_replicated() -> None:
    linear = LINEAR
    frozen = OpType(linear.rule, linear.in_shapes, linear.out_shapes, (True, False, False), (True,), (True,) * 3)
    found = apply(frozen, [Choice("split", "b0", Cut(1, 5, 1))], (2,))
    assert found is not None and found.ins == ((X,), (I,), (I,))


def test_cuts_that_leave_a_rank_empty_are_for_those_who_ask() -> None:
    """5 rows on 4 ranks are 2, 2, 1, 0."""
    assert "split b0" not in map(str, axis_choices(LINEAR, {}, 4))
    assert "split b0" in map(str, axis_choices(LINEAR, {}, 4, empty=True))
    assert "split b0" in map(str, axis_choices(LINEAR, {}, 2)), "3 and 2 rows are fine"
    assert "split b0" not in map(str, axis_choices(LINEAR, {}, 2, uneven=False))


# ------------------------------------------------------------------------------------------------ several axes


def test_axes_combine_as_named_kinds_of_parallelism() -> None:
    """On two axes: batch and columns (data x tensor), columns twice (nested), rows and contraction (as in 3D)."""
    found = {tuple(map(str, s.choices)): s for s in strategies(LINEAR, {}, (2, 2))}
    mixed = found["split b0", "split n"]
    assert mixed.ins == ((X, R), (R, W), (R, W)) and mixed.outs == ((X, S(1, 1, 10, 1)),)
    summed = found["split b0", "split k"]
    assert summed.outs == ((X, P),) and summed.ins[2] == (R, P)
    twice = op_type("m n -> m n", {"x": (4, 8)}, (4, 8))
    nested = next(s for s in strategies(twice, {}, (2, 2)) if [c.factor for c in s.choices] == ["n", "n"])
    assert nested.outs == ((S(1, 1, 8, 1), S(1, 2, 4, 1)),)


def test_nothing_cuts_inside_an_uneven_cut() -> None:
    """5 rows on 2 ranks are 3 and 2: they cannot be cut again."""
    assert not [s for s in strategies(LINEAR, {}, (2, 2)) if [c.factor for c in s.choices] == ["b0", "b0"]]


def test_work_is_that_of_the_fullest_rank() -> None:
    whole, halved, uneven = (apply(LINEAR, [c], (2,)) for c in (Choice(I), *_choices("split n", "split b0")))
    assert whole is not None and halved is not None and uneven is not None
    assert local_flops(LINEAR.rule, whole, (2,)) == 2 * 5 * 12 * 10
    assert local_flops(LINEAR.rule, halved, (2,)) == 2 * 5 * 12 * 5
    assert local_flops(LINEAR.rule, uneven, (2,)) == 2 * 3 * 12 * 10


def _choices(*texts: str) -> list[Choice]:
    return [parse_choice(t, LINEAR.rule) for t in texts]


# ------------------------------------------------------------------------------------------------ partners


STREAM = replace(
    LINEAR,
    rule=replace(LINEAR.rule, algorithms=(Algorithm("stream", ("b0", "n"), print, pairs={"b0": "k", "n": "k"}),)),
)
K_OF_X, K_OF_W = S(1, 1, 12, 1), S(1, 1, 12, 1)


def test_a_partner_is_split_where_the_factor_is_not() -> None:
    """Rows of x with k of w, or columns of w with k of x: what has neither is whole."""
    found = on_one_axis(STREAM)
    assert found["stream b0 with k"] == ((X, K_OF_W, R), (X,))
    assert found["stream n with k"] == ((K_OF_X, W, W), (S(1, 1, 10, 1),))


def test_both_operands_may_be_streamed_over_two_axes() -> None:
    """SUMMA: each tensor is split on both axes."""
    both = apply(STREAM, [parse_choice(c, STREAM.rule) for c in ("stream b0 with k", "stream n with k")], (2, 2))
    assert both is not None
    assert both.ins == ((X, K_OF_X), (K_OF_W, W), (R, W)) and both.outs == ((X, S(1, 1, 10, 1)),)
    assert local_flops(STREAM.rule, both, (2, 2)) == 2 * 3 * 12 * 5, "no work is saved on the contraction"
    assert both.pairs() == [("b0", "k", ((0, Cut(1, 12, 1)),)), ("n", "k", ((1, Cut(1, 12, 1)),))]


def test_a_partner_is_cut_inside_its_own_splits() -> None:
    """The contraction split over one axis and streamed over the others, whatever their order."""
    found = {tuple(c.kind + c.factor for c in s.choices): s for s in strategies(STREAM, {}, (2, 3))}
    for kinds in (("streamn", "splitk"), ("splitk", "streamn")):
        split, streamed = kinds.index("splitk"), kinds.index("streamn")
        x = found[kinds].ins[0]
        assert x[split] == S(1, 1, 12, 1) and x[streamed] == S(1, (2, 3)[split], 12 // (2, 3)[split], 1)


def test_no_tensor_is_split_along_a_partner_twice() -> None:
    rows = op_type("b0 b1 k, n k -> b0 b1 n", {"x": (4, 6, 12), "w": (10, 12)}, (4, 6, 10), form="x*w", sum="k")
    pairs = {"b0": "k", "b1": "k"}
    streamed = replace(
        rows, rule=replace(rows.rule, algorithms=(Algorithm("stream", tuple(pairs), print, pairs=pairs),))
    )
    assert (
        apply(streamed, [parse_choice(c, streamed.rule) for c in ("stream b0 with k", "stream b1 with k")], (2, 2))
        is None
    )


def test_partners_are_written_and_read() -> None:
    choice = Choice("stream", "n", Cut(1, 10, 1), partner=("k", Cut(3, 4, 1)))
    assert str(choice) == "stream n with k at 3,4,1"
    assert parse_choice(str(choice), STREAM.rule) == choice
    for wrong in ("stream n", "stream n with b0", "stream n with k at 5,2,1", "split n with k"):
        with pytest.raises(ValueError, match=r"stream|split"):
            parse_choice(wrong, STREAM.rule)


# ------------------------------------------------------------------------------------------------ text


@pytest.mark.parametrize("text", ["I", "R", "P 0,2", "split n", "split n at 5,2,1"])
def test_choices_read_back(text: str) -> None:
    assert str(parse_choice(text, LINEAR.rule)) == text


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "expected I, R, or split b0, split k, split n"),
        ("split q", "expected I, R, or split b0"),
        ("vocabulary n", "expected I, R, or split b0"),
        ("split n at 5", "expected I, R, or split b0"),
        ("split n at 3,2,1", "3 \\* 2 \\* 1 is not 10"),
        ("P 7,2", "the op is linear in "),
        ("P 0", "the op is linear in "),  # a bias that carries no term would be added once per rank
        ("P x", "expected I, R, or split b0"),
    ],
)
def test_refuses_text_that_is_no_choice(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse_choice(text, LINEAR.rule)


def test_refuses_a_choice_that_another_op_could_make() -> None:
    """A plan file cannot split what must stay whole, nor send a pending sum through an op that is not linear."""
    norm = op_type("a n, n -> a n", {"x": (4, 6), "w": (6,)}, (4, 6), whole="n").rule
    for text in ("split n", "P 0"):
        with pytest.raises(ValueError, match="is no choice here"):
            parse_choice(text, norm)


# ------------------------------------------------------------------------------------------------ real ops


def operation(analysis: Analysis, target: str, module: str = "") -> Operation:
    """The first call of ``target`` whose name or weight mentions ``module``."""
    return next(
        o
        for o in analysis.operations
        if target_name(o.node) == target and any(module in v for v in (o.name, *o.inputs))
    )


def choices_of(analysis: Analysis, op: Operation) -> set[str]:
    return {str(c) for c in axis_choices(op.type, analysis.factor_points(op), analysis.axis_sizes[0])}


class FusedAttention(nn.Module):
    """Queries, keys and values from one weight; four heads of six."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(24, 72)
        self.out = nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


@pytest.fixture(scope="module")
def fused() -> Analysis:
    bound = api.understand(FusedAttention(), {"x": torch.randn(2, 5, 24)}, lambda o, b: o.square().mean())
    return contract(bound, (2,))


def test_a_fused_weight_may_be_cut_in_its_three_groups(fused: Analysis) -> None:
    """The linear cannot see it; cut points come back along the graph, from the chunk and the heads behind it."""
    linear = operation(fused, "aten.linear.default", "qkv")
    assert {"split n", "split n at 3,24,1"} <= choices_of(fused, linear)
    found = apply(linear.type, [parse_choice("split n at 3,24,1", linear.rule)], (2,))
    assert found is not None and found.ins[1] == (S(0, 3, 24, 1),)


def test_strategies_of_attention(fused: Analysis) -> None:
    """Linear in the values; the width of keys stays whole, and they themselves but where they travel."""
    attention = operation(fused, "aten.scaled_dot_product_attention.default")
    assert choices_of(fused, attention) == {
        "I",
        "R",
        "split b",
        "split h",
        "split s",
        "split v",
        "ring s with t",
        "P 2",
    }


def test_strategies_of_embedding() -> None:
    """The vocabulary is split by an algorithm only: each rank gives a term of a sum."""
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 3))
    bound = api.understand(model, (torch.tensor([[2, 7], [9, 0]]),), lambda o, b: o.square().mean())
    analysis = contract(bound, (2,))
    op = operation(analysis, "aten.embedding.default")
    assert choices_of(analysis, op) == {"I", "R", "split d", "split b0", "split b1", "vocabulary v", "P 0"}
    found = apply(op.type, [parse_choice("vocabulary v", op.rule)], (2,))
    assert found is not None and found.ins == ((S(0, 1, 10, 1),), (I,)) and found.outs == ((P,),)


# ------------------------------------------------------------------------------------------------ views


@pytest.mark.parametrize(
    ("a", "b", "left", "right", "sizes"),
    [
        ((8, 6), (4, 12), (("f0", "f1"), ("f2",)), (("f0",), ("f1", "f2")), {"f0": 4, "f1": 2, "f2": 6}),
        ((5, 8), (40,), (("f0",), ("f1",)), (("f0", "f1"),), {"f0": 5, "f1": 8}),
        ((5, 1, 8), (5, 8), (("f0",), (), ("f1",)), (("f0",), ("f1",)), {"f0": 5, "f1": 8}),
    ],
)
def test_views_are_the_common_refinement_of_both_shapes(
    a: tuple[int, ...], b: tuple[int, ...], left: object, right: object, sizes: dict[str, int]
) -> None:
    assert common_refinement(a, b) == (left, right, sizes, frozenset())


def test_shapes_without_a_common_divisor_are_opaque() -> None:
    """(4, 3) -> (3, 4) keeps no rows together; the dimension beside it still may be split."""
    left, right, sizes, opaque = common_refinement((4, 3, 5), (3, 4, 5))
    assert {f for d in left[:2] for f in d} | {f for d in right[:2] for f in d} == opaque
    assert left[2] == right[2] and sizes[left[2][0]] == 5


def test_a_layout_shows_through_a_view() -> None:
    """Batch 5 on two ranks is 3 and 2 rows; flattened with 8 they stay together, in units of 8."""
    left, right, sizes, _ = common_refinement((5, 8), (40,))
    assert relabel((S(0, 1, 5, 1),), left, right, (2,), sizes) == (S(0, 1, 5, 8),)
    assert relabel((S(0, 1, 5, 8),), right, left, (2,), sizes) == (S(0, 1, 5, 1),)
    assert relabel((S(1, 1, 8, 1),), left, right, (2,), sizes) == (S(0, 5, 8, 1),)
    assert relabel((S(0, 1, 40, 1),), right, left, (3,), sizes) is None, "14 rows are no whole rows of 8"


class Groups(nn.Module):
    """Six groups of eight columns."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.w = nn.Linear(6, 48), nn.Parameter(torch.randn(6, 8))

    def forward(self, x: Tensor) -> Tensor:
        return (self.a(x).view(5, 6, 8) * self.w).tanh()


def test_cuts_of_two_dimensions_that_do_not_nest_in_one_cannot_be_had() -> None:
    """Three pairs of groups on two ranks are uneven, so nothing inside them can be cut before."""
    bound = api.understand(Groups(), {"x": torch.randn(5, 6)}, lambda out, batch: out.sum())
    analysis = contract(bound, (2, 2))
    (view,) = analysis.views
    assert analysis.to_root(view, (S(1, 1, 3, 2), I)) == (S(1, 1, 3, 16), I)
    assert analysis.to_root(view, (I, S(2, 1, 8, 1))) == (I, S(1, 6, 8, 1))
    assert analysis.to_root(view, (S(2, 1, 8, 1), S(1, 1, 3, 2))) is None
