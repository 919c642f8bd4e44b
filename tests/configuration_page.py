"""`python -m tests.configuration_page [--write]`: docs/configuration.md, made from the commands' own options.

Options, kinds, defaults and explanations are those that `--help` shows; the variables are those that the code reads.
"""

import argparse
import importlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import typer

from deploy.site.options import option_table

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "configuration.md"

COMMANDS: Mapping[str, str] = {
    "quire up": "quire.cli.serving.up",
    "quire serve gateway": "quire.cli.serving.serve_gateway",
    "quire serve scheduler": "quire.cli.serving.serve_scheduler",
    "quire serve worker": "quire.cli.serving.serve_worker",
    "quire serve simulated-worker": "quire_tools.commands.serve_simulated_worker",
}
VARIABLES: Mapping[str, str] = {
    "QUIRE_API_KEY": "Key that client commands and `quire.Client` show, where `--api-key` is not given.",
    "QUIRE_TLS_CA": "Of client commands: `--tls-ca`, where it is not given.",
    "QUIRE_TLS_CERT": "The same for `--tls-cert`.",
    "QUIRE_TLS_KEY": "The same for `--tls-key`.",
    "QUIRE_TARGET": "Address of the gateway for client commands, where `--target` is not given.",
    "QUIRE_ADMIN": "Address of the admin API for commands that look inside, where `--admin` is not given.",
    "QUIRE_LAB": "URL of the gateway's lab for `quire lab`, where `--url` is not given.",
    "QUIRE_LOG_LEVEL": "`DEBUG`, `INFO`, `WARNING` or `ERROR`: what the services write to standard error.",
    "OTEL_EXPORTER_OTLP_ENDPOINT": "Where traces go, `http://HOST:4317`; unset = no traces.",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "The same for traces alone.",
    "OTEL_TRACES_EXPORTER": "`otlp` = on at the standard address, `none` = off.",
    "OTEL_SDK_DISABLED": "`true` = off, whatever else is set.",
    "OTEL_EXPORTER_OTLP_INSECURE": "`true` = traces go out in plain text.",
    "OTEL_EXPORTER_OTLP_PROTOCOL": "`grpc` (default) or `http/protobuf`, for which the port is 4318 as a rule.",
    "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "The same for traces alone.",
    "OTEL_TRACES_SAMPLER": "Which traces are recorded: `parentbased_always_on` (default), `parentbased_traceidratio`, ...",
    "OTEL_TRACES_SAMPLER_ARG": "Of a ratio: 0 to 1.",
    "OTEL_BSP_MAX_QUEUE_SIZE": "Spans that may wait; default 32768.",
    "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "Spans that go out together; default 2048.",
    "OTEL_BSP_SCHEDULE_DELAY": "Milliseconds between two batches of spans; default 1000.",
    "OTEL_EXPORTER_OTLP_TIMEOUT": "Seconds after which a batch is given up; default 2.",
    "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT": "The same for traces alone.",
    "OTEL_SERVICE_NAME": "Name of the service in traces; default `quire-gateway`, `quire-scheduler`, `quire-worker`.",
}
_INTRODUCTION = """\
# Configuration

This page lists every option of `quire up` and of the three services that it starts, with its default. Options are the whole
configuration: no file is read that an option does not name. `quire up` passes each option to the service that has it, and an option
of both gateway and scheduler to both.

The keys of `--set` are on the page of [policies](policies.md). What a single request can set is on the page of
[request parameters](generating.md). This page is made from the commands by `python -m tests.configuration_page --write`.
"""


def _panels(module: str) -> dict[str, list[Any]]:
    """Options of a command under the headings of its `--help`, in order."""
    command: Any = typer.main.get_command(importlib.import_module(module).app)
    panels: dict[str, list[Any]] = {}
    for option in command.params:
        if option.name != "help" and not option.hidden and option.param_type_name == "option":
            panels.setdefault(option.rich_help_panel or "Options", []).append(option)
    return panels


def _section(name: str, module: str) -> Iterator[str]:
    yield f"## {name}\n"
    for panel, options in _panels(module).items():
        yield f"### {panel}\n"
        yield from option_table(options)


def page() -> str:
    """The whole page."""
    lines = [_INTRODUCTION]
    for name, module in COMMANDS.items():
        lines += _section(name, module)
    lines += ["## Environment\n", "| variable | meaning |\n|---|---|"]
    lines += [f"| `{name}` | {meaning} |" for name, meaning in VARIABLES.items()]
    return "\n".join(lines) + "\n"


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write docs/configuration.md; otherwise print it")
    made = page()
    if parser.parse_args().write:
        PAGE.write_text(made, encoding="utf-8")
    else:
        sys.stdout.write(made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
