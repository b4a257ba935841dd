"""The table of rules, and how a user adds to it."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from autopar.errors import AutoparError, RuleError
from autopar.program import (
    call_arguments,
    gives_tensors,
    is_random,
    is_tensor,
    output_values,
    place,
    shape_of,
    target_name,
)
from autopar.rules.notation import Algorithm, Definition, Rule, Traffic, bind, define

_DEFINITIONS: dict[str, Definition] = {}
_COMPUTED: dict[str, Callable[[fx.Node], Rule]] = {}
_ALGORITHMS: dict[str, tuple[Algorithm, ...]] = {}

COMPOSED = "composed"  # among what is noted of a node: the op of the model that torch makes of it and others


def rule(
    op: str,
    signature: str,
    *,
    args: str,
    form: str = "",
    sum: str = "",
    whole: str = "",
    sizes: Mapping[str, str] | None = None,
    saves: str = "",
    flops: str = "",
) -> None:
    """Say how an op may be split, for example

        rule("mylib.scale.default", "... n, n -> ... n", args="x w", form="x*w", saves="x w")

    op: the name in an error message or in ``str(torch.ops.mylib.scale.default)``.
    signature: factors of every tensor argument and output (`autopar.rules.notation`).  args: a name for each tensor
    argument, in order.  form: the sum of products in which the op is linear; empty if it is not.  sum: factors whose
    parts add up.  whole: factors that may not be split.  sizes: arguments that are sizes, in factors.  saves: what
    autograd keeps for backward.  flops: of the forward pass, as in "2 ... k n".

    Raises RuleError when the text is wrong, or the op has a rule already.
    """
    if op in _DEFINITIONS or op in _COMPUTED:
        raise RuleError("this op has a rule already", where=op, hint="an algorithm() adds a second implementation")
    _DEFINITIONS[op] = define(
        op, signature, args=args, form=form, sum=sum, whole=whole, sizes=sizes, saves=saves, flops=flops
    )


def algorithm(
    op: str,
    name: str,
    *,
    splits: str,
    run: Callable[..., Any],
    lacking: str = "I",
    alike: bool = False,
    traffic: Callable[..., Sequence[Traffic]] | None = None,
    overlaps: bool = False,
) -> None:
    """Add an implementation of ``op`` that communicates itself and so can split more factors (see `Algorithm`).

    splits: factors, by blanks; ``s/t`` for a factor and its partner.  ``run`` is called as the op is, with the keyword
    ``parts``: {factor: Part} for these factors, and ``pairs`` where there are partners.
    Raises RuleError when the op has no rule yet or the name is taken.
    """
    if op not in _DEFINITIONS and op not in _COMPUTED:
        raise RuleError("an algorithm needs the op's rule first", where=op)
    known = _ALGORITHMS.get(op, ())
    if name in ("split", "I", "R", "P") or any(a.name == name for a in known):
        raise RuleError("this name is taken", where=op, got=name)
    written = [text.partition("/") for text in splits.split()]
    pairs = {factor: partner for factor, slash, partner in written if slash}
    made = Algorithm(name, tuple(f for f, _, _ in written), run, lacking, pairs, alike, traffic, overlaps)
    _ALGORITHMS[op] = (*known, made)


def computed(*ops: str) -> Callable[[Callable[[fx.Node], Rule]], Callable[[fx.Node], Rule]]:
    """Register a function that makes the rule of one node: for views, and ops whose arguments decide."""

    def register(make: Callable[[fx.Node], Rule]) -> Callable[[fx.Node], Rule]:
        for op in ops:
            _COMPUTED[op] = make
        return make

    return register


def unregister(op: str) -> None:
    """Forget an op's rule and algorithms (tests of one's own rules)."""
    _DEFINITIONS.pop(op, None)
    _COMPUTED.pop(op, None)
    _ALGORITHMS.pop(op, None)


def has_rule(op: str) -> bool:
    return op in _DEFINITIONS or op in _COMPUTED


def bindable(node: fx.Node) -> bool:
    """Whether there is a rule for a call: one in the table, or by torch's own tag for pointwise ops."""
    return has_rule(target_name(node)) or _is_pointwise(node)


def _is_pointwise(node: fx.Node) -> bool:
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags and not is_random(node)


def rules_fingerprint() -> str:
    """Eight hex digits over the table of rules: a plan speaks of factors by their names."""
    written = [
        (k, d.signature, d.args, d.form, sorted(d.sums), sorted(d.whole), sorted(d.size_args.items()))
        for k, d in _DEFINITIONS.items()
    ]
    text = repr(sorted(written)) + repr(sorted(_COMPUTED))
    known = {k: [(a.name, a.splits, a.lacking, sorted(a.pairs.items())) for a in v] for k, v in _ALGORITHMS.items()}
    text += repr(sorted(known.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _tensor_parameters(target: Any) -> list[str]:
    """Names of a target's tensor parameters, in order."""
    if isinstance(target, torch._ops.OpOverload):
        return [a.name for a in target._schema.arguments if "Tensor" in str(a.type)]
    parameters = inspect.signature(target).parameters.values()
    return [p.name for p in parameters if str(p.annotation).startswith("Tensor")]


def named_inputs(node: fx.Node, names: Sequence[str]) -> dict[str, fx.Node]:
    """The node's tensor arguments under the names a rule gives them; absent optional ones are left out."""
    given = call_arguments(node)
    return {
        name: given[parameter]
        for name, parameter in zip(names, _tensor_parameters(node.target), strict=False)
        if is_tensor(given.get(parameter))
    }


def from_text(node: fx.Node, definition: Definition, given: Mapping[str, int] | None = None) -> Rule:
    """Bind a written rule to ``node``."""
    inputs = {n: shape_of(v) for n, v in named_inputs(node, definition.args).items()}
    value = node.meta["val"]
    outputs = [tuple(value.shape)] if isinstance(value, torch.Tensor) else [tuple(v.shape) for v in value]
    name = target_name(node)
    return bind(
        definition, inputs, outputs, where=f"{name} at {place(node)}", algorithms=_ALGORITHMS.get(name, ()), given=given
    )


def algorithms_of(node: fx.Node) -> tuple[Algorithm, ...]:
    return _ALGORITHMS.get(target_name(node), ())


def rule_for(node: fx.Node) -> Rule:
    """The rule of a call.  Raises RuleError naming op, module and source line where there is none."""
    name = target_name(node)
    if name in _COMPUTED:
        return _made(name, node)
    if name in _DEFINITIONS:
        return from_text(node, _DEFINITIONS[name])
    if _is_pointwise(node):
        return _made("pointwise", node)
    if not gives_tensors(node):
        raise RuleError(
            "a number that depends on the values of tensors has no rule",
            where=place(node),
            expected="numbers that follow from the sizes of the batch",
            got=name,
            hint="keep it a tensor: no .item(), no int() or float() of a tensor",
        )
    shapes = ", ".join(_letters(v) for v in node.all_input_nodes if is_tensor(v))
    out = _letters(node) if is_tensor(node) else "..."
    raise RuleError(
        f"no rule for {name}" + (f", of which {node.meta[COMPOSED]} is made" if COMPOSED in node.meta else ""),
        where=place(node),
        expected="a rule that says which dimensions may be split",
        got="none",
        hint=f'add one: autopar.rules.rule("{name}", "{shapes} -> {out}", args="...", whole="...")',
    )


def _made(name: str, node: fx.Node) -> Rule:
    """The rule that a function makes; a call that the function was not written for is refused, not a crash."""
    try:
        return _COMPUTED[name](node)
    except AutoparError:
        raise
    except Exception as error:
        raise RuleError(
            f"the rule of {target_name(node)} does not know such a call",
            where=place(node),
            got=f"{type(error).__name__}: {error}, for {[shape_of(v) for v in node.all_input_nodes if is_tensor(v)]}",
        ) from error


def _letters(node: fx.Node) -> str:
    """``a b c`` for a value of three dimensions."""
    return " ".join(chr(97 + i) for i in range(len(shape_of(node))))


__all__ = [
    "algorithm",
    "algorithms_of",
    "bindable",
    "computed",
    "from_text",
    "has_rule",
    "output_values",
    "rule",
    "rule_for",
]
