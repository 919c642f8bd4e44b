"""What workers get for a sequence and return for a step, by sequence name: values without the columns of the wire.

Read and written as messages in `workers.result` and `workers.row_messages`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from protos.common.v1 import common_pb2
from protos.worker.v1 import worker_pb2
from scheduler_svc.core.plan import StepResult
from svc_common import wire_arrays

Top = list[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class RowSampling:
    """Sampling of one sequence, as the worker needs it. `trace`: its request's trace context.

    `options`: settings without a column in `AddedRows`; None = none. `min_tokens`: below that many output
    tokens none of `end_ids` is sampled. `ranked`: its tokens' log probabilities are needed to rank it.
    `num_candidates`: it is a beam and yields that many candidates. `adapter_id`: 0 = none.
    """

    temperature: float
    top_p: float
    top_k: int
    seed: int
    logprobs: bool = False
    trace: common_pb2.TraceContext | None = None
    options: common_pb2.ResolvedSampling | None = None
    min_tokens: int = 0
    end_ids: tuple[int, ...] = ()
    ranked: bool = False
    num_candidates: int = 0
    adapter_id: int = 0
    task: common_pb2.Task = common_pb2.TASK_UNSPECIFIED

    @property
    def gives_tokens_alone(self) -> bool:
        """True if the result is tokens only: no log probabilities, candidates or embeddings."""
        return not (self.logprobs or self.ranked or self.num_candidates or self.task)

    @property
    def is_plain(self) -> bool:
        """True if the columns of `AddedRows` express all of it."""
        return self.options is None and not (self.min_tokens or self.num_candidates or self.adapter_id or self.task)


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
