"""The rule notation: what it says, and that each mistake is an error that says which."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from refused import refused

from autopar.errors import RuleError
from autopar.rules import algorithm, rule, unregister
from autopar.rules.notation import bind, define

LINEAR: dict[str, Any] = {"signature": "... k, n k, n -> ... n", "args": "x w b", "form": "x*w + b", "sum": "k"}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"signature": "... k, n k, n"}, "a rule needs inputs -> outputs where: my.op"),
        ({"signature": "... k, [n] k, n -> ... n"}, "dimensions cannot be read where: my.op got: [n] k"),
        ({"args": "x w"}, "names one argument per input tensor where: my.op expected: 3 names got: x w"),
        ({"form": "x*y + b"}, "form names no argument of the rule where: my.op expected: x w b got: y"),
        ({"saves": "x y"}, "saves names no argument of the rule where: my.op expected: x w b out got: y"),
        ({"sum": "k q"}, "sum names no factor"),
        ({"whole": "q"}, "whole names no factor"),
        ({"signature": "... k k, n k, n -> ... n"}, "a factor stands twice in one tensor where: my.op got: ... k k"),
        ({"sizes": {"shape": "... q"}}, "sizes of 'shape' name no factor where: my.op expected: ... k n got: q"),
        (
            {"flops": "2 ... k q"},
            "flops are terms of a number and factors where: my.op expected: ... k n got: 2 ... k q",
        ),
        ({"flops": "k n"}, "flops are terms of a number and factors"),
    ],
)
def test_a_mistake_in_the_text_says_what_is_wrong(changes: dict[str, Any], says: str) -> None:
    with refused(RuleError, says):
        define("my.op", **{**LINEAR, **changes})


@pytest.mark.parametrize(
    ("signature", "args", "factor"),
    [
        ("m k, k n -> m n", "a b", "k"),  # contracted, but nobody says that the parts add up
        ("b c, b -> ", "x t", "b"),
        ("b c -> b c, b", "x", "c"),  # missing from one of two outputs
        ("v d, ... -> d", "w i", "..."),  # leading dimensions are factors too
    ],
)
def test_nothing_is_implicit(signature: str, args: str, factor: str) -> None:
    """A factor that is missing from an output and has no role is an error when the rule is defined."""
    with refused(RuleError, f"factor {factor!r} is missing from an output and has no role", f"sum={factor!r}"):
        define("my.op", signature, args=args, whole="v" if "v" in signature else "")


def test_a_role_makes_it_explicit() -> None:
    assert define("my.mm", "m k, k n -> m n", args="a b", sum="k").sums == {"k"}
    assert define("my.mm", "m k, k n -> m n", args="a b", whole="k").whole == {"k"}


# ------------------------------------------------------------------------------------------------ binding to shapes


def test_factors_take_their_sizes_from_shapes() -> None:
    bound = bind(define("my.linear", **LINEAR), {"x": (5, 7, 12), "w": (10, 12), "b": (10,)}, [(5, 7, 10)])
    assert bound.sizes == {"b0": 5, "b1": 7, "k": 12, "n": 10}
    assert bound.ins == ((("b0",), ("b1",), ("k",)), (("n",), ("k",)), (("n",),))
    assert bound.form == ((0, 1), (2,))


def test_an_absent_optional_argument_leaves_signature_and_form() -> None:
    bound = bind(define("my.linear", **LINEAR), {"x": (5, 12), "w": (10, 12)}, [(5, 10)])
    assert (len(bound.ins), bound.form) == (2, ((0, 1),))


def test_compounds_are_major_to_minor_and_take_what_is_left() -> None:
    definition = define("my.heads", "b (h r) s, b h s -> b (h r) s", args="q k")
    bound = bind(definition, {"q": (2, 12, 7), "k": (2, 4, 7)}, [(2, 12, 7)])
    assert (bound.sizes["h"], bound.sizes["r"]) == (4, 3)
    assert bound.ins[0][1] == ("h", "r")


def test_unit_and_opaque_dimensions_cannot_be_split() -> None:
    bound = bind(define("my.op", "a _ b -> a _ b", args="x"), {"x": (1, 4, 6)}, [(1, 4, 6)])
    assert bound.ins == (((), ("_0",), ("b",)),)
    assert "_0" in bound.whole and "a" not in bound.factors


@pytest.mark.parametrize(
    ("weight", "says"),
    [
        ((10, 12, 1), "rank of w does not fit the rule where: my.linear at block.fc expected: n k in"),
        ((10, 11), "size of w does not fit the rule where: my.linear at block.fc expected: (k) = 12 got: 11"),
    ],
)
def test_shapes_that_part_with_the_signature_are_refused(weight: tuple[int, ...], says: str) -> None:
    with refused(RuleError, says, str(list(weight))):
        bind(
            define("my.linear", **LINEAR),
            {"x": (5, 12), "w": weight, "b": (10,)},
            [(5, 10)],
            where="my.linear at block.fc",
        )


# ------------------------------------------------------------------------------------------------ a user's own rules


@pytest.fixture
def own_rule() -> Iterator[str]:
    rule("my.scale.default", "... n, n -> ... n", args="x w", form="x*w", saves="x w")
    yield "my.scale.default"
    unregister("my.scale.default")


def test_an_op_has_one_rule(own_rule: str) -> None:
    with refused(RuleError, f"this op has a rule already where: {own_rule}", "algorithm()"):
        rule(own_rule, "a -> a", args="x")


def test_an_algorithm_needs_a_rule_and_a_name_of_its_own(own_rule: str) -> None:
    algorithm(own_rule, "parts", splits="n", run=lambda: None)
    with refused(RuleError, "this name is taken", "got: parts"):
        algorithm(own_rule, "parts", splits="n", run=lambda: None)
    with refused(RuleError, "this name is taken", "got: split"):
        algorithm(own_rule, "split", splits="n", run=lambda: None)
    with refused(RuleError, "an algorithm needs the op's rule first where: my.other.default"):
        algorithm("my.other.default", "parts", splits="n", run=lambda: None)
