"""What a captured graph would not show, and so would train otherwise in silence: refused, with the user's line.

torch.export records ops.  The backward pass of a custom ``autograd.Function``, a hook on a gradient, a write that
autograd does not see, or a backward pass inside forward are no ops: the graph without them has other gradients.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import traceback
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.export.graph_signature import InputKind
from torch.overrides import TorchFunctionMode

from autopar.errors import CaptureError


def refuse_wrapped(model: nn.Module) -> None:
    """Raise CaptureError for modules whose forward is not the user's own code any more."""
    kinds = (
        torch._dynamo.OptimizedModule,
        torch.jit.ScriptModule,
        nn.DataParallel,
        nn.parallel.DistributedDataParallel,
    )
    for name, module in model.named_modules():
        if isinstance(module, kinds):
            raise CaptureError(
                "a module that is compiled or made parallel already cannot be captured",
                where=name or "the model",
                expected="the module itself",
                got=type(module).__name__,
                hint="pass what it wraps; autopar makes it parallel, and torch.compile comes after",
            )


def refuse_hooked_weights(model: nn.Module) -> None:
    """Raise CaptureError where a weight's gradient runs through a hook: the weights that train are other tensors."""
    for name, parameter in model.named_parameters():
        for kind in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            if getattr(parameter, kind, None):
                raise CaptureError(
                    "a hook on a weight's gradient is lost in capture",
                    where=name,
                    expected="weights without hooks",
                    got="register_hook" if kind == "_backward_hooks" else "register_post_accumulate_grad_hook",
                    hint="change gradients between forward_backward() and the optimizer's step",
                )


def refuse_shared_memory(model: nn.Module) -> None:
    """Raise CaptureError where training one weight would change another tensor: ``a.weight.data = b.weight.data``.

    A weight that is registered twice is one weight, and fine.
    """
    tensors = [*model.named_parameters(), *model.named_buffers()]
    spans: dict[int, list[tuple[int, int, str, bool]]] = {}
    for name, tensor in tensors:
        if tensor.layout is torch.strided and tensor.numel():
            last = sum((int(n) - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
            first, width = int(tensor.storage_offset()), tensor.element_size()
            span = (first * width, (first + last + 1) * width, name, tensor.requires_grad)
            spans.setdefault(tensor.untyped_storage()._cdata, []).append(span)
    for found in spans.values():
        for (_, end, name, trained), (start, _, other, also) in itertools.pairwise(sorted(found)):
            if start < end and (trained or also):
                raise CaptureError(
                    "two tensors of the model share memory, and one of them is trained",
                    where=f"{name}, {other}",
                    expected="one weight under two names, or memory of their own",
                    got="the same memory",
                    hint=f"tie them: the modules of {name} and {other} hold the same nn.Parameter",
                )


def refuse_stale_views(exported: torch.export.ExportedProgram, model: nn.Module) -> None:
    """Raise CaptureError where what forward takes as a constant is a view of a weight or a buffer, which change."""
    state = itertools.chain(model.named_parameters(), model.named_buffers())
    owners = {t.untyped_storage()._cdata: name for name, t in state if t.numel()}
    for spec in exported.graph_signature.input_specs:
        constant = exported.constants.get(spec.target or "") if spec.kind is InputKind.CONSTANT_TENSOR else None
        if not isinstance(constant, torch.Tensor) or not constant.numel():
            continue
        owner = owners.get(constant.untyped_storage()._cdata)
        if owner is not None:
            raise CaptureError(
                "a view of a weight or a buffer was made outside of forward, and would stay as it is",
                where=(spec.target or "").removeprefix("model."),
                expected="the view made in forward, or a copy of it",
                got=f"the memory of {owner}",
                hint="take the slice, the transpose or detach() in forward",
            )


@contextlib.contextmanager
def refusing_lost_backwards() -> Iterator[None]:
    """Raise CaptureError on what changes gradients and leaves no op behind, while this thread traces a model."""
    import torch.utils.checkpoint as checkpoint_module

    tracing = threading.get_ident()
    apply = torch.autograd.Function.__dict__["apply"]
    region = checkpoint_module._checkpoint_without_reentrant_generator
    inference = torch._C._InferenceMode

    def refused(cls: Any, *args: Any, **kwargs: Any) -> Any:
        custom_op = cls.__module__ == "torch._library.autograd"  # is one node, and brings its backward along
        if custom_op or threading.get_ident() != tracing:
            return apply.__get__(None, cls)(*args, **kwargs)
        if cls is checkpoint_module.CheckpointFunction:
            return region_refused()
        what, expected, hint = _FUNCTIONS.get(cls.__module__.rpartition(".")[0], _OF_A_USER)
        raise CaptureError(
            what, where=user_frame(), got=f"{cls.__module__}.{cls.__qualname__}", expected=expected, hint=hint
        )

    def region_refused(*args: Any, **kwargs: Any) -> Any:
        raise CaptureError(
            "a checkpoint() region vanishes in capture",
            where=user_frame(),
            expected="no activation checkpointing in the model",
            got="torch.utils.checkpoint.checkpoint",
            hint="switch it off (Hugging Face: model.gradient_checkpointing_disable())",
        )

    def without_gradients(mode: bool) -> Any:
        """torch.export leaves no trace of inference mode, but of no_grad."""
        return torch.no_grad() if mode else contextlib.nullcontext()

    function: Any = torch.autograd.Function
    native: Any = torch._C
    function.apply = classmethod(refused)
    checkpoint_module._checkpoint_without_reentrant_generator = region_refused
    native._InferenceMode = without_gradients
    try:
        with _Watch():
            yield
    finally:
        function.apply = apply
        checkpoint_module._checkpoint_without_reentrant_generator = region
        native._InferenceMode = inference


_OF_A_USER = (
    "a custom autograd.Function loses its backward in capture",
    "ops that autograd differentiates itself",
    "write its forward in plain torch ops, or make it an op: torch.library.custom_op with register_autograd",
)
_FUNCTIONS = {
    "torch.nn.modules": ("a module's backward hook is lost in capture", "modules without backward hooks", ""),
    "torch._higher_order_ops": (
        "an operator that takes functions has no rule",
        "plain torch ops",
        "control flow that depends on values of tensors cannot be planned: use torch.where or a mask",
    ),
}


class _Watch(TorchFunctionMode):
    """Refuses calls of tensors that change gradients and leave no op behind."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _LOST:
            raise CaptureError(
                f"{_LOST[func]} in forward is lost in capture", where=user_frame(), got=func.__name__, hint=_HINTS[func]
            )
        if getattr(func, "__self__", None) is torch.Tensor.data:
            if func.__name__ == "__get__":
                return args[0].detach()  # as autograd sees it; a write into it is refused like any into a detach()
            raise CaptureError("assigning .data in forward is lost in capture", where=user_frame(), hint=NO_WRITE)
        return func(*args, **(kwargs or {}))


NO_WRITE = "make a new value instead: y = f(x.detach())"
_GRADIENT_HINT = "write the gradient as plain ops, or take it outside of the model"
_HINTS: dict[Any, str] = {
    torch.Tensor.register_hook: "put the factor into forward: y = x.detach() + scale * (x - x.detach())",
    torch.Tensor.backward: _GRADIENT_HINT,
    torch.autograd.backward: _GRADIENT_HINT,
    torch.autograd.grad: _GRADIENT_HINT,
}
_LOST: dict[Any, str] = {
    torch.Tensor.register_hook: "a hook on a gradient",
    torch.Tensor.backward: "a backward pass",
    torch.autograd.backward: "a backward pass",
    torch.autograd.grad: "a backward pass",
}


def user_frame() -> str:
    """The innermost frame that is not torch's or ours."""
    return innermost(traceback.extract_stack())


def innermost(stack: Iterable[traceback.FrameSummary]) -> str:
    """The last frame of ``stack`` that is not torch's or ours; empty if there is none."""
    own = ("/torch/", "/autopar/capture/", "/contextlib.py")
    frames = [f for f in stack if not any(part in f.filename for part in own)]
    return f"{frames[-1].filename}:{frames[-1].lineno}, in {frames[-1].name}" if frames else ""
