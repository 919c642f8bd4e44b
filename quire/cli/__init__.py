"""The command line, `quire`. The root group, and how errors are printed. Each command has its own module."""

import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, NoReturn

import typer

from quire import extras
from quire.cli.groups import CommandGroup, new_app
from svc_common import garbage
from svc_common.errors import ConfigError, QuireError
from svc_common.version import VERSION

CONFIG_ERROR_STATUS = 2
ERROR_STATUS = 1
_OUR_PACKAGES = {
    "quire",
    "quire_tools",
    "gateway_svc",
    "scheduler_svc",
    "worker_svc",
    "block_manager",
    "paged_kernels",
    "svc_common",
    "protos",
}


class RootGroup(CommandGroup):
    """Commands of `quire`."""

    table: ClassVar[dict[str, tuple[str, str]]] = {
        "run": ("quire.cli.serving.run", "Serve a model here and talk to it, or answer one prompt."),
        "up": ("quire.cli.serving.up", "Start gateway, scheduler and worker on this machine."),
        "serve": ("quire.cli.serving.serve", "Start one service: gateway, scheduler, worker or simulated-worker."),
        "generate": ("quire.cli.requests.generate", "Complete a prompt."),
        "chat": ("quire.cli.requests.chat", "Talk to the model, or ask one question."),
        "embed": ("quire.cli.requests.embed", "Turn texts into vectors."),
        "models": ("quire.cli.requests.models", "List the models served."),
        "adapters": ("quire.cli.operators.adapters", "List, load and unload LoRA adapters."),
        "keys": ("quire.cli.serving.keys", "Make, hash, list and check API keys."),
        "certs": ("quire.cli.serving.certificates", "Make certificates to try mutual TLS with."),
        "policies": ("quire.cli.operators.policies", "List the scheduling policies and the keys of --set."),
        "set-policy": ("quire.cli.operators.set_policy", "Change the policy of a running scheduler."),
        "top": ("quire_tools.commands.top", "Watch the scheduler: waiting requests and reasons, blocks, step times."),
        "lab": ("quire_tools.commands.lab", "See queues, blocks and reasons step by step, in a browser."),
        "load": ("quire.cli.operators.load", "Show how busy the scheduler is."),
        "workers": ("quire.cli.operators.workers", "Show the workers and what is known of each."),
        "drain": (
            "quire.cli.operators.drain",
            "Stop the scheduler from accepting requests, or let it accept them again.",
        ),
        "steps": ("quire.cli.operators.steps", "Show what the scheduler decided, step by step."),
        "why": ("quire.cli.operators.why", "Show why a request waited."),
        "blocks": ("quire.cli.operators.blocks", "Show the KV-cache blocks: pools, tables, reference counts."),
        "record": (
            "quire.cli.operators.record",
            "Write the scheduler's last steps and their inputs to a file.",
        ),
        "replay": (
            "quire_tools.commands.replay",
            "Replay a recording and compare every decision, or try another policy.",
        ),
        "tour": ("quire_tools.commands.tour", "Demonstrate each mechanism: one screen each, from a live stack."),
        "bench": ("quire_tools.commands.bench", "Measure a running service under load."),
        "doctor": ("quire_tools.commands.doctor", "Check this installation, a model, a running service."),
        "plan": ("quire_tools.commands.plan", "What fits in this memory, and why."),
        "convert": ("quire_tools.commands.convert", "Convert a pickled checkpoint to safetensors."),
    }


app = new_app(completion=True)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"quire {VERSION}")
        raise typer.Exit


@app.callback(cls=RootGroup, no_args_is_help=True)
def root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """LLM serving in three small gRPC services.

    Start everything with the built-in model, and use it from a second terminal:

      [bold]quire up[/bold]
      [bold]quire generate "def fibonacci(n):" --max-tokens 60[/bold]
      [bold]quire chat[/bold]
      [bold]quire steps --decode[/bold]
    """


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit with its status: 0, 1 for a failure, 2 for a wrong option or setting."""
    garbage.collect_rarely()
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # our errors say what is wrong; C-core's own lines only confuse
    command: Any = typer.main.get_command(app)
    try:
        command(list(arguments) if arguments is not None else None, prog_name="quire")
    except QuireError as error:
        typer.echo(f"error: {error.message}", err=True)
        sys.exit(CONFIG_ERROR_STATUS if isinstance(error, ConfigError) else ERROR_STATUS)
    except ModuleNotFoundError as error:
        _refuse_incomplete(error)
    except KeyboardInterrupt:
        sys.exit(130)


def _refuse_incomplete(error: ModuleNotFoundError) -> NoReturn:
    """Exit with one line if a third-party package is missing; raise `error` if it is one of ours."""
    missing = (error.name or "").partition(".")[0]
    if missing in _OUR_PACKAGES or not missing:
        raise error
    typer.echo(f"error: {extras.not_installed('this command', [missing], 'all').message}", err=True)
    sys.exit(CONFIG_ERROR_STATUS)


if __name__ == "__main__":
    main()
