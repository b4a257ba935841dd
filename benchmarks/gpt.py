"""A plain GPT as one writes it by hand, and the four shapes that the step-time benchmark uses."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Shape:
    name: str
    layers: int
    hidden: int
    heads: int
    ffn: int
    vocab: int
    seq: int
    batch: int


SHAPES = (
    Shape("wide", 2, 1024, 16, 4096, 8192, 64, 4),
    Shape("tall", 4, 256, 8, 1024, 2048, 256, 16),
    Shape("vocab", 2, 256, 8, 1024, 50257, 128, 4),
    Shape("deep", 12, 256, 8, 1024, 2048, 128, 8),
)


class Block(nn.Module):
    """Pre-norm attention and MLP; q, k and v are linears of their own, as tensor parallelism by hand wants them."""

    def __init__(self, shape: Shape):
        super().__init__()
        h = shape.hidden
        self.width = h // shape.heads
        self.norm1, self.norm2 = nn.LayerNorm(h), nn.LayerNorm(h)
        self.q, self.k, self.v, self.o = (nn.Linear(h, h) for _ in range(4))
        self.up, self.down = nn.Linear(h, shape.ffn), nn.Linear(shape.ffn, h)

    def forward(self, x: Tensor) -> Tensor:
        n = self.norm1(x)
        q, k, v = (f(n).unflatten(-1, (-1, self.width)).transpose(1, 2) for f in (self.q, self.k, self.v))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(a.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.positions = nn.Embedding(shape.seq, shape.hidden)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.hidden)
        self.head = nn.Linear(shape.hidden, shape.vocab, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def make(shape: Shape) -> tuple[GPT, dict[str, Tensor]]:
    """The model and one global batch, the same on every rank."""
    torch.manual_seed(0)
    model = GPT(shape)
    ids = torch.randint(0, shape.vocab, (shape.batch, shape.seq))
    return model, {"ids": ids, "labels": ids.roll(-1, 1)}
