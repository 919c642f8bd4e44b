"""Printed forms of request ids.

The OpenAI API returns `cmpl-ID`, `chatcmpl-ID` or `resp_ID`, Anthropic's `msg_ID`, headers and the gRPC API the plain ID.
"""

COMPLETION = "cmpl"
CHAT = "chatcmpl"
EMBEDDING = "embd"
MESSAGE = "msg"
RESPONSE = "resp"

_DASHED, _UNDERSCORED = (COMPLETION, CHAT, EMBEDDING), (MESSAGE, RESPONSE)
_PREFIXES = (*(f"{kind}-" for kind in _DASHED), *(f"{kind}_" for kind in _UNDERSCORED))


def meanings(printed: str) -> list[str]:
    """Ids that a printed one may stand for, likeliest first: a caller's own x-request-id may begin like a prefix."""
    return [printed, *(printed.removeprefix(prefix) for prefix in _PREFIXES if printed.startswith(prefix))]
