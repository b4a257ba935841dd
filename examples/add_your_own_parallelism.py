"""An op of one's own, the rule that says how it may be split, and a new way to split it.

    python examples/add_your_own_parallelism.py

Ranks are threads here, so that one process shows it all.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.errors import RuleError
from autopar.layout import P, R
from autopar.rules import algorithm, rule
from autopar.runtime.collectives import convert
from autopar.runtime.kernels.parts import Part
from autopar.testing import run_local

# ---------------------------------------------------------------------------------------- the op: ordinary PyTorch


@torch.library.custom_op("mylib::rms_norm", mutates_args=())
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / rms(x) * weight`` over the last dimension; here a fused kernel would be called."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


@rms_norm.register_fake
def _(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.empty_like(x)


def keep(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    x, weight, ctx.eps = inputs
    ctx.save_for_backward(x, weight)


def backward(ctx, grad: Tensor):  # type: ignore[no-untyped-def]
    x, weight = ctx.saved_tensors
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + ctx.eps)
    inner = (grad * weight * x).mean(-1, keepdim=True)
    to_weight = (grad * x * scale).flatten(0, -2).sum(0)
    return grad * weight * scale - x * inner * scale**3, to_weight, None


rms_norm.register_autograd(backward, setup_context=keep)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 10)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 10))
        self.down = nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(rms_norm(self.up(x), self.scale, 1e-6))


# ---------------------------------------------------------------------------------------- how it may be split


def add_rule() -> None:
    """Leading dimensions may be split. ``n`` may not: every number of the result depends on the whole row."""
    rule("mylib.rms_norm.default", "... n, n -> ... n", args="x w", whole="n", saves="x w")


def rms_norm_parts(x: Tensor, weight: Tensor, eps: float, *, parts: Mapping[str, Part]) -> Tensor:
    """What a rank runs that holds a part of ``n``: it adds up squares with the others, one number per row.

    The sum is pending (P) on each axis that cuts n; as R every rank's use of it sends its part of the gradient back.
    """
    n = parts["n"]
    squares = x.square().sum(-1, keepdim=True)
    for cut in n.cuts:
        squares = convert(squares, cut.axis, P, R)
    return x * torch.rsqrt(squares / n.size + eps) * weight


def add_algorithm() -> None:
    """With it ``n`` may be split too, where that is faster: the solver compares."""
    algorithm("mylib.rms_norm.default", "parts", splits="n", run=rms_norm_parts)


# ---------------------------------------------------------------------------------------- what comes of it


def loss_of(out: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    return F.mse_loss(out, batch["y"])


def main() -> None:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    model, cluster = Model(), autopar.ClusterSpec("3xcpu")
    batch = {"x": torch.randn(5, 6), "y": torch.randn(5, 3)}

    try:
        autopar.plan(model, cluster, batch, loss_fn=loss_of)
    except RuleError as error:
        print(f"Without a rule the model is refused, before anything runs:\n\n{error}\n")

    add_rule()
    add_algorithm()
    search, pins = autopar.Search(mesh={"tp": 3}), {"scale": "tp:S0"}
    plan = autopar.plan(model, cluster, batch, loss_fn=loss_of, search=search, pins=pins)
    print(f"With the rule and the algorithm, the scale pinned to be split over three ranks:\n\n{plan.explain()}")

    loss = loss_of(model(batch["x"]), batch)
    loss.backward()

    def rank(_: int) -> tuple[Tensor, dict[str, Tensor]]:
        module = autopar.parallelize(model, cluster, batch, plan=plan, loss_fn=loss_of)
        return module.forward_backward(batch), module.full_gradients()

    for found, gradients in run_local(rank, 3):
        torch.testing.assert_close(found, loss.detach())
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad)
    print(f"\nThe loss ({loss.item():.6f}) and every gradient equal one process's.")


if __name__ == "__main__":
    main()
