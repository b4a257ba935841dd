"""A conversion in an emitted graph, read back as a move between global layouts.

A graph holds what one rank sees: a shard is a `Split` of its local dimension.  What the whole mesh does follows from it
and from the layout that the value has: there is one cut at most that looks so on this rank.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.layout import (
    I,
    Layout,
    Mesh,
    Move,
    P,
    R,
    S,
    Shape,
    Split,
    State,
    format_layout,
    format_state,
    fraction,
    is_valid,
    local_split,
)
from autopar.runtime.collectives import LocalState, Step


class Mistyped(Exception):
    """A node that does not fit what it is given.  Internal: it becomes a finding."""

    def __init__(self, what: str, expected: str = "", got: str = "") -> None:
        super().__init__(what)
        self.what, self.expected, self.got = what, expected, got


def advance(layout: Layout, step: Step, shape: Shape, mesh: Mesh, at: Sequence[int], gradient: bool) -> Layout:
    """The layout after ``step`` of a value of global ``shape`` that is in ``layout``.

    gradient: whether one flows through the value; if not, R and I are one.  Raises Mistyped where the step starts from
    another state than the value's, and where it leads to none.
    """
    name = getattr(step.axis, "name", str(step.axis))
    if name not in mesh.axes:
        raise Mistyped("a conversion on an axis that the mesh does not have", ", ".join(mesh.axes), name)
    axis = mesh.axes.index(name)
    have = layout[axis]
    seen: LocalState = local_split(shape, layout, axis, have, mesh.sizes, at) if isinstance(have, S) else have
    if not _same(step.src, seen, gradient):
        text = f"{name}:{format_state(have)}" + (f", {seen}" if isinstance(seen, Split) else "")
        raise Mistyped(
            f"a conversion from {_text(step.src)} on {name}, where the value is in another state", text, _text(step.src)
        )
    if isinstance(step.dst, Split):
        target: State | None = shard_of(step.dst, axis, layout, shape, mesh, at)
        if target is None:
            raise Mistyped(
                f"a conversion to a cut that a value of this shape cannot have on {name}",
                f"a cut of {list(shape)} in {format_layout(layout, mesh.axes)}",
                str(step.dst),
            )
    elif step.dst in (R, I, P):
        target = I if step.dst == R and not gradient else step.dst
    else:
        raise Mistyped("a conversion to no state", "R, I, P or a Split", str(step.dst))
    if have == P and target == P:
        raise Mistyped("a conversion that does nothing", "a move", f"P -> P on {name}")
    return (*layout[:axis], target, *layout[axis + 1 :])


def _same(src: LocalState, seen: LocalState, gradient: bool) -> bool:
    full = (R, I)
    return src == seen or (not gradient and src in full and seen in full)


def _text(state: LocalState) -> str:
    return str(state)


def shard_of(split: Split, axis: int, layout: Layout, shape: Shape, mesh: Mesh, at: Sequence[int]) -> S | None:
    """The cut that looks like ``split`` on this rank once ``axis`` of ``layout`` has it; None if there is none."""
    n = mesh.sizes[axis]
    if split.dim >= len(shape) or split.units < 1 or split.outer < 1:
        return None
    rows = shape[split.dim]
    others = sorted((s.m, a) for a, s in enumerate(layout) if a != axis and isinstance(s, S) and s.dim == split.dim)
    for outside in range(len(others) + 1):
        m, held = split.outer, 1
        for _, other in others[:outside]:
            state = layout[other]
            assert isinstance(state, S)
            part, whole = fraction(state, mesh.sizes[other], at[other])
            m, held = m * whole, held * part
        if not held or m % held:
            continue
        m //= held
        if rows % (m * split.units):
            continue
        shard = (
            S(split.dim, m, rows // m, 1)
            if split.units == n
            else S(split.dim, m, split.units, rows // (m * split.units))
        )
        result = (*layout[:axis], shard, *layout[axis + 1 :])
        if is_valid(shape, result, mesh.sizes) and local_split(shape, result, axis, shard, mesh.sizes, at) == split:
            return shard
    return None


def as_move(before: Layout, after: Layout) -> Move:
    """The one-axis move between two layouts that differ on one axis."""
    axis = next((a for a, (x, y) in enumerate(zip(before, after, strict=True)) if x != y), 0)
    return Move(before, axis, after[axis])
