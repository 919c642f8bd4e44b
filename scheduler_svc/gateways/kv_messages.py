"""Messages of KV events."""

import struct

from block_manager.prefix_journal import BlockContents
from protos.engine.v1 import engine_pb2
from scheduler_svc.observe.kv_events import KvChange


def kv_message(change: KvChange) -> engine_pb2.SubscribeKvEventsResponse:
    """The change; routers know blocks by the first eight bytes of their hashes."""
    return engine_pb2.SubscribeKvEventsResponse(
        stored=[_stored(key, contents) for key, contents in change.stored.items()],
        removed=map(_short, change.removed),
    )


def _stored(key: bytes, contents: BlockContents) -> engine_pb2.StoredBlock:
    return engine_pb2.StoredBlock(
        block_hash=_short(key),
        parent_hash=None if contents.parent is None else _short(contents.parent),
        token_ids=struct.unpack(f"<{len(contents.tokens) // 4}i", contents.tokens),
        lora_id=contents.lora_id,
    )


def _short(key: bytes) -> int:
    return int.from_bytes(key[:8], "little", signed=True)
