"""Ops without a rule that torch itself makes of others: they are replaced by those.

    y = diff(x)        -->        a = slice(x, -1, 0, 6); b = slice(x, -1, 1, 7); y = sub(b, a)

What autograd differentiates is then the same as in the original.  A composition that writes in place or switches
gradients off inside is left alone, for its graph would not show that, and so is one that draws random numbers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.passes.rewrite import fake_mode_of, splice, tensors_of
from autopar.program import Program, gives_tensors, is_random, target_name
from autopar.rules.registry import COMPOSED, bindable

aten = torch.ops.aten

# composed ops that `normalize` takes as they are, later
_KEPT = {
    aten.adaptive_avg_pool1d.default,
    aten.adaptive_avg_pool2d.default,
    aten.adaptive_avg_pool3d.default,
    aten.batch_norm.default,
    aten.chunk.default,
    aten.contiguous.default,
    aten.cross_entropy_loss.default,
    aten.dropout.default,
    aten.kl_div.default,
    aten.l1_loss.default,
    aten.multilabel_margin_loss.default,
    aten.nll_loss_nd.default,
    aten.to.device,
    aten.to.dtype_layout,
    aten.to.other,
    aten.type_as.default,
}


def decompose(program: Program) -> None:
    """Replace, in place, every composed op that has no rule."""
    for node in list(program.graph.nodes):
        if node.op == "call_function" and is_composed(node.target) and not bindable(node) and gives_tensors(node):
            body = _body(node)
            if body is not None:
                splice(program, node, body, **{COMPOSED: target_name(node)})


def is_composed(target: Any) -> bool:
    """Whether torch defines an op by calls of others, for autograd too."""
    return (
        isinstance(target, torch._ops.OpOverload)
        and target not in _KEPT
        and torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), "CompositeImplicitAutograd")
    )


class _Watch(TorchDispatchMode):
    """Notes calls that the recorded graph would not show rightly."""

    hidden = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.hidden |= func._schema.is_mutable or not torch.is_grad_enabled()
        return func(*args, **(kwargs or {}))


def _body(node: fx.Node) -> fx.Graph | None:
    """The calls that ``node`` is made of; None where they do not say all."""
    inputs, watch = tensors_of(node), _Watch()
    if len(inputs) < len(node.all_input_nodes):
        return None
    target: Any = node.target

    def call(*values: Tensor) -> Any:
        known = dict(zip(inputs, values, strict=True))
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: known[n])
        with torch.enable_grad(), watch:
            return target.decompose(*args, **kwargs)

    mode = fake_mode_of(node.graph)
    before, mode.allow_non_fake_inputs = mode.allow_non_fake_inputs, True
    try:
        with mode:  # values without flags: a pending conjugate would change what is recorded
            values = [torch.empty_like(n.meta["val"]) for n in inputs]
        body: fx.Graph = make_fx(call)(*values).graph
    except (RuntimeError, NotImplementedError):
        return None
    finally:
        mode.allow_non_fake_inputs = before
    strange = watch.hidden or any(
        n.op == "get_attr"
        or n.target is node.target
        or is_random(n)
        or (n.op == "call_function" and "val" not in n.meta)  # a check that raises or returns nothing
        for n in body.nodes
    )
    return None if strange else body
