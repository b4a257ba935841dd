"""Runs an emitted program: what `ParallelModule.code` calls at its end.  Knows neither model nor solver."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils import _pytree as pytree

from autopar.errors import RuntimeMismatch
from autopar.layout import Mesh, parse_layout
from autopar.plan import parse_move
from autopar.runtime.collectives import Axis
from autopar.runtime.dtensor import runtime_axes, steps
from autopar.runtime.engine import Engine
from autopar.runtime.mode import Compiled, Mode, Signature
from autopar.runtime.module import ParallelModule, Weight


@dataclass(frozen=True, slots=True)
class Row:
    """One weight, in the plan's text."""

    names: tuple[str, ...]
    node: str
    shape: tuple[int, ...]
    stored: str
    held: str
    accumulated: str
    gather: tuple[str, ...] = ()
    final: tuple[str, ...] = ()
    requires_grad: bool = True


def weight(row: Row, mesh: Mesh, at: Sequence[int], axes: Sequence[Axis]) -> Weight:
    stored, held, accumulated = (parse_layout(t, mesh.axes, row.shape) for t in (row.stored, row.held, row.accumulated))
    gather, final = (
        steps([parse_move(t, mesh.axes, row.shape) for t in texts], row.shape, mesh, at, axes)
        for texts in (row.gather, row.final)
    )
    return Weight(row.names, row.node, row.shape, stored, held, accumulated, gather, final, row.requires_grad)


def main(
    axes: Mapping[str, int],
    rows: Sequence[Row],
    inputs: Sequence[tuple[str, str]],
    leaves: Mapping[str, int],
    buffers: Mapping[str, str],
    mutations: Sequence[str],
    uses: Mapping[str, int],
    constants: Callable[[Mapping[str, Tensor]], dict[str, Tensor]],
    forward: Callable[[tuple[int, ...]], Callable[..., Any]],
) -> None:
    """Run the program on one batch, ``--steps`` times with AdamW, and print each loss on rank 0.

    Reads ``--weights`` (``module.full_state_dict(persistent_only=False)``) and ``--batch`` (a dict of keyword arguments
    or a tuple), both as ``torch.save`` writes them.  Raises RuntimeMismatch for another number of processes, and for
    weights that are not there.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--weights", required=True)
    parser.add_argument("--batch", required=True)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--lr", type=float, default=1e-3)
    options = parser.parse_args()
    mesh = Mesh.of(axes)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world != mesh.size:
        raise RuntimeMismatch(
            "this program is for another number of processes",
            expected=f"{mesh.size} ({mesh})",
            got=str(world),
            hint=f"torchrun --nproc-per-node {mesh.size} this_file.py",
        )
    device_mesh, rank = None, 0
    if world > 1:
        cuda = torch.cuda.is_available()
        if cuda:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if cuda else "gloo")
        device_mesh = init_device_mesh("cuda" if cuda else "cpu", mesh.sizes, mesh_dim_names=mesh.axes)
        rank = dist.get_rank()
    at = mesh.coordinates(rank)
    places = runtime_axes(mesh, device_mesh, at)
    device = torch.device("cuda" if device_mesh is not None and device_mesh.device_type == "cuda" else "cpu")
    state: dict[str, Tensor] = torch.load(options.weights, map_location=device, weights_only=True)
    missing = [n for r in rows for n in r.names[:1] if n not in state] + [n for n in buffers.values() if n not in state]
    if missing:
        raise RuntimeMismatch(
            "the weights lack values that this program needs",
            where=options.weights,
            expected=", ".join(missing),
            hint="save them with torch.save(module.full_state_dict(persistent_only=False), path)",
        )
    batch = torch.load(options.batch, map_location=device, weights_only=True)
    held = {name: (state[name], True) for name in buffers.values()}
    named = {row.node: row.names[0] for row in rows}
    signature = Signature(_flatten, leaves, {}, {}, None, tuple(mutations), buffers, named, True)
    module = ParallelModule(
        None,
        mesh,
        tuple(weight(r, mesh, at, places) for r in rows),
        state,
        held,
        Mode(signature, constants, lambda outputs: Compiled(forward(at), tuple(inputs), uses)),
        lambda: "",
        device_mesh,
        rank,
    )
    engine = Engine(module, lambda ps: torch.optim.AdamW(ps, lr=options.lr))
    for _ in range(options.steps):
        loss = engine.step(batch)
        if rank == 0:
            print(f"loss {loss.item():.17g}", flush=True)
    if world > 1:
        dist.destroy_process_group()


def _flatten(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    return pytree.tree_leaves(((args, kwargs), {}))
