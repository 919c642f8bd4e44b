"""A stack under a load that has something for every dashboard, watched by a real Prometheus."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from quire.client.sampling_params import SamplingParams
from quire.client.sync_client import Client, RequestOptions
from quire.local_stack.stack import LocalStack
from svc_common.errors import QuireError
from tests.dashboards.prometheus import SCRAPE_S, Prometheus, running
from tests.support.tree import ROOT

_NUM_BLOCKS = 260
_SETTLE_S = 3 * SCRAPE_S


@dataclass(frozen=True, slots=True)
class Scene:
    """What was loaded from `start_s` to `end_s` (Unix), and the Prometheus that saw it."""

    prometheus: Prometheus
    start_s: float
    end_s: float


@contextmanager
def loaded(folder: Path, phases: list[tuple[int, float]]) -> Iterator[Scene]:
    """`phases`: (requests, requests a second), one after the other, with prompts that begin alike and too few blocks for all."""
    with LocalStack(
        simulated=True,
        # Without the peak forecast prompts start that cannot all finish: some request is swapped out.
        policy_set=("preemption_mode=swap", "restraint=null"),
        worker_args=("--num-gpu-blocks", str(_NUM_BLOCKS)),
    ) as stack:
        metrics = stack.metrics_addresses
        targets = {
            "gateway": [stack.admin_url.removeprefix("http://")],
            "scheduler": [metrics["scheduler"]],
            "worker": [metrics[name] for name in stack.options.worker_names],
        }
        with running(folder, targets) as prometheus:
            start_s = time.time()
            for number, rate in phases:
                _wrong_request(stack.grpc_address)
                _bench(stack.grpc_address, number, rate)
                # The first one made the series; what grows is seen from the second on.
                _wrong_request(stack.grpc_address)
                _beams(stack.grpc_address)
            time.sleep(_SETTLE_S)
            yield Scene(prometheus, start_s, time.time())


def _bench(target: str, number: int, rate: float) -> None:
    """`quire bench`, as users run it."""
    command = [
        *(sys.executable, "-m", "quire", "bench", "--target", target, "-n", str(number), "--rate", str(rate)),
        *("--dataset", "prefix-shared", "--prefix-len", "96", "--prompt-len", "lognormal:64:0.6"),
        *("--output-len", "lognormal:96:0.5", "--warmup", "0", "--json"),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def _beams(target: str) -> None:
    """Beams share blocks; one that another writes to is copied."""
    params = SamplingParams(n=3, best_of=3, use_beam_search=True, temperature=0.0, max_tokens=40, ignore_eos=True)
    with Client(target) as client:
        client.generate("def fibonacci(n):", params)


def _wrong_request(target: str) -> None:
    """One that is answered by an error."""
    with Client(target) as client, suppress(QuireError):
        client.generate("x", SamplingParams(max_tokens=1), options=RequestOptions(model="no-such-model"))
