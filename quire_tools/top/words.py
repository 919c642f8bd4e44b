"""Why requests wait, in plain words. Reference of the reasons: docs/explaining.md."""

from collections.abc import Mapping

from quire_tools.reasons_now import BEFORE
from scheduler_svc.core.reasons import KEYS, Reason

WORDS: dict[Reason, str] = {
    Reason.ARRIVED: "just arrived; examined in the next step",
    Reason.NO_WORKER: "no worker can run steps",
    Reason.NEED_BLOCKS: "too few free KV-cache blocks",
    Reason.TOKEN_BUDGET: "the step's token budget is used up",
    Reason.MAX_SEQS: "as many sequences run as are allowed",
    Reason.LORA_SLOTS: "as many adapters are in the batch as are allowed",
    Reason.DELAY: "prompts wait for others, to run together",
    Reason.BATCH_UNDER_WAY: "a static batch admits no request while it runs",
    Reason.STEP_PREEMPTS: "the step preempts, so no request starts in it",
    Reason.DECODE_FIRST: "this step runs decodes only",
    Reason.SWAPPED_FIRST: "swapped requests return before new ones start",
    Reason.OUTRANKED: "requests of higher priority are first",
    Reason.PREFILL_FIRST: "this step runs prompts only",
    Reason.RESULT_PENDING: "their last step is still in flight",
    Reason.MAKES_WAY: "all make way for one that cannot proceed",
    Reason.RESERVED: "blocks are reserved for running requests until they end",
    Reason.THRESHOLD: "prompts may not use more blocks now",
    Reason.SLOT_TYPE: "the slot runs the other kind of step now",
    Reason.LANE_BUSY: "every slot or rank for them is busy",
    Reason.PREFIX_AFFINITY: "they wait for the rank that has their prefix cached",
    Reason.TENANT_SHARE: "it is another tenant's turn",
    Reason.MADE_ROOM: "others were preempted for them; they start in the next step",
    Reason.PREEMPTED: "they were preempted",
    Reason.WORKER_LOST: "their worker was lost; they are recomputed",
    Reason.RUNNING: "running",
    Reason.ENDED: "ended",
    Reason.BEHIND: "behind a request that cannot start",
}
_OF_BEHIND = ("head", "head_reason")
_ID_WIDTH = 13

Numbers = Mapping[str, int | float | str]


def sentence(reason: str, numbers: Numbers) -> str:
    """A reason in words, with its numbers and the policy keys (`--set`) that influence it."""
    if reason == Reason.BEHIND and "head" in numbers:
        rest = {name: value for name, value in numbers.items() if name not in _OF_BEHIND}
        return f"behind {short_id(str(numbers['head']))}: {sentence(str(numbers.get('head_reason', '')), rest)}"
    if reason == BEFORE:
        return "since before the recording begins"
    known = Reason(reason) if reason in Reason.__members__ else None
    text = WORDS[known] if known else reason
    if numbers:
        text += f" ({numbers_text(numbers)})"
    keys = KEYS.get(known, ()) if known else ()
    return f"{text}. Depends on {', '.join(keys)}" if keys else text


def reason_text(reason: str, numbers: Numbers) -> str:
    """ "NEED_BLOCKS need 14, free 3"; for BEHIND, the head's reason and numbers."""
    if reason == Reason.BEHIND and "head" in numbers:
        rest = {name: value for name, value in numbers.items() if name not in _OF_BEHIND}
        return f"behind {short_id(str(numbers['head']))}: {reason_text(str(numbers.get('head_reason', '')), rest)}"
    return f"{reason} {numbers_text(numbers)}".rstrip()


def numbers_text(numbers: Numbers) -> str:
    """ "need 14, free 3"."""
    return ", ".join(f"{name} {_value(value)}" for name, value in numbers.items())


def short_id(request_id: str) -> str:
    """The end of a long id, since consecutive ids share their beginning."""
    return request_id if len(request_id) <= _ID_WIDTH else f"…{request_id[1 - _ID_WIDTH :]}"


def _value(value: int | float | str) -> str:
    return f"{value:,.3g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else value
