"""`quire generate`: one completion, streamed to standard output."""

import dataclasses
import json
import sys
from typing import Annotated

import typer

from quire.cli import options as o
from quire.cli import sampling_options as s
from quire.cli.groups import new_app
from quire.cli.stream_output import show, summary
from quire.client import Client
from quire.sampling_params import SamplingParams
from svc_common.errors import InvalidArgument

app = new_app()


@app.command()
def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="What to complete; absent or - = standard input.", show_default=False)
    ] = None,
    max_tokens: s.MaxTokens = None,
    temperature: s.Temperature = None,
    top_p: s.TopP = None,
    top_k: s.TopK = None,
    seed: s.Seed = None,
    stop: s.Stop = None,
    ignore_eos: s.IgnoreEos = False,
    logprobs: Annotated[
        bool, typer.Option("--logprobs", help="With the tokens' log probabilities (for --json).")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="The whole output as one JSON object, when it is done.")
    ] = False,
    target: o.Target = o.DEFAULT_TARGET,
) -> None:
    """Complete a prompt; the text streams as it is made. Ctrl-C cancels the request.

    [bold]quire generate "def fibonacci(n):" --max-tokens 60[/bold]
    [bold]quire generate "import " --temperature 0 --json[/bold]
    [bold]echo -n "class " | quire generate --seed 7[/bold]
    """
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        stop=stop or (),
        ignore_eos=ignore_eos,
        logprobs=logprobs,
    )
    with Client(o.host_and_port(target, "--target")) as client:
        stream = client.generate_stream(_prompt(prompt), params)
        if as_json:
            typer.echo(json.dumps(dataclasses.asdict(stream.read())))
            return
        show(stream)
    summary(stream.result)


def _prompt(argument: str | None) -> str:
    if argument not in (None, "-"):
        return str(argument)
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise InvalidArgument.field("prompt", f"standard input is not UTF-8 (byte {error.start})") from None
