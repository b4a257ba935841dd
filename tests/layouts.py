"""Random layouts, and what a rank holds of a value in one: for tests of conversions."""

from __future__ import annotations

import itertools
import math
import random

import torch
from torch import Tensor

from autopar.layout import I, Layout, Mesh, P, R, S, State, canonical, is_valid
from autopar.runtime.collectives import Axis
from autopar.runtime.dtensor import take_local


def random_layout(shape: tuple[int, ...], mesh: Mesh, rng: random.Random) -> Layout:
    """Any valid layout of R, I, P and cuts: plain, strided, uneven, with empty shards, several on one dimension."""
    while True:
        layout: list[State] = []
        for n in mesh.sizes:
            d = rng.randrange(len(shape))
            m = rng.choice([k for k in range(1, shape[d] + 1) if shape[d] % k == 0])
            u = rng.choice([k for k in range(1, shape[d] // m + 1) if shape[d] // m % k == 0])
            layout.append(rng.choice([canonical(S(d, m, shape[d] // m // u, u), n)] * 3 + [R, I, P]))
        if is_valid(shape, tuple(layout), mesh.sizes):
            return tuple(layout)


def local_slice(x: Tensor, layout: Layout, mesh: Mesh, at: tuple[int, ...]) -> Tensor:
    """The slice of ``x`` at the rank's place; whole along axes that do not cut."""
    axes = [Axis(a, n, k) for a, n, k in zip(mesh.axes, mesh.sizes, at, strict=True)]
    return take_local(x, _cuts(layout), mesh, at, axes)


def held(x: Tensor, layout: Layout, mesh: Mesh) -> list[Tensor]:
    """What every rank holds of ``x``: its slice, of its own term where the sum is pending.

    Terms are asymmetric and alternate in sign, so that no sum comes out right by luck.
    """
    pending = [a for a, s in enumerate(layout) if s == P]
    places = list(itertools.product(*(range(mesh.sizes[a]) for a in pending)))
    terms = {here: _noise(x, k) for k, here in enumerate(places) if k}
    terms[places[0]] = x - sum(terms.values()) if terms else x
    return [
        local_slice(terms[tuple(at[a] for a in pending)], layout, mesh, at)
        for at in map(mesh.coordinates, range(mesh.size))
    ]


def _noise(x: Tensor, k: int) -> Tensor:
    generator = torch.Generator().manual_seed(k)
    if not (x.is_floating_point() or x.is_complex()):
        return (-1) ** k * torch.randint(k, 5 * k, x.shape, generator=generator).to(x.dtype)
    noise = torch.randn(x.shape, generator=generator, dtype=x.dtype)
    noise = (-1) ** k * (noise + k * torch.sgn(noise) if x.is_complex() else noise.abs() + k)
    return torch.where(torch.isfinite(x), noise, x)  # no finite terms add up to what is not finite


def whole(terms: list[Tensor], layout: Layout, mesh: Mesh, shape: tuple[int, ...]) -> Tensor:
    """The value that ranks hold together: partial terms added, shards laid in their places, copies checked.

    Bool counts as int64: added up, two trues are not one.
    """
    dtype = torch.int64 if terms[0].dtype is torch.bool else terms[0].dtype
    index = torch.arange(math.prod(shape)).reshape(shape)
    out = torch.zeros(math.prod(shape), dtype=dtype)
    first: dict[tuple[int, ...], Tensor] = {}
    for rank, (term, places) in enumerate(zip(terms, held(index, _cuts(layout), mesh), strict=True)):
        if term.shape != places.shape:
            raise AssertionError(f"rank {rank} holds {list(term.shape)} instead of {list(places.shape)}")
        at = tuple(0 if s in (R, I) else k for k, s in zip(mesh.coordinates(rank), layout, strict=True))
        if at not in first:
            first[at] = term
            out.index_add_(0, places.reshape(-1), term.reshape(-1).to(dtype))
        elif not torch.allclose(term, first[at], rtol=1e-12, atol=1e-13, equal_nan=True):
            raise AssertionError(f"rank {rank} holds another copy than the first rank does")
    return out.reshape(shape)


def _cuts(layout: Layout) -> Layout:
    return tuple(s if isinstance(s, S) else I for s in layout)
