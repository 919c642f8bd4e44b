"""Every setting of a service can be set on its command line, under its own name, and `quire up` hands on what it is given."""

import importlib
import json
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer
from pydantic import BaseModel

from gateway_svc.settings import GatewaySettings
from quire.cli import app
from quire.settings import option_name
from quire_tools.simulated_worker.settings import SimulatedWorkerSettings
from scheduler_svc.settings import SchedulerSettings
from svc_common.errors import ConfigError
from tests.support.stack.commands import quire_here
from tests.support.stack.up_process import ROOT, SERVICE_LINE, UpProcess
from worker_svc.settings import WorkerSettings

SERVICES: dict[str, tuple[str, type[BaseModel]]] = {
    "gateway": ("quire.cli.serving.serve_gateway", GatewaySettings),
    "scheduler": ("quire.cli.serving.serve_scheduler", SchedulerSettings),
    "worker": ("quire.cli.serving.serve_worker", WorkerSettings),
    "simulated-worker": ("quire_tools.commands.serve_simulated_worker", SimulatedWorkerSettings),
}
OTHER_WORDS = {
    "workers": ("--worker", "one at a time"),
    "adapters": ("--adapter", "one at a time"),
    "admin_http_names": ("--admin-http-name", "one at a time"),
    "model_aliases": ("--model-alias", "one at a time"),
    "schedulers": ("--scheduler", "one at a time"),
    "record_ring_bytes": ("--record-memory", "a size, as --kv-cache-memory is"),
    "kv_cache_memory_bytes": ("--kv-cache-memory", "a size"),
    "swap_space_gib": ("--swap-space", "a size; vLLM's word"),
    "peers": ("--peer-ca", "several options, --peer-*"),
    "doors": ("--tls-cert", "several options, --tls-*"),
}
"""Settings whose option is not simply their name, and why."""


def _options(module: str) -> dict[str, Any]:
    command: Any = typer.main.get_command(importlib.import_module(module).app)
    return {name: option for option in command.params for name in option.opts}


def _limits(module: str) -> list[str]:
    """Those that take a value and are made from the settings: they have no default of their own."""
    shown = ("Limits", "Times", "Cost model", "Traces")
    options = _options(module).items()
    return [name for name, option in options if option.rich_help_panel in shown and not option.is_flag]


@pytest.mark.parametrize("service", SERVICES)
def test_every_setting_has_an_option(service: str) -> None:
    """By its name, or as OTHER_WORDS says."""
    module, settings = SERVICES[service]
    wanted = {name: OTHER_WORDS.get(name, (option_name(name), ""))[0] for name in settings.model_fields}
    found = _options(module)
    assert {name: option for name, option in wanted.items() if option not in found} == {}


def _arguments(command: str) -> list[list[str]]:
    module = {"up": "quire.cli.serving.up"}.get(command) or SERVICES[command.removeprefix("serve ")][0]
    return [[*command.split(), name, "12 parsecs" if name.endswith("-bytes") else "-1"] for name in _limits(module)]


@pytest.mark.parametrize(
    "arguments",
    [
        *_arguments("serve gateway"),
        *_arguments("serve scheduler"),
        *_arguments("serve worker"),
        *_arguments("serve simulated-worker"),
        *_arguments("up"),
    ],
    ids=" ".join,
)
def test_an_option_reaches_its_setting(arguments: list[str]) -> None:
    """A value that cannot be is refused by the setting, under the option's name, before anything starts."""
    command: Any = typer.main.get_command(app)
    with pytest.raises(ConfigError, match=f"{arguments[-2]}: "):
        command(arguments, prog_name="quire")


def test_their_help_says_unit_and_default() -> None:
    """Seconds and sizes by the word behind the option; sizes are written as everywhere."""
    found = _options("quire.cli.serving.serve_gateway")
    assert (found["--max-request-s"].metavar, found["--max-live-bytes"].metavar) == ("SECONDS", "SIZE")
    assert found["--max-request-s"].help.endswith("Default: 600.")
    assert found["--max-live-bytes"].help.endswith("Default: 512MiB.")
    both = _options("quire.cli.serving.up")["--max-waiting-requests"].help
    assert both.endswith("Default: 4096 (scheduler), 1024 (gateway).")


def test_up_hands_them_to_the_services() -> None:
    """What both services have goes to both, the rest to its own."""
    limits = ("--max-live-requests", "7", "--drain-s", "0.5", "--max-live-bytes", "1MiB", "--max-waiting-s", "3")
    with UpProcess("--simulated", *limits, "--no-reflection", "--log-format", "json") as up:
        up.wait_ready()
        places = {found[1]: found[4] for line in up.lines if (found := SERVICE_LINE.match(line))}
        metrics = {name: httpx.get(f"http://{place}/metrics").text for name, place in places.items() if place}
        lines = {name: Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0") for name, pid in up.pids.items()}
        assert up.stop() == 0
    given = {name: set(pairwise(words)) for name, words in lines.items()}
    both = {("--max-live-requests", "7"), ("--drain-s", "0.5")}
    assert both | {("--max-live-bytes", "1048576")} <= given["gateway"]
    assert both | {("--max-waiting-s", "3.0")} <= given["scheduler"]
    assert "--max-waiting-s" not in lines["gateway"] and "--max-live-requests" not in lines["worker"]
    assert "--no-reflection" in lines["gateway"] and "--no-reflection" in lines["scheduler"]
    assert "quire_steps_total" in metrics["scheduler"] and "quire_worker_rows" in metrics["worker"]
    said = [json.loads(line) for line in up.errors]
    assert all(("--log-format", "json") in words for words in given.values())
    assert "quire.memory" in {line["logger"] for line in said}
    assert all({"time", "level", "logger", "message", "service"} <= line.keys() for line in said)


def test_a_wrong_value_ends_with_status_2() -> None:
    """As any wrong option."""
    result = quire_here("serve", "gateway", "--max-request-s", "0")
    assert result.returncode == 2
    assert result.stderr.startswith("error: --max-request-s:") and "Traceback" not in result.stderr


def test_a_gateway_says_where_each_door_is() -> None:
    """With port 0 it could not be known otherwise."""
    ports = ("--grpc-port", "0", "--http-port", "0", "--admin-port", "0", "--admin-http-port", "0")
    command = [sys.executable, "-m", "quire", "serve", "gateway", "--scheduler", "127.0.0.1:1", *ports]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            found = re.fullmatch(r"service gateway pid=(\d+) address=(\S+) http=(\S+) admin=(\S+) lab=(\S+)\n", line)
            assert found and found[1] == str(process.pid) and len(set(found.groups())) == 5, line
            assert httpx.get(f"{found[3]}/health/live").status_code == 200
            assert httpx.get(f"{found[5]}/metrics").status_code == 200
        finally:
            process.terminate()
