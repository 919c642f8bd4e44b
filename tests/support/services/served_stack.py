"""Gateway, scheduler and a simulated worker, all three real, in one process beside the tests'; it starts sooner than one for each.

`python -m tests.support.services.served_stack` is that process: it prints its addresses once it serves and ends with its input.
"""

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from protos.inference.v1 import inference_pb2 as pb
from tests.support.services.harness import scheduler, worker
from tests.support.services.scripted_engine import gateway
from tests.support.tree import ROOT

START_S = 60.0
# Steps that read a long context take long.
WORKER: dict[str, Any] = {"time_scale": 0.5, "context_token_s": 1e-5}


@dataclass(frozen=True, slots=True)
class ServedStack:
    """Addresses of the gateway: HOST:PORT, a URL for HTTP. The model is called `simulated`, one token per byte, context 4,096."""

    grpc_address: str
    http_url: str
    admin_address: str


@contextlib.contextmanager
def served_stack() -> Iterator[ServedStack]:
    """Starts it; it is ready to serve."""
    command = [sys.executable, "-m", __spec__.name]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        addresses = process.stdout.readline()
        assert addresses, f"it ended with status {process.wait()}"
        yield ServedStack(**json.loads(addresses))
        process.stdin.close()
        assert process.wait(START_S) == 0


async def _serve() -> None:
    async with (
        worker(**WORKER) as (worker_address,),
        scheduler(worker_address, integrity_check_every=0) as (address, _),
        gateway(address, openengine=True) as running,
    ):
        first = pb.GenerateRequest(text="a", stop=pb.StopConditions(max_tokens=1))
        await running.stub.Generate(first, timeout=START_S)
        addresses = {"grpc_address": running.grpc, "http_url": f"http://{running.http}", "admin_address": running.admin}
        print(json.dumps(addresses), flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(_serve())
