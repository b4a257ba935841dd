"""Layers as theory counts them: the four linears of GPT and its attention, with or without what theory leaves out.

    x -> [norm] -> qkv -> attention -> proj -> + x -> [norm] -> up -> gelu -> down -> + x

The first layer's input needs a gradient too, and so every layer of a model sends the same: what a model of three
sends beyond one of two is one layer.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from models import Case, weighted
from torch import Tensor, nn


class GPTLayer(nn.Module):
    """h: width.  shared: heads of keys and values; fewer than heads have weights of their own.  plain: without norms
    and biases."""

    def __init__(self, h: int, heads: int, shared: int, plain: bool) -> None:
        super().__init__()
        self.heads, self.shared, self.of_head = heads, shared, h // heads
        widths = (3 * h,) if shared == heads else (h, 2 * shared * self.of_head)
        self.qkv = nn.ModuleList(nn.Linear(h, width, not plain) for width in widths)
        self.proj = nn.Linear(h, h, not plain)
        self.up, self.down = nn.Linear(h, 4 * h, not plain), nn.Linear(4 * h, h, not plain)
        self.norms = nn.ModuleList(nn.Identity() if plain else nn.LayerNorm(h) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y, pieces = self.norms[0](x), (3,) if self.shared == self.heads else (1, 2)
        parts = [part for f, n in zip(self.qkv, pieces, strict=True) for part in f(y).chunk(n, -1)]
        q, k, v = (part.unflatten(-1, (-1, self.of_head)).transpose(1, 2) for part in parts)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.shared < self.heads)
        x = x + self.proj(seen.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class GPTLayers(nn.Module):
    def __init__(self, shape: tuple[int, int, int], layers: int, heads: int, shared: int, plain: bool) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(shape))
        self.layers = nn.ModuleList(GPTLayer(shape[-1], heads, shared, plain) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(x + self.shift)
        for layer in self.layers:
            x = layer(x)
        return x


def gpt_layers(shape: tuple[int, int, int], layers: int, heads: int, shared: int, plain: bool = True) -> Case:
    """x [batch, sequence, width] through ``layers``; ``shared`` of the heads have keys and values."""
    torch.manual_seed(0)
    model = GPTLayers(shape, layers, heads, shared, plain).double()
    batch = {"x": torch.randn(shape).double(), "y": torch.randn(shape).double()}
    return Case(model, batch, lambda out, batch: weighted(out, batch["y"]))
