"""Runs trials in processes of their own.

A process is forked from a server that has imported torch and transformers; one that crashes or hangs is an
outcome like any other.
"""

import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging as transformers_logging

from tests.worker.families.outcomes import RAISED, Trial
from tests.worker.families.trial import tried

LIMIT_S = 300.0
_LOOK_S, _END_S = 0.5, 5.0


def run(
    model_types: Iterable[str], at_once: int, limit_s: float = LIMIT_S, work: Callable[[str], Trial] = tried
) -> Iterator[tuple[Trial, float]]:
    """Each type's outcome and seconds, as they end. `work`: what a process does with its type."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    pending, running = list(model_types)[::-1], dict[Connection, _Running]()
    while pending or running:
        while pending and len(running) < at_once:
            answer, ours = context.Pipe(duplex=False)
            process = context.Process(target=_answered, args=(work, pending[-1], ours), daemon=True)
            process.start()
            ours.close()
            running[answer] = _Running(pending.pop(), process, time.monotonic())
        ready = wait(list(running), _LOOK_S)
        for answer, one in list(running.items()):
            if answer in ready or one.age_s > limit_s:
                yield one.ended(answer), one.age_s
                del running[answer]


def _answered(work: Callable[[str], Trial], model_type: str, answer: Connection) -> None:
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(1)
    answer.send(work(model_type))


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
