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

import textwrap
from collections.abc import Iterable, Sequence

from autopar.cluster import ClusterSpec
from autopar.errors import PlanError
from autopar.explain.quantities import byte_unit, digits, format_bytes, format_seconds, time_unit
from autopar.explain.table import WIDTH, rows_of, spanned, table
from autopar.plan import ParameterDecision, Plan

KINDS = (
    "kinds: "  # a note that starts so stands among the first lines: "kinds: dp: data parallel, ZeRO-1; tp: tensor 1D"
)
_SHOWN_NAMES = 4


def explain(plan: Plan) -> str:
    """The plan as aligned text of at most `WIDTH` columns, the same for the same plan; ends with a newline."""
    parts = [_header(plan), table(plan), _parameters(plan), _notes(plan)]
    return "\n\n".join("\n".join(lines) for lines in parts if lines) + "\n"


# ------------------------------------------------------------------------------------------------ the first lines


def _header(plan: Plan) -> list[str]:
    title = f"Plan {plan.id}  {plan.model or 'model'} on {_cluster(plan)} as {plan.device_mesh}"
    lines = _join([title, _status(plan), *_solved_in(plan)], "   ")
    kinds = [line for kind in _kinds(plan) for line in textwrap.wrap(kind, WIDTH, subsequent_indent="  ")]
    if not plan.predicted.step_time:
        return [*lines, "nothing is priced: the plan says what runs where, not how long it takes", *kinds]
    said = plan.predicted
    unit, factor = time_unit(said.step_time)
    figures = (said.step_time, said.compute_time, said.exposed_comm_time)
    step, compute, exposed = (digits(s * factor, said.step_time * factor) for s in figures)
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
    unit, factor = byte_unit(memory)
    if peak < factor:
        return f"{format_bytes(peak)} of {format_bytes(memory)}"
    return f"{digits(peak / factor)} of {digits(memory / factor)} {unit}"


def _breakdown(plan: Plan) -> list[str]:
    """What the figures of the line above are made of, as far as the plan says."""
    parts = plan.predicted.breakdown
    unit, factor = time_unit(plan.predicted.step_time)

    def total(names: Sequence[tuple[str, str]]) -> str:
        whole = plan.predicted.step_time * factor
        said = [f"{word} {digits(parts[key] * factor, whole)}" for key, word in names if parts.get(key)]
        return f"{' + '.join(said)} {unit}" if said else ""

    compute = total([(k, k) for k in ("forward", "backward", "recompute", "optimizer")])
    sent = total([("activations", "activations"), ("weights", "weights"), ("inside ops", "inside ops")])
    hidden = parts.get("weights hidden", 0.0) + parts.get("inside ops hidden", 0.0)
    lines = [f"  compute = {compute}"] if compute else []
    if sent or plan.predicted.comm_bytes:
        words = [f"{format_bytes(plan.predicted.comm_bytes)} sent per rank"] if plan.predicted.comm_bytes else []
        words += [f"{format_seconds(hidden)} more hidden"] if hidden else []
        lines.append(f"  communication = {sent or '0'}" + (f" ({', '.join(words)})" if words else ""))
    memory = {k.removeprefix("memory: "): v for k, v in parts.items() if k.startswith("memory: ") and v}
    if memory:
        unit, factor = byte_unit(plan.predicted.peak_memory)
        whole = plan.predicted.peak_memory / factor
        order = sorted(memory, key=lambda k: (-memory[k], k))
        lines.append(f"  memory = {' + '.join(f'{k} {digits(memory[k] / factor, whole)}' for k in order)} {unit}")
    return [line for long in lines for line in textwrap.wrap(long, WIDTH, subsequent_indent="      ")]


def _kinds(plan: Plan) -> list[str]:
    """The names of kinds of parallelism.  To recognise them takes the model, so whoever plans leaves them as a note."""
    return [note for note in plan.notes if note.startswith(KINDS)]


# ------------------------------------------------------------------------------------------------ parameters


def _parameters(plan: Plan) -> list[str]:
    """Where weights live and how their gradients come together: parameters with the same answer share a paragraph."""
    counts = {r.module: r.count for r in rows_of(plan)}
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
    headed = not all(note.startswith("why") for note in notes)
    indent = "  " if headed else ""
    lines = ["why not otherwise"] if headed else []
    for note in notes:
        lines += textwrap.wrap(note, WIDTH, initial_indent=indent, subsequent_indent=indent + "  ")
    return lines
