"""`quire chat`: a conversation on the terminal, or one question."""

import sys
from typing import Annotated

import typer

from quire.cli import options as o
from quire.cli import sampling_options as s
from quire.cli.groups import new_app
from quire.cli.stream_output import show, summary
from quire.client import Client
from quire.sampling_params import SamplingParams
from svc_common.errors import QuireError

app = new_app()


@app.command()
def chat(
    text: Annotated[
        str | None, typer.Argument(help="One question; absent = a conversation.", show_default=False)
    ] = None,
    system: Annotated[
        str | None, typer.Option(help="System message that starts the conversation.", show_default=False)
    ] = None,
    max_tokens: s.MaxTokens = None,
    temperature: s.Temperature = None,
    top_p: s.TopP = None,
    top_k: s.TopK = None,
    seed: s.Seed = None,
    stop: s.Stop = None,
    ignore_eos: s.IgnoreEos = False,
    target: o.Target = o.DEFAULT_TARGET,
) -> None:
    """Talk to the model. A conversation reads one line per turn; Ctrl-C ends an answer, Ctrl-D or /exit the conversation.

    [bold]quire chat[/bold]
    [bold]quire chat "What does itertools.chain do?" --max-tokens 80[/bold]
    """
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        stop=stop or (),
        ignore_eos=ignore_eos,
    )
    turns = [{"role": "system", "content": system}] if system else []
    with Client(o.host_and_port(target, "--target")) as client:
        if text is None:
            _converse(client, turns, params)
        else:
            _answer(client, [*turns, {"role": "user", "content": text}], params)


def _answer(client: Client, turns: list[dict[str, str]], params: SamplingParams) -> str:
    stream = client.chat_stream(turns, params)
    show(stream)
    summary(stream.result)
    return stream.result.text


def _converse(client: Client, turns: list[dict[str, str]], params: SamplingParams) -> None:
    """Reads, answers, remembers. A failed or interrupted answer leaves the conversation as it was before the question."""
    while (question := _read_turn()) is not None:
        if not question.strip():
            continue
        asked = [*turns, {"role": "user", "content": question}]
        try:
            answer = _answer(client, asked, params)
        except KeyboardInterrupt:
            continue
        except QuireError as error:
            sys.stderr.write(f"error: {error.message}\n")
            continue
        turns = [*asked, {"role": "assistant", "content": answer}]


def _read_turn() -> str | None:
    try:
        line = input("> " if sys.stdin.isatty() else "")
    except (EOFError, KeyboardInterrupt):
        return None
    return None if line.strip() == "/exit" else line
