"""Pods as in deploy/kubernetes, in containers: ready by their probes, without power, and ended one after the other under load."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy import kustomize
from quire.client.sampling_params import SamplingParams
from quire.client.sync_client import Client
from tests.compose.checks.conftest import Figures, Stacks
from tests.compose.checks.requests import GREEDY, Streams, undisturbed
from tests.compose.pods import Cell, Pod
from tests.compose.stack import until
from tests.support.kubernetes.cells import NEEDS_KUSTOMIZE

pytestmark = NEEDS_KUSTOMIZE
SHORT = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
COMPONENTS = ("worker", "scheduler", "gateway")
BEGUN = 40
"""Tokens after which a pod is ended."""
_NO_POWER = {
    "NoNewPrivs": "1",
    "Seccomp": "2",
    **dict.fromkeys(("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"), "0" * 16),
}


@pytest.fixture(scope="module")
def cell(stacks: Stacks) -> Iterator[Cell]:
    """The component `cpu`: two gateways, a scheduler, two workers, all ready."""
    stacks.end()
    with Cell(kustomize.cell("cpu")) as running:
        running.start_all()
        yield running


@pytest.fixture(scope="module")
def expected(cell: Cell) -> list[list[int]]:
    """Tokens of an undisturbed run."""
    with door(cell) as client:
        return undisturbed(client)


def door(cell: Cell) -> Client:
    """Of a gateway to which the Service would send."""
    return Client(f"{cell.ready('gateway')[-1].address}:50051")


class Load:
    """Short requests, one after the other, each to a gateway that is ready then, until the block ends."""

    def __init__(self, cell: Cell) -> None:
        self._cell = cell
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.count = 0
        self.errors: list[Exception] = []

    def __enter__(self) -> "Load":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(0.02):
            try:
                with door(self._cell) as client:
                    client.generate("def main():", SHORT, timeout_s=60)
                self.count += 1
            except Exception as error:
                self.errors.append(error)


def test_processes_have_no_power(cell: Cell) -> None:
    """Not root, no capability, no new privileges, system calls filtered, nothing of the root file system writable."""
    assert sorted(pod.component for pod in cell.pods) == ["gateway", "gateway", "scheduler", "worker", "worker"]
    for pod in cell.pods:
        lines = Path(f"/proc/{pod.pid}/status").read_text(encoding="utf-8").splitlines()
        status = {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
        assert set(status["Uid"].split()) == {"10001"}
        assert {name: status[name] for name in _NO_POWER} == _NO_POWER
        [options] = [
            line.split()[5]
            for line in Path(f"/proc/{pod.pid}/mountinfo").read_text().splitlines()
            if line.split()[4] == "/"
        ]
        assert "ro" in options.split(",")


@pytest.mark.parametrize("component", COMPONENTS)
def test_a_pod_is_replaced_under_load(cell: Cell, expected: list[list[int]], figures: Figures, component: str) -> None:
    """preStop, drain and end within the grace period with status 0; no request fails, and streams have the same tokens.

    Streams begin at the pod when its gateway may still be sent to, just before SIGTERM.
    """
    pod = cell.ready(component)[0]
    streams: list[Streams] = []
    with Client(f"{(pod if component == 'gateway' else cell.ready('gateway')[0]).address}:50051") as client:

        def begin() -> None:
            streams.append(Streams(client).start())
            until(lambda: streams[0].num_tokens() >= BEGUN, "tokens", pause_s=0.001)

        with Load(cell) as load:
            if component == "worker":
                begin()  # it drains before SIGTERM
            status, seconds = cell.end(pod, at_signal=begin if component != "worker" else lambda: None)
            replacement = cell.start(pod.manifest)
            cell.wait_until_ready(replacement)
            assert streams[0].finish() == expected
            served = load.count
            until(lambda: load.count > served + 5 or load.errors, "requests after it", timeout_s=60)
    assert (status, load.errors) == (0, [])
    figures.note(f"pod_{component}_ended_s", seconds)
    figures.note(f"pod_{component}_requests_meanwhile", load.count)
    assert all(len(tokens) == GREEDY.max_tokens for tokens in expected)
    _check_faults(cell.pods)


def _check_faults(pods: list[Pod]) -> None:
    assert [(pod.component, pod.faults) for pod in pods if pod.faults] == []
