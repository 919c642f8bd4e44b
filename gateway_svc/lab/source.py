"""What the lab's page is told, as values that go out as JSON, and who tells it: a running scheduler, or a recording.

Times are milliseconds on the source's clock (Unix time where it runs). Blocks go by name: "g3" device block 3, "c0" host block 0,
"g3@1" device block 3 of rank 1. Requests go by their ids in the core. Tokens are counted and never told.
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
    """Whose state it is. `mode`: LIVE or RECORDING. `can_generate`: the playground is there. `overview`: of a recording."""

    mode: str
    title: str
    version: str
    can_generate: bool
    overview: Overview | None = None


# --- steps ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Share:
    """A request's share of a step. `tokens`: over all its sequences; `computed_before`: of the first one."""

    id: str
    sequences: list[str]
    tokens: int
    computed_before: int
    prefill: bool


@dataclass(frozen=True, slots=True)
class TableChange:
    """Block tables right after schedule(), as changes to those of the step told before; `whole`: nothing is left of those."""

    whole: bool
    changed: dict[str, list[str]]
    gone: list[str]


@dataclass(frozen=True, slots=True)
class StepTimes:
    """A step's way, see admin.proto. `duration_ms` at the worker, from `started_ms`; 0 = not known."""

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
    """One step. Pairs are (source, destination); `preempted`: (request, mode); `sampled`: how many tokens came, by sequence.

    `queues`: waiting, running, swapped requests right after schedule(); `free`: device and host blocks then, cached ones too.
    `snapshot`: what there was right after schedule(); None of a live step that was planned while no page looked.
    """

    step: int
    lane: int
    policy: str
    shares: list[Share]
    swap_in: Pairs
    swap_out: Pairs
    copy: Pairs
    preempted: list[tuple[str, str]]
    queues: tuple[int, int, int]
    free: tuple[int, int]
    sampled: dict[str, int]
    computed_tokens: int
    error: str
    times: StepTimes
    tables: TableChange
    snapshot: "Snapshot | None" = None


# --- what is held --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Pool:
    """A device's or the host's blocks: names from `tier` + str(`first`) + `suffix` on, `total` of them."""

    tier: str
    suffix: str
    first: int
    total: int


@dataclass(frozen=True, slots=True)
class Listed:
    """A request that has not ended. `reason` and `numbers`: why it is where it is. `started_ms` None: it never ran."""

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
    """Requests of one queue that have one reason."""

    queue: str
    reason: str
    num_requests: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What there was right after `step`. `cached`: device blocks that nobody holds with a known prefix, next to be evicted first.

    `requests`: at most MAX_LISTED, in order of arrival; `reasons` counts all. `tables`: None where the step itself has them.
    """

    step: int
    block_size: int
    pools: list[Pool]
    cached: list[str]
    requests: list[Listed]
    reasons: list[ReasonCount]
    num_left_out: int
    tables: dict[str, list[str]] | None = None


MAX_LISTED = 300


# --- why -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Episode:
    """A reason that held for a while, see admin.proto; `to_*` None: it holds still."""

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
    """Where a request's time went. `num_waits_not_searched`: asking for `needs` again goes on with these."""

    id: str
    episodes: list[Episode]
    num_waits_not_searched: int = 0


# --- who tells it --------------------------------------------------------------------------------------------------------

Tell = Callable[[Step | Snapshot], Awaitable[None]]


class LabSource(Protocol):
    """Answers for one page at a time; nothing is asked of anybody while no page asks. QuireErrors where it cannot."""

    async def about(self) -> About:
        """Whose state it is."""

    async def steps(self, since: int, limit: int) -> list[Step]:
        """At most `limit` completed steps from number `since` on, oldest first; the first has whole tables."""

    async def follow(self, since: int, tell: Tell) -> None:
        """Tells steps from `since` on (0 = a few of the last) as they complete, until cancelled; while no request runs, snapshots
        as things change.

        A recording has none.
        """

    async def why(self, request_id: str, tenant: str, *, needs: bool) -> Why:
        """Where a request's time went; `needs`: also what would have ended each wait. NotFound."""
