"""Values sent to the lab's page as JSON, and the interface of their source: a running scheduler or a recording.

Times are milliseconds on the source's clock (Unix time for a live one). Block names: "g3" is device block 3,
"c0" host block 0, "g3@1" device block 3 of rank 1. Requests have their ids in the core. Tokens are counted
but never sent.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol

Numbers = dict[str, int | float | str]
Pairs = list[tuple[int, int]]

LIVE, RECORDING = "live", "recording"


@dataclass(frozen=True, slots=True)
class Overview:
    """All steps of a recording as columns, for the timeline."""

    step: list[int] = field(default_factory=list)
    lane: list[int] = field(default_factory=list)
    at_ms: list[float] = field(default_factory=list)
    prefill_tokens: list[int] = field(default_factory=list)
    decode_tokens: list[int] = field(default_factory=list)
    num_moved: list[int] = field(default_factory=list)
    num_preempted: list[int] = field(default_factory=list)
    finished_ms: list[float] = field(default_factory=list)
    duration_ms: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class About:
    """Description of the source.

    `mode`: LIVE or RECORDING. `can_generate`: has a playground. `overview`: of a recording.
    """

    mode: str
    title: str
    version: str
    can_generate: bool
    overview: Overview | None = None


# --- steps ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LabShare:
    """A request's share of a step. `tokens`: over all its sequences; `computed_before`: of the first one."""

    id: str
    sequences: list[str]
    tokens: int
    computed_before: int
    prefill: bool


@dataclass(frozen=True, slots=True)
class TableChange:
    """Block tables right after schedule(), as changes from those of the step sent before.

    `whole`: a full replacement instead.
    """

    whole: bool
    changed: dict[str, list[str]]
    gone: list[str]


NO_CHANGE = TableChange(whole=False, changed={}, gone=[])


@dataclass(frozen=True, slots=True)
class LabStepTimes:
    """Times of a step, see admin.proto. `duration_ms` at the worker, from `started_ms`; 0 = unknown."""

    planned_ms: float
    finished_ms: float
    started_ms: float = 0.0
    duration_ms: float = 0.0
    schedule_ms: float = 0.0
    queued_ms: float = 0.0
    cache_ms: float = 0.0
    prepare_ms: float = 0.0
    model_ms: float = 0.0
    sample_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Step:
    """One step.

    Pairs are (source, destination); `preempted`: (request, mode); `sampled`: number of new tokens by
    sequence. `queues`: waiting, running, swapped requests right after schedule(); `free`: device and host
    blocks then, with cached ones. `granted_steps`, `is_repeat`, `revoked`: see admin.proto. `snapshot`: state
    right after schedule(); None for a live step planned while no page was open.
    """

    step: int
    lane: int
    policy: str
    shares: list[LabShare]
    swap_in: Pairs
    swap_out: Pairs
    copy: Pairs
    preempted: list[tuple[str, str]]
    queues: tuple[int, int, int]
    free: tuple[int, int]
    sampled: dict[str, int]
    computed_tokens: int
    granted_steps: int
    is_repeat: bool
    revoked: str
    error: str
    times: LabStepTimes
    tables: TableChange
    snapshot: "LabSnapshot | None" = None


# --- requests and blocks -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LabPool:
    """Blocks of a device or of the host: `total` names from `tier` + str(`first`) + `suffix` on."""

    tier: str
    suffix: str
    first: int
    total: int


@dataclass(frozen=True, slots=True)
class Listed:
    """A request that has not ended. `reason` and `numbers`: explain its state. `started_ms` None: it never ran."""

    id: str
    request_id: str
    tenant: str
    queue: str
    reason: str
    numbers: Numbers
    priority: int
    num_choices: int
    prompt_tokens: int
    output_tokens: int
    cached_prompt_tokens: int
    arrived_ms: float
    started_ms: float | None
    num_preemptions: int


@dataclass(frozen=True, slots=True)
class ReasonCount:
    """Number of requests of one queue with one reason."""

    queue: str
    reason: str
    num_requests: int


@dataclass(frozen=True, slots=True)
class LabSnapshot:
    """State right after `step`. `cached`: unreferenced device blocks with a known prefix, in eviction order.

    `requests`: at most MAX_LISTED, in order of arrival; `reasons` counts all. `tables`: None if the step
    itself has them.
    """

    step: int
    block_size: int
    pools: list[LabPool]
    cached: list[str]
    requests: list[Listed]
    reasons: list[ReasonCount]
    num_left_out: int
    tables: dict[str, list[str]] | None = None


MAX_LISTED = 300


# --- timeline of a request -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LabEpisode:
    """A period with one reason, see admin.proto; `to_*` None: it still lasts."""

    from_step: int
    to_step: int | None
    from_ms: float
    to_ms: float | None
    queue: str
    reason: str
    numbers: Numbers
    sample: int
    needs: Numbers


@dataclass(frozen=True, slots=True)
class Why:
    """Timeline of a request. `num_waits_not_searched`: waits that another query with `needs` will search."""

    id: str
    episodes: list[LabEpisode]
    num_waits_not_searched: int = 0


# --- source --------------------------------------------------------------------------------------------------------------

Tell = Callable[[Step | LabSnapshot], Awaitable[None]]


class LabSource(Protocol):
    """Source of one page's data; queries nothing while no page asks. Raises QuireErrors."""

    async def about(self) -> About:
        """Describe the source."""

    async def steps(self, since: int, limit: int) -> list[Step]:
        """Return at most `limit` completed steps from number `since` on, oldest first; the first has whole tables."""

    async def follow(self, since: int, tell: Tell) -> None:
        """Pass steps from `since` on (0 = a few recent ones) to `tell` as they complete, until cancelled.

        While no request runs, passes snapshots when something changes. A recording has none.
        """

    async def why(self, request_id: str, tenant: str, *, needs: bool) -> Why:
        """Explain where a request's time went; `needs`: also what would have ended each wait. Raises NotFound."""
