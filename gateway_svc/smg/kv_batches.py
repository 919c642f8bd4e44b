"""KV events of the scheduler as batches of the engine contract."""

import time
from collections.abc import Sequence

from gateway_svc.cell.kv_runs import parent_of, runs
from protos.engine.v1 import engine_pb2
from protos.routers.v1 import smg_common_pb2 as pb


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


def _stored(run: Sequence[engine_pb2.StoredBlock]) -> pb.KvCacheEvent:
    stored = pb.KvBlocksStored(parent_block_hash=parent_of(run[0]), blocks=map(_block, run))
    return pb.KvCacheEvent(stored=stored)


def _block(block: engine_pb2.StoredBlock) -> pb.KvBlock:
    tokens = block.token_ids
    return pb.KvBlock(
        block_hash=block.block_hash, token_ids=tokens, block_size=len(tokens), lora_id=block.lora_id or None
    )
