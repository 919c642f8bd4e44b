"""What is scheduled: requests and their sequences. Pure data with the counters that rules are written in.

A *request* is what the client sent; it is scheduled as a group of *sequences* (one token stream each). Three counters replace mode
flags: `len(token_ids)` known tokens, `num_computed_tokens` of them with KV in blocks, and what a step schedules in between.
"""

import enum
from dataclasses import dataclass, field


class SequenceStatus(enum.IntEnum):
    """Where a sequence stands; finished means any value beyond SWAPPED (R23)."""

    WAITING = 0
    RUNNING = 1
    PREEMPTED = 2
    SWAPPED = 3
    FINISHED_STOPPED = 4
    FINISHED_LENGTH_CAPPED = 5
    FINISHED_ABORTED = 6
    FINISHED_IGNORED = 7

    @property
    def is_finished(self) -> bool:
        """True for every final status."""
        return self > SequenceStatus.SWAPPED


@dataclass(frozen=True, slots=True)
class StopRules:
    """When a sequence ends by itself (R95, R140). `max_tokens` >= 1 output tokens; ids are vocabulary ids."""

    max_tokens: int
    min_tokens: int = 0
    ignore_eos: bool = False
    eos_token_ids: frozenset[int] = frozenset()
    stop_token_ids: frozenset[int] = frozenset()


@dataclass(slots=True, eq=False)
class Sequence:
    """One token stream. Owned by the scheduler core; `token_ids` is the prompt followed by the output."""

    request: "Request"
    index: int
    token_ids: list[int]
    num_prompt_tokens: int
    status: SequenceStatus = SequenceStatus.WAITING
    num_computed_tokens: int = 0
    stop_token_id: int | None = None
    num_preemptions: int = 0
    name: str = field(init=False)

    def __post_init__(self) -> None:
        self.name = f"{self.request.request_id}/{self.index}"

    @property
    def cache_salt(self) -> str:
        """The request's: only equal salts share prefix blocks."""
        return self.request.cache_salt

    @property
    def no_cache_reuse(self) -> bool:
        """The request's: compute everything afresh."""
        return self.request.no_cache_reuse

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and output."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far; they survive preemption (R27)."""
        return len(self.token_ids) - self.num_prompt_tokens


@dataclass(slots=True, eq=False)
class Request:
    """A client's request as the core sees it.

    `priority`: lower = sooner (R24). `arrival_time`: seconds on the caller's clock.
    `cache_salt`: only equal salts share prefix blocks (R138). `committed`: output tokens made in an earlier life.
    """

    request_id: str
    prompt_token_ids: list[int]
    stop: StopRules
    arrival_time: float
    priority: int = 0
    cache_salt: str = ""
    no_cache_reuse: bool = False
    committed: list[int] = field(default_factory=list)
    sequences: list[Sequence] = field(init=False)
    num_cached_tokens: int | None = None

    def __post_init__(self) -> None:
        tokens = [*self.prompt_token_ids, *self.committed]
        self.sequences = [Sequence(self, 0, tokens, len(self.prompt_token_ids))]

    @property
    def is_finished(self) -> bool:
        """All sequences are."""
        return all(s.status.is_finished for s in self.sequences)

    @property
    def unfinished(self) -> list[Sequence]:
        """Sequences that still produce tokens."""
        return [s for s in self.sequences if not s.status.is_finished]
