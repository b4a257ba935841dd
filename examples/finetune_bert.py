"""Trains BERT to fill in masked word pieces of real English, on the ranks at hand.

    torchrun --standalone --nproc-per-node 4 examples/finetune_bert.py
    python examples/finetune_bert.py                                     # one process: the same losses

The number of masked pieces differs from rank to rank; the loss is still the mean over the whole batch. To start from
trained weights, put your own `BertForMaskedLM.from_pretrained(folder)` and its tokenizer in place of `bert` and `load`.
"""

import copy
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import torch
from transformers import BertConfig, BertForMaskedLM

import autopar
import text_data
from text_data import Batch, Text
from training import RANK, Recipe, arguments, eager_losses, fit, parallel, report, say


def bert(vocabulary: int, length: int, layers: int, hidden: int, heads: int) -> BertForMaskedLM:
    """A BERT of this size, the same on every rank. The wide initial weights suit so narrow a model."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=vocabulary,
        max_position_embeddings=length,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        initializer_range=0.1,
        pad_token_id=None,  # nothing is padded, and piece 0, the default, is one to learn
    )
    return BertForMaskedLM(config)


def masked(batches: Iterable[Batch], text: Text, seed: int) -> Iterator[Batch]:
    """BERT's task: of 15 % of the pieces 80 % are hidden, 10 % replaced and 10 % kept, and these are to be told."""
    generator = torch.Generator().manual_seed(seed)
    for batch in batches:
        tokens, shape = batch["input_ids"], batch["input_ids"].shape
        chosen = (torch.rand(shape, generator=generator) < 0.15) & (batch["labels"] != -100)
        fate = torch.rand(shape, generator=generator)
        random = torch.randint(text.vocabulary, shape, generator=generator)
        shown = torch.where(fate < 0.8, text.mask, torch.where(fate < 0.9, random, tokens))
        yield {"input_ids": torch.where(chosen, shown, tokens), "labels": torch.where(chosen, tokens, -100)}


@torch.no_grad()
def evaluate(model: torch.nn.Module, text: Text, batch: int, length: int) -> tuple[float, float]:
    """Loss and accuracy on the masked pieces of the held-out text."""
    nats, right, count = 0.0, 0, 0
    for window in masked(text_data.windows(text.held_out, batch, length), text, seed=1):
        output, labels = model(**window), window["labels"]
        asked = labels != -100
        nats += float(output.loss) * int(asked.sum())
        right += int((output.logits.argmax(-1) == labels)[asked].sum())
        count += int(asked.sum())
    return nats / count, right / count


def main() -> None:
    # Short windows and one layer: with more of either, BERT takes thousands of steps to find that neighbours matter.
    args = arguments(
        __doc__, steps=740, batch=128, length=16, layers=1, hidden=128, heads=4, lr=3e-3, out="demo_output/bert"
    )
    out, recipe = Path(args.out), Recipe(args.steps, args.lr, weight_decay=0.01, beta2=0.98)
    text = text_data.load()
    batches = list(masked(text_data.batches(text.train, args.batch, args.length, args.steps), text, seed=0))
    model = bert(text.vocabulary, args.length, args.layers, args.hidden, args.heads)
    expected = eager_losses(copy.deepcopy(model), islice(batches, args.check), recipe) if RANK == 0 else []

    module = parallel(model, batches[0], args.plan, out)
    engine = autopar.Engine(
        module, optimizer=recipe.optimizer, scheduler=recipe.scheduler, max_grad_norm=recipe.max_grad_norm
    )
    before = evaluate(module, text, args.batch, args.length)
    numbers = fit(engine, batches, recipe, expected)
    after = evaluate(module, text, args.batch, args.length)

    for when, (loss, accuracy) in (("before", before), ("after", after)):
        say(f"Masked pieces of the held-out text, {when}: loss {loss:.3f}, {accuracy:.1%} right.")
    report(out, loss_before=before[0], accuracy_before=before[1], loss=after[0], accuracy=after[1], **numbers)


if __name__ == "__main__":
    main()
