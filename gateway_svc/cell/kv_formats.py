"""Forms of KV events: batches of SMG's engine contract, and the events that vLLM publishes over ZeroMQ.

Both tell runs of blocks that follow each other in one event.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from protos.engine.v1 import engine_pb2
from protos.routers.v1 import smg_common_pb2 as pb

_MEDIUM = "GPU"


class KvBatches:
    """Batches of one stream, numbered from `first` on. The first one is a snapshot, which says what was before is void."""

    def __init__(self, first: int) -> None:
        self._number = first
        self._num_events = 0
        self._snapshot: pb.KvSnapshotChunk | None = pb.KvSnapshotChunk(count=1)

    def batch(self, change: engine_pb2.SubscribeKvEventsResponse) -> pb.KvEventBatch:
        """The batch with this change."""
        events = [] if self._snapshot is None else [pb.KvCacheEvent(cleared=pb.KvCacheCleared())]
        if change.removed:
            events.append(pb.KvCacheEvent(removed=pb.KvBlocksRemoved(block_hashes=change.removed)))
        events += map(_stored, runs(change.stored))
        if self._snapshot is not None:
            self._snapshot.blocks = len(change.stored)
        batch = pb.KvEventBatch(
            sequence_number=self._number, timestamp=time.time(), events=events, snapshot=self._snapshot
        )
        if self._snapshot is None:
            for event in batch.events:
                self._num_events += 1
                event.event_id = self._num_events
        self._number, self._snapshot = self._number + 1, None
        return batch


def vllm_events(change: engine_pb2.SubscribeKvEventsResponse) -> list[list[Any]]:
    """Events of a change. Blocks of adapters are not told: the contract names adapters, the scheduler numbers them."""
    events: list[list[Any]] = []
    if change.removed:
        events.append(["BlockRemoved", list(map(_unsigned, change.removed)), _MEDIUM])
    for run in runs(block for block in change.stored if not block.lora_id):
        tokens = [token for block in run for token in block.token_ids]
        parent = parent_of(run[0])
        hashes = [_unsigned(block.block_hash) for block in run]
        before = None if parent is None else _unsigned(parent)
        events.append(["BlockStored", hashes, before, tokens, len(run[0].token_ids), None, _MEDIUM])
    return events


def _unsigned(short: int) -> int:
    return short % 2**64


def _stored(run: Sequence[engine_pb2.StoredBlock]) -> pb.KvCacheEvent:
    stored = pb.KvBlocksStored(parent_block_hash=parent_of(run[0]), blocks=map(_block, run))
    return pb.KvCacheEvent(stored=stored)


def _block(block: engine_pb2.StoredBlock) -> pb.KvBlock:
    tokens = block.token_ids
    return pb.KvBlock(
        block_hash=block.block_hash, token_ids=tokens, block_size=len(tokens), lora_id=block.lora_id or None
    )


def parent_of(block: engine_pb2.StoredBlock) -> int | None:
    """Hash of the block before it; None for the first of a sequence."""
    return block.parent_hash if block.HasField("parent_hash") else None


def runs(blocks: Iterable[engine_pb2.StoredBlock]) -> Iterator[list[engine_pb2.StoredBlock]]:
    """Split blocks into runs in which each follows the one before."""
    run: list[engine_pb2.StoredBlock] = []
    for block in blocks:
        if run and parent_of(block) != run[-1].block_hash:
            yield run
            run = []
        run.append(block)
    if run:
        yield run
