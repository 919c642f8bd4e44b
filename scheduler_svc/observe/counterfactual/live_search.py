"""Search for the counterfactuals of waits (what would have ended them), in a separate process, so that steps continue."""

import asyncio
import contextlib
import json
import logging
import math
import sys
import tempfile
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from scheduler_svc.core.reasons import KEYS, Reason
from scheduler_svc.observe.counterfactual.search import Counterfactual
from scheduler_svc.observe.counterfactual.wait_questions import WaitQuestion, as_json
from scheduler_svc.observe.recording.file_format import RecordingWriter
from scheduler_svc.observe.recording.record_buffer import RecordBuffer
from scheduler_svc.observe.timelines import WaitEpisode

log = logging.getLogger(__name__)

_MAX_KNOWN = 10_000
_PLAIN = (Reason.NEED_BLOCKS, Reason.TOKEN_BUDGET)
"""Searched first, since one number of the reason's own keys is usually the answer."""
_NUM_IN_ROUND = 16
"""Questions per replay: small, so that first answers come soon and replays stay short."""
_TIMEOUT_S = 25.0
_PROGRAM = (sys.executable, "-m", "scheduler_svc.observe.counterfactual.wait_questions")


class LiveSearch:
    """Runs one search at a time and caches answers, since the past does not change. Searches that time out have no answer."""

    def __init__(self, record_buffer: RecordBuffer) -> None:
        self._record_buffer = record_buffer
        self._lock = asyncio.Lock()
        self._known: OrderedDict[WaitQuestion, Counterfactual] = OrderedDict()

    async def counterfactuals(
        self, core_id: str, episodes: Sequence[WaitEpisode]
    ) -> tuple[dict[int, Counterfactual], int]:
        """Counterfactuals by position of the episode, and the number of waits that could not be searched in time.

        A counterfactual maps policy keys to values that would have let the request in at the episode's first step.
        Only steps in the record buffer can be searched; without recording the result is empty.
        """
        waits = {i: _question(core_id, episodes[i]) for i in by_worth(episodes)}
        if not waits or not self._record_buffer.is_on:
            return {}, 0
        async with self._lock:
            open_questions = [question for question in waits.values() if question not in self._known]
            if open_questions:
                await self._ask(open_questions)
        found = {i: self._known[question] for i, question in waits.items() if question in self._known}
        return {i: values for i, values in found.items() if values}, len(waits) - len(found)

    async def _ask(self, questions: list[WaitQuestion]) -> None:
        with tempfile.NamedTemporaryFile(prefix="quire-", suffix=".rec") as file:
            await asyncio.to_thread(self._write, Path(file.name), min(q.step for q in questions))
            process = await asyncio.create_subprocess_exec(
                *_PROGRAM,
                file.name,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
            )
            try:
                async with asyncio.timeout(_TIMEOUT_S):
                    await self._read(process, questions)
            except TimeoutError:
                log.warning(
                    "what would have ended some of %d waits was not found in %.0f s", len(questions), _TIMEOUT_S
                )
            finally:
                if process.returncode is None:
                    with contextlib.suppress(ProcessLookupError):
                        process.kill()
                    await process.wait()

    async def _read(self, process: asyncio.subprocess.Process, questions: list[WaitQuestion]) -> None:
        assert process.stdin is not None and process.stdout is not None
        rounds = [questions[i : i + _NUM_IN_ROUND] for i in range(0, len(questions), _NUM_IN_ROUND)]
        process.stdin.write(as_json(rounds).encode())
        process.stdin.close()
        async for line in process.stdout:
            number, values = json.loads(line)
            self._known[questions[number]] = values
            if len(self._known) > _MAX_KNOWN:
                self._known.popitem(last=False)
        if await process.wait():
            log.error(
                "what would have ended a wait could not be found: the search ended with status %d", process.returncode
            )

    def _write(self, path: Path, since_step: int) -> None:
        """Write the segments from that step on as a recording."""
        held = self._record_buffer.segments()
        start = max((i for i, segment in enumerate(held) if segment.first_step <= since_step), default=0)
        with path.open("wb") as file:
            writer = RecordingWriter(file)
            writer.write(self._record_buffer.beginning())
            num_segments = num_steps = 0
            for packed in self._record_buffer.pack(held[start:]):
                writer.write(packed.frame)
                num_segments, num_steps = num_segments + 1, num_steps + packed.num_steps
            writer.finish(num_segments=num_segments, num_steps=num_steps)


def by_worth(episodes: Sequence[WaitEpisode]) -> list[int]:
    """Positions of the waits that some number could have ended: waits for blocks or token budget first, longest first."""
    waits = [i for i, episode in enumerate(episodes) if _hangs_on_a_knob(episode)]
    return sorted(waits, key=lambda i: (episodes[i].reason not in _PLAIN, -_length_s(episodes[i])))


def _length_s(episode: WaitEpisode) -> float:
    """Duration; infinite for a wait that is not over."""
    return math.inf if episode.to_time is None else episode.to_time - episode.from_time


def _question(core_id: str, episode: WaitEpisode) -> WaitQuestion:
    head = str(episode.numbers.get("head_reason", ""))
    return WaitQuestion(core_id, episode.sample, episode.from_step, episode.reason.value, head)


def _hangs_on_a_knob(episode: WaitEpisode) -> bool:
    """True for a wait of at least one step that some number could have ended."""
    if not episode.is_wait or episode.from_step == episode.to_step:
        return False
    head = episode.numbers.get("head_reason")
    return (Reason(str(head)) if head else episode.reason) in KEYS
