"""Parse and print sizes in bytes."""

import re

from svc_common.errors import ConfigError

GIB = 2**30

_SIZE = re.compile(r"(?P<number>\d+(\.\d+)?)\s*(?P<unit>[a-zA-Z]*)")
_UNITS = {
    "b": 1,
    **{f"{prefix}ib": 2 ** (10 * (i + 1)) for i, prefix in enumerate("kmgt")},
    **{f"{prefix}b": 10 ** (3 * (i + 1)) for i, prefix in enumerate("kmgt")},
    **{prefix: 2 ** (10 * (i + 1)) for i, prefix in enumerate("kmgt")},
}


def parse_size(text: str, option: str, *, plain_unit: int = 1) -> int:
    """Bytes of "512MiB", "4G" or a plain number (of `plain_unit` bytes).

    Raises ConfigError naming `option` for anything else.
    """
    found = _SIZE.fullmatch(text.strip())
    unit = found["unit"].lower() if found else ""
    if found is None or (unit and unit not in _UNITS):
        raise ConfigError(f"{option}: {text!r} is no size; write 512MiB, 4GiB or a plain number", reason="BAD_SIZE")
    return int(float(found["number"]) * (_UNITS[unit] if unit else plain_unit))


def size_text(num_bytes: int | float) -> str:
    """A readable size: "512.0 MiB"."""
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if abs(num_bytes) >= 1 << power:
            return f"{num_bytes / (1 << power):.1f} {unit}"
    return f"{num_bytes:.0f} B"
