"""Real English for the examples, without a download: the language reference that every Python carries.

    topics --prose()--> paragraphs --split()--> train and held-out text --word_pieces()--> tokens --batches()--> batches

Everything here is a pure function of the Python version, so every rank computes the same data and nothing is shared.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

Batch = dict[str, Tensor]

# 1,051 is prime: no number of ranks divides it, so the examples show that splitting a vocabulary unevenly is exact.
VOCABULARY = 1051
END, MASK = "\n", "[MASK]"  # END closes every paragraph, and opens the text
_TYPOGRAPHY = str.maketrans({"‘": "'", "’": "'", "“": '"', "”": '"', "–": "-", "—": "-", "…": "..."})
_MARKUP = re.compile(r">>>|::=|^\+-|^\||\*\*\*|===|---")


@dataclass(frozen=True, slots=True)
class Text:
    """The text, cut into word pieces. Held-out paragraphs occur nowhere in the training text."""

    tokenizer: Tokenizer
    train_text: str
    held_out_text: str
    train: Tensor  # [tokens], int64
    held_out: Tensor

    @property
    def vocabulary(self) -> int:
        return int(self.tokenizer.get_vocab_size())

    @property
    def mask(self) -> int:
        return int(self.encode(MASK))

    def encode(self, text: str) -> Tensor:
        return torch.tensor(self.tokenizer.encode(text).ids)

    def decode(self, tokens: Sequence[int] | Tensor) -> str:
        return str(self.tokenizer.decode([int(token) for token in tokens], skip_special_tokens=False))


def load() -> Text:
    train_text, held_out_text = (END + END.join(part) + END for part in split(prose()))
    tokenizer = word_pieces(train_text)
    train, held_out = (torch.tensor(tokenizer.encode(part).ids) for part in (train_text, held_out_text))
    text = Text(tokenizer, train_text, held_out_text, train, held_out)
    # Nats per character mean something only if no character is lost on the way to tokens.
    if text.decode(held_out) != held_out_text:
        raise ValueError("the held-out text contains characters that the training text does not")
    return text


def prose() -> list[str]:
    """The paragraphs of the reference that are sentences, each once (sections repeat each other), on one line each."""
    from pydoc_data.topics import topics

    blocks = (block for name in sorted(topics) for block in re.split(r"\n\s*\n", topics[name].translate(_TYPOGRAPHY)))
    lines = (re.sub(r"^(\*|\d+\.|\[\d+\]) ", "", " ".join(block.split())) for block in blocks)
    return list(dict.fromkeys(line for line in lines if _is_prose(line)))


def _is_prose(line: str) -> bool:
    """Sentences end like sentences and are nearly all letters; code, grammar, tables and headings are not."""
    if len(line.split()) < 6 or line[-1] not in ".:;?!)" or not line.isascii() or _MARKUP.search(line):
        return False
    return sum(char.isalpha() or char == " " for char in line) > 0.85 * len(line)


def split(paragraphs: Sequence[str], every: int = 10) -> tuple[list[str], list[str]]:
    """Train and held-out: every 10th paragraph, so that both cover all topics."""
    train = [paragraph for index, paragraph in enumerate(paragraphs, start=1) if index % every]
    return train, list(paragraphs[every - 1 :: every])


def word_pieces(text: str) -> Tokenizer:
    """Byte-pair encoding within words; a piece that begins a word carries the blank, so decoding is exact."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=[MASK], show_progress=False)
    tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
    return tokenizer


def batches(tokens: Tensor, batch: int, length: int, steps: int, seed: int = 0) -> Iterator[Batch]:
    """Random windows of the text, the same on every rank. labels = input_ids: a causal model shifts them itself."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        starts = torch.randint(len(tokens) - length + 1, (batch, 1), generator=generator)
        window = tokens[starts + torch.arange(length)]
        yield {"input_ids": window, "labels": window.clone()}


def windows(tokens: Tensor, batch: int, length: int) -> Iterator[Batch]:
    """The text in order. A window begins with the last token of the one before it, so that a causal model predicts
    every token but the first exactly once; the places left over in the last batch are labelled -100."""
    rows = -(-(len(tokens) - 1) // (length - 1))
    rows = -(-rows // batch) * batch
    padded = tokens.new_full((rows * (length - 1) + 1,), -100)
    padded[: len(tokens)] = tokens
    for labels in padded.unfold(0, length, length - 1).split(batch):
        yield {"input_ids": labels.clamp(min=0), "labels": labels.clone(memory_format=torch.contiguous_format)}


def bigram_nats_per_character(text: Text) -> float:
    """What counting pairs of characters reaches on the held-out text (add-one smoothing): the figure to beat."""
    alphabet = len(set(text.train_text))
    pairs = Counter(zip(text.train_text, text.train_text[1:], strict=False))
    firsts = Counter(text.train_text[:-1])
    held_out = list(zip(text.held_out_text, text.held_out_text[1:], strict=False))
    return -sum(math.log((pairs[a, b] + 1) / (firsts[a] + alphabet)) for a, b in held_out) / len(held_out)
