"""Tiny models with sizes that divide nothing: vocabulary 53, batch 5, sequence 7, three heads, padding, dropout.

transformers is imported where it is needed: every process of a test pays for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, BATCH, SEQUENCE = 53, 5, 7


@dataclass(frozen=True, slots=True)
class Case:
    """A model in float64 and training mode, one global batch (keyword arguments), and its loss where it has none."""

    model: nn.Module
    batch: dict[str, Tensor]
    loss_fn: Callable[[Any, Any], Tensor] | None = None


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(7, 10)
        self.down = nn.Linear(10, 13)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


def mlp() -> Case:
    torch.manual_seed(0)
    batch = {"x": torch.randn(BATCH, 7).double(), "y": torch.randn(BATCH, 13).double()}
    return Case(MLP().double(), batch, lambda out, batch: F.mse_loss(out, batch["y"]))


class Line(nn.Module):
    """One linear; the gradient of its input is that of ``shift``."""

    def __init__(self, shape: tuple[int, ...], out: int, bias: bool) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(shape))
        self.line = nn.Linear(shape[-1], out, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.line(x + self.shift)


def line(
    shape: tuple[int, ...],
    out: int,
    bias: bool = True,
    loss: Callable[[Tensor, Tensor], Tensor] = F.mse_loss,
) -> Case:
    """A linear on x [shape], whose loss is ``loss(y, the batch's "y")``."""
    torch.manual_seed(0)
    batch = {"x": torch.randn(shape).double(), "y": torch.randn(*shape[:-1], out).double()}
    return Case(Line(shape, out, bias).double(), batch, lambda y, batch: loss(y, batch["y"]))


def weighted(y: Tensor, weights: Tensor) -> Tensor:
    """A loss that is a sum: its gradient is ``weights``."""
    return (y * weights).sum()


def tokens(padded: bool, length: int = SEQUENCE) -> dict[str, Tensor]:
    """Token ids and labels, some of them ignored; with padding on either side where ``padded``."""
    ids = torch.randint(0, VOCABULARY, (BATCH, length))
    labels = ids.clone()
    labels[0, 3:] = -100
    batch = {"input_ids": ids, "labels": labels}
    if padded:
        mask = torch.ones(BATCH, length, dtype=torch.long)
        mask[1, length - 3 :] = 0
        mask[0, :2] = 0
        batch["attention_mask"] = mask
    return batch


def language_model(cls: Callable[[Any], nn.Module], config: Any, padded: bool, length: int = SEQUENCE) -> Case:
    """An unmodified model of transformers, with torch's attention."""
    torch.manual_seed(0)
    config._attn_implementation = "sdpa"
    return Case(cls(config).double().train(), tokens(padded, length))


def gpt2(heads: int = 4, padded: bool = False, dropout: float = 0.0, layers: int = 2, length: int = SEQUENCE) -> Case:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=max(16, length),
        n_embd=4 * heads,
        n_layer=layers,
        n_head=heads,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    return language_model(GPT2LMHeadModel, config, padded, length)


def bert(padded: bool = True, dropout: float = 0.0, layers: int = 2, length: int = SEQUENCE) -> Case:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=layers,
        num_attention_heads=4,
        intermediate_size=24,
        max_position_embeddings=16,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    return language_model(BertForMaskedLM, config, padded, length)


# four heads of queries on two of keys and values
GROUPED: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
    "use_cache": False,
}


def llama(padded: bool = False, layers: int = 2, length: int = SEQUENCE) -> Case:
    """Grouped queries: four heads of queries on two of keys and values."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(num_hidden_layers=layers, **GROUPED)
    return language_model(LlamaForCausalLM, config, padded, length)


def mistral(window: int = 3, layers: int = 1, length: int = SEQUENCE) -> Case:
    """Grouped queries that see no further back than ``window`` positions."""
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(num_hidden_layers=layers, sliding_window=window, **GROUPED)
    return language_model(MistralForCausalLM, config, False, length)


class CrossAttention(nn.Module):
    """Queries of one sequence attend to another, part of which is padding."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(12, 12) for _ in range(4))

    def forward(self, x: Tensor, memory: Tensor, is_token: Tensor) -> Tensor:
        def heads(y: Tensor) -> Tensor:
            return y.unflatten(-1, (3, 4)).transpose(1, 2)

        q, k, v = heads(self.q(x)), heads(self.k(memory)), heads(self.v(memory))
        seen = F.scaled_dot_product_attention(q, k, v, is_token[:, None, None])
        return x + self.out(seen.transpose(1, 2).flatten(-2))


def cross_attention(length: int = SEQUENCE, other: int = 10) -> Case:
    torch.manual_seed(0)
    batch = {
        "x": torch.randn(BATCH, length, 12).double(),
        "memory": torch.randn(BATCH, other, 12).double(),
        "is_token": torch.rand(BATCH, other) > 0.3,
        "y": torch.randn(BATCH, length, 12).double(),
    }
    batch["is_token"][3] = False
    return Case(CrossAttention().double(), batch, lambda out, batch: F.mse_loss(out, batch["y"]))


def mixtral(
    implementation: str = "batched_mm", experts: int = 4, layers: int = 1, padded: bool = False, **options: Any
) -> Case:
    """A mixture of experts, two for each token, that computes its experts as ``implementation`` says."""
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {**GROUPED, "intermediate_size": 10, "num_local_experts": experts, "num_experts_per_tok": 2}
    config = MixtralConfig(num_hidden_layers=layers, **sizes, **options)
    config._experts_implementation = implementation
    return language_model(MixtralForCausalLM, config, padded)


def gated(x: Tensor, ids: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Rows times the matrices of their experts, as batched products."""
    a, b = torch.bmm(up[ids], x.unsqueeze(-1)).squeeze(-1).chunk(2, -1)
    return torch.bmm(down[ids], (F.silu(a) * b).unsqueeze(-1)).squeeze(-1)


class Mixture(nn.Module):
    """A linear layer, and experts of which every token goes to two."""

    def __init__(self, width: int, inner: int, count: int = 4) -> None:
        super().__init__()
        self.first, self.router = nn.Linear(width, width), nn.Linear(width, count)
        self.up = nn.Parameter(torch.randn(count, 2 * inner, width))
        self.down = nn.Parameter(torch.randn(count, width, inner))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        shares, ids = self.router(h).softmax(-1).topk(2)
        rows = gated(h.repeat_interleave(2, 0), ids.reshape(-1), self.up, self.down)
        return (rows * shares.reshape(-1, 1)).view(len(x), 2, -1).sum(1)


def mixture() -> Case:
    torch.manual_seed(0)
    batch = {"x": torch.randn(7, 6).double(), "y": torch.randn(7, 6).double()}
    return Case(Mixture(6, 5).double(), batch, lambda out, batch: F.mse_loss(out, batch["y"]))


class Block(nn.Module):
    """Two convolutions and a shortcut, with the in-place ops of torchvision's."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outside)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module | None = None
        if stride != 1 or inside != outside:
            self.shortcut = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        y += x if self.shortcut is None else self.shortcut(x)
        return self.relu(y)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 8, 7, 2, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        )
        self.blocks = nn.Sequential(Block(8, 8, 1), Block(8, 16, 2))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.flatten(self.pool(self.blocks(self.stem(x))), 1))


def resnet() -> Case:
    torch.manual_seed(0)
    batch = {"x": torch.randn(BATCH, 3, 20, 20).double(), "y": torch.randint(0, 10, (BATCH,))}
    return Case(ResNet().double().train(), batch, lambda out, batch: F.cross_entropy(out, batch["y"]))


MODELS: dict[str, Callable[[], Case]] = {
    "mlp": mlp,
    "gpt2": gpt2,
    "gpt2-3-heads": lambda: gpt2(heads=3, layers=1),
    "gpt2-padded-dropout": lambda: gpt2(padded=True, dropout=0.3, layers=1),
    "bert": bert,
    "bert-unpadded": lambda: bert(padded=False, layers=1),
    "bert-dropout": lambda: bert(dropout=0.3, layers=1),
    "llama": llama,
    "llama-padded": lambda: llama(padded=True, layers=1),
    "resnet": resnet,
}
DROPOUT = {"gpt2-padded-dropout", "bert-dropout"}
