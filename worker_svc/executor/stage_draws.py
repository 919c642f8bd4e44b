"""What the last stage of a pipeline draws, at all of its stages.

Only the last stage has logits. All others take what it drew into their rows when a decode step lands, so rows of all stages are
equal whenever they have launched and finished the same steps:

stage 0      | launch k: states  | launch k + 1: states |          | land k, finish k
last stage             \\ | launch k: draws, tells | launch k + 1  | land k, finish k
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from worker_svc.executor.step_flights import StepInFlight
from worker_svc.ranks.stage_tokens import StageTokens
from worker_svc.sampling.row_sampler import NOTHING, Drawn
from worker_svc.sampling.step_results import Tops
from worker_svc.sampling.token_masks import MaskWork

_FIELDS: Mapping[str, np.dtype[Any]] = {
    "token_ids": np.dtype("<i4"),
    "finite": np.dtype("?"),
    "opens": np.dtype("?"),
    "bad_rows": np.dtype("<i4"),
    "bad_vectors": np.dtype("<i4"),
    "masked_rows": np.dtype("<i4"),
    "mask_flags": np.dtype("<u1"),
}
_COUNTS = struct.Struct(f"<{len(_FIELDS)}I")


@dataclass(frozen=True, slots=True)
class _Told:
    """A `Fetched` of one decode step. Never ready at once: on all ranks, a step lands when rank 0 takes it in."""

    tokens: StageTokens
    number: int
    is_ready: bool = False

    def wait(self) -> None:
        """See Fetched."""
        self.tokens.wait(self.number)

    def arrays(self) -> dict[str, NDArray[Any]]:
        """See Fetched."""
        content = self.tokens.take(self.number)
        return _unpacked(content) if content else {}


@dataclass(frozen=True, slots=True)
class _Known:
    """A drawing of the last stage, as another one knows it."""

    known: Drawn

    def drawn(self) -> Drawn:
        """See Drawing."""
        return self.known


class StageDraws:
    """Numbers decode steps; call `depart` and `land` for each, in order."""

    def __init__(self, tokens: StageTokens) -> None:
        self._tokens, self._number = tokens, 0
        self.is_last = tokens.is_last

    def depart(self, flight: StepInFlight) -> None:
        """Tell the others what was drawn if this is the last stage. The flight then waits to be told."""
        self._number += 1
        if self.is_last:
            self._tokens.tell(self._number, _packed(flight))
        flight.fetched = _Told(self._tokens, self._number)

    def land(self, flight: StepInFlight) -> None:
        """Wait for what was drawn, and put it in the flight."""
        found = flight.fetched.arrays()
        if found:
            flight.bad_rows, flight.bad_vectors = found["bad_rows"], found["bad_vectors"]
            flight.drawing = _Known(_drawn(found))


def _packed(flight: StepInFlight) -> bytes:
    drawn = flight.drawing.drawn() if flight.drawing is not None else NOTHING
    flags = drawn.mask_work.flags
    columns = {
        "token_ids": drawn.token_ids,
        "finite": drawn.finite,
        "opens": drawn.opens,
        "bad_rows": flight.bad_rows,
        "bad_vectors": flight.bad_vectors,
        "masked_rows": np.array(list(flags), np.int32),
        "mask_flags": np.array(list(flags.values()), np.uint8),
    }
    counts = _COUNTS.pack(*(len(columns[name]) for name in _FIELDS))
    return counts + b"".join(columns[name].astype(dtype).tobytes() for name, dtype in _FIELDS.items())


def _unpacked(content: bytes) -> dict[str, NDArray[Any]]:
    found, at = {}, _COUNTS.size
    for (name, dtype), count in zip(_FIELDS.items(), _COUNTS.unpack_from(content), strict=True):
        found[name] = np.frombuffer(content, dtype, count, at).copy()
        at += count * dtype.itemsize
    return found


def _drawn(found: Mapping[str, NDArray[Any]]) -> Drawn:
    flags = dict(zip(found["masked_rows"].tolist(), found["mask_flags"].tolist(), strict=True))
    return Drawn(
        token_ids=found["token_ids"],
        logprobs=np.zeros(len(found["token_ids"]), np.float32),
        tops=Tops.none(len(found["token_ids"])),
        finite=found["finite"],
        opens=found["opens"],
        beams=NOTHING.beams,
        candidates=NOTHING.candidates,
        mask_work=MaskWork(flags=flags),
    )
