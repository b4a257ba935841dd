"""A program and its weights in float64, in which rounding hides no mistake.

    x.to(float32) * 0.5                     x.to(float64) * 0.5
    sum(y, dtype=float32)        -->        sum(y, dtype=float64)

Names of nodes and parameters stay, so that a plan of the one is a plan of the other.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from autopar.passes.rewrite import fake_mode_of
from autopar.program import Program

_WIDE = {
    torch.float32: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float16: torch.float64,
    torch.complex64: torch.complex128,
}

SPREAD = 0.02  # how far weights are moved


def wide_tensor(x: Tensor) -> Tensor:
    return x.to(_WIDE.get(x.dtype, x.dtype))


def wide_program(program: Program) -> Program:
    """The program with every floating-point value in float64; it shares nothing that either could change."""
    mode = fake_mode_of(program.graph)
    parameters = {
        node: dataclasses.replace(p, dtype=_WIDE.get(p.dtype, p.dtype)) for node, p in program.parameters.items()
    }
    lifted = {n: wide_tensor(c) for n, c in program.lifted.items()}
    with mode:
        graph = _wide_graph(program.graph)
        prelude = None if program.prelude is None else _wide_graph(program.prelude)
    return dataclasses.replace(
        program, graph=graph, prelude=prelude, parameters=parameters, lifted=lifted, outputs=list(program.outputs)
    )


def _wide_graph(old: fx.Graph) -> fx.Graph:
    graph = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    for node in old.nodes:
        new = copied[node] = graph.node_copy(node, lambda n: copied[n])
        if new.name != node.name:
            new._rename(node.name)
        new.args, new.kwargs = fx.node.map_aggregate((new.args, new.kwargs), _wide_literal)
        new.meta = {**node.meta, "val": _wide_value(node.meta["val"])} if "val" in node.meta else dict(node.meta)
    return graph


def _wide_literal(arg: Any) -> Any:
    return _WIDE.get(arg, arg) if isinstance(arg, torch.dtype) else arg


def _wide_value(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_wide_value(v) for v in value)
    return wide_tensor(value) if isinstance(value, Tensor) else value


def wide_model(parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], like: nn.Module) -> nn.Module:
    """A module that only holds weights and buffers, in float64; names that share a tensor go on sharing it.

    Weights are moved a little, each number by another amount: a bias of zeros or a scale of ones would look alike
    however it is cut.
    """
    root, generator = nn.Module(), torch.Generator().manual_seed(0)
    made: dict[int, nn.Parameter] = {}
    trained = {n: p.requires_grad for n, p in like.named_parameters(remove_duplicate=False)}
    persistent = set(like.state_dict())
    for name, tensor in parameters.items():
        if id(tensor) not in made:
            value = wide_tensor(tensor.detach()).clone()
            if value.is_floating_point():
                noise = torch.randn(tuple(value.shape), generator=generator, dtype=torch.float64)
                value += SPREAD * noise.to(value.device)
            made[id(tensor)] = nn.Parameter(value, requires_grad=trained[name])
        _home(root, name).register_parameter(name.rpartition(".")[2], made[id(tensor)])
    for name, tensor in buffers.items():
        _home(root, name).register_buffer(name.rpartition(".")[2], wide_tensor(tensor).clone(), name in persistent)
    return root.train(like.training)


def invented(x: Tensor, generator: torch.Generator) -> Tensor:
    """Values for a tensor that has none: small numbers, and 0 or 1 where it holds integers, which any index may be."""
    shape = tuple(x.shape)
    if x.is_floating_point():
        return torch.randn(shape, generator=generator, dtype=torch.float64).mul_(0.1)
    return torch.randint(0, 2, shape, generator=generator).to(x.dtype)


def _home(root: nn.Module, name: str) -> nn.Module:
    for part in name.split(".")[:-1]:
        if part not in root._modules:
            root.add_module(part, nn.Module())
        root = root._modules[part]  # type: ignore[assignment]
    return root


def wide_batch(batch: Any) -> Any:
    return torch.utils._pytree.tree_map(lambda x: wide_tensor(x) if isinstance(x, Tensor) else copy.copy(x), batch)
