"""The cyclic garbage collector of a process that has started and from now on serves: to be set by its command, not by its parts."""

import gc

YOUNG_OBJECTS = 20_000
"""New containers, less those that are gone, before the youngest are looked through; Python's own 700 are made within one step."""


def settle() -> None:
    """Never looks again through what is there now, all modules among it, and seldom through what comes.

    What serves a request is freed as it ends, by its reference counts; cycles are left by errors alone.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])
