"""Events of a core, in order: its inputs with the clock reading (`at`, seconds), and its responses."""

from dataclasses import dataclass, field
from typing import Any

from scheduler_svc.observe.plan_record import Ending, PlanRecord
from scheduler_svc.observe.recording.inputs import RequestRecord, ResultRecord, Tokens


@dataclass(slots=True)
class Added:
    """A request arrived. `prefilled`: all its tokens but the last were computed elsewhere. `refused`: reason if it was refused."""

    at: float
    request: RequestRecord
    prefilled: bool = False
    refused: str = ""

    @property
    def num_bytes(self) -> int:
        """Approximate size."""
        return 700 + len(self.request.prompt) + len(self.request.committed)


@dataclass(slots=True)
class AbortEvent:
    """Requests were aborted."""

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
class PlanEvent:
    """`schedule(at, worker)`, or `repeat` where `is_repeat` is set, with a record of each plan; `failed`: it raised that
    error instead."""

    at: float
    decisions: list[PlanRecord]
    failed: str = ""
    num_bytes: int = 200
    worker: int | None = None

    @property
    def is_repeat(self) -> bool:
        """True if the worker ran the step by a grant."""
        return bool(self.decisions) and self.decisions[0].is_repeat


@dataclass(slots=True)
class Revoked:
    """Granted steps of a worker group were revoked (`policies/mixed/decode_grants`)."""

    at: float
    worker: int = 0

    num_bytes = 100


@dataclass(slots=True)
class Returned:
    """A plan's result arrived. `now`: the argument of `update`."""

    at: float
    now: float | None
    result: ResultRecord
    ended: list[Ending] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        """Approximate size."""
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
    """Draft tokens were proposed. `counts`: int32, number of each sequence's."""

    at: float
    names: list[str]
    counts: bytes
    tokens: Tokens

    @property
    def num_bytes(self) -> int:
        """Approximate size."""
        return 200 + 12 * len(self.names) + len(self.tokens)


@dataclass(slots=True)
class WorkerLost:
    """The memory of all workers was lost, or of one of several."""

    at: float
    worker: int | None = None

    num_bytes = 100


@dataclass(slots=True)
class WorkerBack:
    """A lost or drained worker is served again."""

    at: float
    worker: int

    num_bytes = 100


@dataclass(slots=True)
class WorkerPut:
    """A worker group with an empty memory joined, or came back. `pool`: its blocks; `limits`: of the scheduler from then on."""

    at: float
    number: int
    pool: dict[str, int]
    limits: dict[str, Any]

    num_bytes = 500


@dataclass(slots=True)
class WorkerDrained:
    """No group starts on a worker group any more; or, `is_moved`, its groups were requeued."""

    at: float
    worker: int
    is_moved: bool
    keep_movable: bool = False

    num_bytes = 100


@dataclass(slots=True)
class GroupHeld:
    """A sequence sits out plans, to be moved to another worker group (`on`), or takes part again."""

    at: float
    name: str
    on: bool

    num_bytes = 100


@dataclass(slots=True)
class GroupMoved:
    """A held sequence was to continue on another worker group, with the image of its blocks; `done`: whether it does."""

    at: float
    name: str
    worker: int
    image: str
    done: bool

    num_bytes = 200


@dataclass(slots=True)
class WorkerGone:
    """A worker group was removed."""

    at: float
    worker: int

    num_bytes = 100


@dataclass(slots=True)
class PrefixesReset:
    """A reset of all cached prefixes was requested; `done`: whether it happened."""

    at: float
    preempt_running: bool
    done: bool

    num_bytes = 100


@dataclass(slots=True)
class Changed:
    """Policy and limits changed."""

    at: float
    spec: dict[str, Any]
    limits: dict[str, Any]

    num_bytes = 2_000


@dataclass(slots=True)
class CostsSeen:
    """New estimates of step costs, of one worker group or of all."""

    at: float
    costs: dict[str, float]
    worker: int | None = None

    num_bytes = 200


@dataclass(slots=True)
class WarmedUp:
    """The workers' warm-up began (`on`) or ended."""

    at: float
    on: bool

    num_bytes = 100


Event = (
    Added
    | AbortEvent
    | StoppedAt
    | PlanEvent
    | Returned
    | Failed
    | Drafted
    | WorkerLost
    | PrefixesReset
    | Changed
    | CostsSeen
    | WarmedUp
    | WorkerBack
    | Revoked
    | WorkerPut
    | WorkerDrained
    | WorkerGone
    | GroupHeld
    | GroupMoved
)
EVENTS: tuple[type[Any], ...] = (
    Added,
    AbortEvent,
    StoppedAt,
    PlanEvent,
    Returned,
    Failed,
    Drafted,
    WorkerLost,
    PrefixesReset,
    Changed,
    CostsSeen,
    WarmedUp,
    WorkerBack,
    Revoked,
    WorkerPut,
    WorkerDrained,
    WorkerGone,
    GroupHeld,
    GroupMoved,
)
