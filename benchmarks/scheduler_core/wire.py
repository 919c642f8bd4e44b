"""Measures a step's wire cost when every row changes: columns to bytes, bytes to checked arrays."""

import statistics
import time
from dataclasses import dataclass

import numpy as np

from protos.worker.v1 import worker_pb2
from svc_common import wire_arrays
from worker_svc.rows.changes import ChangeLimits, Changes, read_step

_BATCHES = 9
_REPEATS = 300
_BLOCKS = 1 << 20
_LIMITS = ChangeLimits(vocab_size=32_000, max_model_len=4096, block_size=16, num_gpu_blocks=_BLOCKS, num_cpu_blocks=0)


@dataclass(frozen=True, slots=True)
class Wire:
    """Median us of CPU per message of `rows` changed rows; `message_bytes` is its size."""

    rows: int
    encode_us: float
    decode_us: float
    message_bytes: int
    differences: list[str]


def wire(num_rows: int) -> Wire:
    """Encode as the scheduler does (columns, SerializeToString), decode as the worker does (FromString, `read_step`)."""
    rng = np.random.default_rng(num_rows)
    changes = Changes(
        rows=rng.permutation(num_rows).astype(np.int32),
        incarnations=rng.integers(1, 1000, num_rows, np.int32),
        num_tokens=rng.integers(1, 64, num_rows, np.int32),
        num_new_blocks=np.ones(num_rows, np.int32),
        new_block_ids=rng.integers(1, _BLOCKS, num_rows, np.int32),
        num_new_tokens=np.zeros(num_rows, np.int32),
        new_token_ids=np.zeros(0, np.int32),
        num_drafts=np.zeros(num_rows, np.int32),
    )
    data = encode(changes)
    encode_ns, decode_ns = [], []
    for _ in range(_BATCHES):
        started = time.process_time_ns()
        for _ in range(_REPEATS):
            encode(changes)
        encoded = time.process_time_ns()
        for _ in range(_REPEATS):
            decode(data)
        encode_ns.append(encoded - started)
        decode_ns.append(time.process_time_ns() - encoded)
    return Wire(
        rows=num_rows,
        encode_us=round(statistics.median(encode_ns) * 1e-3 / _REPEATS, 2),
        decode_us=round(statistics.median(decode_ns) * 1e-3 / _REPEATS, 2),
        message_bytes=len(data),
        differences=_differences(changes, decode(data)),
    )


def encode(changes: Changes) -> bytes:
    """Encode a step that changes these rows."""
    pack = wire_arrays.pack
    changed = worker_pb2.ChangedRows(
        rows=pack(changes.rows),
        incarnations=pack(changes.incarnations),
        num_tokens=pack(changes.num_tokens),
        num_new_blocks=pack(changes.num_new_blocks),
        new_block_ids=pack(changes.new_block_ids),
    )
    message = worker_pb2.SchedulerOutputs(
        step_id=1000, epoch=1, num_decode_steps=1, scheduler_step=1000, changed=changed
    )
    return message.SerializeToString()


def decode(data: bytes) -> Changes | None:
    """Decode the changed rows, with every check that needs no row state."""
    return read_step(worker_pb2.SchedulerOutputs.FromString(data), _LIMITS).changed


def _differences(sent: Changes, received: Changes | None) -> list[str]:
    if received is None:
        return ["wire: no row changes"]
    names = ("rows", "incarnations", "num_tokens", "num_new_blocks", "new_block_ids")
    return [f"wire: {n} differ" for n in names if not np.array_equal(getattr(sent, n), getattr(received, n))]
