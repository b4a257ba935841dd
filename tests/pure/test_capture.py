"""Capture: what is refused and where, and what a captured program keeps of the user's model."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from refused import refused
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config, GPT2LMHeadModel

from autopar import api
from autopar.capture import capture, flatten_batch
from autopar.errors import CaptureError, RuleError
from autopar.program import Program, fingerprint, module_path, source_line, target_name

X = torch.arange(20.0).reshape(4, 5)


def mean_square(outputs: Tensor, batch: Any) -> Tensor:
    return outputs.square().mean()


def line_of(function: Any, text: str) -> str:
    """``file:line`` of the line of ``function`` that contains ``text``."""
    lines, first = inspect.getsourcelines(function)
    return f"{__file__}:{first + next(i for i, line in enumerate(lines) if text in line)}"


def targets(program: Program) -> list[str]:
    return [target_name(n) for n in program.graph.nodes if n.op == "call_function"]


class Layer(nn.Module):
    """A linear layer, and something done to it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


# ------------------------------------------------------------------------------------------------ refused


class _Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 3


class CustomBackward(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return _Double.apply(self.inner(x))


class Checkpointed(Layer):
    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


class ReentrantCheckpointed(Checkpointed):
    reentrant = True


class DataDependent(Layer):
    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        return y if y.sum() > 0 else -y


def test_a_custom_autograd_function_is_refused_where_it_is_called() -> None:
    """torch.export would keep its forward and lose its backward, silently."""
    with refused(CaptureError, "loses its backward in capture", line_of(CustomBackward, "_Double.apply"), "_Double"):
        capture(CustomBackward(), (X,), mean_square)


@pytest.mark.parametrize("model", [Checkpointed, ReentrantCheckpointed])
def test_a_checkpointed_region_is_refused_where_it_begins(model: type[nn.Module]) -> None:
    with refused(
        CaptureError, "checkpoint() region vanishes", line_of(Checkpointed, "return checkpoint"), "do: switch it off"
    ):
        capture(model(), (X,), mean_square)


def test_control_flow_on_values_is_refused() -> None:
    with refused(
        CaptureError, "cannot capture DataDependent", line_of(DataDependent, "if y.sum()"), "use torch.where or a mask"
    ):
        capture(DataDependent(), (X,), mean_square)


class Masked(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)[x > 3]


def test_a_size_that_depends_on_values_is_refused() -> None:
    what = "the size of a tensor depends on values where: "
    with refused(CaptureError, what + f"the model's forward, {line_of(Masked, 'self.inner')}", "multiply by the mask"):
        capture(Masked(), (X,), mean_square)
    with refused(CaptureError, what + "loss_fn", "multiply by the mask"):
        capture(Layer(), (X,), lambda out, batch: out[batch > 3].mean())


def test_a_batch_may_hold_a_tensor_and_a_view_of_it() -> None:
    """Export would take the size of the tensor for one that depends on values."""

    class Picked(nn.Module):
        def forward(self, x: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
            return x[rows, columns]

    rows = torch.tensor([2, 0, 3])
    program = capture(Picked(), {"x": X, "rows": rows[:, None], "columns": rows})
    assert "aten.index.Tensor" in targets(program)


def test_checkpointing_works_again_after_capture() -> None:
    """The traps are only set while a model is captured."""
    with refused(CaptureError, "checkpoint() region vanishes"):
        capture(Checkpointed(), (X,), mean_square)
    model = Checkpointed()
    assert torch.equal(_Double.apply(model(X)), model.inner(X) * 2)


def test_no_example_batch_is_refused() -> None:
    with refused(CaptureError, "no example batch where: Layer expected: example_inputs=, or model.dummy_inputs"):
        capture(Layer())


@pytest.mark.parametrize("name", ["dummy_inputs", "example_input_array"])
def test_the_models_own_example_batch_is_taken(name: str) -> None:
    """Hugging Face and Lightning carry one."""
    model = Layer()
    setattr(model, name, {"x": X})
    assert list(capture(model, loss_fn=mean_square).inputs.values()) == [0]


def test_a_batch_that_forward_does_not_take_is_refused() -> None:
    with refused(CaptureError, "cannot capture Layer", "check the names and the number of the batch's entries"):
        capture(Layer(), {"y": X})


def test_an_op_without_a_rule_names_op_module_and_line() -> None:
    """Never silently replicated, and the error shows how to add a rule."""

    class Strange(Layer):
        def forward(self, x: Tensor) -> Tensor:
            return torch.linalg.pinv(self.inner(x))

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.strange = Strange()

        def forward(self, x: Tensor) -> Tensor:
            return self.strange(x)

    with refused(
        RuleError,
        "no rule for aten.linalg_pinv",
        f"where: strange, {line_of(Strange, 'torch.linalg.pinv')}",
        'autopar.rules.rule("aten.linalg_pinv',
    ):
        api.understand(Outer(), (X,), mean_square)


# ------------------------------------------------------------------------------------------------ kept


class InPlace(Layer):
    """Writes in place into a value that other ops have read, and into a view."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        z = y * 2
        y += 1
        y[:, 0].mul_(3)
        self.calls += 1
        return F.relu_(y) + z


def test_in_place_ops_become_functional_and_buffers_are_returned() -> None:
    program = capture(InPlace(), (X,), mean_square)
    for node in program.graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload):
            assert not node.target._schema.is_mutable, f"{node.target} writes in place"
    assert list(program.mutations) == ["calls"]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids))


def test_tied_weights_are_one_parameter_under_both_names() -> None:
    program = capture(Tied(), (torch.arange(6).reshape(2, 3),), mean_square)
    ((node, parameter),) = program.parameters.items()
    assert parameter.names == ("embed.weight", "head.weight")
    users = {target_name(u) for u in program.nodes[node].users}
    assert users == {"aten.embedding.default", "aten.linear.default"}, "both uses on the one placeholder"


def test_frozen_parameters_stay_frozen() -> None:
    model = Layer()
    model.inner.bias.requires_grad_(False)
    found = {p.name: p.requires_grad for p in capture(model, (X,), mean_square).parameters.values()}
    assert found == {"inner.weight": True, "inner.bias": False}


def test_the_loss_sees_the_whole_batch_and_forward_only_what_it_takes() -> None:
    program = capture(Layer(), {"x": X, "y": X}, lambda out, batch: F.mse_loss(out, batch["y"]))
    assert sorted(program.inputs.values()) == [0, 1]
    assert program.loss is not None and program.node(program.loss).meta["val"].shape == ()


def test_the_models_own_loss_is_found() -> None:
    class WithLoss(Layer):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            out = self.inner(x)
            return {"loss": out.square().mean(), "out": out}

    program = capture(WithLoss(), (X,))
    assert program.loss is not None and len(program.outputs) == 2


def test_without_a_loss_the_program_is_for_inference() -> None:
    assert capture(Layer(), (X,)).loss is None


def test_a_batch_of_another_structure_is_refused() -> None:
    program = capture(Layer(), {"x": X}, mean_square)
    assert flatten_batch(program, (), {"x": X})[0] is X
    for args, kwargs, got in (
        ((X,), {}, "got: ((*,), {})"),
        ((), {"x": X, "y": X}, "'y': *"),
        ((), {"z": X}, "'z': *"),
    ):
        with refused(CaptureError, "does not have the structure that was captured", "expected: ((), {'x': *})", got):
            flatten_batch(program, args, kwargs)


def test_every_node_knows_its_module_and_line() -> None:
    bound = api.understand(nn.Sequential(Layer(), Layer()), (X,), mean_square)
    linears = [o.node for o in bound.operations if target_name(o.node) == "aten.linear.default"]
    assert [module_path(n) for n in linears] == ["0.inner", "1.inner"]
    assert source_line(linears[0]) == line_of(Layer, "return self.inner(x)")


def test_capture_is_the_same_twice() -> None:
    """A plan belongs to a program by its fingerprint: ops, shapes, arguments, names."""

    def digits(model: nn.Module, x: Tensor) -> str:
        return fingerprint(api.understand(model, (x,), mean_square).program)

    assert digits(Layer(), X) == digits(Layer(), X)
    assert digits(Layer(), X) != digits(Layer(), X[:3])


def test_the_default_cache_of_transformers_is_left_out_of_training() -> None:
    """A config as it comes: use_cache is on, and capture must not fail on the class that holds keys and values."""
    config = GPT2Config(vocab_size=11, n_positions=8, n_embd=4, n_layer=1, n_head=2)
    assert config.use_cache
    model = GPT2LMHeadModel(config).train()
    ids = torch.arange(6).reshape(2, 3)
    program = capture(model, {"input_ids": ids, "labels": ids})
    assert len(program.outputs) == 2 and model.config.use_cache
