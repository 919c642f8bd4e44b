"""Output of a request so far: tokens by choice, with log probabilities where asked for.

A streamed choice is the sequence of the same index. Ranked choices (beam search, best_of above n) are known
only when all sequences are over; nothing of them is delivered until then.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from protos.common.v1 import common_pb2
from scheduler_svc.core.plan import SequenceTokens
from scheduler_svc.core.request import Request, SequenceStatus
from scheduler_svc.worker_values import PromptRun, TokenExtras
from svc_common.errors import Internal

_REASONS = {
    SequenceStatus.FINISHED_STOPPED: common_pb2.FINISH_REASON_STOP,
    SequenceStatus.FINISHED_LENGTH_CAPPED: common_pb2.FINISH_REASON_LENGTH,
    SequenceStatus.FINISHED_ABORTED: common_pb2.FINISH_REASON_CANCELLED,
}


@dataclass(slots=True)
class Ending:
    """How a choice ended. `stop_token_id`: the token that stopped it, if any. `score`: what it was ranked by.

    `num_tokens`: number of its tokens that count, None = all. Tokens behind them are kept for later readers,
    which detect the stop string in them again.
    """

    reason: common_pb2.FinishReason
    stop_token_id: int | None = None
    score: float | None = None
    num_tokens: int | None = None

    @classmethod
    def of(cls, status: SequenceStatus, stop_token_id: int | None) -> "Ending":
        """Ending for a status of the core that is not an error."""
        return cls(_REASONS[status], stop_token_id)


@dataclass(slots=True)
class ChoiceOutput:
    """Tokens of one choice from offset 0, with parallel `logprobs` and `tops` where asked for (0.0 and [] where unknown)."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tops: list[list[tuple[int, float]]] = field(default_factory=list)
    ending: Ending | None = None

    def extend(self, tokens: list[int], extras: TokenExtras | None, *, logprobs: bool, tops: bool) -> None:
        """Append tokens. `extras` may cover more tokens than these, because tokens behind a stop were cut off."""
        count = len(tokens)
        self.tokens.extend(tokens)
        if logprobs:
            given = extras.logprobs[:count] if extras is not None else []
            self.logprobs.extend(given or [0.0] * count)
        if tops:
            likely = extras.tops[:count] if extras is not None else []
            self.tops.extend(likely or [[] for _ in range(count)])

    @property
    def num_tokens(self) -> int:
        """Number of tokens that count."""
        known = None if self.ending is None else self.ending.num_tokens
        return len(self.tokens) if known is None else known

    def stop_at(self, num_tokens: int, *, keep: bool) -> Ending:
        """End the choice at a stop string after `num_tokens` tokens; the tokens behind are deleted unless `keep`."""
        if not keep:
            for values in (self.tokens, self.logprobs, self.tops):
                del values[num_tokens:]
        return Ending(common_pb2.FINISH_REASON_STOP, num_tokens=num_tokens)

    def copy_of(self, num_tokens: int) -> "ChoiceOutput":
        """Copy of the first `num_tokens` tokens, for a fork."""
        return ChoiceOutput(self.tokens[:num_tokens], self.logprobs[:num_tokens], self.tops[:num_tokens])


@dataclass(slots=True)
class PromptLogprobs:
    """Log probabilities of all prompt tokens but the first, filled in chunk by chunk. Row i is prompt token i + 1."""

    logprobs: NDArray[np.float32]
    top_ids: NDArray[np.int32]
    top_logprobs: NDArray[np.float32]

    @classmethod
    def of(cls, num_prompt_tokens: int, num_top: int) -> "PromptLogprobs":
        """Zero-filled arrays for a prompt of that length and `num_top` alternatives per token."""
        size = num_prompt_tokens - 1
        return cls(
            np.zeros(size, np.float32), np.zeros((size, num_top), np.int32), np.zeros((size, num_top), np.float32)
        )

    def put(self, run: PromptRun) -> None:
        """Store the values of one step. Recomputation after a preemption stores the same values again."""
        start = run.start - 1
        end = start + len(run.logprobs)
        self.logprobs[start:end] = run.logprobs
        self.top_ids[start:end], self.top_logprobs[start:end] = run.top_ids, run.top_logprobs


@dataclass(slots=True)
class ChoiceOutputs:
    """All choices of a request. If `ranked`, they are known at the end only; until then `sequences` has the output by index."""

    choices: list[ChoiceOutput]
    ranked: bool = False
    sequences: dict[int, ChoiceOutput] = field(default_factory=dict)
    prompt: PromptLogprobs | None = None
    embedding: bytes = b""

    @property
    def num_tokens(self) -> int:
        """Number of output tokens in all."""
        return sum(choice.num_tokens for choice in (self.sequences.values() if self.ranked else self.choices))

    def put(self, run: SequenceTokens, extras: TokenExtras | None, *, logprobs: bool, tops: bool) -> None:
        """Append new tokens of a sequence. Raises Internal if they do not follow those that it has."""
        if self.ranked and run.forked_from is not None:
            parent = self.sequences[int(run.forked_from.rpartition("/")[2])]
            self.sequences[run.index] = parent.copy_of(run.offset)
        output = self.sequences.setdefault(run.index, ChoiceOutput()) if self.ranked else self.choices[run.index]
        if run.offset != len(output.tokens):
            raise Internal(f"{run.name}: tokens from offset {run.offset} on, after {len(output.tokens)} were delivered")
        output.extend(run.token_ids, extras, logprobs=logprobs, tops=tops)

    def rank(self, request: Request) -> None:
        """Make the best sequences the choices, best first; all sequences must be over."""
        best = request.best_sequences()
        self.choices = [self.sequences.get(sequence.index, ChoiceOutput()) for sequence in best]
        for choice, sequence in zip(self.choices, best, strict=True):
            choice.ending = Ending.of(sequence.status, sequence.stop_token_id)
            choice.ending.score = request.score(sequence)
