"""The command line: help, quick start, and a clear error with its own status for every mistake."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.built_in_model import default_model
from quire.cli.options.common import host_and_port
from quire.local_stack.processes import ServiceProcess, ignore_line
from quire.sizes import GIB, parse_size
from svc_common.errors import ConfigError
from tests.support.stack.commands import quire_here
from tests.support.stack.up_process import FREE_PORTS, ROOT, run_quire

COMMANDS = (
    *("up", "serve", "generate", "chat", "embed", "models", "policies", "top", "steps", "blocks"),
    *("bench", "doctor", "plan", "convert"),
)
SERVICES = ("gateway", "scheduler", "worker", "simulated-worker")


def _imported_by(*commands: tuple[str, ...]) -> set[str]:
    """Packages that a process has imported which ran these one after the other."""
    code = (
        f"import sys\nfrom quire.cli import main\nfor command in {commands!r}:\n"
        "    try:\n        main(command)\n    except SystemExit:\n        pass\n"
        "sys.stderr.write(' '.join(sorted({name.partition('.')[0] for name in sys.modules})))"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(result.stderr.split())


def test_help_lists_every_command_and_imports_none_of_them() -> None:
    """`quire --help` is instant: neither gRPC nor a service is imported."""
    result = quire_here("--help")
    assert result.returncode == 0
    assert all(f" {command} " in result.stdout for command in COMMANDS)
    assert not _imported_by(("--help",)) & {
        "grpc",
        "torch",
        "transformers",
        "gateway_svc",
        "scheduler_svc",
        "worker_svc",
    }


@pytest.mark.parametrize("command", ["run", "up"])
def test_what_the_services_do_not_wait_for_is_not_imported_before_they_start(command: str) -> None:
    """The policies and numpy, which only the check of a loaded worker needs, would delay the first token."""
    assert not _imported_by((command, "--help")) & {"block_manager", "numpy"}


@pytest.mark.parametrize("command", [*COMMANDS, *(f"serve {name}" for name in SERVICES)])
def test_every_command_has_help_with_an_example(command: str) -> None:
    """Help teaches: each shows the command in use."""
    result = quire_here(*command.split(), "--help")
    assert result.returncode == 0, result.stderr
    assert result.stdout.count(f"quire {command.split(maxsplit=1)[0]}") >= 2, "usage, and at least one example"


def test_services_without_a_model_import_no_torch() -> None:
    """Only the real worker needs torch."""
    others = ("gateway", "scheduler", "simulated-worker")
    imported = _imported_by(*(("serve", service, "--help") for service in others))
    assert {"gateway_svc", "scheduler_svc"} <= imported and not imported & {"torch", "transformers"}


def test_version_and_unknown_command() -> None:
    """`--version` prints it; a misspelt command ends with 2 and a suggestion."""
    assert quire_here("--version").stdout.startswith("quire ")
    result = quire_here("stepz")
    assert result.returncode == 2
    assert "steps" in result.stderr


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("512MiB", 512 * 2**20),
        ("2GiB", 2 * GIB),
        ("2g", 2 * GIB),
        ("1.5 KiB", 1536),
        ("1000", 1000),
        ("3MB", 3_000_000),
    ],
)
def test_sizes(text: str, expected: int) -> None:
    """Sizes as people write them."""
    assert parse_size(text, "--kv-cache-memory") == expected


@pytest.mark.parametrize("text", ["", "MiB", "-1", "12 parsecs", "1e9"])
def test_sizes_that_are_none(text: str) -> None:
    """ConfigError names the option."""
    with pytest.raises(ConfigError, match="--swap-space"):
        parse_size(text, "--swap-space", plain_unit=GIB)


@pytest.mark.parametrize("address", ["", "host", "host:", ":50051", "host:0", "host:70000", "host:x"])
def test_addresses_that_are_none(address: str) -> None:
    """ConfigError names the option and shows a right one."""
    with pytest.raises(ConfigError, match=r"--target.*HOST:PORT"):
        host_and_port(address, "--target")


@pytest.fixture
def taken_port() -> Iterator[int]:
    """A port of 127.0.0.1 with a listener."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        yield sock.getsockname()[1]


@pytest.mark.parametrize("option", ["--grpc-port", "--http-port", "--admin-port", "--admin-http-port"])
def test_up_says_which_port_is_taken(taken_port: int, option: str) -> None:
    """Status 2, one line that names port and option, before anything is started."""
    result = quire_here("up", "--simulated", *FREE_PORTS, option, str(taken_port))
    _assert_config_error(result, str(taken_port), option)
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("service", "option"),
    [
        ("gateway", "--grpc-port"),
        pytest.param("gateway", "--http-port", marks=pytest.mark.long),
        pytest.param("scheduler", "--admin-port", marks=pytest.mark.long),
        ("scheduler", "--metrics-port"),
        ("simulated-worker", "--port"),
        pytest.param("simulated-worker", "--metrics-port", marks=pytest.mark.long),
    ],
)
def test_services_say_which_port_is_taken(taken_port: int, service: str, option: str) -> None:
    """The same for each service alone."""
    free = {
        "gateway": ("--port", "0", "--http-port", "0", "--admin-port", "0", "--admin-http-port", "0"),
        "scheduler": ("--port", "0", "--admin-port", "0"),
        "simulated-worker": ("--port", "0"),
    }
    result = run_quire("serve", service, *free.get(service, ()), option, str(taken_port))
    _assert_config_error(result, str(taken_port), option)


def test_unknown_policy_and_setting() -> None:
    """Named with what exists, by the option's name."""
    _assert_config_error(quire_here("up", "--simulated", *FREE_PORTS, "--policy", "best"), "best", "vllm-v1")
    _assert_config_error(quire_here("serve", "scheduler", "--max-num-seqs", "0"), "--max-num-seqs")


def test_policies_shows_presets_and_keys() -> None:
    """A table for people; with --json one object with every key of every preset."""
    shown = quire_here("policies").stdout
    assert all(word in shown for word in ("vllm-v0-chunked", "static", "preemption_mode", "delay_factor"))
    presets = json.loads(quire_here("policies", "--json").stdout)
    assert presets["vllm-v1-async"]["batch_queue"] == 2 and presets["vllm-v0"]["phases"] == "prefill_or_decode"
    assert [presets[name]["cache_type"] for name in ("chitu", "chitu-skew", "vllm-v1")] == ["paged", "skew", None]
    _assert_config_error(
        quire_here("up", "--simulated", *FREE_PORTS, "--policy", "chitu-dp", "--set", "dp_size=2"),
        "dp_size=2",
        "--workers",
    )


@pytest.mark.parametrize("option", ["--max-num-seqs", "--max-num-batched-tokens"])
def test_zero_is_not_the_default(option: str) -> None:
    """`quire up` refuses it before anything is started."""
    result = quire_here("up", "--simulated", *FREE_PORTS, option, "0")
    _assert_config_error(result, option)
    assert result.stdout == ""


def test_no_model_yet_and_no_admin_listener() -> None:
    """`quire models` says that there is none, `quire steps` that it asks the wrong listener; status 1."""
    free = ("--port", "0", "--http-port", "0", "--admin-port", "0", "--admin-http-port", "0")
    gateway = ServiceProcess(
        "gateway", ["gateway", *free, "--scheduler", "127.0.0.1:1"], environ=os.environ, on_line=ignore_line
    )
    try:
        while not (gateway.announced and gateway.address):
            gateway.check()
            time.sleep(0.02)
        models = quire_here("models", "--target", gateway.address)
        steps = quire_here("steps", "--admin", gateway.address)
    finally:
        gateway.terminate()
        gateway.wait(10)
    assert (models.returncode, models.stdout) == (1, "")
    assert "no model is loaded yet" in models.stderr
    assert (steps.returncode, steps.stdout) == (1, "")
    assert gateway.address in steps.stderr and "admin=" in steps.stderr


def test_unknown_model_path(tmp_path: Path) -> None:
    """Says that the folder does not exist, from `up` as from `serve worker`."""
    missing = str(tmp_path / "no such model")
    _assert_config_error(quire_here("serve", "worker", "--port", "0", "--model", missing), missing, "--model")
    _assert_config_error(quire_here("up", *FREE_PORTS, "--model", missing), missing, "--model")


@pytest.mark.long
def test_pickled_weights(tmp_path: Path) -> None:
    """Refused unread, with how to convert."""
    folder = _copy_of_tiny(tmp_path)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04pickle")
    _assert_config_error(run_quire("up", *FREE_PORTS, "--model", str(folder)), "pytorch_model.bin", "safetensors")


@pytest.mark.long
def test_unsupported_architecture(tmp_path: Path) -> None:
    """Named, with the module that is at fault."""
    folder = _copy_of_tiny(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "bloom", "architectures": ["BloomForCausalLM"], "n_layer": 4, "n_head": 8}
    (folder / "config.json").write_text(json.dumps(config))
    _assert_config_error(run_quire("up", *FREE_PORTS, "--model", str(folder)), "Bloom")


@pytest.mark.long
def test_memory_too_small() -> None:
    """R9: says the longest length that fits; `up` ends instead of trying for ever."""
    result = run_quire("up", *FREE_PORTS, "--num-gpu-blocks-override", "4")
    _assert_config_error(result, "--max-model-len 64", "--num-gpu-blocks-override")


@pytest.mark.parametrize(
    "command",
    [
        ("generate", "hi", "--target"),
        ("chat", "hi", "--target"),
        ("models", "--target"),
        ("steps", "--admin"),
        ("blocks", "--admin"),
    ],
)
def test_without_a_listener(command: tuple[str, ...]) -> None:
    """Status 1 and what to do, not a transport's words."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        result = quire_here(*command, f"127.0.0.1:{sock.getsockname()[1]}")
    assert result.returncode == 1
    assert "quire up" in result.stderr
    assert "Traceback" not in result.stderr


def _copy_of_tiny(tmp_path: Path) -> Path:
    return Path(shutil.copytree(default_model(), tmp_path / "a model"))


def _assert_config_error(result: subprocess.CompletedProcess[str], *parts: str) -> None:
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr
    error = next(line for line in result.stderr.splitlines() if line.startswith("error: "))
    assert all(part in error for part in parts), error
