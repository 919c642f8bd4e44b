"""Tuning of the cyclic garbage collector for a process of ours; called by its command, not by its parts."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

YOUNG_OBJECTS = 20_000
"""Container allocations minus deallocations that trigger a young collection.

Python's default of 700 is reached within one step, and hundreds of times by imports, whose objects all stay.
"""


def collect_rarely() -> None:
    """Collect young objects once there are YOUNG_OBJECTS.

    Objects of a request are freed by reference counts when it ends; only errors leave cycles.
    """
    gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])


@contextmanager
def importing() -> Iterator[None]:
    """Collect nothing while modules are imported, and exclude all present objects from collection afterwards.

    Nearly all objects of an import stay, so collections in between cost up to a tenth of its time for nothing.
    """
    gc.disable()
    try:
        yield
    finally:
        exclude()
        gc.enable()


def exclude() -> None:
    """Exclude all present objects from collection without a look for garbage among them, of which a start leaves hardly any."""
    gc.freeze()


def settle() -> None:
    """Collect, exclude all remaining objects from collection, and collect new ones rarely."""
    collect_rarely()
    gc.collect()
    exclude()


def unsettle() -> None:
    """Collect them again, at the end of the process: some libraries report what was not collected by then as leaked."""
    gc.unfreeze()
