"""The integer program of one mesh: which strategy each op takes, how each value travels, where each weight lives.

Its units are powers of ten of seconds and bytes in which its figures are of the order of one to a thousand, as they are
in milliseconds and gigabytes for a large model: a solver's absolute tolerances must be far below what they compare.

- One binary per (op, strategy); they add up to one.
- Every use of a value is a flow over its lattice of layouts: it leaves the layout that its producer makes, and enters
  the one that its user wants.  Arcs are conversions.  One that several users share is paid once: its own column is at
  least the flow of each.
- A weight is two flows on a lattice of two time levels.  Forward: stored -> held, once a step; held -> used, at each
  use and once more for its backward pass.  Backward: the gradient of each use -> accumulated, each microbatch;
  accumulated -> stored, once a step.  Every stage of ZeRO is a choice of stored, held and accumulated.
- Saved activations: one column per (value, layout), at least each user's choice, so that shared ones count once.
- Gradients that are reduced once a step hide behind the backward pass: exposed >= communication - overlap * compute,
  per block.  It is what the runtime hides; nothing else overlaps there.

Repeated blocks are one representative with a multiplicity.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from autopar.layout import Layout, S
from autopar.solver.lattice import Lattice
from autopar.solver.milp import INF, Model, Problem
from autopar.solver.prices import full_states, gradient_states, saved_inputs, saved_outputs
from autopar.solver.space import Flow, Space, Weight, is_full
from autopar.solver.storage import is_plain

# Added to every conversion, to storing in strided cuts, and once more to reducing a gradient at each use where once a
# step costs the same; an objective is at least a hundred, so that all of it is far below any gap.
_TIE = 1e-6


@dataclass(frozen=True, slots=True)
class Columns:
    """Where decisions stand: strategy columns by op, and layout columns by weight."""

    strategy: dict[str, range]
    stored: dict[str, dict[Layout, int]]
    held: dict[str, dict[Layout, int]]
    accumulated: dict[str, dict[Layout, int]]
    second: float  # one in units of the objective


@dataclass(slots=True)
class _Builder:
    space: Space
    model: Model
    memory: bool
    second: float
    byte: float
    strategy: dict[str, range] = field(default_factory=dict)
    stored: dict[str, dict[Layout, int]] = field(default_factory=dict)
    held: dict[str, dict[Layout, int]] = field(default_factory=dict)
    accumulated: dict[str, dict[Layout, int]] = field(default_factory=dict)
    bytes: list[tuple[int, float]] = field(default_factory=list)
    hiding: dict[int, list[tuple[int, float]]] = field(default_factory=dict)


def formulate(
    space: Space, *, limit: float | None = None, zero: int | None = None, smallest: bool = False
) -> tuple[Problem, Columns]:
    """Rows and columns of ``space``.

    limit: bytes per rank; None leaves out everything about memory.  zero: a stage of ZeRO to keep to.  smallest:
    minimise bytes instead of time.
    """
    second = 10.0 ** (2 - _magnitude(lower_bound(space)))
    byte = 10.0 ** -_magnitude(limit or input_bytes(space) + sum(w.value.nbytes for w in space.weights))
    b = _Builder(space, Model(), limit is not None or smallest, second, byte)
    for op in space.ops:
        count = space.count(op.name) * space.prices.microbatches
        first = len(b.model.costs)
        for price in space.costs[op.name]:
            b.model.binary(price.seconds * count * b.second)
        b.strategy[op.name] = range(first, len(b.model.costs))
        b.model.row(1.0, 1.0, ((c, 1.0) for c in b.strategy[op.name]))
    for flow in space.flows:
        _activation(b, flow)
    for weight in space.weights:
        _weight(b, weight, zero)
    _hidden(b)
    constant = input_bytes(space) * b.byte
    if b.memory:
        _memory(b)
        if smallest:
            b.model.costs = [0.0] * len(b.model.costs)
            for column, value in b.bytes:
                b.model.costs[column] += value
        elif limit is not None:
            b.model.row(-INF, limit * b.byte - constant, b.bytes)
    columns = Columns(b.strategy, b.stored, b.held, b.accumulated, second)
    return b.model.freeze(), columns


def _magnitude(x: float) -> int:
    return math.floor(math.log10(x)) if x > 0 else 0


def columns_of(space: Space) -> int:
    """How many columns `formulate` makes, but for those of memory."""
    total = sum(map(len, space.strategies.values()))
    for flow in space.flows:
        if flow.outs is not None:
            ends = len(flow.edge.uses) + flow.edge.whole
            total += len(flow.grid.tails) * (ends + (ends > 1))
    for weight in space.weights:
        times = 1 + len(weight.edge.uses)
        total += len(weight.stored) + len(weight.forward.layouts) + times * len(weight.forward.tails)
        if weight.backward is not None:
            total += len(weight.backward.layouts) + times * len(weight.backward.tails)
    return total


def lower_bound(space: Space) -> float:
    """Seconds: no plan is faster than the cheapest strategy of every op, were conversions free."""
    m = space.prices.microbatches
    work = sum(min(p.seconds for p in space.costs[op.name]) * space.count(op.name) * m for op in space.ops)
    update = sum(min(space.prices.update(w.value, layout) for layout in w.stored) * w.edge.count for w in space.weights)
    return work + update


def input_bytes(space: Space) -> float:
    """Bytes of inputs, buffers and constants, which every rank is given whole."""
    values = space.analysis.values.values()
    return float(sum(v.nbytes for v in values if v.kind in ("input", "buffer", "constant")))


# ------------------------------------------------------------------------------------------------ activations


def _activation(b: _Builder, flow: Flow) -> None:
    if flow.outs is None or flow.producer is None:
        return  # what every rank has whole is sliced without cost
    grid, model = flow.grid, b.model
    count = flow.edge.count * b.space.prices.microbatches
    costs = [c * count * b.second + _TIE for c in grid.costs]
    ends = [
        [(grid.index[layout], column) for layout, column in zip(need, b.strategy[use.op], strict=True)]
        for use, need in zip(flow.edge.uses, flow.needs, strict=True)
    ]
    if flow.edge.whole:
        ends.append([(grid.index[b.space.invariant], -1)])
    made = [grid.index[layout] for layout in flow.outs]
    shared = len(ends) > 1
    paid = [model.column(c) if shared and c > _TIE else -1 for c in costs]
    for end in ends:
        rows = [model.row(0.0, 0.0) for _ in grid.layouts]
        for node, column in zip(made, b.strategy[flow.producer], strict=True):
            model.add(rows[node], column, 1.0)
        for node, column in end:
            if column >= 0:
                model.add(rows[node], column, -1.0)
            else:
                model.row_lower[rows[node]] = model.row_upper[rows[node]] = 1.0
        first = model.flow(rows, grid.tails, grid.heads, [_TIE if shared else c for c in costs])
        if shared:
            for k, column in enumerate(paid):
                if column >= 0:
                    model.row(0.0, INF, ((column, 1.0), (first + k, -1.0)))


# ------------------------------------------------------------------------------------------------ weights


def _weight(b: _Builder, weight: Weight, zero: int | None) -> None:
    model, space = b.model, b.space
    name, count, m = weight.edge.name, weight.edge.count, space.prices.microbatches
    forward, backward, value = weight.forward, weight.backward, weight.value
    stored = {}
    for layout in weight.stored:
        strided = 0.0 if is_plain(layout, space.mesh.sizes) else _TIE
        stored[layout] = model.binary(space.prices.update(value, layout) * count * b.second + strided)
    held = {layout: model.binary() for layout in forward.layouts}
    model.row(1.0, 1.0, ((c, 1.0) for c in stored.values()))
    b.stored[name], b.held[name] = stored, held

    rows = [model.row(0.0, 0.0) for _ in forward.layouts]
    for layout, column in stored.items():
        model.add(rows[forward.index[layout]], column, 1.0)
    for layout, column in held.items():
        model.add(rows[forward.index[layout]], column, -1.0)
    _arcs(b, rows, forward, count, 1)
    for use, need in zip(weight.edge.uses, weight.needs, strict=True):
        rows = [model.row(0.0, 0.0) for _ in forward.layouts]
        for layout, column in held.items():
            model.add(rows[forward.index[layout]], column, 1.0)
        for layout, column in zip(need, b.strategy[use.op], strict=True):
            model.add(rows[forward.index[full_states(layout)]], column, -1.0)
        again = 1 if backward is None else 2  # gathered weights are dropped after forward
        _arcs(b, rows, forward, count, again * m * use.count)
    if backward is not None:
        accumulated = {layout: model.binary() for layout in backward.layouts}
        b.accumulated[name] = accumulated
        for use, need in zip(weight.edge.uses, weight.needs, strict=True):
            rows = [model.row(0.0, 0.0) for _ in backward.layouts]
            for layout, column in zip(need, b.strategy[use.op], strict=True):
                model.add(rows[backward.index[gradient_states(layout)]], column, 1.0)
            for layout, column in accumulated.items():
                model.add(rows[backward.index[layout]], column, -1.0)
            _arcs(b, rows, backward, count, m * use.count, extra=_TIE)
        rows = [model.row(0.0, 0.0) for _ in backward.layouts]
        for layout, column in accumulated.items():
            model.add(rows[backward.index[layout]], column, 1.0)
        for layout, column in stored.items():
            model.add(rows[backward.index[layout]], column, -1.0)
        _arcs(b, rows, backward, count, 1, block=hiding_block(space, weight))
    if zero is not None:
        _stage(b, weight, zero)
    if b.memory:
        _weight_bytes(b, weight)


def _arcs(
    b: _Builder,
    rows: Sequence[int],
    grid: Lattice,
    count: int,
    times: int,
    *,
    extra: float = 0.0,
    block: int | None = None,
) -> None:
    """Arcs that are run ``times`` a step, for ``count`` alike weights; those of a ``block`` may hide behind it."""
    hidden = block is not None and b.space.prices.overlap > 0
    costs = [(0.0 if hidden else c * times * count * b.second) + _TIE + (extra if c else 0.0) for c in grid.costs]
    first = b.model.flow(rows, grid.tails, grid.heads, costs)
    if hidden and block is not None:
        row = b.hiding.setdefault(block, [])
        row += [(first + k, -c * times * b.second) for k, c in enumerate(grid.costs) if c]


def hiding_block(space: Space, weight: Weight) -> int | None:
    """The segment whose backward pass hides a weight's reduction; None where not every such segment has its own."""
    segment = space.folding.segments[weight.edge.uses[0].op]
    return segment if space.folding.kinds.count(segment) == weight.edge.count else None


def _hidden(b: _Builder) -> None:
    space = b.space
    for block, entries in sorted(b.hiding.items()):
        exposed = b.model.column(float(space.folding.kinds.count(block)))
        factor = space.prices.overlap * space.prices.microbatches * b.second
        compute = [
            (column, factor * price.backward)
            for op in space.ops
            if space.folding.segments[op.name] == block
            for column, price in zip(b.strategy[op.name], space.costs[op.name], strict=True)
        ]
        b.model.row(0.0, INF, [(exposed, 1.0), *entries, *compute])


def _stage(b: _Builder, weight: Weight, zero: int) -> None:
    """Keep to a stage of ZeRO on the axes on which no use of the weight is split."""
    for axis in range(len(b.space.mesh.axes)):
        split = [
            (column, -1.0)
            for use, need in zip(weight.edge.uses, weight.needs, strict=True)
            for layout, column in zip(need, b.strategy[use.op], strict=True)
            if not is_full(layout[axis])
        ]

        def forbid(
            columns: dict[Layout, int], refused: Callable[[Layout], bool], split: list[tuple[int, float]] = split
        ) -> None:
            b.model.row(-INF, 0.0, [*((c, 1.0) for layout, c in columns.items() if refused(layout)), *split])

        name = weight.edge.name
        stored, held, accumulated = b.stored[name], b.held[name], b.accumulated.get(name, {})

        def cut(layout: Layout, axis: int = axis) -> bool:
            return isinstance(layout[axis], S)

        def whole(layout: Layout, axis: int = axis) -> bool:
            return not isinstance(layout[axis], S)

        most = max((sum(map(is_full, layout)) for layout in stored), default=0)
        every_axis = any(not any(map(is_full, layout)) for layout in stored) and most >= 0
        if zero == 0:
            forbid(stored, cut)
        elif every_axis:  # a weight too small to be split on every axis is left alone
            forbid(stored, whole)
        if zero < 3:
            forbid(held, cut)
        elif every_axis:
            forbid(held, whole)
        if accumulated and zero == 1:
            forbid(accumulated, cut)
        elif accumulated and zero > 1 and every_axis:
            forbid(accumulated, whole)


# ------------------------------------------------------------------------------------------------ memory


def _weight_bytes(b: _Builder, weight: Weight) -> None:
    prices, value, name = b.space.prices, weight.value, weight.edge.name
    sizes, scale = prices.parameter_bytes(value), weight.edge.count * b.byte
    stored, held = b.stored[name], b.held[name]
    for layout, column in stored.items():
        b.bytes.append((column, sizes.stored * prices.numel(value.shape, layout) * scale))
    for layout, column in held.items():
        nbytes = sizes.held * prices.numel(value.shape, layout) * scale
        if sizes.aliased and layout in stored:  # a second tensor only where held and stored differ
            copy = b.model.column()
            b.model.row(0.0, INF, ((copy, 1.0), (column, -1.0), (stored[layout], 1.0)))
            column = copy
        b.bytes.append((column, nbytes))
    for layout, column in b.accumulated.get(name, {}).items():
        b.bytes.append((column, sizes.gradient * prices.numel(value.shape, layout) * scale))


def _memory(b: _Builder) -> None:
    """Saved activations and the largest transient."""
    space, model = b.space, b.model
    operations = {op.name: op for op in space.ops}
    for flow in space.flows:
        if flow.producer is None or flow.outs is None:
            continue
        keepers = [
            (need, b.strategy[use.op])
            for use, need in zip(flow.edge.uses, flow.needs, strict=True)
            if use.position in saved_inputs(operations[use.op])
        ]
        producer = operations[flow.producer]
        if producer.outputs.index(flow.edge.representative) in saved_outputs(producer):
            keepers.append((flow.outs, b.strategy[flow.producer]))
        layouts = dict.fromkeys(layout for need, _ in keepers for layout in need)
        for layout in layouts:
            nbytes = space.prices.nbytes(flow.value, layout) * flow.edge.count * b.byte
            if len(keepers) == 1:
                need, columns = keepers[0]
                b.bytes += [(c, nbytes) for c, wanted in zip(columns, need, strict=True) if wanted == layout]
                continue
            kept = model.column()
            for need, columns in keepers:
                users = [(c, -1.0) for c, wanted in zip(columns, need, strict=True) if wanted == layout]
                if users:
                    model.row(0.0, INF, [(kept, 1.0), *users])
            b.bytes.append((kept, nbytes))
    for op in space.ops:
        scale = space.count(op.name) * b.byte
        priced = zip(b.strategy[op.name], space.costs[op.name], strict=True)
        b.bytes += [(c, p.inside * scale) for c, p in priced if p.inside]
    largest = model.column()
    b.bytes.append((largest, 1.0))
    for op in space.ops:
        prices = space.costs[op.name]
        entries = [(c, -p.transient * b.byte) for c, p in zip(b.strategy[op.name], prices, strict=True)]
        model.row(0.0, INF, [(largest, 1.0), *entries])
