"""A core's inputs as recordings keep them: token ids as int32 bytes, everything else as plain values."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scheduler_svc.core.plan import StepResult
from scheduler_svc.core.request import Request
from scheduler_svc.core.request_rules import BeamRules, StopRules

_I32 = np.dtype("<i4")
_F64 = np.dtype("<f8")
_TOKEN_FIELDS = ("prompt_token_ids", "committed")
_OTHER_FIELDS = ("stop", "beam", *_TOKEN_FIELDS)
PLAIN_FIELDS = tuple(f.name for f in fields(Request) if f.init and f.name not in _OTHER_FIELDS)
"""Fields of a request that are numbers, strings or None."""
plain_values = attrgetter(*PLAIN_FIELDS)
"""Their values."""
_STOP_SETS = ("eos_token_ids", "stop_token_ids")
_STOP_FIELDS = tuple(f.name for f in fields(StopRules) if f.name not in _STOP_SETS)
_stop_values = attrgetter(*_STOP_FIELDS)


class Tokens(bytes):
    """Token ids, little-endian int32; renamed when they leave the process."""


def tokens(ids: Iterable[int]) -> Tokens:
    """`ids` as bytes."""
    return Tokens(np.asarray(ids if isinstance(ids, Sequence) else list(ids), _I32).tobytes())


def column_of(ids: NDArray[np.int64]) -> Tokens:
    """An array of ids as bytes."""
    return Tokens(ids.astype(_I32).tobytes())


def token_ids(data: bytes) -> list[int]:
    """Bytes as ids."""
    ids: list[int] = np.frombuffer(data, _I32).tolist()
    return ids


def ints(values: Sequence[int]) -> bytes:
    """Integers that are not tokens, as int32 bytes."""
    return np.asarray(values, _I32).tobytes()


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """A request as it arrived. `values`: its fields without tokens."""

    values: dict[str, Any]
    prompt: Tokens
    committed: Tokens
    stop: dict[str, Any]
    stop_sets: tuple[Tokens, ...]
    beam: dict[str, Any] | None

    @classmethod
    def of(cls, request: Request) -> "RequestRecord":
        """Record of a request that is not yet added."""
        rules = request.stop
        return cls(
            values=dict(zip(PLAIN_FIELDS, plain_values(request), strict=True)),
            prompt=tokens(request.prompt_token_ids),
            committed=tokens(request.committed),
            stop=dict(zip(_STOP_FIELDS, _stop_values(rules), strict=True)),
            stop_sets=(tokens(sorted(rules.eos_token_ids)), tokens(sorted(rules.stop_token_ids))),
            beam=None if request.beam is None else asdict(request.beam),
        )

    @property
    def num_tokens(self) -> int:
        """Prompt and committed tokens."""
        return (len(self.prompt) + len(self.committed)) // _I32.itemsize

    def request(self) -> Request:
        """A new request equal to the recorded one."""
        sets: dict[str, Any] = {
            name: frozenset(token_ids(data)) for name, data in zip(_STOP_SETS, self.stop_sets, strict=True)
        }
        return Request(
            **self.values,
            prompt_token_ids=token_ids(self.prompt),
            committed=token_ids(self.committed),
            stop=StopRules(**self.stop, **sets),
            beam=None if self.beam is None else BeamRules(**self.beam),
        )


@dataclass(slots=True)
class ResultRecord:
    """A step's result. `names`: sequences of the tokens; None: all that sample in the plan, in its order.

    `counts`: int32, tokens of each; empty: one each. `duration_s`: at the worker, 0 = unknown; `queued_s`:
    queueing there before. `logprobs`: float64, one per token; `logprobs_of`: by name instead, if they do not
    match the tokens.
    """

    step: int
    names: list[str] | None
    counts: bytes
    tokens: Tokens
    duration_s: float = 0.0
    queued_s: float = 0.0
    logprobs: bytes = b""
    logprobs_of: dict[str, list[float]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    children: dict[str, Tokens] = field(default_factory=dict)
    candidates: dict[str, tuple[Tokens, bytes]] = field(default_factory=dict)
    mask_s: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, result: StepResult, by_name: dict[str, list[int]], expected: tuple[str, ...] | None) -> "ResultRecord":
        """`by_name`: the tokens, including those of a column; `expected`: sequences that sample in the plan, None if unknown."""
        runs = by_name.values()
        flat = [token for run in runs for token in run]
        names = list(by_name)
        one_each = len(flat) == len(names) and all(runs)
        same = expected is not None and tuple(names) == expected
        logprobs, others = _logprobs(result.logprobs, by_name)
        return cls(
            step=result.step,
            names=None if same else names,
            counts=b"" if one_each else ints([len(run) for run in runs]),
            tokens=tokens(flat),
            duration_s=result.duration_s,
            queued_s=result.queued_s,
            logprobs=logprobs,
            logprobs_of=others,
            failed=dict(result.failed),
            children={name: tokens(ids) for name, ids in result.children.items()},
            candidates={name: _candidates(found) for name, found in result.candidates.items()},
            mask_s=dict(result.mask_s),
        )

    @property
    def num_bytes(self) -> int:
        """Approximate size."""
        others = len(self.failed) + len(self.children) + len(self.candidates) + len(self.logprobs_of) + len(self.mask_s)
        names = 0 if self.names is None else 8 * len(self.names)
        return 250 + len(self.tokens) + len(self.counts) + len(self.logprobs) + names + 200 * others

    def result(self, expected: tuple[str, ...]) -> StepResult:
        """The recorded result."""
        names = expected if self.names is None else self.names
        flat = token_ids(self.tokens)
        counts = np.frombuffer(self.counts, _I32).tolist() if self.counts else [1] * len(names)
        by_name = dict(zip(names, _cut(flat, counts), strict=True))
        logprobs = dict(self.logprobs_of)
        if self.logprobs:
            values = np.frombuffer(self.logprobs, _F64).tolist()
            logprobs |= dict(zip(names, _cut(values, counts), strict=True))
        return StepResult(
            self.step,
            tokens=by_name,
            failed=dict(self.failed),
            children={name: token_ids(data) for name, data in self.children.items()},
            candidates={name: _pairs(*found) for name, found in self.candidates.items()},
            logprobs=logprobs,
            mask_s=dict(self.mask_s),
            duration_s=self.duration_s,
            queued_s=self.queued_s,
        )


def _logprobs(logprobs: dict[str, list[float]], by_name: dict[str, list[int]]) -> tuple[bytes, dict[str, list[float]]]:
    """One array if each token has a log probability, else lists by name."""
    if not logprobs:
        return b"", {}
    if list(logprobs) == list(by_name) and all(len(logprobs[n]) == len(run) for n, run in by_name.items()):
        return np.asarray([x for run in logprobs.values() for x in run], _F64).tobytes(), {}
    return b"", {name: [float(x) for x in run] for name, run in logprobs.items()}


def _candidates(found: list[tuple[int, float]]) -> tuple[Tokens, bytes]:
    return tokens([token for token, _ in found]), np.asarray([x for _, x in found], _F64).tobytes()


def _pairs(ids: bytes, logprobs: bytes) -> list[tuple[int, float]]:
    return list(zip(token_ids(ids), np.frombuffer(logprobs, _F64).tolist(), strict=True))


def _cut(flat: list[Any], counts: list[int]) -> list[list[Any]]:
    if len(flat) == len(counts):
        return [[x] for x in flat]
    cuts, start = [], 0
    for count in counts:
        cuts.append(flat[start : start + count])
        start += count
    return cuts
