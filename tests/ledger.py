"""The byte ledger: what a step really sends, counted at torch's collectives, what emission lists, and what is held.

plan = decided(bound, (2, 2), {"linear": ("stream b0 with k", "stream n with k")}, {"line.weight": "x:S1 y:S0"})
sent(case, bound, plan)     # Bytes(forward={"x": 4608, "y": 2304}, backward={...}), of all ranks together
listed(bound, plan)         # the same, from what the emitter and the plan say
held(case, bound, plan)     # [Held(weights=432, saved=5504), ...], of every rank
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from unittest import mock

from equality import forced
from models import Case
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar import api
from autopar.layout import I, Layout, Move, Shape, conversion, default_path, dual, format_layout, forward_layout
from autopar.layout import parse_layout as parse
from autopar.passes.emit import emit
from autopar.passes.fold import expand
from autopar.passes.resolve import Resolved, resolve
from autopar.plan import ParameterDecision, Plan, format_move
from autopar.rules.analysis import Bound
from autopar.runtime.module import ParallelModule
from autopar.runtime.parameters import Gradients
from autopar.solver import sample as sampling
from autopar.testing import run_local
from autopar.verify.traffic import undone_bytes
from autopar.verify.wire import REGATHERED, counted


class Bytes(NamedTuple):
    """Bytes by axis.  again: gathers of weights that the backward pass repeats, of all axes."""

    forward: dict[str, int]
    backward: dict[str, int]
    again: int = 0

    @property
    def total(self) -> int:
        return sum(self.forward.values()) + sum(self.backward.values()) + self.again


def sent(case: Case, bound: Bound, plan: Plan) -> Bytes:
    """What all ranks together send in one step, counted where torch's collectives are called."""
    with counted() as by_axis:

        def count(rank: int) -> tuple[Counter[str], Counter[str]]:
            module: ParallelModule = api.build(case.model, bound, plan)
            loss = module.loss(case.batch)
            forward = by_axis(module)
            loss.backward()
            return forward, by_axis(module)

        ranks = run_local(count, plan.world_size)
    forward, whole = (sum((r[k] for r in ranks), Counter()) for k in (0, 1))
    again = whole.pop(REGATHERED, 0)
    return Bytes(_rounded(forward), _rounded(whole - forward), round(again))


def _rounded(counted: Mapping[str, float]) -> dict[str, int]:
    """Parts of all ranks are whole bytes together: (n - 1) / n of a byte is not."""
    return {axis: round(n) for axis, n in sorted(counted.items()) if round(n)}


def listed(bound: Bound, plan: Plan) -> Bytes:
    """What emission lists for all ranks, and the moves of weights and gradients that are made once a step."""
    resolved = resolve(plan, bound, *expand(plan, bound))
    forward, backward = Counter[str](), Counter[str]()
    for at in resolved.mesh.all_coordinates():
        for c in emit(resolved, at, outputs=False).conversions:
            forward[c.axis] += c.forward_bytes  # type: ignore[assignment]
            backward[c.axis] += c.backward_bytes  # type: ignore[assignment]
        for name, stored in resolved.parameters.items():
            for counter, moves in ((forward, stored.gather), (backward, stored.final)):
                for move in moves if counter is forward or bound.values[name].differentiable else ():
                    counter[resolved.mesh.axes[move.axis]] += _bytes(resolved, at, name, move)  # type: ignore[assignment]
    return Bytes(_rounded(forward), _rounded(backward))


def _bytes(resolved: Resolved, at: tuple[int, ...], name: str, move: Move) -> float:
    nbytes = undone_bytes(resolved, at, name, move)
    return conversion(move.layout[move.axis], move.target, resolved.mesh.sizes[move.axis], nbytes).forward_bytes


class Held(NamedTuple):
    """Elements of float64 on a rank: of weights, and of what autograd keeps beside them, every storage once."""

    weights: int
    saved: int


def held(case: Case, bound: Bound, plan: Plan) -> list[Held]:
    """What every rank holds when a forward pass is over."""
    here, pack = threading.local(), Gradients.pack

    def keep(self: Gradients, x: Tensor) -> Any:
        packed = pack(self, x)
        if isinstance(packed, Tensor):
            here.saved[packed.untyped_storage()._cdata] = packed.untyped_storage().nbytes()
        return packed

    def job(rank: int) -> Held:
        module: ParallelModule = api.build(case.model, bound, plan)
        weights = [p.to_local() if isinstance(p, DTensor) else p for p in module.parameters()]
        here.saved = {}
        loss = module.loss(case.batch)
        own = {w.untyped_storage()._cdata for w in weights}
        saved = sum(n for storage, n in here.saved.items() if storage not in own)
        assert loss.requires_grad  # and so everything that was kept still lives: no storage has come twice
        return Held(sum(w.numel() for w in weights), saved // 8)

    with mock.patch.object(Gradients, "pack", keep):
        return run_local(job, plan.world_size)


# ------------------------------------------------------------------------------------------------ plans


def decided(
    bound: Bound, sizes: tuple[int, ...], choices: Mapping[str, tuple[str, ...]], stored: Mapping[str, str]
) -> Plan:
    """A plan that leaves nothing to chance: choices of all ops by name, and stored layouts of weights by name (whole
    where there is none).  Weights are gathered and gradients reduced once a step, values take the shortest way."""
    assert {op.name for op in sampling.contract(bound, sizes).operations} == set(choices)

    def path(
        shape: Shape, src: Layout, dst: Layout, sizes: Sequence[int], rng: random.Random, differentiable: bool
    ) -> list[Move]:
        return list(default_path(shape, src, dst, sizes))

    def parameter(name: str, shape: Shape, *others: Any) -> ParameterDecision:
        _, _, (used,), mesh, *_ = others
        kept, held = parse(stored.get(name, I), mesh.axes, shape), forward_layout(used)
        made = tuple(dual(s) for s in used)
        gather, final = (
            tuple(format_move(m, mesh.axes) for m in default_path(shape, *ends, sizes))
            for ends in ((kept, held), (made, kept))
        )
        texts = [format_layout(lay, mesh.axes) for lay in (kept, held, made)]
        return ParameterDecision(name, texts[0], texts[1], texts[2], gather, (), (), final)

    changed: dict[str, Any] = {"random_path": path, "_random_parameter": parameter}
    with mock.patch.multiple(sampling, **changed):
        return forced(bound, sizes, choices)
