"""Tuning of the cyclic garbage collector for a process of ours; called by its command, not by its parts."""

import gc

YOUNG_OBJECTS = 20_000
"""Container allocations minus deallocations that trigger a young collection.

Python's default of 700 is reached within one step, and hundreds of times by imports, whose objects all stay.
"""


def collect_rarely() -> None:
    """Collect young objects once there are YOUNG_OBJECTS.

    Objects of a request are freed by reference counts when it ends; only errors leave cycles.
    """
    gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])


def settle() -> None:
    """Exclude all present objects, including all modules, from collection, and collect new ones rarely."""
    collect_rarely()
    gc.collect()
    gc.freeze()


def unsettle() -> None:
    """Collect them again, at the end of the process: some libraries report what was not collected by then as leaked."""
    gc.unfreeze()
