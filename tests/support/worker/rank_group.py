"""A group of ranks: rank 0's engine in this process, the others as the processes that users start."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from protos.worker.v1 import worker_pb2
from quire.local_stack.processes import child_environment
from tests.support.worker.driver import BLOCK_SIZE
from worker_svc.engine import DeviceLost
from worker_svc.executor.model_engine import ModelEngine
from worker_svc.executor.step_runner import StepRunner
from worker_svc.ranks.channel import Channel, MessageKind
from worker_svc.ranks.group_engine import GroupEngine
from worker_svc.ranks.joining import Meeting
from worker_svc.settings import WorkerSettings, option_of

_END_S = 20


class RunningGroup(GroupEngine):
    """The group, for a `Driver`. `losses`: what a worker's process would end with. `followers`: processes of ranks 1 and on."""

    def __init__(self, settings: WorkerSettings) -> None:
        self.settings = settings
        self.losses: list[DeviceLost] = []
        self.meeting = Meeting(settings)
        super().__init__(
            settings, self.meeting, lambda ranks: ModelEngine(settings, ranks=ranks), self.losses.append
        )  # fmt: skip
        self.followers: list[subprocess.Popen[str]] = []

    @property
    def own(self) -> ModelEngine:
        """Rank 0's engine."""
        assert isinstance(self._engine, ModelEngine)
        return self._engine

    @property
    def _runner(self) -> StepRunner:
        assert self.own._runner is not None
        return self.own._runner


def follower(settings: WorkerSettings, port: int, rank: int, **changes: Any) -> subprocess.Popen[str]:
    """The process of a rank, with `changes` to the settings of rank 0."""
    given = settings.model_dump(
        exclude_defaults=True, exclude={"group_port", "peers", "rank", "num_gpu_blocks_override"}
    )
    given |= {"rank": rank, "leader": f"127.0.0.1:{port}", **changes}
    arguments: list[str] = []
    for name, value in given.items():
        if isinstance(value, bool):
            arguments.append(option_of(name) if value else option_of(name).replace("--", "--no-", 1))
        else:
            arguments += [option_of(name), str(value)]
    command = [sys.executable, "-m", "quire", "serve", "worker", *arguments]
    return subprocess.Popen(
        command, env=child_environment(os.environ), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )


def settings_of(path: Path, size: int = 2, **settings: Any) -> WorkerSettings:
    """Settings of rank 0 that listens on any free port."""
    sizes = {"block_size": BLOCK_SIZE, "swap_space_gib": 0.05, "device": "cpu"}
    return WorkerSettings.of(model=path, tensor_parallel=size, group_port=0, **(sizes | settings))


@contextmanager
def joining(settings: WorkerSettings) -> Iterator[RunningGroup]:
    """A group whose ranks join; nothing is loaded. All processes have ended at the end."""
    group = RunningGroup(settings)
    group.followers = [
        follower(settings, group.meeting.port, rank) for rank in range(1, settings.num_ranks)
    ]  # fmt: skip
    try:
        yield group
    finally:
        group.close()
        for process in group.followers:
            try:
                process.communicate(timeout=_END_S)
            finally:
                process.kill()


@contextmanager
def running(path: Path, size: int = 2, *, num_blocks: int = 160, **settings: Any) -> Iterator[RunningGroup]:
    """A group that is loaded, profiled and allocated."""
    with joining(settings_of(path, size, **settings)) as group:
        group.load(lambda _stage, _fraction: None)
        group.profile(64, 8)
        group.allocate(num_blocks, 40)
        yield group


def ended(process: subprocess.Popen[str]) -> str:
    """What a process that ends has written."""
    _, said = process.communicate(timeout=_END_S)
    return said


def stopped(process: subprocess.Popen[str]) -> None:
    """Stop it until SIGCONT. Returns when it stands still, which is some time after the signal."""
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)


def other_block_ids(monkeypatch: pytest.MonkeyPatch, peer: str) -> None:
    """From now on, steps that add rows reach `peer` with another block id."""
    send = Channel.send

    def other_map(channel: Channel, kind: MessageKind, content: bytes = b"", *timeout_s: float) -> None:
        if kind is MessageKind.STEP and channel.peer == peer:
            outputs = worker_pb2.SchedulerOutputs.FromString(content)
            ids = bytearray(outputs.added.block_ids)
            ids[0] ^= 64
            outputs.added.block_ids = bytes(ids)
            content = outputs.SerializeToString()
        send(channel, kind, content, *timeout_s)

    monkeypatch.setattr(Channel, "send", other_map)
