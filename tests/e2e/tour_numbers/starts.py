"""Numbers of the stop `startup`: those that steps know."""

from collections.abc import Mapping, Sequence
from typing import Any

Steps = Sequence[Mapping[str, Any]]


def _startup(files: Sequence[Steps], printed: Mapping[str, str]) -> dict[str, str]:
    """A step's free blocks, and those that it took, are the pool; the null block is the worker's one more."""
    [steps] = files
    pool = steps[0]["free"][0] + len({block for blocks in steps[0]["tables"].values() for block in blocks})
    return {
        "blocks in the pool at step 1": str(pool),
        "device blocks": str(pool + 1),
        "host blocks": str(steps[0]["free"][1]),
    }


RECOMPUTED = {"startup": _startup}
