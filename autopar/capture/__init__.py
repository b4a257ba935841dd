"""Capture: a model and one example batch become a `Program`, through torch.export in the model's own mode."""

from __future__ import annotations

import contextlib
import inspect
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.export.graph_signature import InputKind, OutputKind
from torch.utils import _pytree as pytree

from autopar.capture.dropouts import spread_dropouts
from autopar.capture.gradient_modes import inline_regions, refuse_unseen_writes, stop_in_place
from autopar.capture.hidden import (
    innermost,
    refuse_hooked_weights,
    refuse_shared_memory,
    refuse_stale_views,
    refuse_wrapped,
    refusing_lost_backwards,
)
from autopar.capture.kept import Changes
from autopar.errors import AutoparError, CaptureError
from autopar.program import (
    OutputName,
    Parameter,
    Program,
    place,
    split_batch,
    strip_wrapper,
    target_name,
)

_EXPORT_LOCK = threading.Lock()  # torch.export is not thread-safe

LossFn = Callable[[Any, Any], torch.Tensor]


class _WithLoss(nn.Module):
    """The model and its loss as one module, so that both are captured in one graph."""

    def __init__(self, model: nn.Module, loss_fn: LossFn | None, model_keys: frozenset[str] | None, changes: Changes):
        super().__init__()
        self.model = model
        self._loss_fn = loss_fn
        self._model_keys = model_keys
        self._changes = changes

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        buffers = [(m, dict(m._buffers)) for m in self.model.modules()]
        wanted = {k: v for k, v in kwargs.items() if _wanted(k, self._model_keys)}

        def both() -> tuple[Any, Any]:
            outputs = self.model(*args, **wanted)
            if self._loss_fn is None:
                return find_loss(outputs), outputs
            return self._loss_fn(outputs, kwargs if kwargs else args[0] if len(args) == 1 else args), outputs

        loss, outputs = self._changes.watch(self.model, (args, kwargs), both)
        _write_assigned(buffers)
        return loss, outputs


def _write_assigned(buffers: list[tuple[nn.Module, dict[str, torch.Tensor | None]]]) -> None:
    """``self.buffer = value`` --> ``self.buffer.copy_(value)``: torch.export loses the assignment in a submodule."""
    for module, before in buffers:
        for name, buffer in before.items():
            value = module._buffers.get(name)
            if value is buffer:
                continue
            if buffer is None or value is None or value.shape != buffer.shape or value.dtype != buffer.dtype:
                raise CaptureError(
                    "forward replaces a buffer by another kind of tensor",
                    where=f"{name} of {type(module).__name__}",
                    expected="nothing" if buffer is None else f"{list(buffer.shape)} {buffer.dtype}",
                    got="nothing" if value is None else f"{list(value.shape)} {value.dtype}",
                    hint="keep its shape and its type",
                )
            module._buffers[name] = buffer
            buffer.copy_(value.detach())


def _wanted(key: str, keys: frozenset[str] | None) -> bool:
    return keys is None or key in keys


def find_loss(outputs: Any) -> Any:
    """``outputs.loss`` or ``outputs["loss"]``, or None."""
    if isinstance(outputs, Mapping):
        return outputs.get("loss")
    return getattr(outputs, "loss", None)


def default_inputs(model: nn.Module) -> Any:
    """The model's own example batch.  Raises CaptureError when it has none."""
    for name in ("dummy_inputs", "example_input_array"):
        value = getattr(model, name, None)
        if value is not None:
            return value
    raise CaptureError(
        "no example batch",
        where=type(model).__name__,
        expected="example_inputs=, or model.dummy_inputs, or model.example_input_array",
        got="none of them",
        hint="pass one global batch: a dict for keyword arguments, a tuple for positional ones",
    )


@contextlib.contextmanager
def _without_cache(model: nn.Module) -> Iterator[None]:
    """Switch off Hugging Face's ``config.use_cache`` in training.

    It is on by default and returns every layer's keys and values, which serve generation only; torch.export does not
    know the class that holds them.
    """
    config = getattr(model, "config", None)
    if not model.training or not getattr(config, "use_cache", False):
        yield
        return
    config.use_cache = False  # type: ignore[union-attr]
    try:
        yield
    finally:
        config.use_cache = True  # type: ignore[union-attr]


def with_loss(
    model: nn.Module, kwargs: Mapping[str, Any], loss_fn: LossFn | None = None, changes: Changes | None = None
) -> nn.Module:
    """A module that is called with (args, kwargs) and returns (loss, outputs).

    Of keyword arguments that the model does not take only ``loss_fn`` is told.
    """
    keys = None
    if loss_fn is not None and kwargs:
        parameters = inspect.signature(model.forward).parameters
        if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            keys = frozenset(parameters)
    wrapped = _WithLoss(model, loss_fn, keys, changes or Changes())
    wrapped.training = model.training
    return wrapped


def export(model: nn.Module, example: Any, loss_fn: LossFn | None = None) -> torch.export.ExportedProgram:
    """Export ``model`` with its loss; the graph returns (loss, outputs).

    Raises CaptureError with the cause and the user's line where the model cannot be captured.
    """
    args, kwargs = pytree.tree_map(_Distinct(), split_batch(example))
    refuse_wrapped(model)
    refuse_hooked_weights(model)
    refuse_shared_memory(model)
    changes = Changes()
    wrapped = with_loss(model, kwargs, loss_fn, changes)
    try:
        with _EXPORT_LOCK, refusing_lost_backwards(), _without_cache(model):
            exported = torch.export.export(wrapped, (args, kwargs), strict=False)
            if changes.seen:
                changes.repeat = True
                torch.export.export(wrapped, (args, kwargs), strict=False)
        refuse_stale_views(exported, model)
        untie_buffers(exported, model)
        stop_in_place(exported.graph)
        trained = {
            n for n, p in exported.graph_signature.inputs_to_parameters.items() if exported.state_dict[p].requires_grad
        }
        refuse_unseen_writes(exported.graph_module, trained)
        inline_regions(exported)
        spread_dropouts(exported.graph)
        if needs_functionalization(exported):
            with _EXPORT_LOCK:
                exported = exported.run_decompositions({})
    except AutoparError:
        raise
    except Exception as error:
        nested: BaseException | None = error
        while nested is not None:
            if isinstance(nested, AutoparError):
                raise nested from None
            nested = nested.__cause__ or nested.__context__
        raise CaptureError(
            f"torch.export cannot capture {type(model).__name__}",
            where=innermost(traceback.extract_tb(error.__traceback__)),
            got=f"{type(error).__name__}: {_short(str(error))}",
            hint=_advice(error),
        ) from error
    return exported


def untie_buffers(exported: torch.export.ExportedProgram, model: nn.Module) -> None:
    """All uses of a buffer with several names (of a module that stands in two places) under its first.

    The other names get memory of their own: functionalization takes no buffer that is written and has two names.
    """
    first = {id(b): n for n, b in model.named_buffers()}
    main = {n: first[id(b)] for n, b in model.named_buffers(remove_duplicate=False)}
    nodes = {n.name: n for n in exported.graph.nodes if n.op == "placeholder"}
    specs = {strip_wrapper(s.target or ""): s for s in exported.graph_signature.input_specs}
    for name, spec in specs.items():
        if spec.kind is InputKind.BUFFER and main[name] != name:
            nodes[spec.arg.name].replace_all_uses_with(nodes[specs[main[name]].arg.name])
            tensors: Any = exported.state_dict if spec.target in exported.state_dict else exported.constants
            tensors[spec.target] = tensors[spec.target].clone()


class _Distinct:
    """Copies a tensor that stands twice in a batch (labels that are the ids), or is a view (labels cut from the ids).

    Export would make two that are one a single input, and would take the size of a view's base for unknown.
    """

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def __call__(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) in self._seen or leaf._is_view():
            return leaf.clone()
        self._seen.add(id(leaf))
        return leaf


def needs_functionalization(exported: torch.export.ExportedProgram) -> bool:
    """Whether the graph writes in place, into values or into buffers through batch norm, or has regions (autocast)."""
    for node in exported.graph.nodes:
        target = node.target
        if isinstance(target, torch._ops.HigherOrderOperator):
            return True
        if isinstance(target, torch._ops.OpOverload) and (
            target._schema.is_mutable or target is torch.ops.aten.batch_norm.default
        ):
            return True
    return False


def _short(text: str, limit: int = 300) -> str:
    """The first paragraph: torch adds advice for its own developers."""
    text = text.strip().partition("\n\n")[0]
    return text if len(text) <= limit else text[:limit] + " ..."


def _advice(error: BaseException) -> str:
    text = f"{type(error).__name__} {error}"
    if "GuardOnDataDependent" in text or "data-dependent" in text:
        return "control flow that depends on values of tensors cannot be planned: use torch.where or a mask"
    if "Cache" in text:
        return "keys and values of earlier tokens serve generation only: set model.config.use_cache = False"
    if ("output" in text and "pytree" in text) or "Unsupported type" in text:
        return "register the output class with torch.utils._pytree.register_pytree_node, or return a dict"
    if isinstance(error, TypeError):
        return "check the names and the number of the batch's entries against the model's forward"
    return "run torch.export.export(model, ..., strict=False) on its own to see the whole message"


def capture(model: nn.Module, example: Any = None, loss_fn: LossFn | None = None) -> Program:
    """Capture ``model`` in its own mode on one global batch.  Raises CaptureError."""
    example = default_inputs(model) if example is None else example
    return from_exported(export(model, example, loss_fn), model)


def from_exported(exported: torch.export.ExportedProgram, model: nn.Module) -> Program:
    """The `Program` of an exported model: parameters under their original names, tied weights as one."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    by_name = dict(model.named_parameters(remove_duplicate=False))
    named_buffers = dict(model.named_buffers())
    graph = exported.graph
    _refuse_unknown_sizes(graph)
    nodes = {n.name: n for n in graph.nodes}
    parameters: dict[str, Parameter] = {}
    buffers: dict[str, str] = {}
    lifted: dict[str, torch.Tensor] = {}
    inputs: dict[str, int] = {}
    literals: dict[int, Any] = {}
    saved: list[str] = []
    first: dict[int, str] = {}
    leaf = 0
    for spec in exported.graph_signature.input_specs:
        name = spec.arg.name
        node = nodes[name]
        if spec.kind is InputKind.PARAMETER:
            parameter = by_name[strip_wrapper(spec.target or "")]
            known = first.setdefault(id(parameter), name)
            if known != name:  # a tied weight: all uses on the first placeholder
                node.replace_all_uses_with(nodes[known])
                graph.erase_node(node)
                continue
            parameters[name] = Parameter(
                tuple(names[id(parameter)]), tuple(parameter.shape), parameter.dtype, parameter.requires_grad
            )
        elif spec.kind is InputKind.BUFFER:
            if strip_wrapper(spec.target or "") not in named_buffers:  # another name of one of them
                graph.erase_node(node)
                continue
            buffers[name] = strip_wrapper(spec.target or "")
            if spec.persistent:
                saved.append(buffers[name])
        elif spec.kind is InputKind.CONSTANT_TENSOR:
            lifted[name] = exported.constants[spec.target or ""]
        elif spec.kind is InputKind.USER_INPUT:
            if isinstance(node.meta.get("val"), torch.Tensor):
                inputs[name] = leaf
            else:
                literals[leaf] = getattr(spec.arg, "value", None)
                graph.erase_node(node) if not node.users else node.replace_all_uses_with(literals[leaf])
            leaf += 1
        else:
            raise CaptureError(f"an input of kind {spec.kind.name} is not supported", where=str(spec.target))
    output = graph.output_node()
    leaves: list[Any] = []
    mutations: dict[str, str] = {}
    for spec, value in zip(exported.graph_signature.output_specs, output.args[0], strict=True):
        if spec.kind is OutputKind.USER_OUTPUT:
            leaves.append(OutputName(value.name) if isinstance(value, torch.fx.Node) else value)
        elif spec.kind is OutputKind.BUFFER_MUTATION:
            mutations[strip_wrapper(spec.target or "")] = value.name
        else:
            what, hint = _WRITES.get(spec.kind, (f"an output of kind {spec.kind.name} is not supported", ""))
            raise CaptureError(what, where=strip_wrapper(str(spec.target)), hint=hint)
    graph.erase_node(output)
    (loss, outputs), out_spec = _split_outputs(leaves, exported.call_spec.out_spec)
    if loss is not None and nodes[loss].meta["val"].numel() != 1:
        raise CaptureError(
            "the loss is no scalar",
            where=place(nodes[loss]),
            expected="one number",
            got=f"shape {list(nodes[loss].meta['val'].shape)}",
            hint="return its mean or its sum",
        )
    return Program(
        graph,
        parameters,
        buffers,
        inputs,
        exported.call_spec.in_spec,
        literals,
        outputs,
        out_spec,
        loss,
        mutations,
        training=model.training,
        saved_buffers=frozenset(saved),
        lifted=lifted,
    )


_WRITES = {
    OutputKind.USER_INPUT_MUTATION: ("forward writes into its batch", "write into a clone of it"),
    OutputKind.PARAMETER_MUTATION: ("forward writes into a weight", "make it a buffer: register_buffer(...)"),
}


def _refuse_unknown_sizes(graph: torch.fx.Graph) -> None:
    """Raise CaptureError where a tensor's size depends on values: ``x[mask]``, ``nonzero``, ``unique``."""
    for node in graph.nodes:
        value = node.meta.get("val")
        for tensor in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(tensor, torch.Tensor) and not all(isinstance(n, int) for n in tensor.shape):
                raise CaptureError(
                    "the size of a tensor depends on values",
                    where=place(node),
                    expected="sizes that follow from the sizes of the batch",
                    got=f"{target_name(node)} with shape {list(tensor.shape)}",
                    hint="use torch.where, or multiply by the mask and divide by its sum",
                )


def _split_outputs(leaves: list[Any], spec: Any) -> tuple[tuple[str | None, list[Any]], Any]:
    """Take (loss, outputs) apart."""
    parts = spec.children() if callable(getattr(spec, "children", None)) else spec.children_specs
    loss_spec, output_spec = parts
    count = loss_spec.num_leaves
    loss = leaves[0] if count == 1 else None
    if loss is not None and not isinstance(loss, OutputName):
        loss = None
    return (None if loss is None else str(loss), leaves[count:]), output_spec


def flatten_batch(program: Program, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Leaves of a batch in the order of ``program.inputs``.

    Raises CaptureError where the structure differs from that of the example batch.
    """
    leaves, spec = pytree.tree_flatten(((args, kwargs), {}))
    if spec != program.in_spec:
        raise CaptureError(
            "the batch does not have the structure that was captured",
            expected=str(pytree.tree_unflatten([_Leaf()] * program.in_spec.num_leaves, program.in_spec)[0]),
            got=str(pytree.tree_unflatten([_Leaf()] * spec.num_leaves, spec)[0]),
            hint="pass the same entries as in example_inputs",
        )
    return leaves


class _Leaf:
    def __repr__(self) -> str:
        return "*"
