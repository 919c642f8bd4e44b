"""Tuning of the cyclic garbage collector for a serving process; called by its command, not by its parts."""

import gc

YOUNG_OBJECTS = 20_000
"""Container allocations minus deallocations that trigger a young collection.

Python's default of 700 is reached within one step.
"""


def settle() -> None:
    """Exclude all present objects, including all modules, from collection, and collect new ones rarely.

    Objects of a request are freed by reference counts when it ends; only errors leave cycles.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])
