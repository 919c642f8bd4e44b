"""How torch's compute threads wait for each other. Imported before torch, because OpenMP reads its environment when it is
loaded.

By default a thread that waits spins for milliseconds. Beside gateway, scheduler or any busy neighbour that takes the processor
from the thread waited for: with two threads on two busy cores a step of a small model took 540 ms spinning and 6 ms sleeping.
Operators who own their cores may set OMP_WAIT_POLICY or GOMP_SPINCOUNT themselves.
"""

import os

_CHOICES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def wait_by_sleeping() -> None:
    """Threads sleep while they wait, unless the environment says otherwise. Without effect once torch is loaded."""
    if not any(name in os.environ for name in _CHOICES):
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"


wait_by_sleeping()
