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
    return take_local(x, tuple(s if isinstance(s, S) else I for s in layout), mesh, at, axes)


def local_term(x: Tensor, layout: Layout, mesh: Mesh, at: tuple[int, ...]) -> Tensor:
    """What the rank at ``at`` holds of ``x``: its slice, of its own random term where the sum is pending."""
    pending = [a for a, s in enumerate(layout) if s == P]
    terms: dict[tuple[int, ...], Tensor] = {}
    for k, here in enumerate(itertools.product(*(range(mesh.sizes[a]) for a in pending))):
        noise = torch.Generator().manual_seed(k)
        terms[here] = torch.randn(x.shape, generator=noise, dtype=x.dtype) if k else x
    first = (0,) * len(pending)
    for here, term in terms.items():
        if here != first:
            terms[first] = terms[first] - term
    return local_slice(terms[tuple(at[a] for a in pending)], layout, mesh, at)


def whole(terms: list[Tensor], layout: Layout, mesh: Mesh, shape: tuple[int, ...]) -> Tensor:
    """The value that ranks hold together: partial terms added, shards laid in their places, copies checked."""
    index = torch.arange(math.prod(shape)).reshape(shape)
    out = torch.zeros(shape, dtype=torch.float64)
    for rank, term in enumerate(terms):
        at = mesh.coordinates(rank)
        first = all(k == 0 for k, s in zip(at, layout, strict=True) if s in (R, I))
        places = local_slice(index, layout, mesh, at)
        assert term.shape == places.shape
        if first:
            out.view(-1).index_add_(0, places.reshape(-1), term.reshape(-1))
    for rank, term in enumerate(terms):  # every copy, not only the first one
        at = mesh.coordinates(rank)
        if P not in layout:
            assert torch.allclose(term, local_slice(out, layout, mesh, at), rtol=0, atol=1e-14)
    return out
