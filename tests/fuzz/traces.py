"""What a run may leave behind in the services: nothing."""

import re
import time
import urllib.request
from pathlib import Path

from quire.local_stack.stack import LocalStack
from quire.operators.admin import AdminClient

_SETTLE_S = 15.0
_NUM_FOLLOWING = 40
_ERROR_LINE = re.compile(r"^(ERROR|CRITICAL|Traceback)|Task exception was never retrieved|was never awaited")


class Log:
    """What the services write to standard error. `lines`: all; `errors`: errors and tracebacks, each with the lines that follow."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def __call__(self, name: str, line: str) -> None:
        self.lines.append(f"{name}: {line}")

    @property
    def errors(self) -> list[str]:
        found = [i for i, line in enumerate(self.lines) if _ERROR_LINE.search(line.partition(": ")[2])]
        return ["\n".join(self.lines[i : i + _NUM_FOLLOWING]) for i in found]


def resident_bytes(stack: LocalStack) -> dict[str, int]:
    """Memory of each service."""
    found = {}
    for name, pid in stack.pids.items():
        status = Path(f"/proc/{pid}/status").read_text()
        found[name] = 1024 * int(status.partition("VmRSS:")[2].split()[0])
    return found


def wait_until_nothing_is_left(stack: LocalStack) -> None:
    """No request anywhere, every block free, all serving; AssertionError with what is left."""
    deadline = time.monotonic() + _SETTLE_S
    with AdminClient(stack.admin_address) as admin:
        while left := _left(stack, admin):
            assert time.monotonic() < deadline, left
            time.sleep(0.05)
    stack.check()


def _left(stack: LocalStack, admin: AdminClient) -> str:
    load, blocks = admin.load(), admin.blocks()
    busy = load.num_waiting or load.queues.running or load.queues.swapped or len(load.tenants)
    if busy or blocks.tables or blocks.gpu.free < blocks.gpu.total or not load.serving:
        return f"{load} {blocks.tables}"
    metrics = urllib.request.urlopen(f"{stack.http_url}/metrics", timeout=10).read().decode()
    names = ("quire_gateway_requests_in_flight", "quire_gateway_scheduler_requests", "quire_gateway_open_streams")
    held = [line for line in metrics.splitlines() if line.startswith(names) and not line.endswith(" 0.0")]
    return "\n".join(held)
