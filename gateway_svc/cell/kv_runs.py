"""Runs of KV blocks that follow each other: what every format of KV events tells in one event."""

from collections.abc import Iterable, Iterator

from protos.engine.v1 import engine_pb2


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
