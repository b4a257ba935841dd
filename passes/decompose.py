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
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.passes.rewrite import fake_mode_of, renamed
from autopar.program import Program, args_of, gives_tensors, is_random, is_tensor
from autopar.rules.registry import bindable

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
                _splice(program, node, body)


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
    """The calls that ``node`` is made of; its placeholders are the tensors among the arguments, in order."""
    leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
    places = [i for i, leaf in enumerate(leaves) if is_tensor(leaf)]
    if any(isinstance(leaf, fx.Node) for i, leaf in enumerate(leaves) if i not in places):
        return None
    watch = _Watch()
    target: Any = node.target

    def call(*tensors: Tensor) -> Any:
        given = list(leaves)
        for i, tensor in zip(places, tensors, strict=True):
            given[i] = tensor
        args, kwargs = pytree.tree_unflatten(given, spec)
        with torch.enable_grad(), watch:
            return target.decompose(*args, **kwargs)

    mode = fake_mode_of(node.graph)
    before, mode.allow_non_fake_inputs = mode.allow_non_fake_inputs, True
    try:
        with mode:  # values of their own: one that stands twice is two placeholders
            values = [torch.empty_like(leaves[i].meta["val"]) for i in places]
        body: fx.Graph = make_fx(call)(*values).graph
    except (RuntimeError, NotImplementedError):
        return None
    finally:
        mode.allow_non_fake_inputs = before
    strange = watch.hidden or any(n.op == "get_attr" or n.target is node.target or is_random(n) for n in body.nodes)
    return None if strange else body


def _splice(program: Program, node: fx.Node, body: fx.Graph) -> None:
    """Put the calls of ``body`` in the place of ``node``."""
    graph = program.graph
    tensors = [leaf for leaf in pytree.tree_leaves((node.args, node.kwargs)) if is_tensor(leaf)]
    env: dict[fx.Node, Any] = dict(zip(body.find_nodes(op="placeholder"), tensors, strict=True))
    with graph.inserting_before(node):
        for inner in body.nodes:
            if inner.op == "call_function":
                env[inner] = graph.node_copy(inner, lambda n: env[n])
                env[inner].meta = {k: v for k, v in node.meta.items() if k in ("nn_module_stack", "stack_trace")}
                env[inner].meta["val"] = inner.meta["val"]
    results = fx.node.map_arg(body.output_node().args[0], lambda n: env[n])
    if isinstance(node.meta["val"], Tensor):
        renamed(program, node, results)
    else:
        for item in list(node.users):
            renamed(program, item, results[args_of(item)[1]])
        graph.erase_node(node)
    for inner in reversed(list(env.values())):
        if not inner.users and inner.op == "call_function" and inner.name not in program.roots():
            graph.erase_node(inner)
