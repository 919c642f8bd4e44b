"""Lower the priority of grpc.aio's poller thread, which reports completions to the event loop.

Each write ends with a completion from that thread. If it preempts the loop for each of a step's messages,
each costs two thread switches and wakes one reader; if it runs only when the loop waits, it reports many at a
time.
"""

import contextlib
import os
import threading

# Part of the thread's name, from the library's function. If a version names it otherwise, priorities stay as
# they were.
_POLLER_NAME = "_poll_wrapper"


def wait_its_turn() -> None:
    """Set SCHED_BATCH for all pollers of this process; call after creating a gRPC object.

    No-op where the OS lacks that policy.
    """
    if hasattr(os, "SCHED_BATCH"):
        for thread in threading.enumerate():
            if _POLLER_NAME in thread.name and thread.native_id is not None:
                with contextlib.suppress(OSError):
                    os.sched_setscheduler(thread.native_id, os.SCHED_BATCH, os.sched_param(0))
