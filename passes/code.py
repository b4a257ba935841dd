"""Print an emitted program as Python that a person can read and torchrun can run.

One line an op, the local shape and layout at the right margin.  Ranks whose shards have other sizes get a function of
their own; with even cuts there is one for all.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx

from autopar.layout import S, bounds, format_layout
from autopar.passes.emit import Emitted, emit
from autopar.passes.resolve import Resolved
from autopar.plan import Plan, format_move
from autopar.program import Program

_MARGIN = 88


def print_program(plan: Plan, resolved: Resolved, program: Program, rank: int, version: str = "0.1.0") -> str:
    """The whole file.  Its functions are those of all ranks; the header names the one that printed it."""
    mesh = resolved.mesh
    classes = rank_classes(resolved)
    variants: dict[tuple[int, ...], Emitted] = {}
    for key in itertools.product(*(sorted(set(c)) for c in classes)):
        at = tuple(c.index(k) for c, k in zip(classes, key, strict=True))
        variants[key] = emit(resolved, at, outputs=program.loss is None)
    first = next(iter(variants.values()))
    at = mesh.coordinates(rank)
    where = ", ".join(f"{a} {i}" for a, i in zip(mesh.axes, at, strict=True))
    functions = {}
    for emitted in variants.values():
        for node in emitted.graph.nodes:
            if node.op == "call_function" and node.target is not operator.getitem:
                functions[_callee(node)] = node.target
    head = [
        f"# autopar {version}   mesh {mesh}   plan {plan.id}   rank {rank}" + (f" ({where})" if where else ""),
        "# torch.save(module.full_state_dict(persistent_only=False), 'weights.pt'); torch.save(batch, 'batch.pt')",
        f"# torchrun --nproc-per-node {mesh.size} this_file.py --weights weights.pt --batch batch.pt",
        "import torch",
        "from torch import device",
        "",
        "from autopar.layout import Split",
        "from autopar.runtime.collectives import Step",
        "from autopar.runtime.kernels.parts import AxisCut, Part",
        "from autopar.runtime.standalone import Row, main",
    ]
    head += sorted(
        f"from {f.__module__} import {n}" for n, f in functions.items() if not isinstance(f, torch._ops.OpOverload)
    )
    ops = sorted(f"{n} = torch.ops.{f}" for n, f in functions.items() if isinstance(f, torch._ops.OpOverload))
    head += ["", *ops]
    body = []
    names = {key: "forward" if len(variants) == 1 else "forward_" + "_".join(map(str, key)) for key in variants}
    for key, emitted in variants.items():
        body += ["", "", *print_function(names[key], emitted)]
    body += ["", "", *_print_prelude(program)]
    body += ["", "", *_print_weights(resolved), "", f"CLASSES = {classes!r}"]
    body += ["FORWARD = {" + ", ".join(f"{k!r}: {n}" for k, n in names.items()) + "}"]
    body += [
        "",
        'if __name__ == "__main__":',
        "    main(",
        f"        axes={mesh.as_dict()!r},",
        "        rows=WEIGHTS,",
        f"        inputs={first.inputs!r},",
        f"        leaves={dict(program.inputs)!r},",
        f"        buffers={dict(program.buffers)!r},",
        f"        mutations={tuple(program.mutations)!r},",
        f"        uses={first.uses!r},",
        "        constants=constants,",
        "        forward=lambda at: FORWARD[tuple(c[i] for c, i in zip(CLASSES, at))],",
        "    )",
    ]
    return "\n".join(head + body) + "\n"


def rank_classes(resolved: Resolved) -> list[list[int]]:
    """For each axis, the class of each coordinate: ranks of one class hold equal sizes of everything."""
    uneven: dict[int, set[int]] = {}
    layouts = [lay for s in resolved.strategies.values() for lay in (*s.ins, *s.outs)]
    for moves in resolved.moves.values():
        layouts += [lay for m in moves for lay in (m.layout, m.result)]
    for stored in resolved.parameters.values():
        layouts += [stored.stored, stored.held, stored.accumulated]
        ways = (*stored.gather, *stored.use, *stored.reduce, *stored.final)
        layouts += [lay for m in ways for lay in (m.layout, m.result)]
    for layout in layouts:
        for axis, (state, n) in enumerate(zip(layout, resolved.mesh.sizes, strict=True)):
            if isinstance(state, S) and state.N % n:
                uneven.setdefault(axis, set()).add(state.N)
    out = []
    for axis, n in enumerate(resolved.mesh.sizes):
        seen: dict[tuple[int, ...], int] = {}
        row = []
        for index in range(n):
            sizes = []
            for units in sorted(uneven.get(axis, ())):
                low, high = bounds(S(0, 1, units, 1), n, index)
                sizes.append(high - low)
            row.append(seen.setdefault(tuple(sizes), len(seen)))
        out.append(row)
    return out


def print_function(name: str, emitted: Emitted) -> list[str]:
    """``def name(axes..., rng, gradients, weights..., inputs...)``, one line an op."""
    nodes = list(emitted.graph.nodes)
    comments = {c.name: c for c in emitted.conversions}
    lines = [f"def {name}({', '.join(n.name for n in nodes if n.op == 'placeholder')}):"]
    taken = {_callee(n) for n in nodes if n.op == "call_function"}  # a local name must not hide a function
    names = {n.name: f"{n.name}_0" for n in nodes if n.name in taken}
    for node in nodes:
        if node.op == "call_function":
            note, collective = "", comments.get(node.name)
            if collective is not None:
                note = f"{collective.kind} {_bytes(collective.forward_bytes or collective.backward_bytes)}"
            lines.append(_margin(f"    {names.get(node.name, node.name)} = {_call(node, names)}", node, note))
        elif node.op == "output":
            lines.append(f"    return {_format(node.args[0], names)}")
    return lines


def _margin(code: str, node: fx.Node, note: str) -> str:
    shape = node.meta.get("shape")
    local = "" if shape is None else str(list(shape))
    parts = [local, node.meta.get("layout", ""), note or node.meta.get("where", "")]
    return f"{code:<{_MARGIN}}  # {'   '.join(p for p in parts if p)}".rstrip()


def _callee(node: fx.Node) -> str:
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        packet = target._schema.name.split("::")[1]
        overload = target._overloadname
        return packet if overload == "default" else f"{packet}_{overload}"
    return target.__name__  # type: ignore[union-attr]


def _call(node: fx.Node, names: Mapping[str, str]) -> str:
    if node.target is operator.getitem:
        return f"{_format(node.args[0], names)}[{node.args[1]}]"
    return f"{_callee(node)}({_arguments(node, names)})"


def _arguments(node: fx.Node, names: Mapping[str, str]) -> str:
    args = [_format(a, names) for a in node.args] + [f"{k}={_format(v, names)}" for k, v in node.kwargs.items()]
    return ", ".join(args)


def _format(arg: Any, names: Mapping[str, str]) -> str:
    """An argument as Python; ``names`` gives nodes other names than their own."""
    if isinstance(arg, fx.Node):
        return names.get(arg.name, arg.name)
    if isinstance(arg, dict):
        return "{" + ", ".join(f"{k!r}: {_format(v, names)}" for k, v in arg.items()) + "}"
    if isinstance(arg, (tuple, list)):
        items = ", ".join(_format(a, names) for a in arg)
        if hasattr(arg, "_fields"):
            return f"{type(arg).__name__}({items})"
        return f"[{items}]" if isinstance(arg, list) else f"({items}{',' if len(arg) == 1 else ''})"
    if isinstance(arg, float) and not math.isfinite(arg):
        return f"float('{arg}')"
    return repr(arg)


def _bytes(n: float) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if n >= size:
            return f"{n / size:.3g} {unit}"
    return f"{n:.0f} B"


def _print_prelude(program: Program) -> list[str]:
    """``def constants(buffers)``: position tables, rotary tables and masks, from the buffers."""
    lines = ["def constants(buffers):"]
    assert program.prelude is not None
    for node in program.prelude.nodes:
        if node.op == "placeholder":
            if node.name in program.buffers:
                lines.append(f"    {node.name} = buffers[{program.buffers[node.name]!r}]")
            else:
                value = program.lifted[node.name]
                lines.append(f"    {node.name} = torch.tensor({_format(value.tolist(), {})}, dtype={value.dtype})")
        elif node.op == "call_function":
            lines.append(f"    {node.name} = torch.ops.{node.target}({_arguments(node, {})})")
        else:
            items = ", ".join(f"{k!r}: {v.name}" for k, v in node.args[0].items())
            lines.append(f"    return {{{items}}}")
    return lines


def _print_weights(resolved: Resolved) -> list[str]:
    axes = resolved.mesh.axes

    def moves(given: Iterable[Any]) -> str:
        return repr(tuple(format_move(m, axes) for m in given))

    lines = ["# names, stored layout, layout during the step, layout in which the gradient accumulates", "WEIGHTS = ["]
    for node, parameter in resolved.analysis.program.parameters.items():
        w = resolved.parameters[node]
        texts = [format_layout(lay, axes) for lay in (w.stored, w.held, w.accumulated)]
        trained = resolved.analysis.values[node].differentiable
        lines.append(
            f"    Row({parameter.names!r}, {node!r}, {parameter.shape!r}, {texts[0]!r}, {texts[1]!r}, {texts[2]!r},"
            f" {moves(w.gather)}, {moves(w.final)}, {trained}),"
        )
    return [*lines, "]"]
