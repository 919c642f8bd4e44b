"""`quire run`: one command from nothing to an answer, with the built-in model."""

import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.support.stack.up_process import ROOT, TIMEOUT_S, is_running, run_quire

pytestmark = pytest.mark.processes
GREEDY = ("--temperature", "0", "--max-tokens", "6")
READY = re.compile(r"ready after [\d.]+ s; the OpenAI API is at (http://127\.0\.0\.1:\d+/v1)")


def children_of(pid: int) -> list[int]:
    """Processes that it has started and that run."""
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in text.split()]


def test_one_prompt_and_a_conversation_from_a_pipe() -> None:
    """Standard output has the answers and nothing else, standard error the progress; from a pipe each line is a turn."""
    one = run_quire("run", "tiny", "hello", *GREEDY, stdin=subprocess.DEVNULL)
    assert one.returncode == 0, one.stderr
    assert READY.search(one.stderr) and re.search(r"weights: .* of [\d.]+ MiB", one.stderr)
    piped = run_quire("run", *GREEDY, input="hello\n\n/undo\nhello\n/exit\nnever asked\n")
    assert (piped.returncode, piped.stdout) == (0, 2 * one.stdout), piped.stderr
    assert len(one.stdout.strip()) > 0 and "WARNING" not in one.stderr + piped.stderr


@pytest.mark.long
def test_the_context_fits_the_memory() -> None:
    """A context that the memory does not hold is shortened, and one line says so; nothing is left running after SIGTERM."""
    command = [sys.executable, "-m", "quire", "run", "--kv-cache-memory", "512KiB"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, cwd=ROOT, **pipes)  # type: ignore[call-overload]
    seen = []
    for line in process.stderr:
        seen.append(line)
        if found := READY.search(line):
            break
    [model] = httpx.get(f"{found[1]}/models", timeout=60).json()["data"]
    assert model["max_model_len"] == 256
    children = children_of(process.pid)
    process.terminate()
    process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 143
    [said] = [line for line in seen if "--max-model-len auto: " in line]
    assert re.search(r"auto: 256 tokens, not the model's 2048, .* would need 4.0 MiB and has 512.0 KiB", said)
    assert len(children) == 3 and not any(map(is_running, children))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("nowhere",), "--model nowhere does not exist"),
        (("tiny", "hi", "--temperature", "99"), "temperature: is 99"),
    ],
)
def test_refusals(arguments: tuple[str, ...], words: str) -> None:
    """One line, and nothing on standard output."""
    done = run_quire("run", *arguments)
    assert done.returncode in (1, 2) and words in done.stderr and not done.stdout, done.stderr
    assert "Traceback" not in done.stderr
