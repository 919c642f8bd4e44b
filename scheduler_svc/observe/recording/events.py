"""What happened to a core, in order: its inputs, each with the clock's reading (`at`, seconds), and what it said to them."""

from dataclasses import dataclass, field
from typing import Any

from scheduler_svc.observe.recording.decision import Decision, Ending
from scheduler_svc.observe.recording.inputs import RequestRecord, ResultRecord, Tokens


@dataclass(slots=True)
class Added:
    """A request came. `prefilled`: its tokens but the last were computed elsewhere. `refused`: why it was not taken, a word."""

    at: float
    request: RequestRecord
    prefilled: bool = False
    refused: str = ""

    @property
    def num_bytes(self) -> int:
        """About what it takes."""
        return 100 + self.request.num_bytes


@dataclass(slots=True)
class Aborted:
    """Requests were to end."""

    at: float
    request_ids: list[str]
    ended: list[Ending]

    num_bytes = 300


@dataclass(slots=True)
class StoppedAt:
    """A stop string was found in a sequence."""

    at: float
    name: str
    num_output_tokens: int
    ended: list[Ending]

    num_bytes = 300


@dataclass(slots=True)
class Planned:
    """`schedule(at)`, one decision per plan; `failed`: it ended with that error instead."""

    at: float
    decisions: list[Decision]
    failed: str = ""
    num_bytes: int = 200


@dataclass(slots=True)
class Returned:
    """A plan's result came back. `now`: what `update` was told."""

    at: float
    now: float | None
    result: ResultRecord
    ended: list[Ending] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        """About what it takes."""
        return 150 + self.result.num_bytes + 200 * (len(self.ended) + len(self.dropped))


@dataclass(slots=True)
class Failed:
    """The worker could not run a plan."""

    at: float
    step: int
    why: str
    ended: list[Ending]

    num_bytes = 500


@dataclass(slots=True)
class Drafted:
    """Guesses at next tokens. `counts`: int32, of each."""

    at: float
    names: list[str]
    counts: bytes
    tokens: Tokens

    @property
    def num_bytes(self) -> int:
        """About what it takes."""
        return 200 + 12 * len(self.names) + len(self.tokens)


@dataclass(slots=True)
class WorkerLost:
    """The worker's memory is gone; `lane`: of the worker of that lane alone."""

    at: float
    lane: int | None = None

    num_bytes = 100


@dataclass(slots=True)
class LaneBack:
    """A lane has a worker again."""

    at: float
    lane: int

    num_bytes = 100


@dataclass(slots=True)
class PrefixesReset:
    """An operator wanted all prefixes forgotten; whether they were."""

    at: float
    preempt_running: bool
    done: bool

    num_bytes = 100


@dataclass(slots=True)
class Changed:
    """Policy and limits from now on."""

    at: float
    spec: dict[str, Any]
    limits: dict[str, Any]

    num_bytes = 2_000


@dataclass(slots=True)
class CostsSeen:
    """What work was measured to cost."""

    at: float
    costs: dict[str, float]

    num_bytes = 200


@dataclass(slots=True)
class WarmedUp:
    """The workers began to warm up, or were done."""

    at: float
    on: bool

    num_bytes = 100


Event = (
    Added
    | Aborted
    | StoppedAt
    | Planned
    | Returned
    | Failed
    | Drafted
    | WorkerLost
    | PrefixesReset
    | Changed
    | CostsSeen
    | WarmedUp
    | LaneBack
)
EVENTS: tuple[type[Any], ...] = (
    Added,
    Aborted,
    StoppedAt,
    Planned,
    Returned,
    Failed,
    Drafted,
    WorkerLost,
    PrefixesReset,
    Changed,
    CostsSeen,
    WarmedUp,
    LaneBack,
)
