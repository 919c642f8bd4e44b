"""Ids of requests as doors print them: OpenAI's answers have `cmpl-ID` or `chatcmpl-ID`, headers and our own API ID alone."""

COMPLETION = "cmpl"
CHAT = "chatcmpl"
EMBEDDING = "embd"

_PREFIXES = tuple(f"{kind}-" for kind in (COMPLETION, CHAT, EMBEDDING))


def meanings(printed: str) -> list[str]:
    """The ids that a printed one may mean, the likeliest first: a caller's own x-request-id may begin like a prefix."""
    return [printed, *(printed.removeprefix(prefix) for prefix in _PREFIXES if printed.startswith(prefix))]
