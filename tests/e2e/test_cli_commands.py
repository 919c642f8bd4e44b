"""`quire chat`, `embed`, `bench` and `doctor` as people run them, on a running service."""

import contextlib
import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import numpy as np
import pytest

from quire.cli import main
from quire.local_stack.stack import LocalStack
from quire.operators.admin import AdminClient
from tests.support.stack.commands import ROOT


@pytest.fixture
def doors(stack: LocalStack, monkeypatch: pytest.MonkeyPatch) -> LocalStack:
    """The stack, under the variables that commands read."""
    monkeypatch.setenv("QUIRE_TARGET", stack.grpc_address)
    monkeypatch.setenv("QUIRE_ADMIN", stack.admin_address)
    return stack


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str, stdin: str = "") -> tuple[int, str, str]:
    """`quire ARGUMENTS` in this process: status, standard output, standard error. Neither is a terminal."""
    out, err = io.TextIOWrapper(io.BytesIO()), io.StringIO()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as caught:
        main(list(arguments))
    out.flush()
    return int(caught.value.code or 0), out.buffer.getvalue().decode("latin-1"), err.getvalue()  # type: ignore[attr-defined]


CHAT = ("chat", "--max-tokens", "6", "--temperature", "0", "--no-history")


def test_a_conversation_from_a_pipe(doors: LocalStack, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Answers go to standard output, what commands say to standard error; a mistake changes nothing; /save and /load go round."""
    saved = tmp_path / "talk.json"
    lines = [
        *("hello", "/retry", "/usage", "/set temperature=99", "/set seed=3", "/params", "/why"),
        *('"""', "two", "lines", '"""', "on\\", "and on", "/undo"),
        *(f"/save {saved}", "/reset", "/undo", f"/load {saved}", "/undo"),
        *(f"/load {tmp_path}/none", "/nonsense", "/help", "/quit", "never asked"),
    ]
    status, out, err = run(monkeypatch, *CHAT, stdin="\n".join(lines) + "\n")
    assert status == 0, err
    turns = json.loads(saved.read_text())["turns"]
    assert [turn["content"] for turn in turns if turn["role"] == "user"] == ["hello", "two\nlines"]
    first = turns[1]["content"]
    assert out.startswith(f"{first}\n{first}\n"), "greedy: the same again"
    said = ("2 answers", "temperature: is 99", "seed: 3", "RUNNING", "saved 4 turns", "nothing to take back")
    for words in (
        *said,
        "loaded 4 turns",
        "none cannot be read: No such file",
        "/nonsense is no command",
        "/system TEXT",
    ):
        assert words in err, words
    one = run(monkeypatch, "chat", "hello", "--max-tokens", "6", "--temperature", "0")
    assert one[:2] == (0, f"{first}\n")


class Terminal:
    """`quire chat` on a terminal of its own."""

    def __init__(self, home: Path, *arguments: str) -> None:
        self._end, inner = pty.openpty()
        env = {**os.environ, "XDG_STATE_HOME": str(home), "TERM": "dumb"}
        command = [sys.executable, "-m", "quire", "chat", *arguments]
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdin=inner, stdout=inner, stderr=inner, env=env, start_new_session=True
        )
        os.close(inner)
        self.seen = ""

    def type(self, text: str) -> None:
        """Keys."""
        os.write(self._end, text.encode())

    def wait(self, pattern: str, timeout_s: float = 40.0) -> None:
        """Until something new matches."""
        deadline = time.monotonic() + timeout_s
        while not re.search(pattern, self.seen, re.S):
            assert time.monotonic() < deadline, self.seen
            if select.select([self._end], [], [], 0.2)[0]:
                try:
                    self.seen += os.read(self._end, 4096).decode(errors="replace")
                except OSError:  # the other end is closed
                    break
        found = re.search(pattern, self.seen, re.S)
        assert found, self.seen
        self.seen = self.seen[found.end() :]

    def close(self) -> int:
        """Its status."""
        try:
            return self.process.wait(timeout=20)
        finally:
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()
            os.close(self._end)


def test_ctrl_c_ends_the_answer_and_not_the_program(doors: LocalStack, tmp_path: Path) -> None:
    """On a terminal: an answer without end is ended by Ctrl-C, the next question is answered, the history is kept for next time."""
    terminal = Terminal(tmp_path, "--max-tokens", "1900", "--ignore-eos")
    try:
        terminal.wait("> ")
        terminal.type("tell me\n")
        terminal.wait(r"tell me\r?\n.{20,}")
        terminal.process.send_signal(signal.SIGINT)
        terminal.wait("> ")
        terminal.type("/set max_tokens=4\nshort\n")
        terminal.wait(r"4 generated, length.*> ")
        terminal.type("/quit\n")
    finally:
        assert terminal.close() == 0
    kept = (tmp_path / "quire" / "chat_history").read_text().splitlines()
    assert [line for line in kept if not line.startswith("_")] == ["tell me", "/set max_tokens=4", "short", "/quit"]
    assert (tmp_path / "quire" / "chat_history").stat().st_mode & 0o077 == 0


def test_embed(doors: LocalStack, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """JSON lines, npy and a table say the same vectors; one text per line from a file or a pipe; lengths as asked."""
    status, out, err = run(monkeypatch, "embed", "a cat", "a dog")
    assert status == 0, err
    rows = [json.loads(line) for line in out.splitlines()]
    assert [row["text"] for row in rows] == ["a cat", "a dog"]
    vectors = np.asarray([row["embedding"] for row in rows], np.float32)
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-3)
    file = tmp_path / "lines.txt"
    file.write_text("a cat\n\na dog\n")
    loaded = np.load(io.BytesIO(run(monkeypatch, "embed", "-f", str(file), "--format", "npy")[1].encode("latin-1")))
    assert loaded.dtype == np.float32 and np.allclose(loaded, vectors, atol=1e-5)
    status, out, _ = run(
        monkeypatch, "embed", "--format", "table", "--pooling", "last", "--no-normalize", stdin="a cat\n"
    )
    assert status == 0 and "a cat" in out
    assert run(monkeypatch, "embed")[0] == 1
    assert run(monkeypatch, "embed", "x", "--file", str(file))[0] == 2
    assert run(monkeypatch, "embed", "x", "--pooling", "most")[0] == 1


@pytest.mark.parametrize("door", ["grpc", "openai"])
def test_bench(doors: LocalStack, door: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Both doors: all answered, of the lengths asked for; a plot; a file of prompts."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('"def f("\n{"prompt": "import ", "max_tokens": 3}\n')
    common = ("bench", "-n", "4", "--warmup", "1", "--door", door, "--url", doors.http_url, "--output-len", "5")
    status, out, err = run(
        monkeypatch, *common, "--prompt-len", "12", "-c", "2", "--json", "--plot", str(tmp_path / "p.png")
    )
    assert status == 0, err
    summary = json.loads(out)["summary"]
    assert (summary["requests"], summary["failed"], summary["output_tokens"]) == (4, 0, 20)
    assert summary["prompt_tokens"] == 48 or door == "openai"
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    status, out, err = run(monkeypatch, *common, "--dataset", str(prompts), "--rate", "100")
    assert status == 0 and "TTFT" in out and "4 requests" in out, err


def test_bench_counts_errors_by_reason(doors: LocalStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the service refuses is a figure, and ends with status 1; wrong options end with 2."""
    status, out, _ = run(monkeypatch, "bench", "-n", "2", "--warmup", "0", "--prompt-len", "3000")
    assert status == 1 and re.search(r"failed: 2 x OUT_OF_RANGE [A-Z_]+", out), out
    for wrong, says in (
        (("--rate", "1", "-c", "1"), "give one of them"),
        (("--door", "back"), "grpc or openai"),
        (("--dataset", "none.jsonl"), "cannot be read"),
    ):
        status, _, err = run(monkeypatch, "bench", *wrong)
        assert status == 2 and says in err


def test_doctor_sees_the_service(doors: LocalStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gateway, models, scheduler, worker and their builds are found well."""
    options = ("--scheduler", doors.scheduler_address, "--worker", doors.worker_address)
    status, out, err = run(monkeypatch, "doctor", *options, "--json")
    values = json.loads(out)
    assert status == 0, out + err
    names = {finding["name"] for finding in values["findings"] if finding["state"] == "ok"}
    assert {"gateway", "models", "scheduler", "worker", "gateway's build"} <= names


def test_why_takes_the_id_of_an_answer_and_searches_only_on_request(
    doors: LocalStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`cmpl-ID` and `chatcmpl-ID` as OpenAI's clients have them; `--what-if` alone asks what would have let it in."""
    asked: list[bool] = []
    explain = AdminClient.explain

    def watched(client: AdminClient, request_id: str, *, tenant: str = "", needs: bool = False) -> object:
        asked.append(needs)
        return explain(client, request_id, tenant=tenant, needs=needs)

    monkeypatch.setattr(AdminClient, "explain", watched)
    turns = {"messages": [{"role": "user", "content": "hello"}]}
    for path, prompt in (("completions", {"prompt": ["hello", "you"]}), ("chat/completions", turns)):
        printed = httpx.post(f"{doors.http_url}/v1/{path}", json={**prompt, "max_tokens": 3}, timeout=60).json()["id"]
        status, out, err = run(monkeypatch, "why", printed)
        assert status == 0 and "RUNNING" in out, err
        assert ("see also" in out) == (path == "completions")
    assert asked == [False, False]
    assert run(monkeypatch, "why", printed, "--what-if")[0] == 0 and asked[2:] == [True]
