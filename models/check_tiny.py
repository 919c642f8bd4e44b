"""Measure and sample models/tiny: held-out loss, loss by position, and what it writes."""

from pathlib import Path

import click
import torch
from rich.console import Console
from rich.table import Table
from tiny_corpus import Chat, Corpus, load_corpus
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
from transformers import PreTrainedTokenizerBase as Tokenizer

HERE = Path(__file__).parent
BUCKET = 256
TEXT_PROMPTS = ("def ", "import os\n", "class ", "import argparse\n\n\ndef main():\n")
CHAT_PROMPTS = (
    "What does `str.split` do?",
    "What does `os.path.join` do?",
    "Write the function `textwrap.dedent`.",
    "Write a function that adds two numbers.",
)


def token_losses(model: LlamaForCausalLM, ids: list[int]) -> torch.Tensor:
    """The loss of each token of a document after its first, given those before it."""
    row = torch.tensor([ids])
    with torch.inference_mode():
        logits = model(input_ids=row[:, :-1]).logits[0]
    return cross_entropy(logits, row[0, 1:], reduction="none")


def windows(ids: list[int], length: int) -> list[list[int]]:
    """A document cut into windows of a length and a token; the last one may be shorter."""
    cut = [ids[begin : begin + length + 1] for begin in range(0, len(ids), length)]
    return [window for window in cut if len(window) > 1]


def encode(texts: list[str], tokenizer: Tokenizer, length: int) -> list[list[int]]:
    """All windows of some texts."""
    encoded = [tokenizer(text, verbose=False)["input_ids"] for text in texts]
    return [window for ids in encoded for window in windows(ids, length)]


def chat_texts(corpus: Corpus, tokenizer: Tokenizer) -> list[str]:
    """The chats of a corpus as the chat template writes them."""
    return [tokenizer.apply_chat_template(chat, tokenize=False) for chat in corpus.chats]


def loss_row(model: LlamaForCausalLM, tokenizer: Tokenizer, texts: list[str]) -> list[str]:
    """Tokens, loss per token and bits per byte of some texts."""
    found = encode(texts, tokenizer, model.config.max_position_embeddings)
    losses = torch.cat([token_losses(model, window) for window in found])
    size = sum(len(text.encode()) for text in texts)
    bits = losses.sum().item() / size / torch.tensor(2.0).log().item()
    return [f"{len(losses):,}", f"{losses.mean():.3f}", f"{bits:.3f}"]


def show_losses(model: LlamaForCausalLM, tokenizer: Tokenizer, console: Console) -> None:
    """Print the loss on the held-out documents and on a like share of the training ones."""
    train, held_out = load_corpus()
    train = Corpus(train.texts[::40], train.chats[::50])
    table = Table("documents", "tokens", "loss per token", "bits per byte")
    for name, corpus in (("held out", held_out), ("trained on", train)):
        table.add_row(f"texts, {name}", *loss_row(model, tokenizer, corpus.texts))
        table.add_row(f"chats, {name}", *loss_row(model, tokenizer, chat_texts(corpus, tokenizer)))
    console.print(table)
    show_positions(model, encode([*held_out.texts, *train.texts], tokenizer, 2048), console)


def show_positions(model: LlamaForCausalLM, found: list[list[int]], console: Console) -> None:
    """Print the loss by position in those windows that fill the whole context."""
    full = [window for window in found if len(window) == 2049]
    mean = torch.stack([token_losses(model, window) for window in full]).mean(dim=0)
    table = Table("position", f"loss in {len(full)} full windows")
    for bucket, losses in enumerate(mean.split(BUCKET)):
        begin = bucket * BUCKET
        table.add_row(f"{begin} to {begin + BUCKET - 1}", f"{losses.mean():.3f}")
    console.print(table)


def write_on(model: LlamaForCausalLM, tokenizer: Tokenizer, prompt: str, heat: float, count: int) -> str:
    """What the model writes after a prompt; a heat of zero means greedily."""
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    how = {"do_sample": True, "temperature": heat} if heat else {"do_sample": False}
    torch.manual_seed(0)
    written = model.generate(**inputs, max_new_tokens=count, **how)
    return tokenizer.decode(written[0])


def as_chat(question: str, tokenizer: Tokenizer) -> str:
    """A question as the prompt of a chat."""
    chat: Chat = [{"role": "user", "content": question}]
    return tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)


def show_samples(model: LlamaForCausalLM, tokenizer: Tokenizer, console: Console, count: int) -> None:
    """Print what the model writes after each prompt, greedily and at temperature 0.8."""
    chats = [as_chat(question, tokenizer) for question in CHAT_PROMPTS]
    for prompt in [*TEXT_PROMPTS, *chats]:
        for heat in (0.0, 0.8):
            console.rule(f"temperature {heat}")
            text = write_on(model, tokenizer, prompt, heat, count)
            console.print(text, markup=False, highlight=False)


@click.command(context_settings={"show_default": True})
@click.option("--folder", type=click.Path(path_type=Path), default=HERE / "tiny")
@click.option("--losses/--no-losses", default=True, help="Measure the loss.")
@click.option("--samples/--no-samples", default=True, help="Show what the model writes.")
@click.option("--count", default=120, help="Tokens to write per sample.")
@click.option("--threads", default=2, help="CPU threads.")
def main(folder: Path, losses: bool, samples: bool, count: int, threads: int) -> None:
    """Measure and sample a model in FOLDER, computing in float32."""
    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    console = Console()
    if losses:
        show_losses(model, tokenizer, console)
    if samples:
        show_samples(model, tokenizer, console, count)


if __name__ == "__main__":
    main()
