"""A plan as text: where it runs, what it costs, how every module runs, where weights live, and why not otherwise.

    Plan 3f2a91  Llama-8B on 8x H100 as dp=4 tp=2   optimal, gap 0.00 %   solved in 4.1 s
    step 412 ms = compute 331 + exposed communication 81      peak 61.2 of 80 GiB on rank 0

    module                  layout in -> out      time     communication   bytes/rank
    layers.0-31 (32 alike)                        368 ms
      attn.q,k,v_proj       dp:S0 -> dp:S0 tp:S2  3.1 ms   -               96 MiB

Everything is read from the plan, so that a plan file explains itself without its model.  Figures of a repeated block
are those of one occurrence; its heading has the sum over all.
"""

from __future__ import annotations

import itertools
import math
import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from autopar.cluster import ClusterSpec
from autopar.errors import PlanError
from autopar.plan import ParameterDecision, Plan

WIDTH = 100  # columns
_HEADINGS = ("module", "layout in -> out", "time", "communication", "bytes/rank")
_WIDEST = (28, 32, 8, 14, 10)  # columns are as wide as their longest cell, up to this; longer cells are wrapped
_GAP = "  "
KINDS = (
    "kinds: "  # a note that starts so stands among the first lines: "kinds: dp: data parallel, ZeRO-1; tp: tensor 1D"
)
_SMALL = 0.005  # ops without weights and communication that take less than this part of the step share a line
_SHOWN_OPS = 40  # of a plan without prices
_SHOWN_NAMES = 4


def explain(plan: Plan) -> str:
    """The plan as aligned text of at most `WIDTH` columns, the same for the same plan; ends with a newline."""
    parts = [_header(plan), _table(plan), _parameters(plan), _notes(plan)]
    return "\n\n".join("\n".join(lines) for lines in parts if lines) + "\n"


# ------------------------------------------------------------------------------------------------ quantities


def format_seconds(seconds: float) -> str:
    """``412 ms``, ``3.1 ms``, ``86 us``."""
    unit, factor = _time_unit(seconds)
    return f"{_digits(seconds * factor)} {unit}"


def format_bytes(count: float) -> str:
    """``96 MiB``, ``1.5 GiB``, ``12 B``."""
    unit, factor = _byte_unit(count)
    return f"{_digits(count / factor)} {unit}"


def _digits(value: float, beside: float = 0.0) -> str:
    """Three digits without an exponent; as many decimals as the larger number ``beside`` it has."""
    largest = max(abs(value), abs(beside))
    decimals = 0 if largest >= 99.95 else 1 if largest >= 9.995 else 2
    text = f"{value:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if decimals else text


def _time_unit(seconds: float) -> tuple[str, float]:
    return ("s", 1.0) if seconds >= 1 else ("ms", 1e3) if seconds >= 1e-3 or not seconds else ("us", 1e6)


def _byte_unit(count: float) -> tuple[str, float]:
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = min(int(math.log2(count)) // 10, len(units) - 1) if count >= 1 else 0
    return units[power], 1024.0**power


# ------------------------------------------------------------------------------------------------ the first lines


def _header(plan: Plan) -> list[str]:
    title = f"Plan {plan.id}  {plan.model or 'model'} on {_cluster(plan)} as {plan.device_mesh}"
    lines = _join([title, _status(plan), *_solved_in(plan)], "   ")
    kinds = [line for kind in _kinds(plan) for line in textwrap.wrap(kind, WIDTH, subsequent_indent="  ")]
    if not plan.predicted.step_time:
        return [*lines, "nothing is priced: the plan says what runs where, not how long it takes", *kinds]
    said = plan.predicted
    unit, factor = _time_unit(said.step_time)
    figures = (said.step_time, said.compute_time, said.exposed_comm_time)
    step, compute, exposed = (_digits(s * factor, said.step_time * factor) for s in figures)
    sums = [
        f"step {step} {unit} = compute {compute} + exposed communication {exposed}",
        f"peak {_peak(plan)} on rank 0",
    ]
    return [*lines, *_join(sums, "      "), *_breakdown(plan), *kinds]


def _join(parts: Sequence[str], gap: str) -> list[str]:
    """One line, or several where one would be too wide."""
    lines = [parts[0]]
    for part in parts[1:]:
        if len(lines[-1]) + len(gap) + len(part) <= WIDTH:
            lines[-1] += gap + part
        else:
            lines.append("  " + part)
    return lines


def _cluster(plan: Plan) -> str:
    """``4x cpu``, ``2x8x H100``; the text as it stands where it is no notation of a cluster."""
    try:
        cluster = ClusterSpec(plan.cluster)
    except PlanError:
        return plan.cluster or "an unnamed cluster"
    nodes = f"{cluster.nodes}x" if cluster.nodes > 1 else ""
    return f"{nodes}{cluster.devices_per_node}x {cluster.device}"


def _status(plan: Plan) -> str:
    found = plan.solver
    words = {"time_limit": "best within the time limit", "heuristic": "heuristic"}.get(found.status, found.status)
    if found.status != "optimal" and not found.bound > 0:
        return f"{words}, not bounded" if plan.predicted.step_time else "legal, not optimised"
    return f"{words}, gap {100 * found.gap:.2f} %"


def _solved_in(plan: Plan) -> list[str]:
    return [f"solved in {plan.solver.seconds:.1f} s"] if plan.solver.seconds else []


def _peak(plan: Plan) -> str:
    """``61.2 of 80.0 GiB``, in the unit of the device's memory where that is known."""
    peak = plan.predicted.peak_memory
    try:
        from autopar.cost_model.hardware import device

        memory = float(device(ClusterSpec(plan.cluster)).memory)
    except PlanError:
        return format_bytes(peak)
    unit, factor = _byte_unit(memory)
    if peak < factor:
        return f"{format_bytes(peak)} of {format_bytes(memory)}"
    return f"{_digits(peak / factor)} of {_digits(memory / factor)} {unit}"


def _breakdown(plan: Plan) -> list[str]:
    """What the figures of the line above are made of, as far as the plan says."""
    parts = plan.predicted.breakdown
    unit, factor = _time_unit(plan.predicted.step_time)

    def total(names: Sequence[tuple[str, str]]) -> str:
        whole = plan.predicted.step_time * factor
        said = [f"{word} {_digits(parts[key] * factor, whole)}" for key, word in names if parts.get(key)]
        return f"{' + '.join(said)} {unit}" if said else ""

    compute = total([(k, k) for k in ("forward", "backward", "recompute", "optimizer")])
    sent = total([("activations", "activations"), ("weights", "weights"), ("inside ops", "inside ops")])
    hidden = parts.get("weights hidden", 0.0)
    lines = [f"  compute = {compute}"] if compute else []
    if sent or plan.predicted.comm_bytes:
        words = [f"{format_bytes(plan.predicted.comm_bytes)} sent per rank"] if plan.predicted.comm_bytes else []
        words += [f"{format_seconds(hidden)} more hidden"] if hidden else []
        lines.append(f"  communication = {sent or '0'}" + (f" ({', '.join(words)})" if words else ""))
    memory = {k.removeprefix("memory: "): v for k, v in parts.items() if k.startswith("memory: ") and v}
    if memory:
        unit, factor = _byte_unit(plan.predicted.peak_memory)
        whole = plan.predicted.peak_memory / factor
        order = sorted(memory, key=lambda k: (-memory[k], k))
        lines.append(f"  memory = {' + '.join(f'{k} {_digits(memory[k] / factor, whole)}' for k in order)} {unit}")
    return [line for long in lines for line in textwrap.wrap(long, WIDTH, subsequent_indent="      ")]


def _kinds(plan: Plan) -> list[str]:
    """The names of kinds of parallelism.  To recognise them takes the model, so whoever plans leaves them as a note."""
    return [note for note in plan.notes if note.startswith(KINDS)]


# ------------------------------------------------------------------------------------------------ the table


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


def _rows(plan: Plan) -> list[Row]:
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


def _table(plan: Plan) -> list[str]:
    rows = _rows(plan)
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


# ------------------------------------------------------------------------------------------------ parameters


def _parameters(plan: Plan) -> list[str]:
    """Where weights live and how their gradients come together: parameters with the same answer share a paragraph."""
    counts = {r.module: r.count for r in _rows(plan)}
    found: dict[str, list[tuple[str, int]]] = {}
    for parameter in plan.parameters:
        count = _count(parameter.name, counts)
        found.setdefault(storage_words(parameter, tuple(plan.mesh)), []).append((parameter.name, count))
    lines = ["parameters"] if found else []
    for words, names in found.items():
        lines += textwrap.wrap(words, WIDTH, initial_indent="  ", subsequent_indent="  ")
        shown = [spanned(name, count) for name, count in names[:_SHOWN_NAMES]]
        more = sum(count for _, count in names[_SHOWN_NAMES:])
        text = ", ".join(shown) + (f" and {more} more" if more else "")
        lines += textwrap.wrap(text, WIDTH, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False)
    return lines


def _count(name: str, counts: dict[str, int]) -> int:
    """How many parameters this one stands for: as many as the block of the innermost module in the table has."""
    path = name
    while path:
        path = path.rpartition(".")[0]
        if path in counts:
            return counts[path]
    return 1


def storage_words(parameter: ParameterDecision, axes: Sequence[str]) -> str:
    """How a weight is stored, held and reduced over each axis, axes of which the same can be said together."""
    phrases: dict[str, list[str]] = {}
    for axis in axes:
        phrases.setdefault(_axis_words(parameter, axis), []).append(axis)
    return "; ".join(phrase.format(" and ".join(over)) for phrase, over in phrases.items())


def _axis_words(parameter: ParameterDecision, axis: str) -> str:
    stored, held = (_state(layout, axis) for layout in (parameter.stored, parameter.held))
    gradient = _gradient_words(parameter, axis)
    if stored == "I":
        if held != "I":
            return "stored whole over {}, cut once a step" + gradient
        return "replicated over {}" + (f"{gradient} (data parallel)" if gradient else "")
    if held == stored:
        gathered = any(source == stored and target in "IR" for source, target in _steps(parameter.use, axis))
        return "sharded over {}, gathered at each use (ZeRO-3)" if gathered else "split over {} as it is used"
    if held != "I":
        return "sharded over {}, cut otherwise once a step" + gradient
    kind = "" if not gradient else " (ZeRO-2)" if gradient.endswith("at each use") else " (ZeRO-1)"
    return "sharded over {}, gathered once a step" + gradient + kind


def _gradient_words(parameter: ParameterDecision, axis: str) -> str:
    """``, gradients all-reduced once a step``, or nothing where no sum is pending on the axis.

    A scatter that a gather follows at once is an all-reduce, however the plan writes it.
    """
    whole = _state(parameter.stored, axis) == "I"
    if any(source == "P" for source, _ in _steps(parameter.final, axis)):
        return f", gradients {'all-reduced' if whole else 'reduce-scattered'} once a step"
    if not any(source == "P" for source, _ in _steps(parameter.reduce, axis)):
        return ""
    if _state(parameter.accumulated, axis) == "I":
        return ", gradients all-reduced at each use"
    return ", gradients reduce-scattered at each use" + (" and gathered once a step" if whole else "")


def _state(layout: str, axis: str) -> str:
    """State on one axis of a layout as `autopar.layout.format_layout` writes it."""
    return dict(word.partition(":")[::2] for word in layout.split()).get(axis, "I")


def _steps(moves: Iterable[str], axis: str) -> list[tuple[str, str]]:
    """(from, to) of the moves that change this axis, as `autopar.plan.format_move` writes them."""
    out = []
    for move in moves:
        layout, _, step = move.partition(" > ")
        name, _, target = step.partition(":")
        if name == axis:
            out.append((_state(layout, axis), target))
    return out


# ------------------------------------------------------------------------------------------------ why not


def _notes(plan: Plan) -> list[str]:
    """Under a heading, where the notes do not say themselves what they are."""
    notes = [note for note in plan.notes if not note.startswith(KINDS)]
    headed = not all(note.startswith("why not") for note in notes)
    indent = "  " if headed else ""
    lines = ["why not otherwise"] if headed else []
    for note in notes:
        lines += textwrap.wrap(note, WIDTH, initial_indent=indent, subsequent_indent=indent + "  ")
    return lines
