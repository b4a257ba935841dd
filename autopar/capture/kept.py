"""What forward keeps from one call to the next outside of buffers: a captured graph repeats the call that it saw.

Refused are ``self.calls += 1``, ``random.random()``, ``self.mean = 0.9 * self.mean + x.mean()`` on an attribute, and
``if not self.started: self.scale = 1 / x.std()``.  Fine are ``self.longest = max(self.longest, x.shape[1])``, which
comes to rest, a table made once, and ``self.attention = weights``, which only the same call or a reader outside reads.
"""

from __future__ import annotations

import contextlib
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from autopar.capture.hidden import user_frame
from autopar.errors import CaptureError

_OWN = frozenset(vars(nn.Module()))  # parameters, buffers, modules and hooks are looked at elsewhere


class _Left(torch.Tensor):
    """Stands where an earlier call left a tensor: it may be replaced, not read."""

    names: list[str]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        left = next(x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, _Left))
        raise _reads_the_last_call(left.names, user_frame())


def _reads_the_last_call(names: list[str], where: str) -> CaptureError:
    return CaptureError(
        "forward reads a tensor that its last call left in an attribute, which a captured graph keeps as it was",
        where=where,
        expected="a buffer: register_buffer(...), and self.mean.copy_(...)",
        got=", ".join(names[:5]),
    )


class _Uses(TorchFunctionMode):
    """Lists the calls that make tensors of what training changes: weights, buffers, the batch, and what follows."""

    def __init__(self, roots: Iterable[Any]) -> None:
        super().__init__()
        self.calls: list[str] = []
        self._known = {id(x): x for x in roots}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = [x for x in pytree.tree_leaves(result) if isinstance(x, torch.Tensor)]
        if made and any(id(x) in self._known for x in pytree.tree_leaves((args, kwargs))):
            self.calls.append(getattr(func, "__name__", str(func)))
            self._known.update({id(x): x for x in made})
        return result


class Changes:
    """Watches what calls of forward leave behind, and puts it back as it was.

    seen: whether forward changed anything.  repeat: call forward again and again; raise CaptureError where every call
    changes a number, or reads a tensor that the call before has left, and where only the first one computes something
    of weights, buffers or the batch.
    """

    def __init__(self) -> None:
        self.seen = False
        self.repeat = False
        self._left = torch.empty(0).as_subclass(_Left)

    def watch(self, model: nn.Module, batch: Any, forward: Callable[[], Any]) -> Any:
        held = [(box, list(box) if isinstance(box, (list, deque)) else dict(box)) for box in _boxes(model)]
        try:
            return self._watched(model, batch, forward)
        finally:
            for box, content in held:
                if not isinstance(box, dict):
                    box.clear()
                    box.extend(content)
                elif isinstance(content, dict):
                    for key in [k for k in box if k not in content]:
                        del box[key]
                    box.update(content)

    def _watched(self, model: nn.Module, batch: Any, forward: Callable[[], Any]) -> Any:
        before, draws = _kept(model), _draws()
        uses = self._uses(model, batch)
        with uses if self.repeat else contextlib.nullcontext():
            outputs = forward()
        if draws != _draws():
            raise CaptureError(
                "forward draws random numbers outside of torch, which a captured graph would repeat",
                where=type(model).__name__,
                expected="dropout, or a tensor of random numbers in the batch",
                got="random or numpy.random",
            )
        first = _kept(model)
        self.seen |= bool(_moved(before, first))
        if self.repeat:
            again = self._uses(model, batch)
            with again:
                forward()
            second = _kept(model)
            moved = _moved(first, second)
            numbers = [n for n in moved if not isinstance(second[n][2], torch.Tensor)]
            if numbers:
                raise CaptureError(
                    "forward counts in an attribute, which a captured graph keeps as it was",
                    where=", ".join(numbers[:5]),
                    expected="attributes that stay, or a buffer: register_buffer(...), and self.count += 1",
                    got=f"another value after each call of {type(model).__name__}",
                )
            self._left.names = moved
            for name in moved:
                box, key, _ = second[name]
                box[key] = self._left
            if any(x is self._left for x in pytree.tree_leaves(forward())):
                raise _reads_the_last_call(moved, type(model).__name__)
            if uses.calls != again.calls:
                raise CaptureError(
                    "forward computes something else in its first call, which a captured graph repeats",
                    where=", ".join(_moved(before, first)[:5]),
                    expected="the same computation in every call",
                    got=f"{len(uses.calls)} operations, then {len(again.calls)}",
                    hint="call the model once on a batch before autopar.parallelize, or initialise outside of forward",
                )
        return outputs

    @staticmethod
    def _uses(model: nn.Module, batch: Any) -> _Uses:
        return _Uses([*model.parameters(), *model.buffers(), *pytree.tree_leaves(batch)])


def _draws() -> tuple[Any, ...]:
    """Where the generators of Python and of numpy stand."""
    drawn: Any = np.random.get_state()
    return random.getstate(), drawn[1].tobytes(), drawn[2:]


def _boxes(model: nn.Module) -> Iterator[Any]:
    """The attributes of all modules, and the lists and dicts among them."""
    for module in model.modules():
        yield vars(module)
        for key, value in vars(module).items():
            if key not in _OWN and isinstance(value, (list, deque, dict)):
                yield value


def _kept(model: nn.Module) -> dict[str, tuple[Any, Any, Any]]:
    """Numbers, words and tensors in attributes, and how long lists are: name -> (where it is, under which key, it)."""
    out: dict[str, tuple[Any, Any, Any]] = {}

    def note(name: str, box: Any, key: Any, value: Any) -> None:
        if value is None or isinstance(value, (bool, int, float, str, torch.Tensor)):
            out[name] = (box, key, value)

    for path, module in model.named_modules():
        attributes = vars(module)
        for key, value in attributes.items():
            name = f"{path}.{key}" if path else key
            if key == "training" or key not in _OWN:
                note(name, attributes, key, value)
            if key not in _OWN and isinstance(value, (list, deque, dict)):
                out[f"len({name})"] = (value, None, len(value))
                for inner, item in value.items() if isinstance(value, dict) else enumerate(value):
                    note(f"{name}[{inner!r}]", value, inner, item)
    return out


def _moved(before: dict[str, tuple[Any, Any, Any]], after: dict[str, tuple[Any, Any, Any]]) -> list[str]:
    """Names whose number is another, or that hold another tensor."""

    def same(name: str) -> bool:
        if name not in before:
            return False
        one, other = before[name][2], after[name][2]
        tensors = isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor)
        return one is other or (not tensors and bool(one == other))

    return [name for name in after if not same(name)]
