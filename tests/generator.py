"""Random small models, as data: a list of layers over [batch, rows, width], so that a failing one can be shrunk."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from models import Case
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Layer:
    """kind: a name of ``LAYERS``.  number, flag: what the kind makes of them.  residual: x + layer(x)."""

    kind: str
    number: int = 1
    flag: bool = False
    residual: bool = False


@dataclass(frozen=True, slots=True)
class Genome:
    """tokens: embedded ones, with a vocabulary of 13; else floats.  tied: the head is the embedding's weight."""

    batch: int
    rows: int
    width: int
    layers: tuple[Layer, ...]
    tokens: bool = True
    tied: bool = False
    seed: int = 0


VOCABULARY = 13
EPS = 0.1  # of norms: rows that are nearly alike must not turn rounding into numbers


class _Linear(nn.Module):
    """Up to ``number`` times the width and down again, by an activation; with ``flag`` gated."""

    def __init__(self, width: int, number: int, flag: bool) -> None:
        super().__init__()
        self.up = nn.Linear(width, number * width * (2 if flag else 1), bias=not flag)
        self.down = nn.Linear(number * width, width)
        self.flag = flag

    def forward(self, x: Tensor) -> Tensor:
        if not self.flag:
            return self.down(F.gelu(self.up(x)))
        gate, value = self.up(x).chunk(2, -1)
        return self.down(F.silu(gate) * value)


class _Attention(nn.Module):
    """Self-attention by a fused projection; ``number`` heads; with ``flag`` causal and keys shared by all heads."""

    def __init__(self, width: int, number: int, flag: bool) -> None:
        super().__init__()
        self.heads, self.shared, self.size = number, flag, -(-width // number)
        self.qkv = nn.Linear(width, ((number + 2) if flag else 3 * number) * self.size)
        self.out = nn.Linear(number * self.size, width)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        kept = [self.heads * self.size, *([self.size] * 2 if self.shared else [self.heads * self.size] * 2)]
        q, k, v = (t.view(b, s, -1, self.size).transpose(1, 2) for t in self.qkv(x).split(kept, -1))
        if self.shared:
            k, v = (t.expand(b, self.heads, s, self.size) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.shared)
        return self.out(y.transpose(1, 2).reshape(b, s, -1))


class _Norm(nn.Module):
    """Layer norm; with ``flag`` the root mean square written out."""

    def __init__(self, width: int, number: int, flag: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, eps=EPS)
        self.flag = flag

    def forward(self, x: Tensor) -> Tensor:
        if not self.flag:
            return self.norm(x)
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * self.norm.weight + self.norm.bias


class _Batch(nn.Module):
    """Batch norm over batch and rows."""

    def __init__(self, width: int, number: int, flag: bool) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width, eps=EPS, affine=not flag)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


class _Convolution(nn.Module):
    """Along the rows, 2 * number + 1 wide; with ``flag`` by channel."""

    def __init__(self, width: int, number: int, flag: bool) -> None:
        super().__init__()
        self.conv = nn.Conv1d(width, width, 2 * number + 1, padding=number, groups=width if flag else 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.transpose(1, 2)).transpose(1, 2)


class _Pooled(nn.Module):
    """Every row is scaled by a function of the mean over rows; with ``flag`` of their maximum."""

    def __init__(self, width: int, number: int, flag: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=flag)
        self.flag = flag

    def forward(self, x: Tensor) -> Tensor:
        pooled = x.amax(1) if self.flag else x.mean(1)
        return x * torch.sigmoid(self.linear(pooled))[:, None]


class _Positions(nn.Module):
    """A table of positions is added; with ``flag`` rows are turned by angles instead (rotary)."""

    def __init__(self, width: int, number: int, flag: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(64, width)
        self.flag = flag and width % 2 == 0

    def forward(self, x: Tensor) -> Tensor:
        at = torch.arange(x.shape[1])
        if not self.flag:
            return x + self.table(at)
        half = x.shape[2] // 2
        angle = at[:, None].double() / (1.0 + torch.arange(half))
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


class _Reshaped(nn.Module):
    """Batch and rows as one dimension, through a matrix, and apart again; with ``flag`` the matrix is transposed."""

    def __init__(self, width: int, number: int, flag: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / width)
        self.flag = flag

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        return (flat @ (self.weight.t() if self.flag else self.weight)).view(x.shape)


class _Summed(nn.Module):
    """The running sum over rows; with ``flag`` the difference from the row before."""

    def __init__(self, width: int, number: int, flag: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(width))
        self.flag = flag

    def forward(self, x: Tensor) -> Tensor:
        moved = x - F.pad(x, (0, 0, 1, 0))[:, :-1] if self.flag else x.cumsum(1) / x.shape[1]
        return moved * self.scale


LAYERS: dict[str, type[nn.Module]] = {
    "linear": _Linear,
    "attention": _Attention,
    "norm": _Norm,
    "batch norm": _Batch,
    "convolution": _Convolution,
    "pooled": _Pooled,
    "positions": _Positions,
    "reshaped": _Reshaped,
    "summed": _Summed,
}


class Generated(nn.Module):
    def __init__(self, genome: Genome) -> None:
        super().__init__()
        self.genome = genome
        if genome.tokens:
            self.embedding = nn.Embedding(VOCABULARY, genome.width, padding_idx=3)
        make: Callable[[Layer], nn.Module] = lambda g: LAYERS[g.kind](genome.width, g.number, g.flag)  # type: ignore[call-arg] # noqa: E731
        self.layers = nn.ModuleList([make(g) for g in genome.layers])
        self.head = nn.Linear(genome.width, VOCABULARY, bias=not genome.tied)
        if genome.tied:
            self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        if self.genome.tokens:
            x = self.embedding(x)
        for gene, layer in zip(self.genome.layers, self.layers, strict=True):
            x = x + layer(x) if gene.residual else layer(x)
        return self.head(x)


def loss_of(out: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Some labels are ignored: every rank has another number of terms."""
    return F.cross_entropy(out.flatten(0, 1), batch["y"].flatten())


def generate(rng: random.Random) -> Genome:
    """Any model: two to six layers, sizes that divide nothing."""
    layers = []
    for _ in range(rng.randint(2, 6)):
        kind = rng.choice([*LAYERS, "linear", "attention"])
        layers.append(Layer(kind, rng.choice([1, 2, 3]), rng.random() < 0.5, rng.random() < 0.5))
    tokens = rng.random() < 0.7
    batch, rows = rng.choice([(1, 3), (1, 7), (3, 1), (3, 6), (4, 7), (5, 3), (5, 7)])  # batch norm wants two rows
    return Genome(
        batch,
        rows,
        rng.choice([4, 6, 7, 10]),
        tuple(layers),
        tokens,
        tokens and rng.random() < 0.3,
        rng.randint(0, 10**6),
    )


def build(genome: Genome) -> Case:
    torch.manual_seed(genome.seed)
    model = Generated(genome).double()
    shape = (genome.batch, genome.rows)
    x = torch.randint(0, VOCABULARY, shape) if genome.tokens else torch.randn(*shape, genome.width).double()
    y = torch.randint(0, VOCABULARY, shape)
    y.view(-1)[1::3] = -100
    return Case(model, {"x": x, "y": y}, loss_of)


def smaller(genome: Genome) -> Iterator[Genome]:
    """Models with one thing less, the largest steps first."""
    for i in range(len(genome.layers)):
        yield replace(genome, layers=genome.layers[:i] + genome.layers[i + 1 :])
    if genome.tied:
        yield replace(genome, tied=False)
    if genome.tokens and not genome.tied:
        yield replace(genome, tokens=False)
    for i, g in enumerate(genome.layers):
        for simpler in (replace(g, residual=False), replace(g, flag=False), replace(g, number=1)):
            if simpler != g:
                yield replace(genome, layers=(*genome.layers[:i], simpler, *genome.layers[i + 1 :]))
    for name in ("batch", "rows", "width"):
        for n in range(1, getattr(genome, name)):
            yield replace(genome, **{name: n})


def shrink(genome: Genome, fails: Callable[[Genome], bool], tries: int = 60) -> Genome:
    """The smallest model found that still ``fails``."""
    for _ in range(tries):
        found = next((g for g in smaller(genome) if fails(g)), None)
        if found is None:
            break
        genome = found
    return genome
