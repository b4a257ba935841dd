"""Tensor modes and sequence splits that a user asks for, as roles of the mesh's axes.

    1d      one axis    tensor                2.5d    three axes  depth, rows, columns
    2d      two axes    rows, columns         3d      three axes  rows, turn, turn
    none    no axis     weights whole

    megatron       the axis of 1d, on which whatever lies between its products splits the sequence
    ulysses, ring  one axis; "ring+ulysses" one each
    none           nothing splits the sequence

On the axes that are left weights are used whole where a tensor mode is asked for; else anything goes there.
`autopar.modes` says what the modes are, `autopar.solver.restrict` what the roles allow.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from autopar.cluster import ClusterSpec
from autopar.cost_model.hardware import axis_links
from autopar.errors import PlanError
from autopar.layout import Mesh

TENSOR, ROWS, COLUMNS, DEPTH, TURN = "tensor", "rows", "columns", "depth", "turn"
ULYSSES, RING, OTHER, FREE = "ulysses", "ring", "other", "free"

_TENSOR_MODES = {
    "1d": (TENSOR,),
    "2d": (ROWS, COLUMNS),
    "2.5d": (DEPTH, ROWS, COLUMNS),
    "3d": (ROWS, TURN, TURN),  # rows of x are cut outside those of an axis that turns, which is gathered alone
    "none": (),
}
_OPERANDS = ("gathered", "streamed")  # of 2d, 2.5d and 3d: "2d streamed"
_SEQUENCE = {"none": (), "megatron": (), "ulysses": (ULYSSES,), "ring": (RING,), "ring+ulysses": (RING, ULYSSES)}
TENSOR_MODES = tuple(
    name
    for mode, roles in _TENSOR_MODES.items()
    for name in (mode, *(f"{mode} {o}" for o in _OPERANDS if len(roles) > 1))
)
SEQUENCE_SPLITS = tuple(_SEQUENCE)
_NAMES = {ROWS: "x", COLUMNS: "y", DEPTH: "d", TENSOR: "tp", ULYSSES: "sp", RING: "cp", OTHER: "dp", FREE: "dp"}
_MOST_AXES = 3


@dataclass(frozen=True, slots=True)
class Form:
    """A tensor mode and a sequence split on a mesh.

    mode: as in `TENSOR_MODES`, "" for any.  operands: "gathered", "streamed" or "" for either.  sequence: as in
    `SEQUENCE_SPLITS`, "" for any.  roles: one for each axis of the mesh.
    """

    mode: str
    operands: str
    sequence: str
    mesh: Mesh
    roles: tuple[str, ...]

    @property
    def title(self) -> str:
        """``tensor mode 2D streamed with sequence split ring``."""
        words = [f"tensor mode {self.mode.upper()} {self.operands}".rstrip()] if self.mode else []
        words += [f"sequence split {self.sequence}"] if self.sequence else []
        return " with ".join(words)

    def axes(self, *roles: str) -> list[int]:
        return [a for a, role in enumerate(self.roles) if role in roles]

    def name(self, axis: int) -> str:
        """``x=2``."""
        return f"{self.mesh.axes[axis]}={self.mesh.sizes[axis]}"


def as_names(value: str | Sequence[str] | None, known: Sequence[str], option: str) -> tuple[str, ...]:
    """The names that an option gives, none for None.  Raises PlanError for one that is not known."""
    names = () if value is None else (value,) if isinstance(value, str) else tuple(value)
    for name in names:
        if name not in known:
            raise PlanError(
                f"no such value of {option}", where=f"Search({option}=)", expected=", ".join(known), got=name
            )
    if value is not None and not names:
        raise PlanError(
            f"no value of {option} is left", where=f"Search({option}=)", expected=", ".join(known), got="()"
        )
    return names


def forms(
    tensor_modes: Sequence[str], sequence: Sequence[str], meshes: Sequence[Mesh] | None, cluster: ClusterSpec
) -> tuple[Form, ...]:
    """Every way to give the axes of a mesh the roles that the options ask for, meshes of fewer axes first.

    Of ways that give every role as many ranks over the same links only the first is kept, which has the roles in their
    order, behind axes without.  meshes: those to keep to; None for all of as many axes as a mode has, and one more.
    Raises PlanError where no mesh has the axes, and for options that exclude each other.
    """
    found: dict[object, Form] = {}
    lacking: list[str] = []
    for mode, split in itertools.product(tensor_modes or ("",), sequence or ("",)):
        base, _, operands = mode.partition(" ")
        if split == "megatron" and base not in ("", "1d"):
            continue
        base = base or ("1d" if split == "megatron" else "")
        roles = (*_TENSOR_MODES.get(base, ()), *_SEQUENCE.get(split, ()))
        rest = OTHER if mode else FREE
        fitting = _wide_enough(roles, meshes, cluster.world_size)
        if not fitting:
            lacking.append(f"{Form(base, operands, split, Mesh((), ()), ()).title} needs {len(roles)}")
        ways = [(mesh, given) for mesh in fitting for given in _assignments(roles, rest, mesh.sizes)]
        for mesh, given in sorted(ways, key=lambda way: (len(way[1]), _disorder(way[1], rest, roles))):
            named = mesh if meshes is not None else Mesh(_axis_names(given), mesh.sizes)
            links = axis_links(cluster, mesh.sizes)
            alike = sorted(map(repr, zip(given, mesh.sizes, links, strict=True)))
            found.setdefault((base, operands, split, *alike), Form(base, operands, split, named, given))
    if found:
        return tuple(sorted(found.values(), key=lambda f: len(f.mesh.axes)))
    if not lacking:
        raise PlanError(
            "a sequence split by Megatron belongs to tensor mode 1D",
            where="Search(tensor_modes=, sequence=)",
            expected='tensor_modes="1d" with sequence="megatron"',
            got=f"{', '.join(tensor_modes)} with {', '.join(sequence)}",
        )
    have = "; ".join(map(str, meshes)) if meshes is not None else f"{cluster.world_size} ranks"
    raise PlanError(
        "no mesh has enough axes for what is asked of it",
        where="Search(tensor_modes=, sequence=)",
        expected=f"axes of two ranks or more: {', '.join(lacking)}",
        got=have,
        hint=f"a number of ranks with more factors, or Search(mesh=...) of up to {_MOST_AXES} axes",
    )


def _wide_enough(roles: Sequence[str], meshes: Sequence[Mesh] | None, world_size: int) -> list[Mesh]:
    if meshes is not None:
        return [m for m in meshes if sum(n > 1 for n in m.sizes) >= len(roles)]
    if world_size == 1 and not roles:
        return [Mesh((), ())]
    most = min(max(len(roles) + 1, 2), _MOST_AXES)
    return [Mesh(("",) * len(s), s) for k in range(max(len(roles), 1), most + 1) for s in shapes(world_size, k)]


def shapes(world_size: int, axes: int) -> Iterator[tuple[int, ...]]:
    """Every way to write ``world_size`` as a product of so many numbers of at least two, in order."""
    if axes == 1:
        if world_size > 1:
            yield (world_size,)
        return
    for n in range(2, world_size // 2 + 1):
        if world_size % n == 0:
            yield from ((n, *rest) for rest in shapes(world_size // n, axes - 1))


def _assignments(roles: Sequence[str], rest: str, sizes: Sequence[int]) -> Iterable[tuple[str, ...]]:
    """The roles in every order over the axes of two ranks or more, ``rest`` on those that are left; equal ones once."""
    padded = (*roles, *[rest] * (len(sizes) - len(roles)))
    orders = dict.fromkeys(itertools.permutations(padded))
    return (o for o in orders if all(n > 1 or role == rest for n, role in zip(sizes, o, strict=True)))


def _disorder(given: Sequence[str], rest: str, roles: Sequence[str]) -> tuple[int, ...]:
    """Zeros where the axes have the roles in their order, behind axes without."""
    return tuple(0 if role == rest else 1 + roles.index(role) for role in given)


def _axis_names(roles: Sequence[str]) -> tuple[str, ...]:
    turns = iter("yz")
    names = [next(turns) if role == TURN else _NAMES[role] for role in roles]
    return tuple(n if names.count(n) == 1 else f"{n}{names[:k].count(n) + 1}" for k, n in enumerate(names))
