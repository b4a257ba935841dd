"""Calls that rules are proven on, written for what torch's own samples lack."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.runtime.kernels.attention import attention
from autopar.runtime.kernels.dropout import dropout, random_normal, random_uniform
from autopar.runtime.kernels.experts import experts
from autopar.runtime.kernels.loss import cross_entropy_count, cross_entropy_sum
from autopar.runtime.kernels.norm import batch_norm, instance_norm
from autopar.runtime.kernels.parts import Part

aten = torch.ops.aten
KEY = 12345  # of random ops


class Sample(NamedTuple):
    """A call: a function of tensors, or one op of the table as it stands in a captured graph."""

    fn: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any] = {}


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def written() -> list[Sample]:
    """Several kinds of each: sizes that do not divide, and equal ones, where a wrong dimension would go unnoticed."""
    torch.manual_seed(0)
    buffer, whole = torch.nn.Buffer, [Part(5), Part(6)]
    whole_numbers, few = torch.arange(30).reshape(5, 6), torch.arange(16).reshape(4, 4)
    tokens, labels = torch.tensor([[2, 7, 9], [0, 5, 7]]), torch.tensor([0, 3, 6, -100, 2])
    q, k, v, mask = randn(2, 4, 5, 6), randn(2, 4, 7, 6), randn(2, 4, 7, 3), randn(2, 1, 5, 7)
    places = [Part(n) for n in (2, 4, 5, 7)]
    stats = [randn(6), randn(6), buffer(randn(6)), buffer(randn(6).abs())]
    square = [randn(4), randn(4), buffer(randn(4)), buffer(randn(4).abs())]
    return [
        Sample(F.linear, (randn(5, 3, 6), randn(10, 6), randn(10))),
        Sample(F.linear, (randn(4, 4, 4), randn(4, 4), randn(4))),
        Sample(F.linear, (randn(5, 6), randn(7, 6))),
        Sample(torch.addmm, (randn(5, 7), randn(5, 6), randn(6, 7))),
        Sample(aten.mm.default, (randn(5, 6), randn(6, 7))),
        Sample(aten.mm.default, (randn(4, 4), randn(4, 4))),
        Sample(aten.addmm.default, (randn(7), randn(5, 6), randn(6, 7))),
        Sample(aten.addmm.default, (randn(4), randn(4, 4), randn(4, 4))),
        Sample(aten.bmm.default, (randn(5, 3, 6), randn(5, 6, 7))),
        Sample(aten.bmm.default, (randn(4, 4, 4), randn(4, 4, 4))),
        Sample(torch.matmul, (randn(5, 1, 3, 6), randn(2, 6, 7))),
        Sample(torch.matmul, (randn(4, 4, 4, 4), randn(4, 4, 4))),
        Sample(F.scaled_dot_product_attention, (q, k, v)),
        Sample(F.scaled_dot_product_attention, (q, k, v, mask)),
        Sample(F.scaled_dot_product_attention, (q, k, v, randn(2, 1, 1, 7))),
        Sample(F.scaled_dot_product_attention, (q, k, v, randn(2, 4, 1, 7) > 0)),
        Sample(F.scaled_dot_product_attention, (randn(4, 4, 4, 4), randn(4, 4, 4, 4), randn(4, 4, 4, 4))),
        Sample(F.scaled_dot_product_attention, (q, k[:, :2], v[:, :2]), {"enable_gqa": True}),
        Sample(attention, (q, k, v, None, True, None, 0.0, KEY, 0), {"dims": places}),
        Sample(attention, (q, k, v, mask, True, None, 0.4, KEY, 1), {"dims": places}),
        Sample(attention, (q, k[:, :2], v[:, :2], None, False, 0.3, 0.4, KEY, 2), {"dims": places}),
        Sample(attention, (q, k, v, randn(2, 1, 1, 7), False, None, 0.4, KEY, 2), {"dims": places}),
        Sample(dropout, (randn(5, 6), 0.4, KEY, 3), {"dims": whole}),
        Sample(dropout, (randn(4, 1, 4), 0.4, KEY, 3), {"dims": [Part(4), Part(1), Part(4)]}),
        Sample(F.embedding, (tokens, randn(10, 6))),
        Sample(F.embedding, (tokens, randn(11, 6), 7)),
        Sample(F.embedding, (torch.arange(16).reshape(4, 4) % 4, randn(4, 4))),
        Sample(cross_entropy_sum, (randn(5, 7), labels)),
        Sample(cross_entropy_sum, (randn(5, 7, 3), torch.arange(15).reshape(5, 3) % 7, 2, 0.1)),
        Sample(cross_entropy_sum, (randn(4, 4, 4), torch.arange(16).reshape(4, 4) % 4)),
        Sample(cross_entropy_count, (labels, -100, torch.float64)),
        Sample(cross_entropy_count, (torch.arange(15).reshape(5, 3) % 7, 2, torch.float64)),
        Sample(batch_norm, (randn(5, 6, 3), *stats, 0.1, 1e-5, KEY)),
        Sample(batch_norm, (randn(5, 6), *stats, 0.1, 1e-5, None)),
        Sample(batch_norm, (randn(4, 4, 4), *square, 0.1, 1e-5, KEY)),
        Sample(F.layer_norm, (randn(5, 3, 6), (6,), randn(6), randn(6))),
        Sample(F.layer_norm, (randn(5, 3, 6), (3, 6), randn(3, 6))),
        Sample(F.layer_norm, (randn(4, 4), (4,), randn(4), randn(4))),
        Sample(F.conv1d, (randn(5, 6, 7), randn(10, 6, 3), randn(10))),
        Sample(F.conv2d, (randn(5, 6, 7, 5), randn(4, 3, 3, 3), randn(4)), {"groups": 2, "padding": 1}),
        Sample(F.conv2d, (randn(4, 4, 4, 4), randn(4, 4, 1, 1), randn(4))),
        Sample(F.conv3d, (randn(2, 3, 4, 4, 4), randn(4, 3, 2, 2, 2))),
        Sample(F.max_pool2d, (randn(5, 3, 6, 6), 2)),
        Sample(F.avg_pool2d, (randn(5, 3, 6, 6), 2)),
        Sample(F.adaptive_avg_pool2d, (randn(5, 3, 6, 6), 2)),
        Sample(torch.reshape, (randn(6, 4), (3, 8))),
        Sample(torch.reshape, (randn(4, 3, 5), (3, 4, 5))),
        Sample(aten.view.default, (randn(5, 8), [5, 2, 4])),
        Sample(aten._unsafe_view.default, (randn(5, 2, 4), [5, 8])),
        Sample(torch.flatten, (randn(5, 2, 4), 1)),
        Sample(torch.unflatten, (randn(5, 8), 1, (2, 4))),
        Sample(torch.repeat_interleave, (randn(5, 4), 3, 1)),
        Sample(torch.chunk, (randn(5, 6), 3, 1)),
        Sample(torch.split, (randn(5, 7), [2, 4, 1], 1)),
        Sample(torch.stack, ([randn(5, 6), randn(5, 6)], 1)),
        Sample(torch.stack, ([randn(4, 4), randn(4, 4)], 1)),
        Sample(torch.cat, ([randn(5, 6), randn(5, 3)], 1)),
        Sample(torch.cat, ([randn(4, 4), randn(4, 4)], 0)),
        Sample(torch.permute, (randn(5, 4, 6), (2, 0, 1))),
        Sample(torch.roll, (randn(5, 6), 2, 1)),
        Sample(F.pad, (randn(5, 6), (1, 2))),
        Sample(F.pad, (randn(5, 6), (1, 2), "constant", 3.0)),
        Sample(aten.softmax.int, (randn(5, 6), -1)),
        Sample(aten._softmax.default, (randn(4, 4), -1, False)),
        Sample(aten._softmax.default, (randn(5, 6), -1, False)),
        Sample(aten.amax.default, (randn(5, 6), [1])),
        Sample(aten.amax.default, (randn(4, 4), [0], True)),
        Sample(aten.amin.default, (randn(5, 6), [1])),
        Sample(aten.amin.default, (randn(4, 4), [0], True)),
        Sample(aten.sum.default, (randn(5, 6),)),
        Sample(aten.sum.dim_IntList, (randn(5, 3, 6), [1])),
        Sample(aten.sum.dim_IntList, (randn(4, 4, 4), [0], True)),
        *(Sample(getattr(aten, op).default, (randn(5, 6),)) for op in ("clone", "alias", "contiguous", "detach")),
        *(Sample(getattr(aten, op).default, (randn(4, 4),)) for op in ("clone", "alias", "contiguous", "detach")),
        *(
            Sample(getattr(aten, f"__{op}__").Tensor, (whole_numbers, whole_numbers.flip(0)))
            for op in ("and", "or", "xor")
        ),
        *(Sample(getattr(aten, f"__{op}__").Scalar, (whole_numbers, 3)) for op in ("and", "or", "xor")),
        *(Sample(getattr(aten, f"__{op}__").Tensor, (few, few.flip(0))) for op in ("and", "or", "xor")),
        *(Sample(getattr(aten, f"__{op}__").Scalar, (few, 3)) for op in ("and", "or", "xor")),
        Sample(aten.sum.default, (randn(4, 4),)),
        Sample(cross_entropy_count, (few % 5, 2, torch.float64)),
        Sample(torch.cat, ([randn(4, 8), randn(4, 8)], 0)),
        Sample(aten.constant_pad_nd.default, (randn(4, 3), (1, 0))),
        Sample(F.pad, (randn(4, 3), (1, 0))),
        Sample(F.pad, (randn(3, 4), (0, 0, 1, 0))),
        Sample(torch.flip, (randn(4, 4), [1])),
        Sample(torch.roll, (randn(4, 4), 1, 1)),
        Sample(torch.reshape, (randn(4, 3, 4), (3, 4, 4))),
        Sample(torch.repeat_interleave, (randn(4, 4), 4, 0)),
        Sample(torch.chunk, (randn(3, 12), 3, 1)),
        Sample(torch.split, (randn(6, 10), [4, 6], 1)),
        Sample(torch.split, (randn(10, 6), [4, 6], 0)),
        Sample(torch.split, (randn(10, 4), [4, 6], 0)),
        Sample(F.conv3d, (randn(2, 2, 2, 2, 2), randn(2, 2, 2, 2, 2))),
        Sample(F.conv3d, (randn(2, 2, 3, 3, 3), randn(2, 2, 2, 2, 2))),
        Sample(torch.permute, (randn(4, 4, 4), (2, 0, 1))),
        Sample(torch.transpose, (randn(4, 4, 4), 0, 1)),
        Sample(torch.t, (randn(4, 4),)),
        Sample(torch.flip, (randn(4, 4, 4), [0])),
        Sample(torch.roll, (randn(4, 4, 4), 1, 0)),
        Sample(torch.stack, ([randn(4, 4, 2)] * 4, 1)),
        Sample(torch.cat, ([randn(8, 4), randn(8, 4)], 1)),
        Sample(torch.cat, ([randn(4, 4, 4), randn(4, 4, 4)], 0)),
        Sample(torch.chunk, (randn(4, 12), 3, 1)),
        Sample(torch.split, (randn(4, 10), [4, 6], 1)),
        Sample(torch.unsqueeze, (randn(4, 4), 1)),
        Sample(torch.repeat_interleave, (randn(4, 4), 4, 1)),
        Sample(torch.reshape, (randn(4, 4, 4), (16, 4))),
        Sample(aten._unsafe_view.default, (randn(4, 4, 4), [4, 16])),
        Sample(F.layer_norm, (randn(4, 4, 4), (4,), randn(4), randn(4))),
        Sample(F.pad, (randn(4, 4, 4), (1, 0))),
        Sample(aten.constant_pad_nd.default, (randn(4, 4, 4), (1, 0))),
        Sample(F.conv1d, (randn(4, 4, 4), randn(4, 4, 1), randn(4))),
        Sample(F.conv3d, (randn(4, 4, 2, 2, 2), randn(4, 4, 1, 1, 1))),
        *(Sample(pool, (randn(4, 4, 4, 4), 2)) for pool in (F.max_pool2d, F.avg_pool2d, F.adaptive_avg_pool2d)),
        Sample(
            F.scaled_dot_product_attention,
            (randn(2, 4, 2, 2), randn(2, 2, 2, 2), randn(2, 2, 2, 2)),
            {"enable_gqa": True},
        ),
        Sample(F.scaled_dot_product_attention, (randn(4, 4, 4, 4), *[randn(4, 4, 4, 4)] * 2, randn(4, 1, 4, 4))),
        Sample(
            attention,
            (*(randn(4, 4, 4, 4) for _ in range(3)), randn(4, 1, 4, 4), False, None, 0.4, KEY, 1),
            {"dims": [Part(4)] * 4},
        ),
        Sample(
            attention,
            (randn(2, 4, 2, 2), randn(2, 2, 2, 2), randn(2, 2, 2, 2), None, True, None, 0.0, KEY, 1),
            {"dims": [Part(n) for n in (2, 4, 2, 2)]},
        ),
    ]


def more() -> list[Sample]:
    """Ops of images, sequences and indices."""
    torch.manual_seed(1)
    x, image, line, box = randn(5, 6), randn(5, 3, 4, 6), randn(5, 3, 4), randn(2, 3, 4, 3, 2)
    whole_numbers = torch.arange(-180, 180).reshape(5, 3, 4, 6) * 7 % 101 - 50
    rows, columns, mask = torch.tensor([4, 0, 2, 0]), torch.tensor([[1], [5], [3], [5]]), x > 0
    buffer, targets = torch.nn.Buffer, torch.tensor([0, 3, 6, 1, 2])
    gates = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
    complex_rows = torch.view_as_complex(randn(5, 6, 2))

    ends, each = torch.tensor([3, 5, 8], dtype=torch.int32), torch.arange(1, 17, dtype=torch.int32)
    statistics, drawn = (buffer(randn(3)), buffer(randn(3).abs())), (random_normal, random_uniform)

    def resized(x: Tensor, mode: str, **more: Any) -> Sample:
        return Sample(F.interpolate, (x, [n + 2 for n in x.shape[2:]]), {"mode": mode, **more})

    def recurrent(kind: str) -> Sample:
        k = gates[kind]
        weights = [randn(k * 4, 6), randn(k * 4, 4), randn(k * 4), randn(k * 4)]
        state = [randn(1, 5, 4), randn(1, 5, 4)] if kind == "lstm" else randn(1, 5, 4)
        op = getattr(aten, kind).input
        return Sample(op, (randn(3, 5, 6), state, weights, True, 1, 0.0, True, False, False))

    return [
        Sample(aten._log_softmax.default, (x, -1, False)),
        Sample(F.prelu, (line, randn(3))),
        *(resized(line, mode) for mode in ("nearest", "nearest-exact", "linear")),
        *(resized(image, mode) for mode in ("nearest", "nearest-exact", "bilinear", "bicubic")),
        *(resized(image, mode, antialias=True) for mode in ("bilinear", "bicubic")),
        *(resized(box, mode) for mode in ("nearest", "nearest-exact", "trilinear")),
        *(Sample(F.interpolate, (y, [2 * n for n in y.shape[2:]])) for y in (line, image)),
        *(Sample(F.interpolate, (y, [2 * n for n in y.shape[2:]]), {"mode": "nearest-exact"}) for y in (line, image)),
        *(Sample(F.interpolate, (image, [8, 4]), {"mode": mode}) for mode in ("nearest", "nearest-exact")),
        Sample(F.adaptive_avg_pool1d, (line, 2)),
        Sample(torch.Tensor.repeat, (x, 2, 4)),
        Sample(F.affine_grid, (randn(5, 2, 3), (5, 3, 4, 6)), {"align_corners": False}),
        Sample(F.grid_sample, (image, randn(5, 2, 3, 2)), {"align_corners": False}),
        *(Sample(getattr(aten, op).dim, (mask, 1)) for op in ("all", "any")),
        *(Sample(getattr(aten, op).dims, (mask, [0], True)) for op in ("all", "any")),
        Sample(F.conv1d, (randn(5, 6, 7), randn(4, 6, 3)), {"padding": "same"}),
        Sample(F.conv2d, (randn(5, 6, 7, 5), randn(4, 6, 3, 3), randn(4)), {"padding": "same"}),
        Sample(F.conv2d, (randn(5, 6, 8, 5), randn(6, 1, 3, 3), randn(6)), {"groups": 6, "stride": 2, "padding": 1}),
        Sample(F.conv_transpose2d, (randn(5, 6, 4, 5), randn(6, 4, 3, 3), randn(4)), {"stride": 2}),
        *(
            Sample(conv, (randn(3, 4, *[5] * d), randn(4, 2, *[1] * d)), {"groups": 2, **more})
            for d, conv, more in (
                (1, F.conv1d, {}),
                (3, F.conv3d, {}),
                *((d, (F.conv1d, F.conv2d, F.conv3d)[d - 1], {"padding": "same"}) for d in (1, 2, 3)),
                (1, F.conv_transpose1d, {}),
                (2, F.conv_transpose2d, {}),
                (3, F.conv_transpose3d, {}),
            )
        ),
        *(Sample(F.cross_entropy, (randn(5, 7), targets), {"reduction": how}) for how in ("none", "mean", "sum")),
        Sample(F.cross_entropy, (randn(5, 7), targets, buffer(randn(7).abs()))),
        Sample(F.nll_loss, (randn(5, 7), targets), {"reduction": "none"}),
        Sample(F.multi_margin_loss, (randn(5, 7), targets), {"reduction": "none"}),
        Sample(F.multi_margin_loss, (randn(5, 7), targets)),
        Sample(F.soft_margin_loss, (x, buffer(torch.sign(randn(5, 6))))),
        *(recurrent(kind) for kind in gates),
        *(Sample(pool, (x[:, :, None].expand(5, 6, 6), 2), {"return_indices": True}) for pool in (F.max_pool1d,)),
        Sample(F.max_pool2d, (image, 2), {"return_indices": True}),
        Sample(F.max_pool2d, (image, 3), {"stride": 1, "padding": 1}),
        Sample(F.max_pool3d, (box, 2), {"return_indices": True}),
        Sample(F.max_pool1d, (line, 2)),
        Sample(F.max_pool1d, (line, 3), {"stride": 2, "padding": 1}),
        Sample(F.max_pool3d, (box, 2), {"stride": 1}),
        *(Sample(F.avg_pool2d, (y, 3), {"stride": 2, "padding": 1}) for y in (image, whole_numbers)),
        Sample(F.avg_pool2d, (whole_numbers, 2), {"stride": 1, "divisor_override": 3}),
        Sample(F.avg_pool1d, (whole_numbers[0], 3), {"stride": 1, "padding": 1, "count_include_pad": False}),
        Sample(F.max_pool3d, (randn(2, 3, 4, 4, 4), 2)),
        Sample(F.multilabel_margin_loss, (randn(5, 4), torch.tensor([[2, 0, -1, 1]] * 5)), {"reduction": "none"}),
        Sample(torch.prod, (x, 1)),
        Sample(torch.squeeze, (randn(5, 1, 6), 1)),
        *(Sample(kind, ([5, 6], torch.float64, x.device, KEY, 1), {"dims": [Part(5), Part(6)]}) for kind in drawn),
        Sample(instance_norm, (line, randn(3), randn(3), *statistics, 0.1, 1e-5, KEY)),
        Sample(instance_norm, (line, randn(3), randn(3), *statistics, 0.1, 1e-5, None)),
        Sample(aten._grouped_mm.default, (randn(8, 16).float(), randn(3, 16, 24).float(), ends)),
        Sample(aten._grouped_mm.default, (randn(16, 16).float(), randn(16, 16, 16).float(), each)),
        Sample(torch.channel_shuffle, (randn(5, 6, 2, 3), 3)),
        Sample(F.batch_norm, (line, None, None, randn(3), randn(3), True)),
        Sample(F.batch_norm, (line, buffer(randn(3)), buffer(randn(3).abs()), randn(3), randn(3), False)),
        Sample(F.group_norm, (randn(5, 6, 3), 2, randn(6), randn(6))),
        Sample(F.group_norm, (randn(3, 9, 3), 3, randn(9), randn(9))),
        *(Sample(op, (complex_rows, 1)) for op in (torch.var, torch.std, torch.var_mean, torch.std_mean)),
        Sample(torch.linalg.vector_norm, (complex_rows,), {"dim": 1}),
        Sample(F.pairwise_distance, (complex_rows, complex_rows.flip(0))),
        Sample(lambda x, i: x[i], (x, rows)),
        Sample(lambda x, i: x[:, i], (x, rows)),
        Sample(lambda x, i, j: x[i, j], (x, rows, columns)),
        Sample(lambda x, i, j: x[i, :, j], (randn(5, 3, 6), rows, columns)),
        *(Sample(torch.index_put, (x, (rows,), randn(4, 6), how)) for how in (True,)),
        Sample(aten._unsafe_index.Tensor, (x, [rows, None])),
        Sample(aten._unsafe_index_put.default, (x, [rows, None], randn(4, 6), True)),
        *(Sample(torch.index_select, (x, d, rows)) for d in (0, 1)),
        Sample(torch.masked_fill, (x, mask, torch.tensor(2.5, dtype=torch.float64))),
        Sample(F.one_hot, (torch.tensor([[2, 7, 9], [0, 5, 7]]), 11)),
        Sample(torch.index_fill, (x, 1, columns[:, 0], torch.tensor(2.5, dtype=torch.float64))),
        Sample(torch.scatter, (x, 1, columns, 2.5)),
        Sample(torch.slice_scatter, (x, randn(2, 6), 0, 1, 3)),
        *(Sample(torch.where, (mask, *branches)) for branches in ((x, 0.0), (x, 2.0), (0.0, x), (1.0, 2.0))),
        Sample(torch.fft.fft, (complex_rows,)),
        Sample(torch.fft.rfft, (x,)),
        Sample(torch.fft.irfft, (complex_rows, 10)),
        Sample(F.fold, (randn(5, 12, 6), (3, 4), (2, 2))),
        Sample(F.unfold, (image, (2, 2))),
        Sample(F.embedding_bag, (torch.tensor([[2, 7, 9], [0, 5, 7]]), randn(10, 6)), {"mode": "sum"}),
    ]


def along() -> list[Sample]:
    """Ops that read, write, order and multiply along a dimension."""
    torch.manual_seed(2)
    x, source, cube, number = randn(5, 6), randn(5, 6), randn(5, 3, 6), torch.tensor(2.5, dtype=torch.float64)
    places = torch.arange(30).reshape(5, 6) % 5
    lines = {d: torch.arange(n) * 2 % n for d, n in enumerate(x.shape)}
    return [
        *(
            Sample(fn, (x, d, *rest))
            for d in (0, 1)
            for fn, *rest in (
                (torch.gather, places),
                (torch.scatter, places, 2.5),
                (torch.scatter, places, source),
                (torch.scatter_add, places, source),
                (torch.scatter_reduce, places, source, "sum"),
                (torch.index_add, lines[d], source),
                (torch.index_copy, torch.arange(x.shape[d]).flip(0), source),
                (torch.index_fill, lines[d], 2.5),
                (torch.index_fill, lines[d], number),
                (torch.sort,),
            )
        ),
        *(Sample(torch.scatter_reduce, (x, 1, places, source, how)) for how in ("amax", "mean", "prod")),
        Sample(torch.scatter_reduce, (x, 1, places, source, "sum"), {"include_self": False}),
        *(Sample(torch.sort, (cube,), {"dim": d, "stable": True}) for d in (0, 1)),
        *(Sample(torch.topk, (x, 4, d)) for d in (0, 1)),
        *(Sample(aten.slice.Tensor, (x, d, 1, 5)) for d in (0, 1)),
        Sample(aten.slice.Tensor, (randn(5, 8), 1, 4, 8)),
        *(Sample(torch.slice_scatter, (x, y, d, 1, 3)) for d, y in ((0, randn(2, 6)), (1, randn(5, 2)))),
        Sample(torch.addbmm, (randn(3, 7), cube, randn(5, 6, 7))),
        Sample(torch.baddbmm, (randn(5, 3, 7), cube, randn(5, 6, 7))),
        Sample(torch.addmv, (randn(5), x, randn(6))),
        Sample(torch.mv, (x, randn(6))),
        Sample(torch.einsum, ("ij,jk->ik", x, randn(6, 7))),
        Sample(torch.view_as_complex, (randn(5, 6, 2),)),
        Sample(torch.unbind, (cube, 0)),
        *(Sample(torch.Tensor.unfold, (randn(5, 8), 1, n, n)) for n in (2, 4)),
        Sample(torch.Tensor.unfold, (randn(8, 5), 0, 2, 2)),
        Sample(F.unfold, (randn(5, 3, 4, 6), (2, 2)), {"stride": 2}),
        Sample(F.fold, (randn(5, 12, 6), (4, 6), (2, 2)), {"stride": 2}),
        Sample(F.embedding_bag, (places, randn(10, 4)), {"mode": "max"}),
        Sample(torch.Tensor.floor_divide, (places, places + 1)),
        Sample(F.multilabel_margin_loss, (x, torch.tensor([[1, 3, -1, 0, 0, 0]] * 5))),
    ]


def telling() -> list[Sample]:
    """Values that tell an op from a linear one: zeros, equal ones, and those that are not finite."""
    torch.manual_seed(3)
    inf, nan = torch.inf, torch.nan
    special = torch.tensor([[0.0, nan, inf, -inf], [1.0, 2.0, 0.0, 0.1]], dtype=torch.float64)
    ordered = randn(4, 6).sort().values
    return [
        *(Sample(getattr(torch, op), (special,)) for op in ("isnan", "isinf", "isposinf", "isneginf", "nan_to_num")),
        Sample(torch.logical_not, (special,)),
        *(Sample(op, (special[1:], special[1:].flip(0))) for op in (torch.logical_xor, torch.eq)),
        Sample(torch.logical_xor, (special[1:], special[1:, [2, 0, 1, 3]])),
        Sample(torch.eq, (special, 1.0)),
        Sample(F.hardshrink, (randn(4, 4) * 0.6,)),
        Sample(torch.isin, (special[1:], torch.tensor([2.0, 2.0, 0.1, 0.1, 7.0], dtype=torch.float64))),
        Sample(torch.bucketize, (randn(4, 4), randn(6).sort().values)),
        Sample(torch.searchsorted, (ordered, randn(4, 5))),
        Sample(torch.searchsorted, (randn(4, 4).sort().values, randn(4, 4))),
        *(Sample(F.threshold, (randn(5, 6), 0.1, value)) for value in (0.0, 2.0)),
        Sample(F.softshrink, (randn(5, 6) * 2,)),
        Sample(torch.logsumexp, (randn(5, 6), 1)),
        *(Sample(op, (randn(5, 6), randn(5, 6))) for op in (torch.fmax, torch.copysign)),
        Sample(torch.clamp_min, (randn(5, 6), randn(5, 6))),
        *(Sample(torch.nanmedian, (randn(5, 6), *dim)) for dim in ((), (1,))),
        Sample(torch.addmv, (randn(1), randn(5, 3), randn(3))),
        *(Sample(F.adaptive_avg_pool3d, (randn(2, 3, n, 4, 6), 2)) for n in (4, 5)),
        *(Sample(op, (randn(5, 6),)) for op in (torch.argmax, torch.argmin, torch.median)),
        *(Sample(op, (randn(5, 6), 1)) for op in (torch.argmax, torch.argmin, torch.median)),
    ]


def mixtures() -> list[Sample]:
    """Rows of experts: gated in one matrix or interleaved, with biases; of one product; some experts without rows."""
    torch.manual_seed(4)
    ids, few = torch.tensor([3, 0, 0, 3, 2, 0, 3]), torch.tensor([1, 1, 2, 1, 2, 1])
    linear, down = ("linear", ("%0", 0, False), {}), ("linear", ("%5", 1, False), {})
    halves = [("piece", ("%1", k, 2, False), {}) for k in (0, 1)]
    gated = [linear, halves[0], ("aten.silu.default", ("%2",), {}), halves[1], ("aten.mul.Tensor", ("%3", "%4"), {})]
    turned: list[Any] = [
        ("linear", ("%0", 0, True), {}),
        ("take", (1,), {}),
        ("aten.add.Tensor", ("%1", "%2"), {}),
        *(("piece", ("%3", k, 2, True), {}) for k in (0, 1)),
        ("aten.clamp.default", ("%4", None, 1.5), {}),
        ("aten.gelu.default", ("%6",), {"approximate": "tanh"}),
        ("aten.add.Tensor", ("%5", 1), {}),
        ("aten.mul.Tensor", ("%7", "%8"), {}),
        ("linear", ("%9", 2, True), {}),
        ("take", (3,), {}),
        ("aten.add.Tensor", ("%10", "%11"), {}),
    ]
    apart = [linear, ("aten.relu.default", ("%1",), {}), ("linear", ("%0", 1, False), {})]
    apart += [("aten.mul.Tensor", ("%2", "%3"), {}), ("linear", ("%4", 2, False), {})]
    biased = [randn(4, 5, 6), randn(4, 6), randn(4, 3, 5), randn(4, 5)]
    return [
        Sample(experts, (randn(7, 5), ids, [randn(4, 6, 5), randn(4, 5, 3)], [*gated, down])),
        Sample(experts, (randn(6, 4), few, [randn(4, 8, 4), randn(4, 4, 4)], [*gated, down], True)),
        Sample(experts, (randn(7, 5), ids + 1, biased, turned, True)),
        Sample(experts, (randn(7, 5), ids, [randn(4, 3, 5), randn(4, 3, 5), randn(4, 5, 3)], apart)),
        Sample(experts, (randn(7, 5), ids - 4, [randn(4, 6, 5)], [linear])),
        Sample(experts, (randn(7, 5), ids * 0, [randn(1, 6, 5), randn(1, 5, 3)], [*gated, down])),
    ]


def all_written() -> list[Sample]:
    return [*written(), *more(), *along(), *telling(), *mixtures()]
