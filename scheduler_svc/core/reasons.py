"""Why a request waits, and the events that report it: codes, numbers, and the settings behind each
(docs/explaining.md).

An event is recorded when an *examined* request changes state or reason. The rest of a queue waits behind its
head, so one event about the queue covers all of it; `timelines` joins both on demand.
"""

import enum
from collections.abc import Mapping
from typing import NamedTuple

Numbers = Mapping[str, int | float | str]
NOTHING: Numbers = {}
WAITING_QUEUES = ("waiting", "swapped")


class Revocation(enum.StrEnum):
    """Why the rest of a grant of decode steps was revoked (`policies/mixed/decode_grants`)."""

    REQUEST_WAITS = "REQUEST_WAITS"
    """A request waits or is swapped out, and the next plan examines it."""
    ROW_ENDED = "ROW_ENDED"
    """A row of the batch was cancelled, reached its deadline or a stop string."""
    WARMING_UP = "WARMING_UP"
    """The worker is to compute a step of its own."""
    POLICY_CHANGED = "POLICY_CHANGED"


class Reason(enum.StrEnum):
    """States and reasons of a request. Reasons for waiting that a setting can relieve are in `KEYS`."""

    ARRIVED = "ARRIVED"
    """It arrived during a step; the next plan examines it."""
    NO_WORKER = "NO_WORKER"
    """No worker could run steps. Set by the service, never by the core."""
    NEED_BLOCKS = "NEED_BLOCKS"
    TOKEN_BUDGET = "TOKEN_BUDGET"
    MAX_SEQS = "MAX_SEQS"
    LORA_SLOTS = "LORA_SLOTS"
    DELAY = "DELAY"
    BATCH_UNDER_WAY = "BATCH_UNDER_WAY"
    """Static batching: no request joins a running batch."""
    STEP_PREEMPTS = "STEP_PREEMPTS"
    """No group starts or is swapped in during a step that preempted a group."""
    DECODE_FIRST = "DECODE_FIRST"
    """The step runs decodes, or running groups, only."""
    STEP_GRANTED = "STEP_GRANTED"
    """The worker had begun the step by a grant before the revocation reached it."""
    SWAPPED_FIRST = "SWAPPED_FIRST"
    """Groups swapped out to the host are resumed before new prompts start."""
    OUTRANKED = "OUTRANKED"
    """It is swapped out, and a higher-ranked waiting request goes first."""
    PREFILL_FIRST = "PREFILL_FIRST"
    """The step runs prompts only."""
    RESULT_PENDING = "RESULT_PENDING"
    """A step from before its preemption is still in flight."""
    MAKES_WAY = "MAKES_WAY"
    """All other groups wait for one that makes no progress (progress guard)."""
    RESERVED = "RESERVED"
    """The slot, rank or policy keeps room for running requests."""
    THRESHOLD = "THRESHOLD"
    """It needs more blocks than prompts may use at present (Chitu's adaptive threshold)."""
    SLOT_TYPE = "SLOT_TYPE"
    """Its slot currently accepts only tasks of another type."""
    LANE_BUSY = "LANE_BUSY"
    """Every slot or rank that could take it is in flight or full."""
    PREFIX_AFFINITY = "PREFIX_AFFINITY"
    """It was assigned to the rank that has its prompt prefix cached, or waits for the worker group that has."""
    GROUP_BUSY = "GROUP_BUSY"
    """Another worker group would have computed its prompt sooner, and starts it with its next step."""
    GROUP_TOO_SMALL = "GROUP_TOO_SMALL"
    """The worker group's cache could not hold it at its longest, and that of another one could."""
    WORKER_DRAINS = "WORKER_DRAINS"
    """Every worker group is drained: requests that run end, and none starts."""
    TENANT_SHARE = "TENANT_SHARE"
    """It is the head of a tenant that was served more than other waiting tenants; one of theirs starts first."""
    MADE_ROOM = "MADE_ROOM"
    """Other groups were preempted for it in this step; it starts in the next."""
    PREEMPTED = "PREEMPTED"
    MOVED = "MOVED"
    """It goes on on another worker group, which has its KV."""
    WORKER_LOST = "WORKER_LOST"
    """Its KV was lost with its worker, or must be recomputed; it waits again with its tokens."""
    RUNNING = "RUNNING"
    ENDED = "ENDED"
    BEHIND = "BEHIND"
    """Not examined: a request before it in the queue could not start. Derived by `timelines`, never an event."""


KEYS: dict[Reason, tuple[str, ...]] = {
    Reason.NEED_BLOCKS: ("num_gpu_blocks", "num_cpu_blocks", "watermark_blocks"),
    Reason.TOKEN_BUDGET: ("max_num_batched_tokens", "chunk_s", "prefill_chunk_size"),
    Reason.MAX_SEQS: ("max_num_seqs", "max_reqs"),
    Reason.LANE_BUSY: ("max_reqs", "max_num_seqs"),
    Reason.LORA_SLOTS: ("max_loras",),
    Reason.DELAY: ("delay_factor",),
    Reason.STEP_PREEMPTS: ("num_gpu_blocks", "max_num_batched_tokens"),
    Reason.SWAPPED_FIRST: ("num_gpu_blocks",),
    Reason.OUTRANKED: ("num_gpu_blocks",),
    Reason.RESERVED: ("num_gpu_blocks",),
    Reason.THRESHOLD: ("num_gpu_blocks",),
}
"""Settings that would have to be larger to admit it, most likely first. Reasons not listed depend on no setting."""


class CoreEvent(NamedTuple):
    """A change of state or reason, in the step that decided it. `now`: seconds on the clock of `schedule`.

    `queue`: the group's queue from then on, "" = finished. `sample`: index of the group within its request.
    `of_queue`: the reason also applies to all unexamined groups behind it in that queue; `request_id` is then
    the head's, or "" if none was examined.
    """

    step: int
    now: float
    queue: str
    reason: Reason
    request_id: str = ""
    sample: int = 0
    of_queue: bool = False
    numbers: Numbers = NOTHING
