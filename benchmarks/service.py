"""Runs one service with any of its settings as a benchmark process; `quire serve` has options for some of them only.

    python -m benchmarks.service scheduler '{"workers": ["127.0.0.1:50061"], "max_waiting_s": 0.5}'

Prints its address as `quire serve` does and stops on SIGTERM. `Stack` starts all three services.
"""

import asyncio
import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, Self

import typer

from benchmarks.overlap.stack import until_serving
from gateway_svc import app as gateway
from gateway_svc.settings import GatewaySettings
from quire.local_stack.processes import child_environment
from quire_tools.simulated_worker.app import serve_simulated
from quire_tools.simulated_worker.settings import SimulatedWorkerSettings
from scheduler_svc import app as scheduler
from scheduler_svc.settings import SchedulerSettings
from svc_common import garbage
from worker_svc import app as worker
from worker_svc.settings import WorkerSettings

_STOP_S = 120
_PORTS = {
    "worker": {"port": 0},
    "scheduler": {"port": 0, "admin_port": 0, "metrics_port": 0},
    "gateway": {"grpc_port": 0, "http_port": 0, "admin_port": 0, "admin_http_port": 0},
}


class Stack:
    """Owner of the three processes.

    `worker`: settings of the simulated worker, or with a `model` of the real one; likewise the others.
    `call_logs`: folder for the logs of all calls (benchmarks.call_path.trace), which are complete when the stack
    has ended. `address`: the gateway's.
    """

    def __init__(
        self,
        worker: dict[str, Any],
        scheduler: dict[str, Any],
        gateway: dict[str, Any] | None = None,
        *,
        call_logs: Path | None = None,
    ) -> None:
        self._settings = {"worker": worker, "scheduler": scheduler, "gateway": gateway or {}}
        self._call_logs = call_logs
        self._exits = ExitStack()
        self.address = ""

    def __enter__(self) -> Self:
        with ExitStack() as started:
            worker = self._start(started, "worker", {})
            scheduler = self._start(started, "scheduler", {"workers": [worker]})
            self.address = self._start(started, "gateway", {"schedulers": [scheduler]})
            until_serving(self.address)
            self._exits = started.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._exits.close()

    def _start(self, started: ExitStack, name: str, peers: dict[str, Any]) -> str:
        """Start a service: HOST:PORT once it listens. Raises RuntimeError if it ends before."""
        arguments = [name, json.dumps(_PORTS[name] | self._settings[name] | peers)]
        logs = self._call_logs
        program = (
            ["benchmarks.service", *arguments]
            if logs is None
            else ["benchmarks.call_path.trace", *arguments, str(logs)]
        )
        process = subprocess.Popen(
            [sys.executable, "-m", *program],
            stdout=subprocess.PIPE,
            env=child_environment(os.environ),
            text=True,
        )
        started.callback(process.communicate, timeout=_STOP_S)
        started.callback(process.terminate)
        line = process.stdout.readline() if process.stdout else ""
        if not line.startswith("service "):
            raise RuntimeError(f"the {name} ended with status {process.wait(_STOP_S)} before it listened")
        return line.strip().rpartition("address=")[2]


def main(
    name: Annotated[str, typer.Argument(help=f"Service: {', '.join(_PORTS)}.")],
    settings: Annotated[str, typer.Argument(help="Settings of the service, a JSON object.")] = "{}",
) -> None:
    """Runs one service of a benchmark."""
    values = json.loads(settings)

    def ready(address: str, *_: str) -> None:
        print(f"service {name} address={address}", flush=True)
        garbage.settle()

    quiet = worker.Watchers(on_budget=lambda readable: None, on_progress=lambda stage, fraction: None)
    if name == "gateway":
        asyncio.run(gateway.serve(GatewaySettings(**values), on_ready=ready))
    elif name == "scheduler":
        asyncio.run(scheduler.serve(SchedulerSettings(**values), on_ready=ready))
    elif "model" in values:
        asyncio.run(worker.serve(WorkerSettings.of(**values), on_ready=ready, watchers=quiet))
    else:
        asyncio.run(serve_simulated(SimulatedWorkerSettings.of(**values), on_ready=ready, watchers=quiet))


if __name__ == "__main__":
    typer.run(main)
