"""Fast decoding of results in which the same rows yield one token each: compared as bytes with the expected columns."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from protos.worker.v1 import worker_pb2
from scheduler_svc.worker_values import SampledColumns
from scheduler_svc.workers.row_messages import Row
from svc_common import wire_arrays


@dataclass(frozen=True, slots=True)
class PlainRows:
    """Expected columns of a plan's result, rows ascending. `places`: position in them of each sequence, in the plan's order."""

    names: tuple[str, ...]
    rows: bytes
    incarnations: bytes
    counts: bytes
    flags: bytes
    places: NDArray[np.int64]

    @classmethod
    def of(cls, rows: list[Row]) -> "PlainRows | None":
        """Expected columns for rows in a plan's order; None if a row yields anything but one token."""
        if any(row.num_children > 1 or not row.sampling.gives_tokens_alone for row in rows):
            return None
        listed = sorted(rows, key=lambda row: row.index)
        return cls(
            names=tuple([row.name for row in listed]),
            rows=wire_arrays.pack([row.index for row in listed]),
            incarnations=wire_arrays.pack([row.incarnation for row in listed]),
            counts=wire_arrays.pack([1] * len(listed)),
            flags=bytes(len(listed)),
            places=np.searchsorted([row.index for row in listed], [row.index for row in rows]),
        )

    def read(self, message: worker_pb2.WorkerOutputs) -> tuple[SampledColumns, NDArray[np.int64]] | None:
        """Tokens as listed, and as int64 in the plan's order; None if the message has anything but one token per row."""
        if message.rows != self.rows or message.num_tokens != self.counts or message.flags != self.flags:
            return None
        if message.incarnations != self.incarnations or message.HasField("error"):
            return None
        if message.logprobs or message.HasField("tops") or message.prompt_logprobs or message.embeddings:
            return None
        if message.mask_rows or message.HasField("candidates"):
            return None
        listed = wire_arrays.unpack(message.token_ids, "token_ids", length=len(self.names), minimum=0)
        return SampledColumns(self.names, self.counts, message.token_ids), listed.astype(np.int64)[self.places]
