"""What single decisions cost on one mesh: seconds and bytes of ops, of conversions, of parameters.

The integer program and the pricing of a finished plan both take their figures here, so that they can only differ in
how they add them up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from autopar.cluster import ClusterSpec
from autopar.cost_model import collectives
from autopar.cost_model.compute import ELEMENT_OPS, copy_seconds, op_seconds, optimizer_seconds
from autopar.cost_model.hardware import Device, Link, axis_links, device
from autopar.cost_model.memory import OPTIMIZERS, ParameterBytes, parameter_bytes
from autopar.cost_model.profiler import Profile, op_key
from autopar.layout import I, Layout, P, R, S, Shape, State, conversion, dual, largest_local_numel, local_shape
from autopar.program import target_name
from autopar.rules.analysis import Operation, Value
from autopar.rules.derive import Choice, Strategy, algorithm_of, is_paired
from autopar.rules.notation import Algorithm
from autopar.rules.work import factor_size, local_flops, local_sum
from autopar.solver.gemm import gemm_shape, is_gemm, short_name

# An algorithm that combines parts of statistics (softmax, normalisation) reduces one number per row this many times.
_STATISTICS_FORWARD, _STATISTICS_BACKWARD = 2, 1

# Copies of the whole value that a bundled collective makes: an all-reduce lays tensors end to end; a reduce-scatter
# sorts them by rank, receives and adds up; an all-gather lays out what it receives and takes it apart.
_COPIES = {
    "local": 0.0,
    "permute": 2.0,
    "all-reduce": 1.0,
    "reduce-scatter": 2.5,
    "all-gather": 2.0,
    "all-to-all": 2.0,
}
BUCKET = 25e6  # bytes of gradients that are reduced at once, as in torch's DistributedDataParallel


class OpPrice(NamedTuple):
    """Seconds of one op on the fullest rank, and seconds and bytes of what it communicates itself.

    communication, communication_back: what holds up its forward and backward pass.  hidden: what goes on while it
    computes.
    """

    forward: float
    backward: float
    communication: float
    communication_back: float
    hidden: float
    sent: float
    transient: float  # bytes of its inputs and outputs, and of what passes through
    inside: float = 0.0  # bytes that autograd keeps beside inputs and outputs

    @property
    def seconds(self) -> float:
        return self.forward + self.backward + self.communication + self.communication_back


class MovePrice(NamedTuple):
    """One conversion: seconds forward and backward, bytes sent per rank."""

    forward: float
    backward: float
    sent: float

    @property
    def seconds(self) -> float:
        return self.forward + self.backward


@dataclass(frozen=True, slots=True)
class Prices:
    """Figures of one mesh on one cluster, for one optimizer and precision.

    microbatches: how often a step repeats its forward and backward pass; ops and values are those of one microbatch.
    """

    sizes: tuple[int, ...]
    links: tuple[Link, ...]
    device: Device
    optimizer: str
    precision: str
    microbatches: int = 1
    profile: Profile | None = None
    _numel: dict[tuple[Shape, Layout], int] = field(default_factory=dict, repr=False, compare=False)
    _seconds: dict[tuple[str, float, int], float] = field(default_factory=dict, repr=False, compare=False)

    @property
    def overlap(self) -> float:
        """Part of compute behind which communication in the background hides."""
        measured = None if self.profile is None else self.profile.overlap
        return self.device.overlap if measured is None else measured

    # ---------------------------------------------------------------------------------------- sizes

    def numel(self, shape: Shape, layout: Layout) -> int:
        """Elements on the fullest rank."""
        key = (shape, layout)
        known = self._numel.get(key)
        if known is None:
            known = self._numel[key] = largest_local_numel(shape, layout, self.sizes)
        return known

    def width(self, dtype: torch.dtype) -> int:
        """Bytes per element of an activation: floating ones are computed in the precision asked for."""
        mixed = self.precision in ("bf16", "fp16")
        return min(dtype.itemsize, 2) if mixed and dtype.is_floating_point else dtype.itemsize

    def nbytes(self, value: Value, layout: Layout) -> float:
        return self.numel(value.shape, layout) * self.width(value.dtype)

    def compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        if dtype.is_floating_point and dtype.itemsize >= 4 and self.precision in ("bf16", "fp16"):
            return torch.bfloat16 if self.precision == "bf16" else torch.float16
        return dtype

    def parameter_bytes(self, value: Value) -> ParameterBytes:
        """Bytes per element of a weight; a frozen one has neither gradient nor state."""
        optimizer = self.optimizer if value.differentiable else "none"
        if self.precision in ("bf16", "fp16"):
            sizes = parameter_bytes(optimizer, self.precision)
            return sizes if value.differentiable else ParameterBytes(2, 2, 0, True)
        width = value.dtype.itemsize
        trained = width if value.differentiable else 0
        return ParameterBytes(width * (1 + OPTIMIZERS[optimizer]), width, trained, True)

    # ---------------------------------------------------------------------------------------- ops

    def op(self, op: Operation, strategy: Strategy, ins: Sequence[Value], outs: Sequence[Value]) -> OpPrice:
        """Price of running ``op`` by ``strategy``.

        Backward is two forwards where arithmetic counts (the gradients of two operands) and moves twice the bytes
        elsewhere (reads the gradient and what was saved, writes a gradient).
        """
        rule = op.rule
        sizes_in = [self.nbytes(v, layout) for v, layout in zip(ins, strategy.ins, strict=True)]
        sizes_out = [self.nbytes(v, layout) for v, layout in zip(outs, strategy.outs, strict=True)]
        held = sum(sizes_in) + sum(sizes_out)
        steps, passing = self._passing(op, strategy, ins, outs)
        # what passes through is read as well, and what a product adds up is read and written again at every step
        moved = held + passing + 2 * (steps - 1) * sum(sizes_out)
        floating = next((v.dtype for v in (*outs, *ins) if v.dtype.is_floating_point), outs[0].dtype)
        gemm, shape = is_gemm(op), None
        if gemm:
            flops = local_flops(rule, strategy, self.sizes)
            shape = gemm_shape(op, strategy, self.sizes, steps)
        else:
            elements = max(self.numel(v.shape, layout) for v, layout in self._largest(strategy, ins, outs))
            flops = elements * ELEMENT_OPS.get(short_name(op), 1)
        forward = op_seconds(
            flops,
            moved,
            self.compute_dtype(floating),
            self.device,
            gemm=gemm,
            shape=shape,
            largest_new=max(sizes_out),
        )
        forward += (steps - 1) * self.device.launch_overhead
        has_backward = any(op.type.differentiable_outs)
        backward = 2 * forward if has_backward else 0.0
        measured = None
        if self.profile is not None and not any(c.partner for c in strategy.choices):  # else shards do not say the work
            measured = self.profile.ops.get(local_key(op, strategy, ins, outs, self.sizes))
        if measured is not None:
            forward, backward = measured[0], measured[1] if has_backward else 0.0
        own = self._communication(op, strategy, ins, outs, forward, backward)
        transient = held + 2 * passing / steps  # of what passes through a rank holds this step's and the next one's
        kept = local_sum(rule.inner, rule, strategy, self.sizes) * self.width(outs[0].dtype) if has_backward else 0.0
        return OpPrice(forward, backward, *own, transient * (2 if has_backward else 1), kept)

    def _passing(
        self, op: Operation, strategy: Strategy, ins: Sequence[Value], outs: Sequence[Value]
    ) -> tuple[int, float]:
        """(steps in which an algorithm that overlaps works, bytes of all that passes through a rank in them).

        Two axes that walk one factor walk the common refinement of their cuts.
        """
        steps, passing = 1, 0.0
        for axis, choice in enumerate(strategy.choices):
            algorithm, n = algorithm_of(op.rule, choice), self.sizes[axis]
            if algorithm is None or not algorithm.overlaps or choice.partner is None:
                continue
            steps += n - math.gcd(steps, n)
            passing += sum(
                self.undone(("in", i), strategy, ins, outs, axis)
                for i, dims in enumerate(op.rule.ins)
                if is_paired(dims, choice)
            )
        return steps, passing

    def ideal(self, op: Operation, ins: Sequence[Value], outs: Sequence[Value], ranks: int) -> float:
        """Seconds that no split over ``ranks`` can beat: arithmetic and bytes shared evenly, at full rates."""
        moved = sum(v.nbytes * self.width(v.dtype) / v.dtype.itemsize for v in (*ins, *outs))
        floating = next((v.dtype for v in (*outs, *ins) if v.dtype.is_floating_point), outs[0].dtype)
        gemm = is_gemm(op)
        flops = sum(c * math.prod(op.rule.sizes[f] for f in factors) for c, factors in op.rule.flops) if gemm else 0.0
        forward = op_seconds(
            flops / ranks, moved / ranks, self.compute_dtype(floating), self.device, gemm=gemm, shape=None
        )
        return forward * (3 if any(op.type.differentiable_outs) else 1)

    def _largest(self, strategy: Strategy, ins: Sequence[Value], outs: Sequence[Value]) -> list[tuple[Value, Layout]]:
        return [*zip(outs, strategy.outs, strict=True), *zip(ins[:1], strategy.ins[:1], strict=True)]

    def _communication(
        self,
        op: Operation,
        strategy: Strategy,
        ins: Sequence[Value],
        outs: Sequence[Value],
        forward: float,
        backward: float,
    ) -> tuple[float, float, float, float]:
        """Of what algorithms send: seconds that hold up the forward and the backward pass, hidden seconds, bytes.

        Where communication overlaps, all but the first of as many steps as the axis has ranks hides behind the others'
        compute, as far as the device lets it, and no compute hides two axes'.
        """
        held, hidden, sent, cover = [0.0, 0.0], 0.0, 0.0, [self.overlap * forward, self.overlap * backward]
        for axis, choice in enumerate(strategy.choices):
            algorithm = algorithm_of(op.rule, choice)
            if algorithm is None:
                continue
            n, seconds = self.sizes[axis], [0.0, 0.0]
            messages: list[tuple[collectives.Kind, float, tuple[float, float]]]
            if algorithm.traffic is None:
                messages = [] if algorithm.lacking == P else self._statistics(op, strategy, algorithm)
            else:
                messages = [
                    (t.kind, self.undone(t.tensor, strategy, ins, outs, axis), (t.forward, t.backward))
                    for t in algorithm.traffic(op.type, choice, n)
                ]
            for kind, nbytes, times in messages:
                one = self.collective(kind, nbytes, axis)
                seconds = [s + one * t for s, t in zip(seconds, times, strict=True)]
                sent += collectives.sent_bytes(kind, nbytes, n) * sum(times)
            for k in range(2):
                behind = min(seconds[k], cover[k]) * (n - 1) / n if algorithm.overlaps else 0.0
                held[k] += seconds[k] - behind
                cover[k] -= behind
                hidden += behind
        return held[0], held[1], hidden, sent

    def _statistics(
        self, op: Operation, strategy: Strategy, algorithm: Algorithm
    ) -> list[tuple[collectives.Kind, float, tuple[float, float]]]:
        """All-reduces of one number per row of the first input."""
        rows = math.prod(
            factor_size(op.rule, strategy, f, self.sizes, (0,) * len(self.sizes))
            for dims in op.rule.ins[0]
            for f in dims
            if f not in algorithm.splits
        )
        back = _STATISTICS_BACKWARD if any(op.type.differentiable_outs) else 0
        return [("all-reduce", rows * 4, (_STATISTICS_FORWARD, back))]

    def undone(
        self, tensor: tuple[str, int], strategy: Strategy, ins: Sequence[Value], outs: Sequence[Value], axis: int
    ) -> float:
        """Bytes on the fullest rank of an op's input or output, ("in", i) or ("out", j), with ``axis`` undone."""
        where, i = tensor
        value, layout = (ins[i], strategy.ins[i]) if where == "in" else (outs[i], strategy.outs[i])
        part = self.nbytes(value, layout)
        whole = self.nbytes(value, (*layout[:axis], I, *layout[axis + 1 :]))
        return max(whole, part * self.sizes[axis]) if isinstance(layout[axis], S) else whole

    # ---------------------------------------------------------------------------------------- communication

    def collective(self, kind: collectives.Kind, nbytes: float, axis: int) -> float:
        key = (kind, nbytes, axis)
        known = self._seconds.get(key)
        if known is None:
            n = self.sizes[axis]
            measured = None if self.profile is None else self.profile.collective(kind, nbytes, n)
            known = collectives.seconds(kind, nbytes, n, self.links[axis]) if measured is None else measured
            self._seconds[key] = known
        return known

    def move(self, value: Value, layout: Layout, axis: int, target: State) -> MovePrice:
        """Price of converting an activation on one axis; one without a gradient has no backward."""
        return self.move_of(value, axis, layout[axis], target, self._undone(value.shape, layout, axis, target))

    def move_of(self, value: Value, axis: int, source: State, target: State, elements: int) -> MovePrice:
        """As `move`, of so many elements with the axis undone."""
        whole = elements * self.width(value.dtype)
        made = conversion(source, target, self.sizes[axis], whole)
        forward = self.collective(made.forward, whole, axis)
        if not value.differentiable:
            return MovePrice(forward, 0.0, made.forward_bytes)
        backward = self.collective(made.backward, whole, axis)
        return MovePrice(forward, backward, made.forward_bytes + made.backward_bytes)

    def weight_move(self, value: Value, layout: Layout, axis: int, target: State, *, gradient: bool) -> MovePrice:
        """Price of one conversion of a weight, or of a gradient, which has no backward of its own.

        Gradients are reduced in buckets: each pays its share of a bucket's latency.  Whatever is bundled is copied on
        the way (``_COPIES``).
        """
        elements = self._undone(value.shape, layout, axis, target)
        return self.weight_move_of(value, axis, layout[axis], target, elements, gradient=gradient)

    def weight_move_of(
        self, value: Value, axis: int, source: State, target: State, elements: int, *, gradient: bool
    ) -> MovePrice:
        """As `weight_move`, of so many elements with the axis undone."""
        sizes = self.parameter_bytes(value)
        whole = elements * (sizes.gradient if gradient else sizes.held)
        made = conversion(source, target, self.sizes[axis], whole)
        seconds = self.collective(made.forward, whole, axis)
        if gradient and seconds:
            unshared = collectives.steps(made.forward, self.sizes[axis]) * self.links[axis].latency
            seconds -= unshared * (1 - min(1.0, whole / BUCKET))
        seconds += copy_seconds(_COPIES[made.forward] * whole, self.device)
        return MovePrice(seconds, 0.0, made.forward_bytes)

    def _undone(self, shape: Shape, layout: Layout, axis: int, target: State) -> int:
        source = layout[axis]
        undone = (*layout[:axis], I, *layout[axis + 1 :])
        whole = self.numel(shape, undone)
        if isinstance(source, S) or isinstance(target, S):  # the fullest rank's share decides where cuts are uneven
            n = self.sizes[axis]
            part = max(
                self.numel(shape, (*layout[:axis], s, *layout[axis + 1 :]))
                for s in (source, target)
                if isinstance(s, S)
            )
            return max(whole, part * n)
        return whole

    def update(self, value: Value, stored: Layout) -> float:
        """Seconds of the optimizer on one weight."""
        if not value.differentiable or self.optimizer == "none":
            return 0.0
        launches = 1 if self.device.name == "cpu" else 0  # on a GPU one launch serves many tensors
        return optimizer_seconds(self.numel(value.shape, stored), launches, self.optimizer, self.device)

    def weight_memory(self, value: Value, stored: Layout, held: Layout, accumulated: Layout) -> float:
        """Bytes of one weight with its gradient and optimizer state on one rank."""
        sizes = self.parameter_bytes(value)
        total = sizes.stored * self.numel(value.shape, stored) + sizes.gradient * self.numel(value.shape, accumulated)
        return total + (0 if sizes.aliased and stored == held else sizes.held * self.numel(value.shape, held))


def prices(
    cluster: ClusterSpec,
    sizes: Sequence[int],
    *,
    optimizer: str = "adamw",
    precision: str = "fp32",
    microbatches: int = 1,
    profile: Profile | None = None,
) -> Prices:
    """The figures for a mesh of ``sizes``.

    profile: what was measured, which goes before the catalogue.  Raises PlanError for an unknown optimizer, precision
    or kind of device.
    """
    parameter_bytes(optimizer, precision)  # refuses unknown names
    links = axis_links(cluster, sizes)
    return Prices(tuple(sizes), links, device(cluster), optimizer, precision, microbatches, profile)


def local_key(
    op: Operation, strategy: Strategy, ins: Sequence[Value], outs: Sequence[Value], sizes: Sequence[int]
) -> str:
    """The key under which a profile knows what the first rank runs of ``op``."""
    first = (0,) * len(sizes)

    def local(values: Sequence[Value], layouts: Sequence[Layout]) -> list[tuple[Shape, torch.dtype]]:
        return [(local_shape(v.shape, s, sizes, first), v.dtype) for v, s in zip(values, layouts, strict=True)]

    return op_key(target_name(op.node), local(ins, strategy.ins), local(outs, strategy.outs))


def saved_inputs(op: Operation) -> tuple[int, ...]:
    """Inputs that autograd keeps: of a product only those whose partner has a gradient."""
    if not any(op.type.differentiable_outs):
        return ()
    kept = []
    for where, i in op.rule.saves:
        if where == "in":
            partners = [j for term in op.rule.form if i in term and len(term) > 1 for j in term if j != i]
            if not partners or any(op.type.differentiable_ins[j] for j in partners):
                kept.append(i)
    return tuple(kept)


def saved_outputs(op: Operation) -> tuple[int, ...]:
    if not any(op.type.differentiable_outs):
        return ()
    return tuple(k for where, k in op.rule.saves if where == "out")


def full_states(layout: Layout) -> Layout:
    """A weight's layout as its holder sees it: shards, and I wherever it is whole."""
    return tuple(s if isinstance(s, S) else I for s in layout)


def gradient_states(layout: Layout) -> Layout:
    """Layout of the gradient that a use in ``layout`` makes, with R, which is free to call I, as I."""
    return tuple(I if dual(s) == R else dual(s) for s in layout)


__all__ = [
    "Choice",
    "MovePrice",
    "OpPrice",
    "Prices",
    "full_states",
    "gradient_states",
    "prices",
    "saved_inputs",
    "saved_outputs",
]
