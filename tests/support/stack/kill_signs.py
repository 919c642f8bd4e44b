"""What test and worker tell each other through a folder about how the worker is to end, and has ended. No torch.

The folder named by $QUIRE_TEST_KILLS holds `armed`, the moment at which a worker is to end next, with "@R" for rank R of a
group (no file: none), and `hits`, to which it writes a line just before. `kill_plan` arms it; moments of a real worker's
steps are in `kill_moments`.
"""

import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from protos.common.v1 import common_pb2
from protos.worker.v1 import worker_pb2
from worker_svc.engine import DeviceLost, Progress

FOLDER_VARIABLE = "QUIRE_TEST_KILLS"
LOSS = "loss"
"""No kill: in place of the model's run, the device is lost."""
LOADING = "loading"
"""No kill: the load does not come to its end, in threads of a library's own, which a process waits for before it ends."""
POISON = "poison"
POISON_TOKEN = 97
"""First token of a prompt that kills its workers, in every step, while POISON is armed."""


class Signs:
    """The worker's side."""

    def __init__(self, folder: Path, rank: str = "0") -> None:
        self._folder, self._rank = folder, rank

    @property
    def armed(self) -> str:
        """The moment that is armed for this rank; empty: none."""
        try:
            moment, _, rank = (self._folder / "armed").read_text().partition("@")
        except FileNotFoundError:
            return ""
        return moment if (rank or "0") == self._rank else ""

    def note(self, moment: str, detail: str) -> None:
        """It has come, and is disarmed unless it lasts."""
        with (self._folder / "hits").open("a") as hits:
            hits.write(f"{moment}: pid {os.getpid()}, {detail}\n")
        if moment != POISON:
            (self._folder / "armed").unlink()

    def hang_load(self) -> None:
        """Never returns, where that is armed."""
        if self.armed == LOADING:
            self.note(LOADING, "no kill")
            with ThreadPoolExecutor(2) as pool:
                pool.submit(threading.Event().wait).result()

    def lose_device(self) -> None:
        """DeviceLost, where that is armed."""
        if self.armed == LOSS:
            self.note(LOSS, "no kill")
            raise DeviceLost("the bus fell off")


def signs() -> Signs:
    """Of this process."""
    rank = sys.argv[sys.argv.index("--rank") + 1] if "--rank" in sys.argv else "0"
    return Signs(Path(os.environ[FOLDER_VARIABLE]), rank)


def watch_simulated() -> None:
    """Puts the hooks in, for the life of this process."""
    # Not above: a process with a real worker imports this module while it watches the other engine's.
    from quire_tools.simulated_worker.engine import SimulatedEngine

    load: Callable[..., common_pb2.ModelLimits] = SimulatedEngine.load
    execute: Callable[..., worker_pb2.WorkerOutputs] = SimulatedEngine.execute
    found = signs()

    def watched(engine: SimulatedEngine, outputs: worker_pb2.SchedulerOutputs) -> worker_pb2.WorkerOutputs:
        found.lose_device()
        return execute(engine, outputs)

    def watched_load(engine: SimulatedEngine, progress: Progress) -> common_pb2.ModelLimits:
        found.hang_load()
        return load(engine, progress)

    SimulatedEngine.execute = watched  # type: ignore[method-assign]
    SimulatedEngine.load = watched_load  # type: ignore[method-assign]
