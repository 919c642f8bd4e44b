"""README's quick start works as written: every command and every program in it is run."""

import contextlib
import io
import runpy
import sys
from pathlib import Path

import httpx
import pytest

from quire.local_stack.stack import LocalStack
from tests.repo.test_docs import PYTHON
from tests.support.cli_lines import shell_lines
from tests.support.stack.commands import quire_here
from tests.support.tree import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
QUICK_START = README.partition("## Quick start")[2].partition("\n## ")[0]
STARTING = ("up", "run")
COMMANDS = [words for words in shell_lines(QUICK_START) if words[0].endswith("bin/quire") and words[1] not in STARTING]
PROGRAMS = PYTHON.findall(QUICK_START)


def printed_by(program: str, folder: Path) -> str:
    """What it prints, in this process, which has imported everything."""
    (file := folder / "program.py").write_text(program, encoding="utf-8")
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.chdir(ROOT):
        runpy.run_path(str(file), run_name="__main__")
    return out.getvalue()


def test_the_quick_start_is_whole() -> None:
    """The tests below see what they are to see."""
    assert [words[1] for words in COMMANDS] == ["generate", "chat", "steps", "blocks", "top", "lab"]
    assert len(PROGRAMS) == 2


def test_commands_print_what_they_promise(stack: LocalStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """generate and chat (asked a question) print text; steps, blocks and a look at `top` then show it; the lab is where it says."""
    env = {"QUIRE_TARGET": stack.grpc_address, "QUIRE_ADMIN": stack.admin_address, "QUIRE_LAB": stack.admin_url}
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stdin", io.StringIO("What does this module do?\n"))
    # An answer of a chat may have two thousand tokens.
    here = {"chat": ["chat", "--max-tokens", "60"], "top": ["top", "--once"], "lab": ["lab"]}
    printed = {words[1]: quire_here(*here.get(words[1], words[1:]), check=True).stdout for words in COMMANDS}
    # What a model draws may be a few characters long.
    assert all(len(text.strip()) > (0 if name in {"generate", "chat"} else 20) for name, text in printed.items()), (
        printed
    )
    assert "16" in printed["blocks"]
    assert stack.admin_url in printed["lab"]


def test_the_grpc_program_streams(stack: LocalStack, tmp_path: Path) -> None:
    """The first program, with the address of this stack."""
    program = PROGRAMS[0].replace("127.0.0.1:50051", stack.grpc_address)
    assert printed_by(program, tmp_path).strip()


def test_the_offline_program_prints_outputs_in_input_order(tmp_path: Path) -> None:
    """The second program: four prompts, four lines, in order."""
    lines = printed_by(PROGRAMS[1], tmp_path).splitlines()
    assert [line.partition(" -> ")[0] for line in lines] == [
        "'import '",
        "'def main():'",
        "'class Node:'",
        "'for i in '",
    ]
    assert all(len(line.partition(" -> ")[2]) > 2 for line in lines)


def test_the_curl_line_streams(stack: LocalStack) -> None:
    """The HTTP request, sent as curl would."""
    words = next(words for words in shell_lines(QUICK_START) if words[0] == "curl")
    url, body = words[2].replace("http://127.0.0.1:8000", stack.http_url), words[words.index("-d") + 1]
    reply = httpx.post(url, content=body, headers={"content-type": "application/json"}, timeout=60)
    assert reply.status_code == 200, reply.text
    lines = [line for line in reply.text.splitlines() if line]
    assert len(lines) > 3
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
