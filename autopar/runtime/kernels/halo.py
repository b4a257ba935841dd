"""Convolution and pooling along positions that ranks share: each gets the rows that its own outputs need.

A window that starts at output position p covers the input rows p * stride - padding + (0, dilation, 2 dilation, ...).
A rank that holds a run of output positions needs one run of input rows; what it lacks its neighbours send.  Uneven and
empty shards are as good as any; the gradients of the rows go back the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from autopar.layout import S, bounds, middle
from autopar.runtime.collectives import Axis
from autopar.runtime.kernels.parts import Part

Run = tuple[int, int]  # first and past-the-last row


class Window(NamedTuple):
    """Of one dimension: ``reach`` is dilation * (size - 1) + 1; ``before`` the rows of padding in front."""

    reach: int
    stride: int
    before: int


def _runs(part: Part) -> list[Run]:
    """The rows that every rank of the cut's axis holds."""
    (cut,) = part.cuts
    shard = S(0, cut.m, cut.N, cut.u)
    inner = part.size // middle(shard, cut.axis.size)
    found = (bounds(shard, cut.axis.size, i) for i in range(cut.axis.size))
    return [(low * inner, high * inner) for low, high in found]


def _overlap(a: Run, b: Run) -> Run:
    low = max(a[0], b[0])
    return low, max(low, min(a[1], b[1]))


def _send(pieces: Sequence[Tensor], counts: Sequence[int], axis: Axis) -> list[Tensor]:
    """Piece i goes to rank i; from rank i come ``counts[i]`` rows.  Pieces are [rows, ...] with equal rests."""
    rest = pieces[0].shape[1:]
    each = rest.numel()
    sent = torch.cat([p.reshape(-1) for p in pieces])
    received = sent.new_empty(sum(counts) * each)
    sizes = [p.shape[0] * each for p in pieces]
    dist.all_to_all_single(received, sent, [n * each for n in counts], sizes, group=axis.group)
    return [
        r.reshape(-1 if each else n, *rest)
        for r, n in zip(received.split([n * each for n in counts]), counts, strict=True)
    ]


class _Rows(torch.autograd.Function):
    """The rows ``needs[rank]`` of a tensor of which every rank has the rows ``held[rank]``, along dimension 0."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, held: list[Run], needs: list[Run]) -> Tensor:
        me = axis.index
        start = held[me][0]
        ctx.axis, ctx.rows = axis, x.shape[0]
        ctx.given = [tuple(r - start for r in _overlap(held[me], need)) for need in needs]
        ctx.taken = [high - low for low, high in (_overlap(h, needs[me]) for h in held)]
        return torch.cat(_send([x[low:high] for low, high in ctx.given], ctx.taken, axis))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        pieces = _send(grad.contiguous().split(ctx.taken), [high - low for low, high in ctx.given], ctx.axis)
        out = grad.new_zeros(ctx.rows, *grad.shape[1:])
        for piece, (low, high) in zip(pieces, ctx.given, strict=True):
            out[low:high] += piece
        return out, None, None, None


def borrow(x: Tensor, dim: int, before: Part, after: Part, window: Window, fill: float) -> Tensor:
    """The rows of ``x`` along ``dim`` that this rank's output positions need, ``fill`` where there are none.

    before, after: what the rank holds of the positions of input and output.  A rank without output positions gets the
    rows of one, all ``fill``: no kernel takes fewer.
    """
    (cut,) = before.cuts
    wanted = [
        (a * window.stride - window.before, (b - 1) * window.stride - window.before + window.reach)
        for a, b in _runs(after)
    ]
    empty = [a == b for a, b in _runs(after)]
    size = before.size
    needs = [
        (0, 0) if none else (min(max(a, 0), size), min(max(b, 0), size))
        for (a, b), none in zip(wanted, empty, strict=True)
    ]
    me = cut.axis.index
    rows = _Rows.apply(x.movedim(dim, 0), cut.axis, _runs(before), needs)
    if empty[me]:
        front, back = window.reach, 0
    else:
        length = wanted[me][1] - wanted[me][0]
        front = min(max(-wanted[me][0], 0), length)
        back = length - front - (needs[me][1] - needs[me][0])
    rows = rows.movedim(0, dim)
    if not front and not back:
        return rows.contiguous()
    pads = [0, 0] * (x.dim() - 1 - dim) + [front, back]
    return F.pad(rows, pads, value=fill)


def _each(value: Any, count: int) -> list[Any]:
    if isinstance(value, (int, str)):
        return [value] * count
    return list(value) * (count if len(value) == 1 else 1)


def _borrowed(
    x: Tensor, windows: Sequence[Window], parts: Mapping[str, Part], fill: float
) -> tuple[Tensor, list[int], list[int]]:
    """``x`` with all rows needed; the split dimensions; those of them of which the rank has no output positions."""
    first = x.dim() - len(windows)
    split, none = [], []
    for i, window in enumerate(windows):
        before, after = parts.get(f"y{i}"), parts.get(f"z{i}")
        if before is None or after is None or not before.cuts:
            continue
        x = borrow(x, first + i, before, after, window, fill)
        split.append(i)
        low, high = _runs(after)[after.cuts[0].axis.index]
        if low == high:
            none.append(i)
    return x, split, none


def conv_halo(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
    *,
    parts: Mapping[str, Part],
) -> Tensor:
    """Convolution with positions split; the arguments are those of torch's."""
    space = weight.dim() - 2
    function: Any = (F.conv1d, F.conv2d, F.conv3d)[space - 1]
    strides, dilations, paddings = (_each(v, space) for v in (stride, dilation, padding))
    windows = []
    for i in range(space):
        reach = dilations[i] * (weight.shape[2 + i] - 1) + 1
        before = {"valid": 0, "same": (reach - 1) // 2}.get(paddings[i], paddings[i])
        windows.append(Window(reach, strides[i], before))
    x, split, none = _borrowed(x, windows, parts, 0.0)
    if isinstance(padding, str):  # the same on both sides only where the window is odd
        pads: list[int] = []
        for i in reversed(range(space)):
            total = 0 if i in split or padding == "valid" else windows[i].reach - 1
            pads += [total // 2, total - total // 2]
        x, paddings = F.pad(x, pads), [0] * space
    left = [0 if i in split else p for i, p in enumerate(paddings)]
    return _without(function(x, weight, bias, strides, left, dilations, groups), none, space)


def _without(y: Tensor, dims: Sequence[int], space: int) -> Tensor:
    """``y`` with no rows in the spatial dimensions ``dims``; still part of the graph."""
    for i in dims:
        y = y.narrow(y.dim() - space + i, 0, 0)
    return y


def _pool_windows(kernel: Any, stride: Any, padding: Any, dilation: Any, space: int) -> list[Window]:
    sizes, paddings, dilations = (_each(v, space) for v in (kernel, padding, dilation))
    strides = _each(stride, space) if stride not in (None, [], ()) else sizes
    return [Window(dilations[i] * (sizes[i] - 1) + 1, strides[i], paddings[i]) for i in range(space)]


def _max_pool(
    function: Callable[..., Tensor],
    space: int,
    x: Tensor,
    kernel_size: Any,
    stride: Any = (),
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    *,
    parts: Mapping[str, Part],
) -> Tensor:
    windows = _pool_windows(kernel_size, stride, padding, dilation, space)
    x, split, none = _borrowed(x, windows, parts, float("-inf"))
    left = [0 if i in split else w.before for i, w in enumerate(windows)]
    y = function(x, kernel_size, [w.stride for w in windows], left, dilation, ceil_mode)
    return _without(y, none, space)


def max_pool1d_halo(x: Tensor, *args: Any, parts: Mapping[str, Part], **options: Any) -> Tensor:
    """Maximum pooling with positions split; the arguments are those of torch's, as for the two below."""
    return _max_pool(F.max_pool1d, 1, x, *args, parts=parts, **options)


def max_pool2d_halo(x: Tensor, *args: Any, parts: Mapping[str, Part], **options: Any) -> Tensor:
    return _max_pool(F.max_pool2d, 2, x, *args, parts=parts, **options)


def max_pool3d_halo(x: Tensor, *args: Any, parts: Mapping[str, Part], **options: Any) -> Tensor:
    return _max_pool(F.max_pool3d, 3, x, *args, parts=parts, **options)


def _avg_pool(
    space: int,
    x: Tensor,
    kernel_size: Any,
    stride: Any = (),
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
    *,
    parts: Mapping[str, Part],
) -> Tensor:
    """The sums of the windows, divided by what they cover of the whole."""
    windows = _pool_windows(kernel_size, stride, padding, 1, space)
    whole = [parts[f"y{i}"].size if f"y{i}" in parts else n for i, n in enumerate(x.shape[-space:])]
    x, split, none = _borrowed(x, windows, parts, 0.0)
    left = [0 if i in split else w.before for i, w in enumerate(windows)]
    sizes, strides = [w.reach for w in windows], [w.stride for w in windows]
    if space == 1:  # torch's takes no divisor
        flat = F.avg_pool2d(x.unsqueeze(-2), [1, *sizes], [1, *strides], [0, *left], ceil_mode, True, 1)
        y = flat.squeeze(-2)
    else:
        y = (F.avg_pool2d if space == 2 else F.avg_pool3d)(x, sizes, strides, left, ceil_mode, True, 1)
    y = _without(y, none, space)
    if divisor_override is not None:
        return _mean(y, divisor_override)
    for i, w in enumerate(windows):
        rows = (0, y.shape[i - space])
        if i in split:
            after = parts[f"z{i}"]
            rows = _runs(after)[after.cuts[0].axis.index]
        start = torch.arange(*rows, device=y.device) * w.stride - w.before
        end = (start + w.reach).clamp(max=whole[i] + (w.before if count_include_pad else 0))
        count = end - (start if count_include_pad else start.clamp(min=0))
        y = _mean(y, count.to(y.dtype).reshape(-1, *[1] * (space - 1 - i)))
    return y


def _mean(total: Tensor, count: Tensor | int) -> Tensor:
    """A mean of whole numbers is one, too: torch's pooling drops the rest."""
    return total.div(count, rounding_mode=None if total.is_floating_point() else "trunc")


def avg_pool1d_halo(x: Tensor, *args: Any, parts: Mapping[str, Part], **options: Any) -> Tensor:
    """Average pooling with positions split; the arguments are those of torch's, as for the two below."""
    return _avg_pool(1, x, *args, parts=parts, **options)


def avg_pool2d_halo(x: Tensor, *args: Any, parts: Mapping[str, Part], **options: Any) -> Tensor:
    return _avg_pool(2, x, *args, parts=parts, **options)


def avg_pool3d_halo(x: Tensor, *args: Any, parts: Mapping[str, Part], **options: Any) -> Tensor:
    return _avg_pool(3, x, *args, parts=parts, **options)
