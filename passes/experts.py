"""Experts as one op, in which an axis may split them.

    a = bmm(index(w, [ids]), unsqueeze(x, -1))
    b = silu(a)                                         -->        c = experts(x, ids, [w, v], steps of b)
    c = bmm(index(v, [ids]), unsqueeze(b, -1))

A look-up of weights by a row's expert gives, with experts split, a sum of which all terms but one are zero, and no
activation lets a sum through.  All that lies between the first product and the last works row by row, so that the rank
that holds a row's expert can do it alone.

Rows that are sorted by expert, multiplied in groups and put back in order (`unsort`) are left as they are: the op sorts
rows itself, and may do so on every rank for itself.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from autopar.passes.rewrite import argument, calls, new_node, renamed
from autopar.program import Program, args_of, dtype_of, is_random, is_tensor, shape_of, target_name
from autopar.runtime.kernels.experts import LINEAR, PIECE, TAKE, Step, experts

aten = torch.ops.aten
_GROUPED = ("aten._grouped_mm.default", "transformers.grouped_mm_fallback.default")


def fuse_experts(program: Program, values: Mapping[str, Tensor]) -> None:
    """Make one op of every region of two products or more with weights of experts.  values: of constants, by name."""
    unsort(program, values)
    products = {n: p for n in program.graph.nodes if (p := product(n)) is not None}
    for last in reversed(products):
        if last in products:
            region = _Region.around(last, products)
            if region is not None:
                region.replace(program)
                products = {n: p for n, p in products.items() if n not in region.steps}


# ------------------------------------------------------------------------------------------------ what rows meet


@dataclass(frozen=True, slots=True)
class Product:
    """Rows times the matrix of each one's expert; transposed where that is [k, n].  spare: as `experts` has it."""

    rows: fx.Node
    ids: fx.Node
    weight: fx.Node
    transposed: bool
    spare: bool = False


def looked_up(node: Any) -> tuple[fx.Node, fx.Node] | None:
    """(weight, ids) of ``index(weight, [ids])`` with one expert per row."""
    if not isinstance(node, fx.Node) or node.target not in (aten.index.Tensor, aten.index_select.default):
        return None
    weight, *rest = args_of(node)
    if node.target is aten.index.Tensor:
        (indices,) = rest
        if len(indices) != 1 or indices[0] is None:
            return None
        ids = indices[0]
    else:
        dim, ids = rest
        if dim % len(shape_of(weight)):
            return None
    whole = not (dtype_of(ids).is_floating_point or dtype_of(ids) in (torch.bool, torch.uint8))
    return (weight, ids) if whole and len(shape_of(ids)) == 1 else None


def product(node: fx.Node) -> Product | None:
    """The product that ``node`` is: of one row each, or one that `unsort` has made."""
    if node.target is experts:
        rows, ids, weights, body, spare = args_of(node)
        if len(body) == 1:
            return Product(rows, ids, weights[0], body[0][1][2], spare)
    if node.target not in (aten.squeeze.dim, aten.squeeze.dims) or not is_tensor(node):
        return None
    made = args_of(node)[0]
    if made.target is not aten.bmm.default or len(made.users) != 1 or len(shape_of(node)) != 2:
        return None
    a, b = args_of(made)
    for weight, row, transposed in ((a, b, False), (b, a, True)):
        found = looked_up(weight)
        dim = 1 if transposed else 2  # of the row, which is one column or one row of a matrix
        if found is None or row.target is not aten.unsqueeze.default or shape_of(made)[dim] != 1:
            continue
        if args_of(row)[1] % 3 == dim and shape_of(node) == (shape_of(made)[0], shape_of(made)[3 - dim]):
            return Product(args_of(row)[0], found[1], found[0], transposed)
    return None


def _is_elementwise(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten" or not is_tensor(node):
        return False
    return target is aten.to.dtype or (torch.Tag.pointwise in target.tags and not is_random(node))


def _piece(node: fx.Node) -> tuple[fx.Node, int, int, bool] | None:
    """(rows, k, g, strided) of a piece of the last dimension, all g of which are equal."""
    if node.target is operator.getitem:
        split, k = args_of(node)
        if split.target is aten.split_with_sizes.default:
            source, sizes = args_of(split)[:2]
            if argument(split, "dim") % len(shape_of(source)) == 1 and len(set(sizes)) == 1:
                return source, k, len(sizes), False
    if node.target is aten.slice.Tensor:
        source = args_of(node)[0]
        dim, start, end, step = (argument(node, n) for n in ("dim", "start", "end", "step"))
        width = shape_of(source)[-1]
        start = start or 0
        if (
            dim % len(shape_of(source)) == 1
            and 0 <= start < step
            and width % step == 0
            and (end is None or end >= width)
        ):
            return source, start, step, True
    return None


# ------------------------------------------------------------------------------------------------ regions


class _NoRegion(Exception):
    """What lies between products is not row by row, or is used elsewhere."""


@dataclass(slots=True)
class _Region:
    """Nodes that become one op.  steps: what each is in the body, the rows that go in as ``%0``."""

    last: fx.Node
    ids: fx.Node
    products: Mapping[fx.Node, Product]
    rows: fx.Node | None = None
    spare: bool = False
    weights: list[fx.Node] = field(default_factory=list)
    body: list[Step] = field(default_factory=list)
    steps: dict[fx.Node, str] = field(default_factory=dict)
    hidden: list[fx.Node] = field(default_factory=list)  # nodes that are part of a step
    meets: dict[fx.Node, bool] = field(default_factory=dict)

    @classmethod
    def around(cls, last: fx.Node, products: Mapping[fx.Node, Product]) -> _Region | None:
        """The region that ends with the product ``last`` and vectors of experts that are added to it."""
        ids = products[last].ids
        while len(last.users) == 1:
            (user,) = last.users
            others = [a for a in args_of(user) if a is not last]
            if user.target is not aten.add.Tensor or user.kwargs or len(others) != 1:
                break
            found = looked_up(others[0])
            if found is None or found[1] is not ids or len(shape_of(others[0])) != 2:
                break
            last = user
        region = cls(last, ids, products)
        try:
            region.value(last)
            region.close()
        except _NoRegion:
            return None
        return region if sum(name == LINEAR for name, _, _ in region.body) > 1 else None

    def reaches(self, node: fx.Node) -> bool:
        """Whether a product lies on the way to ``node``, which is row by row."""
        if node not in self.meets:
            own = self.products.get(node)
            piece = _piece(node)
            if own is not None:
                self.meets[node] = own.ids is self.ids
            elif piece is not None:
                self.meets[node] = self.reaches(piece[0])
            else:
                inside = _is_elementwise(node) and len(shape_of(node)) == 2
                self.meets[node] = inside and any(self.reaches(n) for n in node.all_input_nodes)
        return self.meets[node]

    def value(self, node: fx.Node) -> str:
        """The name of ``node`` in the body, whose steps it comes with."""
        if node in self.steps:
            return self.steps[node]
        step: Step
        found = looked_up(node)
        if found is not None and found[1] is self.ids and len(shape_of(node)) == 2:
            step = (TAKE, (self.weight(found[0]),), {})
        elif not self.reaches(node):
            if self.rows not in (None, node) or len(shape_of(node)) != 2:
                raise _NoRegion
            self.rows = node
            return "%0"
        elif node in self.products:
            own = self.products[node]
            self.spare |= own.spare
            if node.target is not experts:
                self.hidden += _feeding(node)
            step = (LINEAR, (self.value(own.rows), self.weight(own.weight), own.transposed), {})
        elif (piece := _piece(node)) is not None:
            source, *which = piece
            if node.target is operator.getitem:
                self.hidden.append(args_of(node)[0])
            step = (PIECE, (self.value(source), *which), {})
        else:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), self.value)
            if any(isinstance(a, (list, tuple)) for a in args):
                raise _NoRegion
            step = (target_name(node), tuple(args), dict(kwargs))
        self.body.append(step)
        self.steps[node] = f"%{len(self.body)}"
        return self.steps[node]

    def weight(self, node: fx.Node) -> int:
        if node not in self.weights:
            self.weights.append(node)
        return self.weights.index(node)

    def close(self) -> None:
        """Raise where what lies inside is used outside."""
        inside = {*self.steps, *self.hidden}
        if self.rows is None or any(u not in inside for n in inside - {self.last} for u in n.users):
            raise _NoRegion
        if len({shape_of(w)[0] for w in self.weights}) != 1:
            raise _NoRegion

    def replace(self, program: Program) -> None:
        assert self.rows is not None
        args = (self.rows, self.ids, self.weights, tuple(self.body), self.spare)
        with program.graph.inserting_before(self.last):
            renamed(program, self.last, _call(program.graph, args, self.last))


def _feeding(node: fx.Node) -> list[fx.Node]:
    """What a product is written with: the bmm, and the row as a matrix."""
    made = args_of(node)[0]
    return [made, *(a for a in args_of(made) if a.target is aten.unsqueeze.default), *filter(looked_up, args_of(made))]


def _call(graph: fx.Graph, args: tuple[Any, ...], like: fx.Node) -> fx.Node:
    """`experts` with the value of ``like``; it is not traced, since how it runs depends on values."""
    node = graph.call_function(experts, args)
    node.meta.update({k: like.meta[k] for k in ("nn_module_stack", "stack_trace", "val") if k in like.meta})
    return node


# ------------------------------------------------------------------------------------------------ sorted rows


def unsort(program: Program, values: Mapping[str, Tensor]) -> None:
    """Rows that are sorted by expert, multiplied in groups and put back in order --> `experts` of rows as they were.

        e, p = sort(ids)
        y = grouped_mm(x[p // 2], w, ends of e)         -->        z = experts(repeat(x, 2), ids, [w], linear)
        z = y[inverse of p]

    In the order of the whole batch's experts rows could not be split with the batch.
    """
    for node in calls(program.graph, aten.index.Tensor):
        source, indices = args_of(node)
        order = _inverted(indices[0], values) if len(indices) == 1 and indices[0] is not None else None
        if order is None:
            continue
        with program.graph.inserting_before(node):
            plain = _Unsorted(program.graph, *order).twin(source)
        if plain is not None:
            renamed(program, node, plain)


def _inverted(index: fx.Node, values: Mapping[str, Tensor]) -> tuple[fx.Node, fx.Node] | None:
    """(sort, its permutation) where ``index`` is ``index_put(_, [permutation], arange)``."""
    if index.target is not aten.index_put.default or argument(index, "accumulate"):
        return None
    _, indices, ranks = args_of(index)[:3]
    value = values.get(ranks.name)
    if len(indices) != 1 or indices[0] is None or value is None or not is_tensor(indices[0]):
        return None
    order = indices[0]
    sort = args_of(order)[0] if order.target is operator.getitem and args_of(order)[1] == 1 else None
    if sort is None or sort.target not in (aten.sort.default, aten.sort.stable):
        return None
    keys = args_of(sort)[0]
    if len(shape_of(keys)) != 1 or argument(sort, "descending") or shape_of(index) != shape_of(keys):
        return None
    return (sort, order) if torch.equal(value, torch.arange(*shape_of(keys))) else None


@dataclass(slots=True)
class _Unsorted:
    """Values in the order of rows from before ``sort``, made where they are asked for; None for what has none."""

    graph: fx.Graph
    sort: fx.Node
    order: fx.Node
    known: dict[fx.Node, fx.Node | None] = field(default_factory=dict)

    def twin(self, node: fx.Node) -> fx.Node | None:
        if node not in self.known:
            self.known[node] = self.make(node)
        return self.known[node]

    def make(self, node: fx.Node) -> fx.Node | None:
        args = node.args
        if node.target is operator.getitem:
            source, k = args_of(node)
            if source is self.sort:
                return args_of(source)[0] if k == 0 else None
            if source.target is aten.split_with_sizes.default and argument(source, "dim") % 2 == 1:
                return self.again(source, lambda new: new_node(self.graph, operator.getitem, (new, k), like=node))
            return None
        if node.target is aten.index.Tensor and len(args_of(node)[1]) == 1:
            return self.picked(node, *args_of(node)[1])
        if target_name(node) in _GROUPED:
            return self.grouped(node)
        if not is_tensor(node) or not shape_of(node) or shape_of(node)[0] != shape_of(self.order)[0]:
            return None
        columns = node.target in (aten.unsqueeze.default, aten.slice.Tensor, aten.squeeze.dim) and is_tensor(args[0])
        if columns and argument(node, "dim") % max(map(len, (shape_of(node), shape_of(args_of(node)[0])))):
            return self.again(node)
        return self.again(node) if _is_elementwise(node) else None

    def again(self, node: fx.Node, then: Callable[[fx.Node], fx.Node] = lambda new: new) -> fx.Node | None:
        """``node`` of the twins of its operands; what has no rows stays as it is."""
        twins: dict[fx.Node, fx.Node] = {}
        dims = 2 if not is_tensor(node) else max(len(shape_of(node)), 1)
        for operand in node.all_input_nodes:
            shape = shape_of(operand)
            if (len(shape) < dims and node.target is not aten.unsqueeze.default) or shape[:1] == (1,):
                twins[operand] = operand
                continue
            new = self.twin(operand)
            if new is None:
                return None
            twins[operand] = new
        call, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: twins[n])
        return then(new_node(self.graph, node.target, call, dict(kwargs), like=node))  # type: ignore[arg-type]

    def picked(self, node: fx.Node, index: fx.Node | None) -> fx.Node | None:
        """``x[p]``, ``x[p // k]``, and vectors of sorted experts."""
        source = args_of(node)[0]
        if index is self.order:
            return source if shape_of(source)[0] == shape_of(index)[0] else None
        if index is None or not is_tensor(index):
            return None
        if index.target is aten.floor_divide.default and args_of(index)[0] is self.order:
            k = args_of(index)[1]
            if isinstance(k, int) and shape_of(source)[0] * k == shape_of(index)[0]:
                return new_node(self.graph, aten.repeat_interleave.self_int, (source, k, 0), like=node)
            return None
        ids = self.twin(index)
        return None if ids is None else new_node(self.graph, aten.index.Tensor, (source, [ids]), like=node)

    def grouped(self, node: fx.Node) -> fx.Node | None:
        rows, weight, ends = args_of(node)[:3]
        new, ids = self.twin(rows), args_of(self.sort)[0]
        if new is None or node.kwargs or len(shape_of(rows)) != 2 or len(shape_of(weight)) != 3:
            return None
        if any(a is not None for a in args_of(node)[3:]) or not self.are_ends(ends, shape_of(weight)[0]):
            return None
        flipped = weight.target is aten.transpose.int and {d % 3 for d in args_of(weight)[1:]} == {1, 2}
        step: Step = (LINEAR, ("%0", 0, not flipped), {})
        return _call(self.graph, (new, ids, [args_of(weight)[0] if flipped else weight], (step,), True), node)

    def are_ends(self, ends: fx.Node, count: int) -> bool:
        """Whether ``ends`` is ``cumsum(histc(sorted experts, count, 0, count - 1))``: where each one's rows end."""
        if ends.target is not aten.cumsum.default:
            return False
        hist = args_of(ends)[0]
        if hist.target is not aten.histc.default:
            return False
        bounds = tuple(argument(hist, n) for n in ("bins", "min", "max"))
        keys = args_of(hist)[0]
        while keys.target is aten.to.dtype:
            keys = args_of(keys)[0]
        ours = keys.target is operator.getitem and args_of(keys) == (self.sort, 0)
        return ours and bounds == (count, 0, count - 1)


__all__ = ["fuse_experts", "looked_up", "product", "unsort"]
