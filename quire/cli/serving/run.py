"""`quire run`: one command from a model's name to its answer: plan, download, serve on this machine, chat, stop."""

import json
import math
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer

from quire import extras
from quire.built_in_model import default_model
from quire.cli.groups import new_app
from quire.cli.options import common as o
from quire.cli.options import model as m
from quire.cli.options import sampling as s
from quire.cli.options.gathering import gathers
from quire.cli.options.settings import as_arguments, options_of
from quire.cli.serving.load_progress import LoadProgress
from quire.conversation.session import Session
from quire.hub import ModelFolder, checkpoint_folder, is_hub_name
from quire.local_stack.stack import LocalStack
from quire.local_stack.stack_options import StackOptions
from quire.sizes import size_text
from svc_common.errors import ConfigError, QuireError
from svc_common.observability.log_format import LogFormat
from worker_svc.settings import AUTO, WorkerSettings, option_of

CHECK_S = 0.1
TERMINATED_STATUS = 128 + signal.SIGTERM

app = new_app()

_planned = options_of(
    WorkerSettings,
    spelled=option_of,
    panels={
        "Model": ("max_model_len", "dtype", "quantization", "device"),
        "Memory": ("kv_cache_memory_bytes", "kv_cache_dtype"),
    },
)


@app.command()
@gathers(worker=_planned)
def run(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]",
            help="Folder of a checkpoint, a .gguf file, or ORG/NAME of the hub. Default: the built-in model, also named tiny.",
            show_default=False,
        ),
    ] = None,
    prompt: Annotated[
        str | None, typer.Argument(help="Answer this and exit; absent = a conversation.", show_default=False)
    ] = None,
    revision: m.Revision = "",
    system: Annotated[
        str | None, typer.Option(help="System message that starts the conversation.", show_default=False)
    ] = None,
    max_tokens: s.MaxTokens = None,
    temperature: s.Temperature = None,
    top_p: s.TopP = None,
    seed: s.Seed = None,
    history: Annotated[
        bool,
        typer.Option("--history/--no-history", help="Keep what is typed in $XDG_STATE_HOME/quire, for the next time."),
    ] = True,
    http_port: o.HttpPort = 0,
    grpc_port: o.GrpcPort = 0,
    *,
    worker: dict[str, Any],
) -> None:
    """Serve a model on this machine and talk to it: one command from nothing to an answer.

    With PROMPT: the answer goes to standard output as it is generated, and the command ends. Without: a conversation, as in
    `quire chat`; Ctrl-C ends an answer, Ctrl-D or /exit the conversation. From a pipe each line is a turn.

    Everything else is written to standard error: what is downloaded and loaded, with sizes and the time left. A model of the hub is
    planned first (`quire plan`), so that one that does not fit is not downloaded. The OpenAI API is served until the command ends.

    The context is --max-model-len auto, unless given: the model's, shortened to what the memory holds.

    Examples:

      [bold]quire run[/bold]                                            talk to the built-in model
      [bold]quire run tiny "def fibonacci(n):" --max-tokens 60[/bold]   one answer of it
      [bold]quire run ~/Qwen3-0.6B "Why is the sky blue?" | cat[/bold]  only the answer
      [bold]quire run Qwen/Qwen3-0.6B --system "Answer in one line."[/bold]
      [bold]quire run ~/Llama-3.2-1B --kv-cache-memory 4GiB[/bold]      a longer context
    """
    extras.require("quire run", *extras.services())
    settings = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "seed": seed}
    session = Session(system or "", settings=settings)
    _ = session.params  # raises for invalid ones before anything starts
    worker = {"max_model_len": AUTO} | worker
    found = _found(model, revision, worker)
    if found.name:
        worker["served_model_name"] = found.name
    options = StackOptions(
        model=found.path, http_port=http_port, grpc_port=grpc_port, worker_args=as_arguments(worker, option_of)
    )
    begun_s = time.monotonic()
    progress = LoadProgress(LogFormat.TEXT, quiet=True)
    with _terminated_by_signal(), progress, _launched(options, progress) as stack:
        from quire.cli.serving.talk import talk  # noqa: PLC0415  (here, because the services start meanwhile)

        stack.start()
        progress.finish()
        _say(f"ready after {time.monotonic() - begun_s:.1f} s; the OpenAI API is at {stack.http_url}/v1")
        with closing(_Reviving(stack)):
            talk(stack, session, prompt, history=history)


# --- the model -------------------------------------------------------------------------------------------------------


def _found(model: str | None, revision: str, worker: Mapping[str, Any]) -> ModelFolder:
    """The model's folder. Raises ConfigError, before weights are downloaded, if a model of the hub does not fit."""
    built_in = default_model()
    if model is None or (model == built_in.name and not Path(model).exists()):
        return ModelFolder(built_in)
    if is_hub_name(model):
        checkpoint_folder(model, revision, weights=False)
        _check_fits(model, revision, worker)
    return checkpoint_folder(model, revision)


def _check_fits(model: str, revision: str, worker: Mapping[str, Any]) -> None:
    """Raise ConfigError if `quire plan` finds that the model does not fit. In a process of its own, as it imports torch."""
    named = ["--model", model, *(["--revision", revision] if revision else [])]
    command = [sys.executable, "-m", "quire", "plan", *named, *as_arguments(worker, option_of), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if not done.stdout:
        raise ConfigError(done.stderr.strip().rpartition("error: ")[2], reason="MODEL_UNSUPPORTED")
    plan = json.loads(done.stdout)
    if plan["problems"]:
        raise ConfigError("; ".join([*plan["problems"], *plan["advice"]]), reason="MEMORY_TOO_SMALL")
    parts = ", ".join(f"{part['name']} {size_text(part['num_bytes'])}" for part in plan["parts"])
    _say(f"{model} fits: {parts}; context {plan['model']['max_model_len']} tokens")


# --- the services ----------------------------------------------------------------------------------------------------


@contextmanager
def _launched(options: StackOptions, progress: LoadProgress) -> Iterator[LocalStack]:
    """The stack, of which the processes have been started; stopped at the end."""
    stack = LocalStack(
        options,
        start_timeout_s=math.inf,
        on_line=progress.line,
        on_progress=progress.show,
        on_restart=progress.restart,
    )
    try:
        stack.launch()
        yield stack
    finally:
        progress.stopping()
        stack.stop_at_once()


class _Reviving:
    """Owns a thread that restarts services that died, until closed. One that is given up is reported, and its requests fail."""

    def __init__(self, stack: LocalStack) -> None:
        self._stack, self._closed = stack, threading.Event()
        self._thread = threading.Thread(target=self._run, name="revive", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._closed.wait(CHECK_S):
                self._stack.revive()
        except QuireError as error:
            _say(f"error: {error.message}")

    def close(self) -> None:
        """Stop, before the services are stopped."""
        self._closed.set()
        self._thread.join()


@contextmanager
def _terminated_by_signal() -> Iterator[None]:
    """SIGTERM ends the command as Ctrl-C does, so that the services are stopped."""

    def on_signal(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(TERMINATED_STATUS)

    before = signal.signal(signal.SIGTERM, on_signal)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
