"""What the command line calls MODEL: ``package.module:function`` of the user's own, or ``hf:`` and a configuration."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from autopar.errors import AutoparError, PlanError

MODEL = "package.module:function, which returns model, example_inputs[, loss_fn]; or hf:DIR or hf:CONFIG.json"


class Loaded(NamedTuple):
    """What a plan is made for."""

    model: Any
    example_inputs: Any
    loss_fn: Callable[..., Any] | None = None


def load_model(text: str, batch: int, seq: int | None, precision: str = "fp32") -> Loaded:
    """The model that MODEL names.  Raises PlanError where there is none."""
    if text.startswith("hf:"):
        return load_hugging_face(text.removeprefix("hf:"), batch, seq, precision)
    module, colon, function = text.partition(":")
    if not colon or not all(word.isidentifier() for word in (*module.split("."), function)):
        raise PlanError("the model cannot be read", where="MODEL", expected=MODEL, got=repr(text))
    return load_function(module, function)


def load_function(module: str, function: str) -> Loaded:
    """Call ``module:function`` of the installed packages or of the current directory."""
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not (module == error.name or module.startswith(f"{error.name}.")):
            raise _raised(error, f"importing {module} failed") from error
        raise PlanError(
            "the model's module cannot be found",
            where=f"{module}:{function}",
            expected=f"a module in {here} or an installed one",
            got=str(error),
            hint="run autopar in the folder that the module's package is in",
        ) from error
    except Exception as error:
        raise _raised(error, f"importing {module} failed") from error
    make = getattr(found, function, None)
    if not callable(make):
        own = [n for n, v in vars(found).items() if inspect.isfunction(v) and v.__module__ == found.__name__]
        raise PlanError(
            "the model's function cannot be found",
            where=f"{module}:{function}",
            expected=f"one of {', '.join(own)}" if own else "a function of that module",
            got="none of that name" if make is None else repr(make),
        )
    try:
        made = make()
    except AutoparError:
        raise
    except Exception as error:
        raise _raised(error, f"{module}:{function}() failed") from error
    return _checked(made, f"{module}:{function}")


def _checked(made: Any, where: str) -> Loaded:
    from torch import nn

    good = isinstance(made, tuple) and len(made) in (2, 3) and isinstance(made[0], nn.Module)
    if not good or (len(made) == 3 and made[2] is not None and not callable(made[2])):
        kinds = ", ".join(type(m).__name__ for m in made) if isinstance(made, tuple) else type(made).__name__
        raise PlanError(
            "the model's function returns something else",
            where=where,
            expected="a tuple of model, example_inputs and, if the model gives no loss, loss_fn",
            got=f"({kinds})" if isinstance(made, tuple) else kinds,
        )
    return Loaded(*made)


def _raised(error: Exception, what: str) -> PlanError:
    """An exception of the user's own code, with the line that raised it."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return PlanError(
        what,
        where=f"{frame.filename}:{frame.lineno}, in {frame.name}",
        got=f"{type(error).__name__}: {error}",
        hint="autopar plan --debug shows the traceback",
    )


class _Task(NamedTuple):
    """Models of one kind: how their architectures are called, the class that builds them, and what a batch holds.

    fields: name of an input -> whether it has one entry per token, else one per row.
    """

    endings: tuple[str, ...]
    factory: str
    fields: dict[str, bool]


_TASKS = (
    _Task(("ForCausalLM", "LMHeadModel"), "AutoModelForCausalLM", {"input_ids": True, "labels": True}),
    _Task(("ForMaskedLM",), "AutoModelForMaskedLM", {"input_ids": True, "labels": True}),
    _Task(("ForConditionalGeneration",), "AutoModelForSeq2SeqLM", {"input_ids": True, "labels": True}),
    _Task(("ForSequenceClassification",), "AutoModelForSequenceClassification", {"input_ids": True, "labels": False}),
    _Task(("ForTokenClassification",), "AutoModelForTokenClassification", {"input_ids": True, "labels": True}),
    _Task(
        ("ForQuestionAnswering",),
        "AutoModelForQuestionAnswering",
        {"input_ids": True, "start_positions": False, "end_positions": False},
    ),
)


def load_hugging_face(path: str, batch: int, seq: int | None, precision: str) -> Loaded:
    """Build a model from its configuration without allocating its weights, in training mode, and a batch of zeros.

    Raises PlanError where there is no configuration, or it is of a kind that this does not know how to feed.
    """
    try:
        import transformers
    except ImportError as error:
        raise PlanError(
            "hf: models need transformers", where=f"hf:{path}", got=str(error), hint="pip install transformers"
        ) from error
    import torch

    transformers.logging.set_verbosity_error()
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    if not file.is_file():
        raise PlanError(
            "no model configuration",
            where=f"hf:{path}",
            expected="a folder with config.json, or such a file, on this machine",
            got=f"{file} is not there",
        )
    try:
        config = transformers.AutoConfig.from_pretrained(str(file), local_files_only=True)
    except Exception as error:
        raise PlanError("the model configuration cannot be read", where=file, got=error) from error
    task = _task(config, file)
    config.use_cache = False  # a training step needs none, and its tensors would be outputs of the graph
    longest = getattr(config, "max_position_embeddings", None)
    tokens = seq or min(longest or 1024, 1024)
    if longest is not None and tokens > longest:
        raise PlanError(
            "more tokens than the model has positions", where="--seq", expected=f"at most {longest}", got=tokens
        )
    dtype = torch.float64 if precision == "fp64" else torch.float32
    try:
        with _without_weights():
            model = getattr(transformers, task.factory).from_config(config, dtype=dtype)
    except Exception as error:
        raise _raised(error, f"{task.factory} cannot build the model") from error
    shapes = {name: (batch, tokens) if per_token else (batch,) for name, per_token in task.fields.items()}
    return Loaded(model.train(), {name: torch.zeros(shape, dtype=torch.int64) for name, shape in shapes.items()})


@contextlib.contextmanager
def _without_weights() -> Iterator[None]:
    """Modules that are made inside get fake parameters, which have a shape and take no memory.

    Buffers are real.  Were they on the meta device too, masks and positions that are made of them would not be
    known, and the captured graph would not be that of the model with its weights: its plan would be for another model.
    """
    import torch
    from torch import nn
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    register = nn.Module.register_parameter

    def register_fake(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not isinstance(parameter, FakeTensor):
            with mode:
                empty = torch.empty(parameter.shape, dtype=parameter.dtype)
            parameter = nn.Parameter(empty, requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    with mock.patch.object(nn.Module, "register_parameter", register_fake):
        yield


def _task(config: Any, file: Path) -> _Task:
    """The kind of model that a configuration is for."""
    import transformers

    architectures = getattr(config, "architectures", None) or []
    for task in _TASKS:
        if any(a.endswith(task.endings) for a in architectures):
            return task
    if not architectures:  # a decoder has no masked variant, an encoder may have a causal one
        for task in (_TASKS[1], _TASKS[2], _TASKS[0]):
            if type(config) in getattr(transformers, task.factory)._model_mapping:
                return task
    raise PlanError(
        "no batch is known for this kind of model",
        where=file,
        expected=f"architectures that end in {', '.join(e for t in _TASKS for e in t.endings)}",
        got=", ".join(architectures) or f"none, for {config.model_type}",
        hint="write a function that returns model, example_inputs, and name it as package.module:function",
    )
