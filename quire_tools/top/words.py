"""Why requests wait, in plain words."""

from quire.operators.reason_texts import NOW, Numbers, behind
from quire_tools.reasons_now import BEFORE
from scheduler_svc.core.reasons import KEYS, Reason

_ID_WIDTH = 13


def sentence(reason: str, numbers: Numbers) -> str:
    """A reason in words, with its numbers and the policy keys (`--set`) that influence it."""
    if (found := behind(reason, numbers)) is not None:
        head, head_reason, rest = found
        return f"behind {short_id(head)}: {sentence(head_reason, rest)}"
    if reason == BEFORE:
        return "since before the recording begins"
    text = NOW.get(reason, reason)
    if numbers:
        text += f" ({numbers_text(numbers)})"
    keys = KEYS.get(Reason(reason), ()) if reason in Reason.__members__ else ()
    return f"{text}. Depends on {', '.join(keys)}" if keys else text


def reason_text(reason: str, numbers: Numbers) -> str:
    """ "NEED_BLOCKS need 14, free 3"; for BEHIND, the head's reason and numbers."""
    if (found := behind(reason, numbers)) is not None:
        head, head_reason, rest = found
        return f"behind {short_id(head)}: {reason_text(head_reason, rest)}"
    return f"{reason} {numbers_text(numbers)}".rstrip()


def numbers_text(numbers: Numbers) -> str:
    """ "need 14, free 3"."""
    return ", ".join(f"{name} {_value(value)}" for name, value in numbers.items())


def short_id(request_id: str) -> str:
    """The end of a long id, since consecutive ids share their beginning."""
    return request_id if len(request_id) <= _ID_WIDTH else f"…{request_id[1 - _ID_WIDTH :]}"


def _value(value: int | float | str) -> str:
    return f"{value:,.3g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else value
