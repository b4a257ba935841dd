"""Every plan of a tiny program, tried: strategies times storage, by broadcasting tables; nothing of the solver's rows.

It shares with the solver only the price of one op, of one conversion, and what strategies there are.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from autopar.layout import I, Layout, P, R, S, Shape, State, dual, is_valid
from autopar.passes.rewrite import new_node
from autopar.program import Parameter, Program
from autopar.rules.analysis import Analysis, Bound, Value, bind_program
from autopar.rules.derive import Strategy, strategies
from autopar.solver.prices import Prices, saved_inputs, saved_outputs
from autopar.solver.storage import storable

aten = torch.ops.aten
Table = NDArray[np.float64]


# ------------------------------------------------------------------------------------------------ random programs


def random_program(rng: random.Random, ops: int) -> Bound:
    """``ops`` calls: linears, pointwise ones and a branch, then a sum, which is the loss."""
    graph, mode = fx.Graph(), FakeTensorMode()
    parameters: dict[str, Parameter] = {}
    rows, width = rng.choice([4, 6, 8]), rng.choice([4, 6, 8])

    def placeholder(name: str, shape: Shape) -> fx.Node:
        node = graph.placeholder(name)
        with mode:
            node.meta["val"] = torch.empty(shape)
        return node

    x = placeholder("x", (rows, width))
    kinds = ["linear", *rng.choices(["linear", "relu", "square", "residual", "neg"], k=ops - 2)]
    weights = []
    sizes = [width]
    for k, kind in enumerate(kinds):
        if kind == "linear":
            sizes.append(rng.choice([4, 6, 8]))
            name = f"w{k}"
            parameters[name] = Parameter((name,), (sizes[-1], sizes[-2]), torch.float32, rng.random() < 0.85)
            weights.append(placeholder(name, (sizes[-1], sizes[-2])))

    def uses(node: fx.Node) -> int:
        return sum(list(user.args).count(node) for user in node.users)

    values = [x]
    for kind in kinds:
        last = values[-1]
        if kind == "linear":
            values.append(new_node(graph, aten.linear.default, (last, weights.pop(0)), like=x))
        elif kind == "relu":
            values.append(new_node(graph, aten.relu.default, (last,), like=x))
        elif kind == "square":
            values.append(new_node(graph, aten.square.default, (last,), like=x))
        elif kind == "neg":
            values.append(new_node(graph, aten.neg.default, (last,), like=x))
        else:
            alike = [v for v in values[1:-1] if v.meta["val"].shape == last.meta["val"].shape]
            same = [v for v in alike if uses(v) < 2]
            other = rng.choice(same) if same else last
            values.append(new_node(graph, aten.mul.Tensor, (last, other), like=x))
    loss = new_node(graph, aten.sum.default, (values[-1],), like=x)
    program = Program(graph, parameters, {}, {"x": 0}, None, {}, [], None, loss.name)
    return bind_program(program)


# ------------------------------------------------------------------------------------------------ all plans


@dataclass(frozen=True, slots=True)
class Best:
    seconds: float
    smallest: float  # bytes of the leanest plan


def brute_force(analysis: Analysis, prices: Prices, limit: float) -> Best:
    """The least seconds of any plan within ``limit`` bytes, and the least bytes of any plan."""
    ops = analysis.operations
    options: list[list[Strategy]] = [
        [
            s
            for s in strategies(op.type, analysis.factor_points(op), prices.sizes)
            if all(analysis.to_root(v, s.ins[i]) is not None for i, v in enumerate(op.inputs))
        ]
        for op in ops
    ]
    count = len(ops)

    def spread(table: Table, *which: int) -> Table:
        """A table over the strategies of some ops (ascending) as one over all."""
        shape = [1] * count
        for axis, size in zip(which, table.shape, strict=True):
            shape[axis] = size
        return table.reshape(shape)

    seconds = np.zeros((1,) * count)
    saved = np.zeros((1,) * count)
    transient = np.zeros((1,) * count)
    for k, op in enumerate(ops):
        ins, outs = ([analysis.values[v] for v in names] for names in (op.inputs, op.outputs))
        costs = [prices.op(op, s, ins, outs) for s in options[k]]
        seconds = seconds + spread(np.array([c.seconds for c in costs]), k)
        transient = np.maximum(transient, spread(np.array([c.transient for c in costs]), k))

    takers: dict[str, list[tuple[int, int]]] = {}
    for k, op in enumerate(ops):
        for i, v in enumerate(op.inputs):
            takers.setdefault(v, []).append((k, i))
    makers = {op.outputs[0]: k for k, op in enumerate(ops)}
    weights = []
    for name, users in takers.items():
        value = analysis.values[name]
        if value.kind == "parameter":
            weights.append((value, users))
        elif value.kind == "op":
            cost, nbytes, which = _value(value, makers[name], users, options, analysis, prices)
            seconds = seconds + spread(cost, *which)
            saved = saved + spread(nbytes, *which)
    loss = ops[-1].outputs[0]
    whole = (I,) * len(prices.sizes)
    grid = _Ways(analysis.values[loss], prices, [s.outs[0] for s in options[-1]] + [whole])
    seconds = seconds + spread(np.array([grid.cost(s.outs[0], whole) for s in options[-1]]), count - 1)

    given = float(sum(v.nbytes for v in analysis.values.values() if v.kind == "input"))
    fronts = [(_fronts(value, users, options, prices), users[0][0]) for value, users in weights]
    best, least = float("inf"), float("inf")
    for picks in itertools.product(*(range(front[0].shape[1]) for front, _ in fronts)):
        time, nbytes = seconds, saved + transient + given
        for (front, op_index), pick in zip(fronts, picks, strict=True):
            time = time + spread(front[0][:, pick], op_index)
            nbytes = nbytes + spread(front[1][:, pick], op_index)
        least = min(least, float(nbytes.min()))
        fits = nbytes <= limit * (1 + 1e-9)
        best = min(best, float(np.where(fits, time, np.inf).min()))
    return Best(best, least)


def _value(
    value: Value,
    maker: int,
    users: Sequence[tuple[int, int]],
    options: Sequence[Sequence[Strategy]],
    analysis: Analysis,
    prices: Prices,
) -> tuple[Table, Table, tuple[int, ...]]:
    """Seconds of conversions and bytes saved, by strategy of the maker and of up to two users."""
    outs = [s.outs[0] for s in options[maker]]
    needs = [[s.ins[i] for s in options[k]] for k, i in users]
    grid = _Ways(value, prices, [*outs, *(n for need in needs for n in need)])
    keeps = [i in saved_inputs(analysis.operations[k]) for k, i in users]
    keeps_out = 0 in saved_outputs(analysis.operations[maker])

    def nbytes(out: Layout, wanted: Sequence[Layout]) -> float:
        kept = {layout for layout, keep in zip(wanted, keeps, strict=True) if keep} | ({out} if keeps_out else set())
        return sum(prices.nbytes(value, layout) for layout in kept)

    which = sorted({maker, *(k for k, _ in users)})
    sizes = [len(options[k]) for k in which]
    cost, kept = np.zeros(sizes), np.zeros(sizes)
    for at in np.ndindex(*sizes):
        chosen = dict(zip(which, at, strict=True))
        wanted = [need[chosen[k]] for need, (k, _) in zip(needs, users, strict=True)]
        cost[at] = grid.tree(outs[chosen[maker]], wanted)
        kept[at] = nbytes(outs[chosen[maker]], wanted)
    return cost, kept, tuple(which)


class _Ways:
    """Cheapest conversions between all layouts of a value, by Floyd and Warshall."""

    def __init__(self, value: Value, prices: Prices, ends: Sequence[Layout], gradient: bool | None = None):
        axes = range(len(prices.sizes))
        states: list[list[State]] = [sorted({I, *(e[a] for e in ends)}, key=str) for a in axes]
        layouts = [c for c in itertools.product(*states) if is_valid(value.shape, c, prices.sizes)]
        self.index = {layout: k for k, layout in enumerate(layouts)}
        self.distance = np.full((len(layouts), len(layouts)), np.inf)
        for a, b in itertools.permutations(layouts, 2):
            changed = [k for k in axes if a[k] != b[k]]
            if len(changed) == 1:
                (k,) = changed
                move = prices.move if gradient is None else _weight_move(prices, gradient)
                self.distance[self.index[a], self.index[b]] = move(value, a, k, b[k]).seconds
        np.fill_diagonal(self.distance, 0.0)
        for k in range(len(layouts)):
            self.distance = np.minimum(self.distance, self.distance[:, k : k + 1] + self.distance[k : k + 1, :])

    def cost(self, source: Layout, target: Layout) -> float:
        return float(self.distance[self.index[source], self.index[target]])

    def tree(self, source: Layout, targets: Sequence[Layout]) -> float:
        """One or two targets: a common stretch, and from where it ends to each."""
        distinct = list(dict.fromkeys(targets))
        if len(distinct) == 1:
            return self.cost(source, distinct[0])
        a, b = (self.index[t] for t in distinct)
        return float((self.distance[self.index[source]] + self.distance[:, a] + self.distance[:, b]).min())


def _weight_move(prices: Prices, gradient: bool):  # type: ignore[no-untyped-def]
    return lambda value, layout, axis, target: prices.weight_move(value, layout, axis, target, gradient=gradient)


def _fronts(
    value: Value, users: Sequence[tuple[int, int]], options: Sequence[Sequence[Strategy]], prices: Prices
) -> tuple[Table, Table]:
    """Of each strategy of the user: seconds and bytes of every storage that no other beats in both."""
    ((op, position),) = users
    ends = [_full(s.ins[position]) for s in options[op]]
    dims = range(len(value.shape))
    states: list[State] = [I, *(S(d, 1, value.shape[d], 1) for d in dims)]
    stored = []
    for combination in itertools.product(states, repeat=len(prices.sizes)):
        nested: list[State] = []
        taken = dict.fromkeys(dims, 1)
        for state, n in zip(combination, prices.sizes, strict=True):
            if isinstance(state, S):
                rows, m = value.shape[state.dim] // taken[state.dim], taken[state.dim]
                nested.append(S(state.dim, m, rows, 1))
                taken[state.dim] *= n
                divides_some = any(d % n == 0 for d in value.shape)
                if value.shape[state.dim] % m or rows < 2 or (rows % n and divides_some) or _empties(rows, n):
                    break
            else:
                nested.append(state)
        else:
            if is_valid(value.shape, tuple(nested), prices.sizes):
                stored.append(tuple(nested))
    forward = _Ways(value, prices, [*ends, *stored], gradient=False)
    stored = [layout for layout in forward.index if storable(value.shape, layout, prices.sizes)]
    held = list(forward.index)
    rows: list[list[tuple[float, float]]] = []
    backward = None
    if value.differentiable:
        made = [tuple(I if dual(s) == R else dual(s) for s in o.ins[position]) for o in options[op]]
        backward = _Ways(value, prices, [*held, *made], gradient=True)
    for strategy, end in zip(options[op], ends, strict=True):
        produced = tuple(I if dual(s) == R else dual(s) for s in strategy.ins[position])
        found = []
        for s in stored:
            gradients = [(s, 0.0)]
            if backward is not None:
                gradients = [(a, backward.cost(produced, a) + backward.cost(a, s)) for a in backward.index]
            for h in held:
                gather = forward.cost(s, h) + forward.cost(h, end) * (2 if value.differentiable else 1)
                for a, reduce in gradients:
                    time = gather + reduce + prices.update(value, s)
                    found.append((time, prices.weight_memory(value, s, h, a)))
        rows.append(_pareto(found))
    width = max(map(len, rows))
    padded = np.array([row + [(np.inf, np.inf)] * (width - len(row)) for row in rows])
    return padded[:, :, 0], padded[:, :, 1]


def _empties(rows: int, n: int) -> bool:
    return rows % n != 0 and -(-rows // n) * (n - 1) >= rows


def _pareto(found: list[tuple[float, float]]) -> list[tuple[float, float]]:
    out: list[tuple[float, float]] = []
    for time, nbytes in sorted(found):
        if not out or nbytes < out[-1][1] - 1e-9:
            out.append((time, nbytes))
    return out


def _full(layout: Layout) -> Layout:
    return tuple(s if isinstance(s, S) else I for s in layout)


__all__ = ["Best", "P", "brute_force", "random_program"]
