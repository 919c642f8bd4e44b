"""Sets how torch's compute threads wait for each other.

Import before torch: OpenMP reads its environment on load.

By default a waiting thread spins for milliseconds. With a gateway, a scheduler or another busy process on the
same cores, this takes the processor from the thread it waits for: with two threads on two busy cores, a step
of a small model took 540 ms spinning and 6 ms sleeping. Operators with dedicated cores may set
OMP_WAIT_POLICY or GOMP_SPINCOUNT themselves.
"""

import os

_CHOICES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def wait_by_sleeping() -> None:
    """Make waiting threads sleep, unless the environment sets a policy. No effect once torch is loaded."""
    if not any(name in os.environ for name in _CHOICES):
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"


wait_by_sleeping()
