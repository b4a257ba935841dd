"""Many tensors in one collective: what is reduced or gathered alike goes laid end to end."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.layout import P, Split
from autopar.runtime.collectives import (
    Step,
    gather_rows,
    move,
    stack_part,
    stack_parts,
    start_reduce_rows,
    unstack_part,
    unstack_parts,
    whole_shape,
)


def move_along(x: Tensor, steps: Sequence[Step]) -> Tensor:
    """``x`` after a chain of conversions; no gradient."""
    for axis, src, dst in steps:
        x = move(x, axis, src, dst)
    return x


def kind(step: Step) -> str:
    """The collective that many tensors can share in this step; empty where each goes by itself."""
    if step.axis.size == 1 or step.src == step.dst:
        return ""
    if step.src == P and step.dst != P:
        return "reduce-scatter" if isinstance(step.dst, Split) else "all-reduce"
    return "all-gather" if isinstance(step.src, Split) and not isinstance(step.dst, Split) and step.dst != P else ""


def signature(steps: Sequence[Step]) -> tuple[tuple[str, str], ...]:
    """What two chains must have in common to share their collectives: (axis, kind) of each step."""
    return tuple((s.axis.name, kind(s)) for s in steps)


def start(xs: Sequence[Tensor], steps: Sequence[Step]) -> Callable[[], list[Tensor]]:
    """Begin one step of every tensor, all of one kind and axis; the function returned waits and gives the results."""
    axis = steps[0].axis
    shared = kind(steps[0])
    if shared == "all-reduce":
        flat = torch.cat([x.reshape(-1) for x in xs])
        work = dist.all_reduce(flat, group=axis.group, async_op=True)

        def reduced() -> list[Tensor]:
            work.wait()
            return [p.view(x.shape) for p, x in zip(flat.split([x.numel() for x in xs]), xs, strict=True)]

        return reduced
    if shared == "reduce-scatter":
        targets: list[Split] = [s.dst for s in steps]  # type: ignore[misc]
        rows = [stack_parts(x, t, axis) for x, t in zip(xs, targets, strict=True)]
        sizes, shapes = [r.shape[1] for r in rows], [tuple(x.shape) for x in xs]
        buffer, scattering, finish = start_reduce_rows(torch.cat(rows, 1).reshape(-1), axis)

        def scattered() -> list[Tensor]:
            scattering.wait()
            parts = finish(buffer).split(sizes)
            return [unstack_part(p, t, axis, s) for p, t, s in zip(parts, targets, shapes, strict=True)]

        return scattered
    if shared == "all-gather":
        sources: list[Split] = [s.src for s in steps]  # type: ignore[misc]
        mine = [stack_part(x, s, axis) for x, s in zip(xs, sources, strict=True)]
        table = gather_rows(torch.cat(mine), axis).reshape(axis.size, -1)
        columns = table.split([m.numel() for m in mine], 1)
        whole = [unstack_parts(c, s, axis, whole_shape(x, s)) for c, s, x in zip(columns, sources, xs, strict=True)]
        return lambda: whole
    alone = [move(x, s.axis, s.src, s.dst) for x, s in zip(xs, steps, strict=True)]
    return lambda: alone


def move_together(xs: Sequence[Tensor], ways: Sequence[Sequence[Step]]) -> list[Tensor]:
    """`move_along` of many tensors, those with chains of one signature and one dtype in shared collectives."""
    out = list(xs)
    groups: dict[tuple[object, torch.dtype], list[int]] = {}
    for i, (x, way) in enumerate(zip(xs, ways, strict=True)):
        if way and not x.is_complex():
            groups.setdefault((signature(way), x.dtype), []).append(i)
        else:
            out[i] = move_along(x, way)
    for members in groups.values():
        moved = [out[i] for i in members]
        for k in range(len(ways[members[0]])):
            moved = start(moved, [ways[i][k] for i in members])()
        for i, x in zip(members, moved, strict=True):
            out[i] = x
    return out
