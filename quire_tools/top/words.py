"""Why requests wait, in plain words. Reference of the reasons: docs/explaining.md."""

from collections.abc import Mapping

from quire_tools.reasons_now import BEFORE
from scheduler_svc.core.reasons import KEYS, Reason

WORDS: dict[Reason, str] = {
    Reason.ARRIVED: "just came; the next plan looks at them",
    Reason.NO_WORKER: "no worker can run steps",
    Reason.NEED_BLOCKS: "too few free KV-cache blocks",
    Reason.TOKEN_BUDGET: "the step's tokens are taken",
    Reason.MAX_SEQS: "as many sequences run as may",
    Reason.LORA_SLOTS: "as many adapters are in the batch as may be",
    Reason.DELAY: "prompts wait for company",
    Reason.BATCH_UNDER_WAY: "nobody joins a static batch under way",
    Reason.STEP_PREEMPTS: "the step made others leave, so nobody starts in it",
    Reason.DECODE_FIRST: "the step is one of decodes",
    Reason.SWAPPED_FIRST: "those on the host come back before new ones start",
    Reason.OUTRANKED: "more important ones come first",
    Reason.PREFILL_FIRST: "the step is one of prompts",
    Reason.RESULT_PENDING: "a step of theirs is under way still",
    Reason.MAKES_WAY: "all make way for one that is stuck",
    Reason.RESERVED: "room is kept for those that run, until they end",
    Reason.THRESHOLD: "prompts may not use more blocks at present",
    Reason.SLOT_TYPE: "the lane takes other work now",
    Reason.LANE_BUSY: "every lane that could take them is busy",
    Reason.PREFIX_AFFINITY: "they wait for the rank that knows how they begin",
    Reason.TENANT_SHARE: "another tenant's turn",
    Reason.MADE_ROOM: "others left for them; they start in the next step",
    Reason.PREEMPTED: "they ran and had to leave",
    Reason.WORKER_LOST: "their worker was lost; they are computed again",
    Reason.RUNNING: "they run",
    Reason.ENDED: "over",
    Reason.BEHIND: "behind somebody who cannot start",
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
    return f"{text}. Hangs on {', '.join(keys)}" if keys else text


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
