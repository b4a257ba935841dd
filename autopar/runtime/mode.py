"""A captured program as the runtime sees it: what it is called with, its graphs, and the constants made of buffers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from autopar.errors import RuntimeMismatch
from autopar.layout import Shape


@dataclass(frozen=True, slots=True)
class Compiled:
    """One emitted graph: ``run(*values)`` returns (loss, output leaves, new buffers)."""

    run: Callable[..., Any]
    inputs: tuple[tuple[str, str], ...]  # (kind, name) of each placeholder
    uses: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Signature:
    """What the module is called with and returns."""

    flatten: Callable[[tuple[Any, ...], dict[str, Any]], list[Any]]  # a batch's leaves; raises for another structure
    leaf_of: Mapping[str, int]  # input placeholder -> leaf
    shapes: Mapping[str, tuple[Shape, torch.dtype]]
    literals: Mapping[int, Any]
    out_spec: Any
    mutations: tuple[str, ...]  # original buffer names, in the order in which the graph returns them
    buffer_of: Mapping[str, str]  # buffer placeholder -> original name
    weight_of: Mapping[str, str]  # parameter placeholder -> its main name
    has_loss: bool


@dataclass(slots=True)
class Mode:
    """The program of training, or of evaluation, and what was made of it.

    make_constants: from the buffers by name.  compile_graph(whether outputs are wanted).  made_from: the buffers that
    ``constants`` follow from, as they were.
    """

    signature: Signature
    make_constants: Callable[[Mapping[str, Tensor]], dict[str, Tensor]]
    compile_graph: Callable[[bool], Compiled]
    compiled: dict[bool, Compiled] = field(default_factory=dict)
    constants: dict[str, Tensor] = field(default_factory=dict)
    made_from: list[tuple[int, int]] | None = None

    def graph(self, outputs: bool) -> Compiled:
        if outputs not in self.compiled:
            self.compiled[outputs] = self.compile_graph(outputs)
        return self.compiled[outputs]


def check_leaves(signature: Signature, leaves: list[Any]) -> None:
    """Raise RuntimeMismatch where a batch is not like the one that the program was captured on."""
    for name, (shape, dtype) in signature.shapes.items():
        value = leaves[signature.leaf_of[name]]
        if not isinstance(value, Tensor) or tuple(value.shape) != shape or value.dtype != dtype:
            got = f"{list(value.shape)} {value.dtype}" if isinstance(value, Tensor) else repr(value)
            raise RuntimeMismatch(
                "an input differs from the example batch",
                where=name,
                expected=f"{list(shape)} {dtype}",
                got=got,
                hint="plan again with example_inputs of this size",
            )
        if value.requires_grad:
            raise RuntimeMismatch(
                "gradients of inputs are not computed",
                where=name,
                expected="an input without requires_grad",
                got="requires_grad",
                hint="detach it, or make it a parameter of the model",
            )
    for leaf, literal in signature.literals.items():
        if leaves[leaf] != literal:
            raise RuntimeMismatch(
                "an argument that was captured as a constant has another value",
                expected=repr(literal),
                got=repr(leaves[leaf]),
                hint="plan again with this value",
            )
