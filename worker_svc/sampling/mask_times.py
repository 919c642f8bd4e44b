"""Cost of grammar masks over the decode steps of one message, as reported to the scheduler. Does not import torch."""

from dataclasses import dataclass, field

from protos.worker.v1 import worker_pb2
from svc_common import wire_arrays
from worker_svc.rows.options import IntArray
from worker_svc.sampling.token_masks import MaskWork

USUAL_NS = 100_000
"""Threshold above which a mask's time is reported per row: masks of usual grammars stay below it."""
_NS_PER_US = 1_000


@dataclass(slots=True)
class MaskTimes:
    """Collects `MaskWork`; `fill` writes it into the message."""

    _total_ns: int = 0
    _beyond_ns: dict[tuple[int, int], int] = field(default_factory=dict)
    _budget_ms: float = 0.0

    def add(self, rows: IntArray, incarnations: IntArray, work: MaskWork) -> None:
        """Add one decode step. A row delays others by its share of the threads' time."""
        for row, life in zip(rows.tolist(), incarnations.tolist(), strict=True):
            cpu_ns = work.cpu_ns[row]
            self._total_ns += cpu_ns
            if cpu_ns > USUAL_NS:
                beyond_ns = (cpu_ns - USUAL_NS) // work.num_threads
                self._beyond_ns[row, life] = self._beyond_ns.get((row, life), 0) + beyond_ns
        if worker_pb2.ROW_FLAG_MASK_BUDGET in work.flags.values():
            self._budget_ms = work.budget_ms

    def fill(self, result: worker_pb2.WorkerOutputs) -> None:
        """Write the times; none if no mask was computed."""
        result.timings.mask_ns = self._total_ns
        result.mask_budget_ms = self._budget_ms
        if self._beyond_ns:
            places = sorted(self._beyond_ns)
            result.mask_rows = wire_arrays.pack([row for row, _ in places])
            result.mask_incarnations = wire_arrays.pack([life for _, life in places])
            result.mask_us = wire_arrays.pack([self._beyond_ns[place] // _NS_PER_US for place in places])
