"""A step's result read from the wire, by sequence name: in the core's terms, plus log probabilities and embeddings."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from protos.common.v1 import common_pb2
from protos.worker.v1 import worker_pb2
from scheduler_svc.core.plan import StepResult
from scheduler_svc.workers import row_failures
from svc_common import wire_arrays
from svc_common.errors import InvalidArgument

US_PER_S = 1_000_000
Top = list[tuple[int, float]]
NameOf = Callable[[int, int], str | None]
"""Maps row index and incarnation to the sequence's name; None for a row that is not known any more."""


@dataclass(slots=True)
class TokenExtras:
    """Log probabilities (natural) of one sequence's tokens, and the top tokens at each position; empty = not asked for."""

    logprobs: list[float] = field(default_factory=list)
    tops: list[Top] = field(default_factory=list)

    def one(self, at: int) -> "TokenExtras":
        """The extras of one token."""
        return TokenExtras(self.logprobs[at : at + 1], self.tops[at : at + 1])


@dataclass(frozen=True, slots=True)
class PromptRun:
    """Log probabilities [n] of prompt tokens from position `start` >= 1 on, and the top tokens [n, k] at each."""

    start: int
    logprobs: NDArray[np.float32]
    top_ids: NDArray[np.int32]
    top_logprobs: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class SampledColumns:
    """Tokens by sequence name as columns: `counts` and `token_ids` are int32 bytes."""

    names: tuple[str, ...]
    counts: bytes
    token_ids: bytes

    @classmethod
    def of(cls, tokens: Mapping[str, Sequence[int]]) -> "SampledColumns":
        """Columns for a mapping of names to tokens."""
        runs = tokens.values()
        counts = wire_arrays.pack([len(run) for run in runs])
        return cls(tuple(tokens), counts, wire_arrays.pack([token for run in runs for token in run]))


@dataclass(frozen=True, slots=True)
class WorkerResult:
    """A step's result by sequence name. `extras`: parallel to `result.tokens`, for rows that asked. `embeddings`: float32 bytes.

    `error`: the whole step failed and `result` is empty. `num_computed_tokens`, `duration_ns` and `timings`
    are the worker's. `plain`: the tokens, if `result` has them as a column; then there are no extras, prompts
    or embeddings. `continues`: the worker has begun the next granted step.
    """

    step_id: int
    result: StepResult
    extras: dict[str, TokenExtras]
    num_computed_tokens: int
    duration_ns: int
    timings: worker_pb2.StepTimings = field(default_factory=worker_pb2.StepTimings)
    prompts: list[tuple[str, PromptRun]] = field(default_factory=list)
    embeddings: dict[str, bytes] = field(default_factory=dict)
    error: common_pb2.ErrorStatus | None = None
    plain: SampledColumns | None = None
    continues: bool = False


@dataclass(slots=True)
class RowResults:
    """Contents of a result's columns by sequence name; rows that are not known any more are omitted."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    extras: dict[str, TokenExtras] = field(default_factory=dict)
    candidates: dict[str, Top] = field(default_factory=dict)
    mask_s: dict[str, float] = field(default_factory=dict)


def read_rows(message: worker_pb2.WorkerOutputs, name_of: NameOf) -> RowResults:
    """Read a result's row columns. Raises InvalidArgument if they are inconsistent."""
    found = RowResults()
    rows = wire_arrays.unpack(message.rows, "rows")
    n = len(rows)
    lives = wire_arrays.unpack(message.incarnations, "incarnations", length=n)
    counts = wire_arrays.unpack(message.num_tokens, "num_tokens", length=n, minimum=0)
    ids = wire_arrays.unpack(message.token_ids, "token_ids", length=int(counts.sum()), minimum=0).tolist()
    flags = wire_arrays.unpack(message.flags, "flags", wire_arrays.U8, length=n).tolist()
    logprobs = _logprobs(message, len(ids))
    tops = _tops(message.tops, len(ids)) if message.HasField("tops") else []
    start = 0
    for row, life, count, flag in zip(rows.tolist(), lives.tolist(), counts.tolist(), flags, strict=True):
        end = start + count
        name = name_of(row, life)
        if name is not None and flag:
            found.failed[name] = row_failures.why(flag, message.mask_budget_ms)
        elif name is not None and count:
            found.tokens[name] = ids[start:end]
            if logprobs or tops:
                found.extras[name] = TokenExtras(logprobs[start:end], tops[start:end])
        start = end
    if message.HasField("candidates"):
        found.candidates.update(_candidates(message.candidates, name_of))
    if message.mask_rows:
        found.mask_s.update(_mask_times(message, name_of))
    return found


def _mask_times(message: worker_pb2.WorkerOutputs, name_of: NameOf) -> Iterator[tuple[str, float]]:
    rows = wire_arrays.unpack(message.mask_rows, "mask_rows")
    lives = wire_arrays.unpack(message.mask_incarnations, "mask_incarnations", length=len(rows))
    times = wire_arrays.unpack(message.mask_us, "mask_us", length=len(rows), minimum=0)
    for row, life, microseconds in zip(rows.tolist(), lives.tolist(), times.tolist(), strict=True):
        name = name_of(row, life)
        if name is not None:
            yield name, microseconds / US_PER_S


def _logprobs(message: worker_pb2.WorkerOutputs, num_tokens: int) -> list[float]:
    logprobs: list[float] = wire_arrays.unpack(message.logprobs, "logprobs", wire_arrays.F32).tolist()
    if logprobs and len(logprobs) != num_tokens:
        raise InvalidArgument.field("logprobs", f"has {len(logprobs)} elements where {num_tokens} tokens are")
    return logprobs


def _tops(message: worker_pb2.TopColumns, num_tokens: int) -> list[Top]:
    counts = wire_arrays.unpack(message.counts, "tops.counts", length=num_tokens, minimum=0)
    return _pairs(counts, message.token_ids, message.logprobs, "tops")


def _candidates(message: worker_pb2.CandidateColumns, name_of: NameOf) -> Iterator[tuple[str, Top]]:
    rows = wire_arrays.unpack(message.rows, "candidates.rows")
    lives = wire_arrays.unpack(message.incarnations, "candidates.incarnations", length=len(rows))
    counts = wire_arrays.unpack(message.counts, "candidates.counts", length=len(rows), minimum=0)
    runs = _pairs(counts, message.token_ids, message.logprobs, "candidates")
    for row, life, run in zip(rows.tolist(), lives.tolist(), runs, strict=True):
        name = name_of(row, life)
        if name is not None:
            yield name, run


def _pairs(counts: NDArray[np.int32], ids: bytes, logprobs: bytes, field_name: str) -> list[Top]:
    total = int(counts.sum(dtype=np.int64))
    tokens = wire_arrays.unpack(ids, f"{field_name}.token_ids", length=total, minimum=0).tolist()
    values = wire_arrays.unpack(logprobs, f"{field_name}.logprobs", wire_arrays.F32, length=total).tolist()
    pairs = list(zip(tokens, values, strict=True))
    ends = np.cumsum(counts, dtype=np.int64).tolist()
    return [pairs[end - count : end] for end, count in zip(ends, counts.tolist(), strict=True)]


def read_prompts(message: worker_pb2.WorkerOutputs, name_of: NameOf) -> list[tuple[str, PromptRun]]:
    """Read log probabilities of prompt tokens. Raises InvalidArgument if the columns are inconsistent."""
    found = []
    for run in message.prompt_logprobs:
        name = name_of(run.row, run.incarnation)
        if name is not None:
            logprobs = wire_arrays.unpack(run.logprobs, "prompt_logprobs.logprobs", wire_arrays.F32)
            shape = (len(logprobs), run.num_top)
            size = len(logprobs) * run.num_top
            ids = wire_arrays.unpack(run.top_token_ids, "prompt_logprobs.top_token_ids", length=size, minimum=0)
            tops = wire_arrays.unpack(run.top_logprobs, "prompt_logprobs.top_logprobs", wire_arrays.F32, length=size)
            found.append((name, PromptRun(run.start, logprobs, ids.reshape(shape), tops.reshape(shape))))
    return found


def read_embeddings(message: worker_pb2.WorkerOutputs, name_of: NameOf) -> dict[str, bytes]:
    """Embeddings as float32 bytes, by sequence name."""
    named = ((name_of(e.row, e.incarnation), e.values) for e in message.embeddings)
    return {name: values for name, values in named if name is not None}
