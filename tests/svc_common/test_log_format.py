"""Bugs in the log: found by type, place and id, and nothing that a caller wrote is in it, whatever the exception quotes."""

import asyncio
import json
import logging
import re
import subprocess
import sys

from svc_common.errors import Unavailable
from svc_common.observability.log_context import LogContext, about, enter, tenant_hash
from svc_common.observability.log_format import DiscreetFormatter, JsonFormatter
from tests.support.canaries import CANARY
from tests.support.tree import ROOT

_PROGRAM = """
import asyncio
import logging
import sys
import grpc.aio
from quire.cli.serving import service
from svc_common.net import rpc
from svc_common.observability.log_format import LogFormat


def look_up(prompt):
    try:
        return {}[prompt]
    except KeyError as error:
        raise ValueError("no such thing: " + prompt) from error


async def forgotten(prompt):
    look_up(prompt)


async def serve():
    try:
        look_up("kanarien" + "vogel7f3a")
    except ValueError as error:
        print(rpc.hide(error).metadata["error_id"])
    of_grpc = logging.getLogger("grpc._cython.cygrpc")
    of_grpc.error("a batch failed", exc_info=grpc.aio.InternalError("written to a client that left"))
    of_grpc.error("a port is broken", exc_info=grpc.aio.UsageError("wrong"))
    task = asyncio.create_task(forgotten("kanarien" + "vogel7f3a"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    del task
    raise SystemExit


service.run(serve(), stop_with_stdin=False, name="gateway", log_form=LogFormat(sys.argv[1]))
"""


def test_a_service_logs_a_bug_without_what_it_quotes() -> None:
    """As a service runs: a bug in a call, with its cause, and one in a task that is not awaited."""
    assert CANARY not in _PROGRAM, "lines of code are in tracebacks"
    command = [sys.executable, "-c", _PROGRAM, "text"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    said = done.stderr
    assert CANARY not in said, said
    assert f"internal error {done.stdout.strip()}" in said
    assert said.count("ValueError: (what it says is left out") == 2 and said.count("KeyError: (") == 2
    assert "the direct cause of the following exception" in said
    assert len(re.findall(r'File "<string>", line \d+, in look_up', said)) == 4
    assert "asyncio: Task exception was never retrieved" in said
    assert "a port is broken" in said and "a batch failed" not in said, "clients may leave at any time"


def _written(error: BaseException) -> str:
    record = logging.LogRecord("x", logging.ERROR, "x.py", 1, "so %s", ("it is",), (type(error), error, None))
    return DiscreetFormatter("%(levelname)s %(message)s").format(record)


def test_what_quotes_nothing_is_whole() -> None:
    """Our own errors and the system's; groups and contexts are gone through, notes are left out."""
    assert _written(Unavailable("no worker")).endswith("svc_common.errors.Unavailable: no worker")
    assert _written(FileNotFoundError(2, "No such file", "x")).endswith("[Errno 2] No such file: 'x'")
    error = ExceptionGroup(CANARY, [TypeError(CANARY), OSError(5, "I/O error")])
    error.add_note(CANARY)
    error.__context__ = RuntimeError(CANARY)
    text = _written(error)
    assert CANARY not in text
    assert [name in text for name in ("RuntimeError", "TypeError", "I/O error", "ExceptionGroup")] == [True] * 4
    assert "During handling of the above exception" in text


def test_as_json_every_line_is_an_object() -> None:
    """The same program: one line for each bug, traceback within it, with logger and time."""
    command = [sys.executable, "-c", _PROGRAM, "json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert CANARY not in done.stderr
    assert [(line["level"], line["service"], line["logger"]) for line in lines] == [
        ("ERROR", "gateway", "svc_common.net.rpc"),
        ("ERROR", "gateway", "grpc._cython.cygrpc"),
        ("ERROR", "gateway", "svc_common.observability.log_format"),
    ]
    assert lines[0]["message"] == f"internal error {done.stdout.strip()}"
    bugs = [line["exception"] for line in lines if line["logger"].startswith("svc_common.")]
    assert all(exception.count("ValueError: (what it says is left out") == 1 for exception in bugs)
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}\+00:00", line["time"]) for line in lines)


def test_a_task_s_lines_are_about_what_it_serves() -> None:
    """Ids stay within their tasks and what these start; a line may name another request."""
    written: list[dict[str, str]] = []
    formatter = JsonFormatter("scheduler")

    def write(**extra: LogContext) -> None:
        record = logging.LogRecord("x", logging.INFO, "x.py", 1, "so", (), None)
        record.__dict__.update(extra)
        written.append(json.loads(formatter.format(record)))

    async def serve(request_id: str) -> None:
        enter(LogContext(request_id, tenant_hash("acme")))
        await asyncio.sleep(0)
        await asyncio.to_thread(write)

    async def serve_two() -> None:
        await asyncio.gather(serve("one"), serve("two"))
        write()
        write(**about(LogContext.of_message(request_id="three", tenant="", traceparent=f"00-{'a' * 32}-{'b' * 16}-01")))

    asyncio.run(serve_two())
    assert {line.get("request_id") for line in written[:2]} == {"one", "two"}
    assert {line["tenant"] for line in written[:2]} == {tenant_hash("acme")} != {"acme"}
    assert written[2].keys() == {"time", "level", "logger", "message", "service"}
    assert (written[3]["request_id"], written[3]["trace_id"], written[3]["span_id"]) == ("three", "a" * 32, "b" * 16)
    assert "tenant" not in written[3]
