"""Why a request waits, and the events that say so (design.md 4, Explain): codes, numbers, and the knob that each hangs on.

An event is made when an *examined* request changes state or reason. The rest of a queue stands behind its head, so one event
about the queue says it for all of them; `timelines` puts both together when somebody asks.
"""

import enum
from collections.abc import Mapping
from typing import NamedTuple

Numbers = Mapping[str, int | float | str]
NOTHING: Numbers = {}
WAITING_QUEUES = ("waiting", "swapped")


class Reason(enum.StrEnum):
    """States and reasons. Those of waiting are in `KEYS`."""

    ARRIVED = "ARRIVED"
    """It came while a step was under way; the next plan looks at it."""
    NO_WORKER = "NO_WORKER"
    """No worker could run steps. The service's, never the core's."""
    NEED_BLOCKS = "NEED_BLOCKS"
    TOKEN_BUDGET = "TOKEN_BUDGET"
    MAX_SEQS = "MAX_SEQS"
    LORA_SLOTS = "LORA_SLOTS"
    DELAY = "DELAY"
    BATCH_UNDER_WAY = "BATCH_UNDER_WAY"
    """Static batching: nobody joins a batch."""
    STEP_PREEMPTS = "STEP_PREEMPTS"
    """Nobody starts, or comes back, in a step that made somebody leave (R132, R5)."""
    DECODE_FIRST = "DECODE_FIRST"
    """The step is one of decodes, or of those that run."""
    SWAPPED_FIRST = "SWAPPED_FIRST"
    """Groups on the host come before new prompts (R41)."""
    OUTRANKED = "OUTRANKED"
    """It is on the host, and a more important one that waits for its first blocks comes before it."""
    PREFILL_FIRST = "PREFILL_FIRST"
    """The step is one of prompts (R41)."""
    RESULT_PENDING = "RESULT_PENDING"
    """A step from before its preemption is under way still (R154)."""
    MAKES_WAY = "MAKES_WAY"
    """Everybody makes way for one that is stuck (progress guard)."""
    RESERVED = "RESERVED"
    """The slot, rank or policy keeps room for those that run."""
    THRESHOLD = "THRESHOLD"
    """More blocks than prompts may use at present (Chitu's adaptive threshold, R170)."""
    SLOT_TYPE = "SLOT_TYPE"
    """Its lane takes only work of another type now (R184)."""
    LANE_BUSY = "LANE_BUSY"
    """Every lane that could take it is under way or full."""
    PREFIX_AFFINITY = "PREFIX_AFFINITY"
    """It was given to the rank that knows how its prompt begins."""
    TENANT_SHARE = "TENANT_SHARE"
    """It is the next of a tenant that was served more than others that wait; one of theirs starts before it."""
    MADE_ROOM = "MADE_ROOM"
    """Others left for it in this step; it starts in the next (R85)."""
    PREEMPTED = "PREEMPTED"
    WORKER_LOST = "WORKER_LOST"
    """What its worker held is gone, or must be computed again; it waits again with its tokens."""
    RUNNING = "RUNNING"
    ENDED = "ENDED"
    BEHIND = "BEHIND"
    """Not examined: somebody before it could not start. Composed, never an event."""


KEYS: dict[Reason, tuple[str, ...]] = {
    Reason.NEED_BLOCKS: ("num_gpu_blocks", "num_cpu_blocks", "watermark_blocks"),
    Reason.TOKEN_BUDGET: ("max_num_batched_tokens", "prefill_chunk_size"),
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
"""What more of would have admitted it, the likeliest first. Reasons that are not here hang on no number."""


class Event(NamedTuple):
    """A change of state or reason, in the step that decided it. `now`: seconds on the clock of `schedule`.

    `queue`: where the group stands from then on, "" = it is over. `sample`: which group of its request it is. `of_queue`: all
    that stand behind it in that queue and were not examined wait for the same; `request_id` is then the head's, "" where none
    was looked at.
    """

    step: int
    now: float
    queue: str
    reason: Reason
    request_id: str = ""
    sample: int = 0
    of_queue: bool = False
    numbers: Numbers = NOTHING
