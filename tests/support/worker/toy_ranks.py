"""A group of ranks with the toy grammars of `ToyMasks`: rank 0 in this process, the others in processes of this module."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from protos.common.v1 import common_pb2
from quire.local_stack.processes import child_environment
from tests.support.worker.rank_group import RunningGroup, settings_of
from tests.support.worker.sampled_rows import ToyMasks
from worker_svc.engine import Progress
from worker_svc.executor.model_engine import ModelEngine
from worker_svc.ranks.follower import follow
from worker_svc.ranks.joining import join
from worker_svc.settings import WorkerSettings


class _ToyEngine(ModelEngine):
    def load(self, progress: Progress) -> common_pb2.ModelLimits:
        """See Engine."""
        limits = super().load(progress)
        self._masks = ToyMasks()
        return limits


class _ToyGroup(RunningGroup):
    def __init__(self, settings: WorkerSettings) -> None:
        super().__init__(settings)
        self._make = lambda ranks: _ToyEngine(settings, ranks=ranks)


@contextmanager
def toy_group(
    path: Path, tensor: int, stages: int, *, num_blocks: int, num_cpu_blocks: int, **settings: Any
) -> Iterator[RunningGroup]:
    """A group that is loaded, profiled and allocated. No rank ends with an error."""
    own = settings_of(path, tensor, pipeline_parallel=stages, **settings)
    group = _ToyGroup(own)
    for rank in range(1, own.num_ranks):
        other = own.model_copy(update={"rank": rank, "leader": f"127.0.0.1:{group.meeting.port}"})
        command = [sys.executable, "-m", __name__, other.model_dump_json()]
        group.followers.append(subprocess.Popen(command, env=child_environment(os.environ)))  # type: ignore[arg-type]
    try:
        group.load(lambda _stage, _fraction: None)
        group.profile(192, 8)
        group.allocate(num_blocks, num_cpu_blocks)
        yield group
    finally:
        group.close()
        codes = [process.wait(20) for process in group.followers]
    assert codes == [0] * len(codes), codes


def main() -> None:
    """A rank above 0."""
    settings = WorkerSettings.model_validate_json(sys.argv[1])
    joined = join(settings, threading.Event())
    assert joined is not None
    ranks, channel = joined
    follow(channel, ranks, lambda: _ToyEngine(settings, ranks=ranks))


if __name__ == "__main__":
    main()
