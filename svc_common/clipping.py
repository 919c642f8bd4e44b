"""Size limits of error texts: gRPC sends them in headers, of which a client accepts 8 KiB."""

MESSAGE_BYTES = 1_500
NAME_BYTES = 256
VALUE_BYTES = 512
DESCRIPTION_BYTES = 3_000


def clip(text: str, num_bytes: int) -> str:
    """Truncate `text` to `num_bytes` in a header, where anything but plain ASCII takes three bytes per byte of UTF-8."""
    left = num_bytes
    for at, char in enumerate(text[:num_bytes]):
        left -= 1 if " " <= char <= "~" and char != "%" else 3 * len(char.encode(errors="replace"))
        if left < 0:
            return text[:at] + "..."
    return text if len(text) <= num_bytes else text[:num_bytes] + "..."


def clip_all(texts: list[str], num_bytes: int) -> list[str]:
    """Truncate each text to an equal share of `num_bytes`."""
    share = num_bytes // max(1, len(texts))
    return [clip(text, share) for text in texts]
