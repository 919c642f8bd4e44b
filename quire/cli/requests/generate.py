"""`quire generate`: one completion, streamed to standard output."""

import dataclasses
import json
import sys
from typing import Annotated

import typer

from quire.cli.groups import new_app
from quire.cli.options import access as a
from quire.cli.options import common as o
from quire.cli.options import sampling as s
from quire.cli.options.gathering import gathers
from quire.cli.requests.stream_output import show, summary
from quire.client.connections import Credentials
from quire.client.sampling_params import SamplingParams
from quire.client.sync_client import Client, RequestOptions
from svc_common.errors import InvalidArgument

app = new_app()


@app.command()
@gathers(credentials=a.credentials)
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
    min_p: s.MinP = None,
    repetition_penalty: s.RepetitionPenalty = None,
    presence_penalty: s.PresencePenalty = 0.0,
    frequency_penalty: s.FrequencyPenalty = 0.0,
    bad_word: s.BadWords = None,
    n: s.N = 1,
    best_of: s.BestOf = None,
    beam_width: s.BeamWidth = None,
    length_penalty: s.LengthPenalty = 1.0,
    json_schema: s.JsonSchema = None,
    regex: s.Regex = None,
    choice: s.Choice = None,
    grammar: s.Grammar = None,
    logprobs: Annotated[
        bool, typer.Option("--logprobs", help="Include the tokens' log probabilities (for --json).")
    ] = False,
    top_logprobs: Annotated[
        int | None,
        typer.Option(
            help="Include this many of the likeliest tokens at each position (for --json).", show_default=False
        ),
    ] = None,
    prompt_logprobs: Annotated[
        int | None, typer.Option(help="The same for the prompt; 0 = its own tokens only.", show_default=False)
    ] = None,
    model: s.Model = "",
    as_json: Annotated[
        bool, typer.Option("--json", help="The whole output as one JSON object, when it is done.")
    ] = False,
    target: o.Target = o.DEFAULT_TARGET,
    *,
    credentials: Credentials,
) -> None:
    """Complete a prompt; the text streams as it is made. Ctrl-C cancels the request.

    [bold]quire generate "def fibonacci(n):" --max-tokens 60[/bold]
    [bold]quire generate "import " --temperature 0 --json[/bold]
    [bold]echo -n "class " | quire generate --seed 7[/bold]
    [bold]quire generate "def " -n 4 --beam-width 4[/bold]
    [bold]quire generate "A person: " --json-schema person.json[/bold]
    """
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        stop=stop or (),
        ignore_eos=ignore_eos,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        bad_words=bad_word,
        n=n,
        best_of=_num_sequences(best_of, beam_width),
        use_beam_search=beam_width is not None,
        length_penalty=length_penalty,
        structured_outputs=s.structured_outputs(json_schema, regex, choice, grammar),
        logprobs=top_logprobs or logprobs,
        prompt_logprobs=prompt_logprobs,
    )
    with Client(o.host_and_port(target, "--target"), credentials=credentials) as client:
        stream = client.generate_stream(_prompt(prompt), params, options=RequestOptions(model=model))
        if as_json:
            typer.echo(json.dumps(dataclasses.asdict(stream.read())))
            return
        show(stream, num_choices=n)
    summary(stream.result)


def _num_sequences(best_of: int | None, beam_width: int | None) -> int | None:
    if best_of is not None and beam_width is not None:
        raise InvalidArgument.field("best_of", "is how many beams there are in a beam search; give --beam-width alone")
    return best_of if beam_width is None else beam_width


def _prompt(argument: str | None) -> str:
    if argument not in (None, "-"):
        return str(argument)
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise InvalidArgument.field("prompt", f"standard input is not UTF-8 (byte {error.start})") from None
