"""spmd_types' ``rulecheck`` over our conversions: what the hook says of each against what its kernel computes."""

from __future__ import annotations

import zlib
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.layout import I, P, R, Split
from autopar.runtime import collectives
from autopar.runtime.collectives import Axis, LocalState, move, spmd_type

N = 2
WHOLE = (4, 6)


def kernel(src: LocalState, dst: LocalState) -> type:
    """A conversion as `rulecheck` calls it: with the group in place of our axis."""

    class Conversion(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
            n = dist.get_world_size(group)
            if n == 1:
                return x.clone()
            return move(x, Axis("x", n, dist.get_rank(group), group), src, dst).clone()

        @staticmethod
        def spmd_typecheck(*, x: Any, group: Any) -> Any:
            return spmd_type(x, Axis("x", N, 0), src, dst)

    return Conversion


def check_hooks() -> int:
    """How many conversions the package found to be what their hook says.  Raises its error at the first that is not."""
    import spmd_types
    from spmd_types import rulecheck

    rows, columns = Split(0, 1, N, WHOLE[0] // N), Split(1, 1, N, WHOLE[1] // N)
    words = {P: spmd_types.P, R: spmd_types.R, I: spmd_types.I, rows: spmd_types.S(0), columns: spmd_types.S(1)}
    pairs = [(P, I), (P, R), (P, rows), (rows, R), (columns, I), (rows, columns), (rows, P)]
    pairs += [(I, R), (R, I), (R, rows), (I, columns)]
    x = torch.randn(WHOLE)
    with (
        mock.patch.object(rulecheck, "_seeded_noise", noise),  # its own draws by an op that CPUs lack
        mock.patch.object(collectives, "chunk_bounds", even_bounds),  # an index of many ranks
    ):
        for src, dst in pairs:
            placements = {"x": {"x": words[src]}}
            made = kernel(src, dst)
            rulecheck.rulecheck(made, (x, "x"), placements=placements, mesh={"x": N}, local_tensor_mode=True)
    return len(pairs)


def even_bounds(units: int, n: int, index: Any) -> tuple[Any, Any]:
    """`chunk_bounds` of a cut that divides."""
    return index * (units // n), (index + 1) * (units // n)


def noise(like: Tensor, *key: object) -> Tensor:
    """Numbers that follow from ``key`` alone."""
    generator = torch.Generator().manual_seed(zlib.crc32(repr(key).encode()))
    return torch.randn(tuple(like.shape), generator=generator, dtype=like.dtype)
