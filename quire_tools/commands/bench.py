"""`quire bench`: what a running service does under load."""

import asyncio
import contextlib
import importlib
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from quire import extras
from quire.cli.groups import new_app
from quire.cli.options import access as a
from quire.cli.options import common as o
from quire.cli.options.gathering import gathers
from quire.client.connections import Credentials
from quire.client.sync_client import Client
from quire.hub import checkpoint_folder
from quire.local_stack.stack import LocalStack
from quire_tools.bench import dataset as files
from quire_tools.bench import figures
from quire_tools.bench.measure import summarise
from quire_tools.bench.provenance import provenance
from quire_tools.bench.session import LoadPlan, Planner
from quire_tools.bench.targets import GrpcTarget, LoadTarget
from quire_tools.bench.workloads import Length, LoadShape, Tokenizer, WorkloadKind, plan
from svc_common.errors import ConfigError, FailedPrecondition

app = new_app()

_RANDOM, _SHARED = "random", "prefix-shared"
_LOAD, _REQUESTS, _TARGET = "Load", "Requests", "Target"
_DEFAULT_HTTP = f"http://127.0.0.1:{o.DEFAULT_HTTP_PORT}"


def length_option(text: str) -> Length:
    """Parse a length option. Usage error if it is malformed."""
    try:
        return Length.parse(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


@app.command()
@gathers(credentials=a.credentials)
def bench(
    requests: Annotated[
        int, typer.Option("--requests", "-n", min=1, help="Requests to send.", rich_help_panel=_LOAD)
    ] = 64,
    rate: Annotated[
        float | None,
        typer.Option(
            min=1e-6,
            help="Requests per second, at random times, whether or not earlier ones have ended. Default: all at once.",
            show_default=False,
            rich_help_panel=_LOAD,
        ),
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(
            "--concurrency",
            "-c",
            min=1,
            help="Instead: number of clients, each of which sends its next request when the last one has ended.",
            show_default=False,
            rich_help_panel=_LOAD,
        ),
    ] = None,
    warmup: Annotated[
        int, typer.Option(min=0, help="Requests sent first and not measured.", rich_help_panel=_LOAD)
    ] = 4,
    seed: Annotated[
        int, typer.Option(help="Equal seeds make equal requests at equal times.", rich_help_panel=_LOAD)
    ] = 0,
    timeout_s: Annotated[
        float, typer.Option(min=0.1, help="Seconds after which a request fails.", rich_help_panel=_LOAD)
    ] = 600.0,
    dataset: Annotated[
        str,
        typer.Option(
            metavar="random|prefix-shared|FILE",
            help="Random prompts, random prompts with shared prefixes, or a JSONL file of prompts.",
            rich_help_panel=_REQUESTS,
        ),
    ] = _RANDOM,
    prompt_len: Annotated[
        Length,
        typer.Option(
            parser=length_option,
            metavar="N|lognormal:MEDIAN:SIGMA[:MIN:MAX]",
            help="Tokens of random prompts.",
            rich_help_panel=_REQUESTS,
        ),
    ] = "64",  # type: ignore[assignment]
    output_len: Annotated[
        Length,
        typer.Option(
            parser=length_option,
            metavar="N|lognormal:MEDIAN:SIGMA[:MIN:MAX]",
            help="Output tokens.",
            rich_help_panel=_REQUESTS,
        ),
    ] = "32",  # type: ignore[assignment]
    prefix_len: Annotated[int, typer.Option(min=1, help="Tokens of a shared prefix.", rich_help_panel=_REQUESTS)] = 256,
    num_prefixes: Annotated[
        int, typer.Option(min=1, help="Number of different prefixes.", rich_help_panel=_REQUESTS)
    ] = 4,
    ignore_eos: Annotated[
        bool,
        typer.Option(
            "--ignore-eos/--no-ignore-eos",
            help="Generate exactly the output length, ignoring end-of-sequence.",
            rich_help_panel=_REQUESTS,
        ),
    ] = True,
    door: Annotated[
        str, typer.Option(metavar="grpc|openai", help="Which API of the gateway.", rich_help_panel=_TARGET)
    ] = "grpc",
    target: o.Target = o.DEFAULT_TARGET,
    url: Annotated[
        str,
        typer.Option(
            help="URL for --door openai: Quire's, or any endpoint with OpenAI's API.", rich_help_panel=_TARGET
        ),
    ] = _DEFAULT_HTTP,
    chat: Annotated[
        bool, typer.Option("--chat", help="Chats instead of completions (--door openai).", rich_help_panel=_TARGET)
    ] = False,
    model: Annotated[
        str,
        typer.Option(help="Model or adapter to use. Default: the model.", show_default=False, rich_help_panel=_TARGET),
    ] = "",
    up: Annotated[
        str,
        typer.Option(
            metavar="FOLDER|ORG/NAME",
            help="Start the three services with this model, measure them, and stop them.",
            show_default=False,
            rich_help_panel=_TARGET,
        ),
    ] = "",
    as_json: o.AsJson = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Draw the figures (needs matplotlib).", show_default=False)
    ] = None,
    *,
    credentials: Credentials,
) -> None:
    """Measure a running service under load: times to the first token and between tokens, throughput, errors by reason.

    Times count from the moment a request was due, so that a late client cannot flatter the service:
    TTFT to the first token, TPOT per token after it, ITL between messages, latency to the end.
    Exit status 1 when any request failed.

    [bold]quire bench[/bold]                                             64 requests at once
    [bold]quire bench --rate 8 -n 200 --plot load.png[/bold]             8 requests per second
    [bold]quire bench -c 16 --prompt-len lognormal:256:0.6[/bold]        16 clients
    [bold]quire bench --dataset prefix-shared --prefix-len 512[/bold]    what the prefix cache does
    [bold]quire bench --dataset prompts.jsonl --json[/bold]              your prompts, one JSON string per line
    [bold]quire bench --door openai --url http://127.0.0.1:8000[/bold]   the same over HTTP
    [bold]quire bench --up models/tiny[/bold]                            without a running service
    """
    _check(door, rate, concurrency, chat=chat)
    if plot is not None:
        extras.require("--plot", "bench")
    kind = WorkloadKind.SHARED_PREFIX if dataset == _SHARED else WorkloadKind.POISSON if rate else WorkloadKind.BATCH
    shape = LoadShape(kind, requests, prompt_len, output_len, seed, rate, prefix_len, num_prefixes)
    with _service(up, target, url, door) as address, contextlib.ExitStack() as held:
        measured = _target(door, address, model, credentials, ignore_eos=ignore_eos, timeout_s=timeout_s, chat=chat)
        tokenizer = _tokenizer(held, door, address, model, credentials)
        load = LoadPlan(
            [shape], measured, _planner(dataset, tokenizer), warmup, None, sys.stderr.isatty(), num_clients=concurrency
        )
        runs = asyncio.run(load.run())
    summary = {name: summarise(records) for name, records in runs.items()}
    result = {
        "target": measured.name,
        "dataset": dataset,
        "lengths_in": "tokens" if tokenizer else "words",
        "concurrency": concurrency,
        "shape": asdict(shape),
        "summary": summary[kind.value],
    }
    _show(result, as_json=as_json)
    if plot is not None:
        figures.plot(runs, plot)
    if summary[kind.value]["failed"]:
        raise typer.Exit(1)


def _check(door: str, rate: float | None, concurrency: int | None, *, chat: bool) -> None:
    """Raises ConfigError for options that do not go together."""
    if door not in ("grpc", "openai"):
        raise ConfigError(f"--door: {door!r} is none; use grpc or openai", reason="INVALID_SETTING")
    if rate is not None and concurrency is not None:
        raise ConfigError(
            "--rate sends at set times and --concurrency waits for answers: give one of them", reason="INVALID_SETTING"
        )
    if chat and door == "grpc":
        raise ConfigError("--chat needs --door openai", reason="INVALID_SETTING")


@contextlib.contextmanager
def _service(up: str, target: str, url: str, door: str) -> Iterator[str]:
    """The address of the target; starts a stack if --model is given."""
    if not up:
        yield o.host_and_port(target, "--target") if door == "grpc" else url
        return
    folder = checkpoint_folder(up)
    with LocalStack(model=folder.path, worker_args=folder.name_arguments) as stack:
        yield stack.grpc_address if door == "grpc" else stack.http_url


def _target(door: str, address: str, model: str, credentials: Credentials, **options: Any) -> LoadTarget:
    """The API to measure. `options`: ignore_eos, timeout_s, and chat, which only the OpenAI API has."""
    if door == "grpc":
        del options["chat"]
        return GrpcTarget(address, model=model, credentials=credentials, **options)
    extras.require("--door openai", "bench")
    openai = importlib.import_module("quire_tools.bench.openai_target")  # its client is an optional package
    made: LoadTarget = openai.OpenAITarget(address, model=model, credentials=credentials, **options)
    return made


def _tokenizer(
    held: contextlib.ExitStack, door: str, address: str, model: str, credentials: Credentials
) -> Tokenizer | None:
    """The service's own tokenizer, if its API offers one."""
    if door != "grpc":
        return None
    client = held.enter_context(Client(address, credentials=credentials))
    if not client.models():
        raise FailedPrecondition(f"no model is loaded yet behind {address}; try again when its worker is ready")
    return _ServedTokenizer(client, model)


def _planner(dataset: str, tokenizer: Tokenizer | None) -> Planner:
    if dataset in (_RANDOM, _SHARED):
        return lambda shape: plan(shape, tokenizer)
    prompts = files.read_prompts(Path(dataset).expanduser())
    return lambda shape: files.plan_of(prompts, shape)


def _show(result: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({**provenance(), **result}, indent=2))
        return
    figures.print_percentiles(result["summary"], Console())


@dataclass(slots=True, frozen=True)
class _ServedTokenizer:
    """The tokenizer of a model that a gateway serves, for prompts of exact lengths; needs no files on this machine."""

    client: Client
    model: str = ""

    def encode(self, text: str) -> list[int]:
        """Token ids of the text, including the special ones that the tokenizer adds."""
        return self.client.tokenize(text, self.model)

    def decode(self, ids: list[int]) -> str:
        """Text of the ids."""
        return self.client.detokenize(ids, self.model)
