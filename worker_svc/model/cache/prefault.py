"""Pre-fault KV-cache pages before a step writes to them.

Unwritten memory gets its pages on the first write, in the writing thread, while all other threads of the
model wait for it. On a virtual machine where the host had to find each page, this took 0.9 s for 256 MiB,
against 0.02 s for existing pages. Policies allocate blocks in order where they can, so the blocks written
next are usually known. (A policy of 2023 without a prefix cache starts with the last block: its pages are
faulted on write.)
"""

import contextlib
import logging
import os
import sys
import threading
import time

import torch

from paged_kernels.host_memory import LARGE_PAGE, make_pages

log = logging.getLogger(__name__)

AHEAD_BYTES = 256 * 2**20
FIRST_BYTES = 64 * 2**20
"""Pre-faulted ahead of an empty pool, which need never fill: a service that nothing uses takes no more."""

_NICE = 10
"""A ninth of the processor time of a usual thread that competes with it."""

_LOOK_S = 0.02


class PagesAhead:
    """Keeps the pages of a host's `pool`, [num_layers, 2, num_blocks, block_elements], ahead of the blocks in use.

    As far ahead as blocks are in use, from FIRST_BYTES to `ahead_bytes`. A thread of low priority faults them
    piece by piece: one large page of each layer's keys and values at a time. While the process computes it waits,
    as long as a quarter of a piece is ahead: a step with a prompt took up to twice as long beside it.
    """

    def __init__(self, pool: torch.Tensor, ahead_bytes: int = AHEAD_BYTES) -> None:
        num_layers, two, self._num_blocks, elements = pool.shape
        self._pool, self._num_runs = pool, num_layers * two
        self._block_bytes = elements * pool.element_size()
        self._piece = max(1, LARGE_PAGE // self._block_bytes)
        self._most = max(self._piece, ahead_bytes // (self._block_bytes * self._num_runs))
        self._least = min(self._most, max(self._piece, FIRST_BYTES // (self._block_bytes * self._num_runs)))
        self._made = self._num_used = 0
        self._can = pool.device.type == "cpu" and pool.is_contiguous()
        self._thread: threading.Thread | None = None

    def expect(self, num_used: int) -> None:
        """Pre-fault beyond block `num_used`; blocks below it are in use or will be in this step. Returns at once."""
        self._num_used = num_used
        if not self._can or (self._thread is not None and self._thread.is_alive()):
            return
        ahead = max(self._least, min(num_used, self._most))
        begin, end = max(self._made, num_used), min(num_used + ahead, self._num_blocks)
        is_rest = begin < end == self._num_blocks
        if end - begin >= self._piece or is_rest:
            self._made = end
            self._thread = threading.Thread(target=self._make, args=(begin, end), name="pages-ahead", daemon=True)
            self._thread.start()

    def join(self) -> None:
        """Wait for the pages being faulted."""
        if self._thread is not None:
            self._thread.join()

    def _make(self, begin: int, end: int) -> None:
        _give_way()
        for piece in range(begin, end, self._piece):
            first, last = piece * self._block_bytes, min(piece + self._piece, end) * self._block_bytes
            for run in range(self._num_runs):
                self._wait_for_rest(piece)
                start = self._pool.data_ptr() + run * self._num_blocks * self._block_bytes
                if not make_pages(start + first, start + last):
                    log.debug("the system does not support pre-faulting: pages are faulted when written")
                    self._can = False
                    return

    def _wait_for_rest(self, piece: int) -> None:
        """Return when the process rests, or when the blocks from `piece` on are needed soon."""
        while piece - self._num_used > self._piece // 4 and _is_busy():
            pass


def _is_busy() -> bool:
    """Look for a moment whether the process computes: its threads take more than half of a core."""
    began, took = time.monotonic(), time.process_time()
    time.sleep(_LOOK_S)
    return time.process_time() - took > (time.monotonic() - began) / 2


def _give_way() -> None:
    """Lower the calling thread's priority.

    Not to the idle class: on a busy machine such a thread waits for seconds, and if it holds Python's lock or the
    lock of the process's memory map, the whole process waits with it.
    """
    if sys.platform == "linux":  # elsewhere it would be that of the process
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
