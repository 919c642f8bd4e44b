"""Which kills there are to be: at chosen moments of a worker's steps and at random ones, each while the streams go on."""

import os
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.support.stack.kill_signs import FOLDER_VARIABLE
from tests.support.stack.supervised import Readings, Supervised

_SITE = Path(__file__).parent / "kill_site"
_HIT_S = 120.0
AT_RANDOM = "random"


class Killer:
    """Arms moments in `folder`, one after the other; knows from there which were hit."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def environ(self) -> dict[str, str]:
        """For a stack whose workers are to watch for moments."""
        path = [str(_SITE), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {**os.environ, "PYTHONPATH": os.pathsep.join(path), FOLDER_VARIABLE: str(self._folder)}

    @property
    def hits(self) -> list[str]:
        """A line for each worker that ended itself: "MOMENT: pid N, DETAIL"."""
        found = self._folder / "hits"
        return found.read_text().splitlines() if found.exists() else []

    @property
    def counts(self) -> Counter[str]:
        """How often each moment was hit."""
        return Counter(hit.partition(":")[0] for hit in self.hits)

    def arm(self, moment: str, rank: int = 0) -> None:
        """From now on, for a worker's process of that rank."""
        (self._folder / "arming").write_text(f"{moment}@{rank}")
        (self._folder / "arming").rename(self._folder / "armed")

    def disarm(self) -> None:
        """No longer."""
        (self._folder / "armed").unlink()

    def end_at(self, moment: str, readings: Readings, rank: int = 0) -> None:
        """Returns when the worker is about to end at the moment. AssertionError where that does not come; what ended a stream."""
        num_hits = len(self.hits)
        self.arm(moment, rank)
        deadline = time.monotonic() + _HIT_S
        while len(self.hits) == num_hits:
            readings.check()
            assert time.monotonic() < deadline, f"no step has the moment {moment!r}"
            time.sleep(0.005)
        assert self.hits[-1].startswith(f"{moment}:"), self.hits[-1]

    def kills(self, running: Supervised, moments: Sequence[str], seed: int) -> Callable[[Readings], None]:
        """Kills at each of `moments`, AT_RANDOM among them, in another order; some tokens come between any two."""
        draw = random.Random(seed)
        order = draw.sample(moments, len(moments))

        def kill(readings: Readings) -> None:
            for moment in order:
                readings.wait_for(readings.num_tokens + draw.randrange(20, 120))
                time.sleep(draw.uniform(0, 0.02))
                if moment == AT_RANDOM:
                    running.kill("worker")
                else:
                    self.end_at(moment, readings)

        return kill
