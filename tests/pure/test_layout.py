"""The algebra of layouts: which rows a rank holds, which layouts exist, what a conversion costs, and its text."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from layouts import local_slice, random_layout

from autopar.layout import (
    I,
    Layout,
    Mesh,
    P,
    R,
    S,
    State,
    canonical,
    chunk_bounds,
    conversion,
    cut_order,
    default_path,
    dual,
    format_layout,
    format_state,
    is_valid,
    largest_local_numel,
    local_shape,
    parse_layout,
    parse_state,
)
from autopar.runtime.dtensor import from_placements, placements


def rows(state: S, n: int, index: int) -> list[int]:
    """Rows of a cut by its definition: dim d seen as (m, N, u), N cut as torch.chunk does."""
    low, high = chunk_bounds(state.N, n, index)
    return [r for r in range(state.m * state.N * state.u) if low <= r // state.u % state.N < high]


# ------------------------------------------------------------------------------------------------ rows


def test_positions_are_global_so_undoing_one_axis_does_not_rename_another() -> None:
    """The example of the design: arange(8) on x = 2, then y = 2; gathering x leaves [0, 1, 4, 5] on y = 0."""
    mesh, x = Mesh(("x", "y"), (2, 2)), torch.arange(8)
    outer, inner = S(0, 1, 8, 1), S(0, 2, 4, 1)
    assert [local_slice(x, (outer, inner), mesh, at).tolist() for at in mesh.all_coordinates()] == [
        [0, 1],
        [2, 3],
        [4, 5],
        [6, 7],
    ]
    assert local_slice(x, (I, inner), mesh, (1, 0)).tolist() == [0, 1, 4, 5]
    assert local_slice(x, (inner, outer), mesh, (0, 1)).tolist() == [4, 5]  # the order of axes is part of the value


@pytest.mark.parametrize("seed", range(40))
def test_ranks_hold_the_rows_that_the_definition_says(seed: int) -> None:
    """Slices agree with the definition applied row by row, with `local_shape`, and rank 0 is the fullest."""
    rng = random.Random(seed)
    mesh = Mesh(("x", "y", "z"), rng.choice([(2, 2, 2), (3, 2, 1), (4, 2, 3)]))
    shape = rng.choice([(12, 5), (7, 8), (24, 3), (5, 18)])
    x = torch.arange(shape[0] * shape[1]).reshape(shape)
    layout = random_layout(shape, mesh, rng)
    sizes = []
    for at in mesh.all_coordinates():
        expected = x
        kept = [set(range(n)) for n in shape]
        for state, n, index in zip(layout, mesh.sizes, at, strict=True):
            if isinstance(state, S):
                kept[state.dim] &= set(rows(state, n, index))
        for d, keep in enumerate(kept):
            expected = expected.index_select(d, torch.tensor(sorted(keep), dtype=torch.long))
        assert torch.equal(local_slice(x, layout, mesh, at), expected)
        assert local_shape(shape, layout, mesh.sizes, at) == tuple(expected.shape)
        sizes.append(expected.numel())
    assert largest_local_numel(shape, layout, mesh.sizes) == max(sizes)


@pytest.mark.parametrize(("size", "n"), [(5, 2), (5, 4), (7, 3), (1, 2), (8, 4), (3, 4), (53, 4)])
def test_chunk_bounds_are_those_of_torch_chunk(size: int, n: int) -> None:
    parts = [p.tolist() for p in torch.arange(size).chunk(n)]
    parts += [[]] * (n - len(parts))  # torch gives fewer parts where we give empty ones
    assert [list(range(*chunk_bounds(size, n, k))) for k in range(n)] == parts


def test_units_keep_rows_together_that_a_view_had_apart() -> None:
    """Batch 5 on two ranks, flattened with 8: 24 and 16 rows, not 20 and 20."""
    assert [local_shape((40,), (S(0, 1, 5, 8),), (2,), (k,)) for k in range(2)] == [(24,), (16,)]
    assert [local_shape((40,), (S(0, 1, 40, 1),), (2,), (k,)) for k in range(2)] == [(20,), (20,)]


def test_even_cuts_have_one_form() -> None:
    assert canonical(S(0, 3, 4, 2), 2) == S(0, 3, 8, 1)
    assert canonical(S(0, 1, 5, 8), 2) == S(0, 1, 5, 8)  # uneven: the unit matters


def test_ranks_are_row_major() -> None:
    mesh = Mesh.of({"dp": 2, "tp": 3})
    assert [mesh.coordinates(r) for r in range(mesh.size)] == list(mesh.all_coordinates())
    assert mesh.coordinates(4) == (1, 1)


# ------------------------------------------------------------------------------------------------ which layouts exist


@pytest.mark.parametrize(
    ("layout", "valid"),
    [
        ((S(0, 1, 12, 1), S(0, 2, 6, 1)), True),
        ((S(0, 2, 6, 1), S(0, 1, 12, 1)), True),  # y outside x
        ((S(0, 3, 4, 1), S(0, 6, 2, 1)), True),
        ((S(0, 1, 12, 1), S(0, 1, 12, 1)), False),  # twice the same cut
        ((S(0, 1, 12, 1), S(0, 3, 4, 1)), False),  # starts inside the other
        ((S(0, 1, 3, 4), S(0, 3, 4, 1)), False),  # 3 rows of 4 on two ranks are uneven: nothing may cut inside
        ((S(0, 4, 3, 1), S(0, 1, 12, 1)), True),  # 3 rows on two ranks are uneven: innermost is fine
        ((S(0, 2, 6, 1), S(0, 3, 4, 1)), False),  # three groups are no multiple of the four parts outside
        ((S(1, 1, 5, 1), S(0, 1, 12, 1)), True),  # different dimensions never clash
        ((S(2, 1, 5, 1), I), False),  # no such dimension
        ((S(0, 1, 8, 1), I), False),  # 8 rows are not 12
    ],
)
def test_cuts_of_one_dimension_nest(layout: Layout, valid: bool) -> None:
    assert is_valid((12, 5), layout, (2, 2)) is valid


def test_slices_are_taken_from_the_outside_in() -> None:
    assert cut_order((S(1, 2, 2, 1), S(0, 3, 2, 1), I, S(1, 1, 4, 1))) == [1, 3, 0]


# ------------------------------------------------------------------------------------------------ conversions


N, n = 1000.0, 4
RING = (n - 1) / n * N


@pytest.mark.parametrize(
    ("src", "dst", "forward", "backward", "sent"),
    [
        (S(0, 1, 8, 1), S(1, 1, 8, 1), "all-to-all", "all-to-all", 2 * RING / n),
        (S(0, 1, 8, 1), R, "all-gather", "reduce-scatter", 2 * RING),
        (S(0, 1, 8, 1), I, "all-gather", "local", RING),
        (P, I, "all-reduce", "local", 2 * RING),
        (P, R, "all-reduce", "all-reduce", 4 * RING),
        (P, S(0, 1, 8, 1), "reduce-scatter", "all-gather", 2 * RING),
        (I, R, "local", "all-reduce", 2 * RING),
        (I, S(0, 1, 8, 1), "local", "all-gather", RING),
        (R, S(0, 1, 8, 1), "local", "local", 0),
        (S(0, 1, 8, 1), P, "local", "local", 0),
        (R, I, "local", "local", 0),
        (I, P, "local", "local", 0),
        (R, P, "local", "local", 0),
    ],
)
def test_table_of_conversions(src: State, dst: State, forward: str, backward: str, sent: float) -> None:
    """The table of section 1, row by row: bytes sent per rank, forward and backward together."""
    found = conversion(src, dst, n, N)
    assert (found.forward, found.backward) == (forward, backward)
    assert found.forward_bytes + found.backward_bytes == pytest.approx(sent)


STATES: list[State] = [S(0, 1, 8, 1), S(1, 1, 8, 1), R, I, P]


@pytest.mark.parametrize(("src", "dst"), list(itertools.product(STATES, STATES)))
def test_backward_is_the_conversion_of_the_duals(src: State, dst: State) -> None:
    there, back = conversion(src, dst, n, N), conversion(dual(dst), dual(src), n, N)
    assert (there.backward, there.backward_bytes) == (back.forward, back.forward_bytes)
    assert dual(dual(src)) == src


@pytest.mark.parametrize("seed", range(20))
def test_default_path_is_legal_and_arrives(seed: int) -> None:
    rng = random.Random(seed)
    mesh, shape = Mesh(("x", "y", "z"), (2, 3, 2)), (12, 7)
    src, dst = random_layout(shape, mesh, rng), random_layout(shape, mesh, rng)
    current = src
    for move in default_path(shape, src, dst, mesh.sizes):
        assert move.layout == current and is_valid(shape, move.result, mesh.sizes)
        current = move.result
    assert current == dst


# ------------------------------------------------------------------------------------------------ text and DTensor


@pytest.mark.parametrize("seed", range(20))
def test_text_reads_back(seed: int) -> None:
    mesh, shape = Mesh(("dp", "tp"), (2, 3)), (12, 7)
    layout = random_layout(shape, mesh, random.Random(seed))
    assert parse_layout(format_layout(layout, mesh.axes), mesh.axes, shape) == layout


def test_plain_cuts_and_invariant_axes_are_short() -> None:
    assert format_layout((S(0, 1, 12, 1), I), ("dp", "tp")) == "dp:S0"
    assert format_layout((I, I), ("dp", "tp")) == "I"
    assert format_state(S(0, 3, 4, 1)) == "S0(3,4,1)"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Q", "'Q' is no state: expected R, I, P, S<dim> or"),
        ("S0(1,2)", "is no state"),
        ("S2", "names dimension 2 of a tensor with 2 dimensions"),
        ("S0(2,3,1)", "2 \\* 3 \\* 1 is not the dimension's size 12"),
    ],
)
def test_refuses_text_that_is_no_state(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_state(text, (12, 5))


def test_refuses_an_axis_that_the_mesh_lacks() -> None:
    with pytest.raises(ValueError, match="'pp:R' names no axis of the mesh: expected one of dp, tp"):
        parse_layout("dp:S0 pp:R", ("dp", "tp"), (12, 5))


@pytest.mark.parametrize(
    "layout",
    [
        (S(0, 1, 12, 1), S(1, 1, 5, 1)),
        (S(0, 1, 12, 1), S(0, 2, 6, 1)),  # nested in the order of the axes
        (S(0, 3, 4, 1), I),  # strided: a fused QKV weight
        (S(0, 2, 6, 1), S(0, 1, 12, 1)),  # inside the later axis
        (I, I),
    ],
)
def test_stored_layouts_are_dtensor_placements_and_back(layout: Layout) -> None:
    assert from_placements((12, 5), placements(layout, (2, 2)), (2, 2)) == layout
