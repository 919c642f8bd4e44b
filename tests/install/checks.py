"""What a wheel has to do in an environment of its own, in order: each check may use what those before it installed."""

import json
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.install import bare
from tests.install.environment import Environment
from tests.install.served import Served
from tests.support.commands import Failure

PROMPT = "def fibonacci(n):"
NUM_TOKENS = 40
RUN = ("run", "tiny", PROMPT, "--max-tokens", str(NUM_TOKENS), "--temperature", "0")


def bare_commands(environment: Environment) -> str:
    """Every `--help` works; each command that needs more says in one line what, and ends with a status other than 0."""
    faults = bare.faults(environment.python, environment.empty, environ={**environment.environ, "PYTHONPATH": ""})
    _require(not faults, "\n".join(faults))
    return f"{len(bare.helps())} helps, {len(bare.NEEDS)} commands that need more, quire doctor"


def named_command(environment: Environment) -> str:
    """The command that `quire up` names installs what it needs, without CUDA."""
    done = environment.quire("up")
    _require(done.returncode == 2 and done.stderr.count("\n") == 1, f"quire up: {done.returncode} {done.stderr}")
    command = done.stderr.strip().partition("not installed: ")[2]
    environment.shell(command)
    packages = subprocess.run(
        [environment.python, "-m", "pip", "list"], capture_output=True, text=True, check=True
    ).stdout
    cuda = [line for line in packages.splitlines() if line.startswith(("nvidia-", "cuda-"))]
    _require(not cuda or "nvidia-smi" in command, f"CUDA was installed on a machine without a GPU: {cuda}")
    doctor = json.loads(environment.quire("doctor", "--json").stdout)
    _require(doctor["problems"] == 0, f"quire doctor: {doctor}")
    return command


def prebuilt_kernels(environment: Environment) -> str:
    """Without a compiler a worker takes the kernels that the wheel carries."""
    doctor = json.loads(environment.quire("doctor", "--json").stdout)
    [kernels] = [finding for finding in doctor["findings"] if finding["name"] == "CPU kernels"]
    _require(kernels["what"].startswith("prebuilt for "), f"quire doctor: {kernels}")
    return str(kernels["what"])


def serves_built_in_model(environment: Environment) -> str:
    """`quire up` from an empty folder serves the built-in model; `quire generate` streams from it."""
    with Served(environment) as served:
        made = environment.quire(
            *("generate", PROMPT, "--target", served.grpc),
            *("--max-tokens", str(NUM_TOKENS), "--temperature", "0", "--ignore-eos", "--json"),
        )
        models = environment.quire("models", "--target", served.grpc)
    _require(made.returncode == 0, made.stderr)
    _require("tiny" in models.stdout, models.stdout)
    for sign in ("Traceback", "several times slower"):
        _require(sign not in "".join(served.errors), "".join(served.errors))
    return made.stdout.strip().splitlines()[-1][:100]


def runs_one_command(environment: Environment) -> str:
    """`quire run` answers with the built-in model, in a home where nothing ran before, and again; seconds to the first token."""
    cold_s, first = _first_token(environment)
    warm_s, again = _first_token(environment)
    _require(first == again and first.strip(), f"quire run: {first!r}, then {again!r}")
    return f"first token after {cold_s:.1f} s, and after {warm_s:.1f} s the second time"


def _first_token(environment: Environment) -> tuple[float, str]:
    """Seconds from the command to its first output, and all of it."""
    return first_output([environment.bin / "quire", *RUN], cwd=environment.empty, env=environment.environ)


def first_output(command: Sequence[str | Path], **where: Any) -> tuple[float, str]:
    """Seconds from the start of a command to its first output, and all of it. Failure: what it says was wrong."""
    began_s = time.monotonic()
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, **where, **pipes)
    first = process.stdout.read(1)
    first_s = time.monotonic() - began_s
    rest, errors = process.communicate(timeout=600)
    _require(process.returncode == 0, errors)
    return first_s, first + rest


Check = Callable[[Environment], str]
"""Takes the environment, returns what to print; Failure says what is wrong."""

CHECKS: tuple[Check, ...] = (bare_commands, named_command, runs_one_command, prebuilt_kernels, serves_built_in_model)


def _require(condition: object, what: str) -> None:
    if not condition:
        raise Failure(what)
