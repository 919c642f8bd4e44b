"""Train models/tiny, the built-in model, on the Python standard library.

The same seed, steps and interpreter give the same batches. A run that was stopped
goes on from its last checkpoint when it is started again with the same options.
"""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, pairwise
from math import cos, pi
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from safetensors.torch import load_file, save_file
from tiny_corpus import Chat, Corpus, load_corpus
from tiny_format import CONTEXT, END_OF_TEXT, export, new_model, train_tokenizer
from torch.nn.functional import cross_entropy
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

HERE = Path(__file__).parent
SHORT_ROWS, SHORT_LENGTH = 8, 512
LONG_ROWS, LONG_LENGTH = 2, CONTEXT
LONG_PART = 0.15
FROM_DOCUMENT_START = 0.25
WARM_UP = 200
WORD_AFTER_SPACE = re.compile(r"(?<= )(?=\w)")
CUT_SHARE = 0.02
_OPTIMIZER_STATE = ("step", "exp_avg", "exp_avg_sq")

LossFunction = Callable[[LlamaForCausalLM, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Tokens:
    """Documents laid end to end, and where each of them starts."""

    ids: np.ndarray
    starts: np.ndarray


@dataclass(frozen=True)
class Options:
    """The settings of one training run."""

    work: Path
    out: Path
    steps: int
    until: int
    peak_rate: float
    seed: int
    compiled: bool
    save_every: int
    export_every: int

    def rate(self, step: int) -> float:
        """The learning rate of a step: a linear warm-up, then a cosine down to a twentieth."""
        if step < WARM_UP:
            return self.peak_rate * (step + 1) / WARM_UP
        done = (step - WARM_UP) / max(1, self.steps - WARM_UP)
        return self.peak_rate * (0.05 + 0.95 * (1 + cos(pi * done)) / 2)

    def shape(self, step: int) -> tuple[int, int]:
        """Rows and length of a step's batch: the last part is trained at the full context."""
        if step < self.steps * (1 - LONG_PART):
            return SHORT_ROWS, SHORT_LENGTH
        return LONG_ROWS, LONG_LENGTH


def render_chat(chat: Chat, tokenizer: PreTrainedTokenizerFast) -> str:
    """A chat as the chat template writes it, without the line break after its end."""
    text = tokenizer.apply_chat_template(chat, tokenize=False)
    return text.removesuffix("\n")


def cut(text: str, rng: np.random.Generator) -> list[str]:
    """Cut a text before some of its words, where a prompt such as ``def `` would end.

    The tokenizer joins a space to the word after it, so without such cuts the model
    would never have seen what follows a prompt that ends in a space.
    """
    places = [match.start() for match in WORD_AFTER_SPACE.finditer(text)]
    chosen = [place for place in places if rng.random() < CUT_SHARE]
    return [text[begin:end] for begin, end in pairwise([0, *chosen, len(text)])]


def documents(corpus: Corpus, tokenizer: PreTrainedTokenizerFast, rng: np.random.Generator) -> Iterator[list[str]]:
    """All documents of a corpus, in pieces: first the plain texts, then the chats, uncut."""
    yield from (cut(text, rng) for text in corpus.texts)
    yield from ([render_chat(chat, tokenizer)] for chat in corpus.chats)


def encode(pieces: list[str], tokenizer: PreTrainedTokenizerFast) -> np.ndarray:
    """One document's tokens, with the end of text after them."""
    encoded = tokenizer.backend_tokenizer.encode_batch(pieces, add_special_tokens=False)
    end = tokenizer.convert_tokens_to_ids(END_OF_TEXT)
    return np.array([*chain.from_iterable(item.ids for item in encoded), end], dtype=np.int32)


def lay_out(corpus: Corpus, tokenizer: PreTrainedTokenizerFast, seed: int) -> Tokens:
    """Encode a corpus and lay its documents, shuffled, end to end."""
    rng = np.random.default_rng(seed)
    encoded = [encode(pieces, tokenizer) for pieces in documents(corpus, tokenizer, rng)]
    shuffled = [encoded[index] for index in rng.permutation(len(encoded))]
    starts = np.cumsum([0, *map(len, shuffled[:-1])])
    return Tokens(np.concatenate(shuffled), starts)


def draw_batch(tokens: Tokens, step: int, options: Options) -> torch.Tensor:
    """The batch of a step: random windows, some of which begin where a document begins."""
    rows, length = options.shape(step)
    rng = np.random.default_rng([options.seed, step])
    last = len(tokens.ids) - length - 1
    anywhere = rng.integers(0, last, rows)
    at_starts = np.minimum(rng.choice(tokens.starts, rows), last)
    begins = np.where(rng.random(rows) < FROM_DOCUMENT_START, at_starts, anywhere)
    windows = [tokens.ids[begin : begin + length + 1] for begin in begins]
    return torch.from_numpy(np.stack(windows)).long()


def batch_loss(model: LlamaForCausalLM, batch: torch.Tensor) -> torch.Tensor:
    """The mean cross-entropy of each next token of a batch."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(input_ids=batch[:, :-1], use_cache=False).logits
    return cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())


def new_optimizer(model: LlamaForCausalLM) -> torch.optim.AdamW:
    """AdamW, with weight decay on matrices alone."""
    parameters = list(model.parameters())
    matrices = [item for item in parameters if item.dim() > 1]
    vectors = [item for item in parameters if item.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)


class Trainer:
    """A model in training: its weights, its optimizer and the step it has come to."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, options: Options) -> None:
        """Start from the last checkpoint, or from random weights if there is none."""
        torch.manual_seed(options.seed)
        self.tokenizer = tokenizer
        self.options = options
        self.model = new_model(tokenizer)
        self.optimizer = new_optimizer(self.model)
        self.loss: LossFunction = batch_loss
        if options.compiled:
            self.loss = torch.compile(batch_loss, dynamic=False)
        self.step = 0
        self.checkpoint = options.work / "checkpoint.safetensors"
        if self.checkpoint.exists():
            self.resume()

    def resume(self) -> None:
        """Take weights, optimizer and step from the checkpoint."""
        tensors = load_file(self.checkpoint)
        for name, parameter in self.model.named_parameters():
            parameter.data.copy_(tensors[f"model.{name}"])
            kept = {key: tensors[f"optimizer.{name}.{key}"] for key in _OPTIMIZER_STATE}
            self.optimizer.state[parameter] = kept
        self.step = int(tensors["step"])

    def save(self) -> None:
        """Write the checkpoint, replacing the one before it in one step."""
        tensors = {"step": torch.tensor(self.step)}
        for name, parameter in self.model.named_parameters():
            tensors[f"model.{name}"] = parameter.data
            for key in _OPTIMIZER_STATE:
                tensors[f"optimizer.{name}.{key}"] = self.optimizer.state[parameter][key]
        arriving = self.checkpoint.with_suffix(".new")
        save_file(tensors, arriving)
        os.replace(arriving, self.checkpoint)

    def export(self) -> None:
        """Write the model as it stands, for others to load."""
        export(self.model, self.tokenizer, self.options.out)

    def advance(self, tokens: Tokens) -> float:
        """Train one step and return its loss."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.options.rate(self.step)
        loss = self.loss(self.model, draw_batch(tokens, self.step, self.options))
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.step += 1
        return loss.item()

    def run(self, tokens: Tokens) -> None:
        """Train until the last step asked for, saving and exporting on the way."""
        average = None
        with progress_bar(self.step, self.options.steps) as report:
            while self.step < self.options.until:
                loss = self.advance(tokens)
                average = loss if average is None else 0.98 * average + 0.02 * loss
                report(self.step, average)
                self.keep()
        self.save()
        self.export()

    def keep(self) -> None:
        """Save and export whenever a step is due for it."""
        if self.step % self.options.save_every == 0:
            self.save()
        if self.step % self.options.export_every == 0:
            self.export()


@contextmanager
def progress_bar(step: int, steps: int) -> Iterator[Callable[[int, float], None]]:
    """A bar that shows the step, the loss and the time; every 50th step also gets a line."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns) as bar:
        task = bar.add_task("training", total=steps, completed=step)

        def report(now: int, loss: float) -> None:
            bar.update(task, completed=now, description=f"loss {loss:.3f}")
            if now % 50 == 0:
                bar.console.print(f"step {now} of {steps}: loss {loss:.4f}")

        yield report


def prepare(options: Options) -> tuple[PreTrainedTokenizerFast, Tokens]:
    """Read the corpus, train the tokenizer on it, and lay the tokens out."""
    train, _ = load_corpus()
    chats = [message["content"] for chat in train.chats for message in chat]
    tokenizer = train_tokenizer([*train.texts, *chats])
    tokens = lay_out(train, tokenizer, options.seed)
    click.echo(f"{len(tokens.starts):,} documents, {len(tokens.ids):,} tokens to train on")
    return tokenizer, tokens


@click.command(context_settings={"show_default": True})
@click.option("--work", type=click.Path(path_type=Path), required=True, help="Checkpoint folder.")
@click.option("--out", type=click.Path(path_type=Path), default=HERE / "tiny", show_default=False)
@click.option("--steps", default=3600, help="Steps of 4,096 tokens.")
@click.option("--until", type=int, help="Stop early, at this step of the schedule.", show_default=False)
@click.option("--peak-rate", default=3e-3, help="Highest learning rate.")
@click.option("--seed", default=0, help="Seed of weights, order and batches.")
@click.option("--threads", default=2, help="CPU threads.")
@click.option("--compiled/--eager", default=True, help="Compile the model (needs a C++ compiler).")
@click.option("--save-every", default=200, help="Steps between checkpoints.")
@click.option("--export-every", default=400, help="Steps between exports.")
def main(work: Path, steps: int, until: int | None, threads: int, **settings: Any) -> None:
    """Train the built-in model and write it to OUT; stop and start it as you like."""
    torch.set_num_threads(threads)
    disable_progress_bar()
    work.mkdir(parents=True, exist_ok=True)
    options = Options(work=work, steps=steps, until=min(until or steps, steps), **settings)
    tokenizer, tokens = prepare(options)
    Trainer(tokenizer, options).run(tokens)


if __name__ == "__main__":
    main()
