"""Runs trials in processes of their own, and keeps their outcomes in a file.

A process is forked from a server that has imported torch and transformers; one that crashes or hangs is an
outcome like any other.
"""

import json
import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.worker.families.trial import RAISED, Trial, tried

PATH = Path(__file__).with_name("table.json")
LIMIT_S = 120.0
_LOOK_S, _END_S = 0.5, 5.0


@dataclass(frozen=True, slots=True)
class Table:
    """Outcomes by model type, with the release of transformers that has these classes."""

    transformers: str
    trials: Mapping[str, Trial]

    @classmethod
    def read(cls, path: Path = PATH) -> "Table":
        raw = json.loads(path.read_text(encoding="utf-8"))
        return cls(raw["transformers"], {name: Trial(name, **fields) for name, fields in raw["classes"].items()})

    def write(self, path: Path = PATH) -> None:
        """One line for each class, in order of their names."""
        rows = [f"    {json.dumps(name)}: {json.dumps(_fields(self.trials[name]))}" for name in sorted(self.trials)]
        head = f'{{\n  "transformers": {json.dumps(self.transformers)},\n  "classes": {{\n'
        path.write_text(head + ",\n".join(rows) + "\n  }\n}\n", encoding="utf-8")

    def count(self, outcome: str) -> int:
        """Number of classes with this outcome."""
        return sum(trial.outcome == outcome for trial in self.trials.values())


def _fields(trial: Trial) -> dict[str, object]:
    return {name: value for name, value in asdict(trial).items() if value and name != "model_type"}


def run(model_types: Iterable[str], at_once: int, limit_s: float = LIMIT_S) -> Iterator[tuple[Trial, float]]:
    """Each type's outcome and seconds, as they end."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    pending, running = list(model_types)[::-1], dict[Connection, _Running]()
    while pending or running:
        while pending and len(running) < at_once:
            answer, ours = context.Pipe(duplex=False)
            process = context.Process(target=_answered, args=(pending[-1], ours), daemon=True)
            process.start()
            ours.close()
            running[answer] = _Running(pending.pop(), process, time.monotonic())
        ready = wait(list(running), _LOOK_S)
        for answer, one in list(running.items()):
            if answer in ready or one.age_s > limit_s:
                yield one.ended(answer), one.age_s
                del running[answer]


def _answered(model_type: str, answer: Connection) -> None:
    answer.send(tried(model_type))


@dataclass(frozen=True, slots=True)
class _Running:
    """One process at work."""

    model_type: str
    process: BaseProcess
    begun: float

    @property
    def age_s(self) -> float:
        return time.monotonic() - self.begun

    def ended(self, answer: Connection) -> Trial:
        """Its outcome; of one that sent none, why."""
        try:
            trial: Trial = answer.recv() if answer.poll() else self._stopped()
        except EOFError:
            self.process.join()
            trial = self._failed(f"its process ends with code {self.process.exitcode}")
        self.process.join(_END_S)
        self.process.kill()
        return trial

    def _stopped(self) -> Trial:
        self.process.kill()
        return self._failed("does not end in time")

    def _failed(self, why: str) -> Trial:
        return Trial(self.model_type, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[self.model_type], RAISED, why)
