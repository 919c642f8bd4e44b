"""Bounds of what an error says: gRPC sends it in headers, which a client takes 8 KiB of, whatever made it so long."""

MESSAGE_BYTES = 1_500
NAME_BYTES = 256
VALUE_BYTES = 512
DESCRIPTION_BYTES = 3_000


def clip(text: str, num_bytes: int) -> str:
    """`text`, cut where it takes more than `num_bytes` in a header; anything but plain ASCII takes three for each byte of UTF-8."""
    left = num_bytes
    for at, char in enumerate(text[:num_bytes]):
        left -= 1 if " " <= char <= "~" and char != "%" else 3 * len(char.encode(errors="replace"))
        if left < 0:
            return text[:at] + "..."
    return text if len(text) <= num_bytes else text[:num_bytes] + "..."


def clip_all(texts: list[str], num_bytes: int) -> list[str]:
    """Each text, as long as all of them fit `num_bytes` together; equal shares."""
    share = num_bytes // max(1, len(texts))
    return [clip(text, share) for text in texts]
