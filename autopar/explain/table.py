"""How every module runs: a row per op, repeated blocks and ops that run alike as one."""

from __future__ import annotations

import itertools
import math
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopar.explain.quantities import format_bytes, format_seconds
from autopar.plan import Plan

WIDTH = 100  # columns
_HEADINGS = ("module", "layout in -> out", "time", "communication", "bytes/rank")
_WIDEST = (28, 32, 8, 14, 10)  # columns are as wide as their longest cell, up to this; longer cells are wrapped
_GAP = "  "
_SMALL = 0.005  # ops without weights and communication that take less than this part of the step share a line
_SHOWN_OPS = 40  # of a plan without prices


@dataclass(frozen=True, slots=True)
class Row:
    """One op, or several alike.

    seconds and nbytes (of its weights, their gradients and optimizer state, on one rank) are those of one occurrence;
    count: how often it occurs.
    """

    module: str
    op: str
    source: str
    target: str
    seconds: float
    communication: str
    nbytes: float
    count: int

    @property
    def is_light(self) -> bool:
        """Whether it has no weights and sends nothing."""
        return not self.nbytes and not self.communication


def rows_of(plan: Plan) -> list[Row]:
    """The rows that the solver wrote into the plan; none in a plan without prices."""
    return [
        Row(
            row.get("module", ""),
            row.get("op", ""),
            row.get("in", ""),
            row.get("out", ""),
            _number(row.get("time", "")),
            "" if row.get("communication", "-") == "-" else row["communication"],
            _number(row.get("bytes", "")),
            max(1, int(_number(row.get("count", "1")))),
        )
        for row in plan.table
    ]


def _number(text: str) -> float:
    """The figure, 0 where there is none: a plan file may have been edited by hand."""
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return value if math.isfinite(value) else 0.0


def table(plan: Plan) -> list[str]:
    """The lines of the table; of a plan without prices, how each op runs on each axis."""
    rows = rows_of(plan)
    if not rows:
        return _choices(plan)
    total = sum(r.seconds * r.count for r in rows)
    cells: list[tuple[str, str, str, str, str]] = [_HEADINGS]
    for count, group in _groups(rows):
        first = _index(group)
        prefix = "" if count == 1 else "  "
        if count > 1:
            cells.append(
                (_block_title(group, count), "", format_seconds(sum(r.seconds for r in group) * count), "", "")
            )
        small = [r for r in group if r.is_light and r.seconds * count < _SMALL * total]
        kept = _merged(_runs([r for r in group if r not in small]))
        modules = [r.module for r in kept]
        for row in kept:
            label = _label(row, first if count > 1 else None, modules.count(row.module) > 1)
            cells.append((prefix + label, *_figures(row)))
        if small:
            title = "1 small op" if len(small) == 1 else f"{len(small)} small ops"
            cells.append((prefix + title, "", format_seconds(sum(r.seconds for r in small)), "", ""))
    return _aligned(cells)


def _figures(row: Row) -> tuple[str, str, str, str]:
    nbytes = format_bytes(row.nbytes) if row.nbytes else "-"
    layout = f"{row.source} -> {row.target}" if row.source else row.target
    return layout, format_seconds(row.seconds), row.communication or "-", nbytes


def _groups(rows: Sequence[Row]) -> list[tuple[int, list[Row]]]:
    """Runs of rows of one repeated block, or of none (count 1)."""
    out: list[tuple[int, list[Row]]] = []
    stem = ""
    for row in rows:
        here = _split(row.module)[0] if row.count > 1 else ""
        joined = out and out[-1][0] == row.count and (row.count == 1 or here in (stem, "") or not stem)
        if joined:
            out[-1][1].append(row)
        else:
            out.append((row.count, [row]))
            stem = ""
        stem = here or stem
    return out


def _split(path: str) -> tuple[str, int | None, str]:
    """What stands before the first number of a module's path, the number, what follows: layers.3.attn."""
    words = path.split(".")
    for k, word in enumerate(words):
        if word.isdecimal():
            return ".".join(words[:k]), int(word), ".".join(words[k + 1 :])
    return "", None, path


def _index(group: Sequence[Row]) -> int | None:
    found = [i for r in group if (i := _split(r.module)[1]) is not None]
    return min(found) if found else None


def spanned(path: str, count: int) -> str:
    """``layers.0-31.attn`` for ``layers.0.attn`` of a block that occurs 32 times."""
    before, index, after = _split(path)
    if index is None or count == 1:
        return path
    return ".".join(w for w in (before, f"{index}-{index + count - 1}", after) if w)


def _block_title(group: Sequence[Row], count: int) -> str:
    numbered = [r for r in group if _split(r.module)[1] is not None]
    if not numbered:
        return f"{group[0].module or 'block'} ({count} alike)"
    before, _, _ = _split(numbered[0].module)
    first = _index(numbered)
    path = spanned(".".join(w for w in (before, str(first)) if w), count)
    return f"{path} ({count} alike)"


def _label(row: Row, first: int | None, with_op: bool) -> str:
    """The module's path inside its block; of a neighbour's module, which a block may reach into, with its number."""
    _, index, after = _split(row.module)
    path = row.module
    if first is not None and index is not None:
        path = after if index == first else f"{index}.{after}".rstrip(".")
    if not path:
        return row.op or "-"
    return f"{path} {_op_name(row.op)}" if with_op and row.op else path


def _op_name(op: str) -> str:
    """The op without what makes its node's name unique: linear for linear_default_3."""
    return re.sub(r"(_default)?(_\d+)?$", "", op)


def _runs(rows: Sequence[Row]) -> list[Row]:
    """Light ops of one module that follow each other in one layout, as one: the eight of an activation function."""
    out: list[Row] = []
    for key, found in itertools.groupby(rows, lambda r: (r.module, r.source, r.target, r.is_light)):
        run = list(found)
        if len(run) == 1 or not key[0] or not key[3]:
            out += run
        else:
            out.append(replace(run[0], op=f"({len(run)} ops)", seconds=sum(r.seconds for r in run)))
    return out


def _merged(rows: Sequence[Row]) -> list[Row]:
    """Neighbours that run alike in sibling modules as one: q_proj, k_proj, v_proj -> q,k,v_proj."""

    def alike(row: Row) -> tuple[str, ...]:
        parent = row.module.rpartition(".")[0]
        return (parent, _op_name(row.op), row.source, row.target, row.communication)

    out: list[Row] = []
    for _, found in itertools.groupby(rows, alike):
        run = list(found)
        modules = list(dict.fromkeys(r.module for r in run))
        if len(run) == 1 or len(modules) < len(run):
            out += run
            continue
        parent = modules[0].rpartition(".")[0]
        name = _brace([m.rpartition(".")[2] for m in modules])
        out.append(
            replace(
                run[0],
                module=f"{parent}.{name}" if parent else name,
                seconds=sum(r.seconds for r in run),
                nbytes=sum(r.nbytes for r in run),
            )
        )
    return out


def _brace(names: Sequence[str]) -> str:
    """``q,k,v_proj`` for q_proj, k_proj, v_proj; ``query,key`` where no ending is shared."""
    ends = {n[n.rindex("_") :] if "_" in n else "" for n in names}
    if len(ends) == 1 and (end := ends.pop()):
        return ",".join(n.removesuffix(end) for n in names) + end
    return ",".join(names)


def _choices(plan: Plan) -> list[str]:
    """Of a plan without a table: how each op runs on each axis."""
    shown = plan.ops[:_SHOWN_OPS]
    cells = [("op", *(f"on {a}" for a in plan.mesh))]
    cells += [(op.name, *op.choices) for op in shown]
    widths = [max(len(row[k]) for row in cells if k < len(row)) for k in range(len(cells[0]))]
    lines = [_GAP.join(c.ljust(w) for c, w in zip(row, widths, strict=False)).rstrip()[:WIDTH] for row in cells]
    more = len(plan.ops) - len(shown)
    return lines + ([f"and {more} more"] if more else [])


def _aligned(cells: Sequence[tuple[str, str, str, str, str]]) -> list[str]:
    """Columns of equal width; what is too long goes on below.  A title without a layout may use both columns."""
    wrapped = [[_fold(cell, k) if row[1] else [cell] for k, cell in enumerate(row)] for row in cells]
    widths = [max(len(line) for row in wrapped if row[1] != [""] for line in row[k]) for k in range(len(_HEADINGS))]
    lines = []
    for row in wrapped:
        if row[1] == [""]:
            title, time = row[0][0], row[2][0]
            lines.append(f"{title.ljust(widths[0] + len(_GAP) + widths[1])}{_GAP}{time}")
            continue
        for parts in itertools.zip_longest(*row, fillvalue=""):
            lines.append(_GAP.join(p.ljust(w) for p, w in zip(parts, widths, strict=True)).rstrip())
    return lines


def _fold(cell: str, column: int) -> list[str]:
    width = _WIDEST[column]
    if len(cell) <= width:
        return [cell]
    if column == 0:  # the end of a path says more than its beginning
        indent = cell[: len(cell) - len(cell.lstrip())]
        return [f"{indent}...{cell[len(indent) + 3 - width :]}"]
    source, arrow, target = cell.partition(" -> ")
    parts = [source, f"-> {target}"] if arrow and column == 1 else [cell]
    return [line for part in parts for line in textwrap.wrap(part, width, subsequent_indent="   " if arrow else "")]
