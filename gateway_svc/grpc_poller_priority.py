"""The thread of grpc.aio that tells the event loop what is done: it is to come when the loop waits, not between two messages.

Each write ends with word from that thread. Where it interrupts the loop for each of a step's messages, each costs two switches
between threads, and wakes its reader alone; where it waits for its turn, it has word of many at a time.
"""

import contextlib
import os
import threading

# In the thread's name, by the library's function. Where that is called otherwise, all goes on as it was.
_POLLER_NAME = "_poll_wrapper"


def wait_its_turn() -> None:
    """For all pollers of this process, once there is a gRPC object. Nothing happens where the system has no such policy."""
    if hasattr(os, "SCHED_BATCH"):
        for thread in threading.enumerate():
            if _POLLER_NAME in thread.name and thread.native_id is not None:
                with contextlib.suppress(OSError):
                    os.sched_setscheduler(thread.native_id, os.SCHED_BATCH, os.sched_param(0))
