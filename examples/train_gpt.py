"""Plans a small GPT for the ranks at hand, trains it on real English, and lets it write.

    torchrun --standalone --nproc-per-node 4 examples/train_gpt.py       # or `make demo`
    python examples/train_gpt.py                                         # one process: the same losses

The model is an ordinary one from transformers, and nothing below says how it is split.
"""

import copy
from itertools import islice
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import autopar
import text_data
from text_data import END, Text
from training import RANK, Recipe, arguments, eager_losses, fit, parallel, report, say


def gpt(vocabulary: int, length: int, layers: int, hidden: int, heads: int) -> GPT2LMHeadModel:
    """A GPT-2 of this size, the same on every rank. Without dropout: the corpus is small, the run short."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=vocabulary,
        n_positions=length,
        n_embd=hidden,
        n_layer=layers,
        n_head=heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,  # keys and values of earlier tokens serve generation one token at a time only
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # transformers would guess the same from the class's name, with a warning
    return model


@torch.no_grad()
def nats_per_character(model: torch.nn.Module, text: Text, batch: int, length: int) -> float:
    """Loss on the held-out text per character, so that it does not depend on how text is cut into word pieces."""
    nats = 0.0
    for window in text_data.windows(text.held_out, batch, length):
        predicted = int((window["labels"][:, 1:] != -100).sum())
        nats += float(model(**window).loss) * predicted
    return nats / (len(text.held_out_text) - len(END))  # the first token, END, is given


@torch.no_grad()
def write(model: torch.nn.Module, text: Text, prompt: str, batch: int, length: int) -> list[str]:
    """Continues the prompt once per row of a batch, up to the end of the paragraph or of the model's window."""
    generator = torch.Generator().manual_seed(0)  # every rank draws the same tokens
    start = text.encode(END + prompt)
    tokens = torch.zeros(batch, length, dtype=torch.int64)
    tokens[:, : len(start)] = start
    for position in range(len(start), length):
        logits = model(input_ids=tokens, labels=tokens).logits[:, position - 1]
        tokens[:, position] = torch.multinomial((logits / 0.6).softmax(-1), 1, generator=generator)[:, 0]
    return [text.decode(row).split(END)[1] for row in tokens]


def main() -> None:
    args = arguments(__doc__, steps=740, batch=32, length=64, layers=2, hidden=128, heads=4, lr=3e-3, out="demo_output")
    out, recipe = Path(args.out), Recipe(args.steps, args.lr)
    text = text_data.load()
    batches = list(text_data.batches(text.train, args.batch, args.length, args.steps))
    model = gpt(text.vocabulary, args.length, args.layers, args.hidden, args.heads)
    # Rank 0 alone first does what everyone does without a compiler; the others wait for it in their first collective.
    expected = eager_losses(copy.deepcopy(model), islice(batches, args.check), recipe) if RANK == 0 else []

    module = parallel(model, batches[0], args.plan, out)
    engine = autopar.Engine(
        module, optimizer=recipe.optimizer, scheduler=recipe.scheduler, max_grad_norm=recipe.max_grad_norm
    )
    numbers = fit(engine, batches, recipe, expected)

    reached, bigram = (
        nats_per_character(module, text, args.batch, args.length),
        text_data.bigram_nats_per_character(text),
    )
    say(f"Held-out text: {reached:.3f} nats per character; counting pairs of characters reaches {bigram:.3f}.")
    for sample in write(module, text, "The", args.batch, args.length)[:4]:
        say(f"  > {sample}")
    report(out, nats_per_character=reached, bigram_nats_per_character=bigram, **numbers)


if __name__ == "__main__":
    main()
