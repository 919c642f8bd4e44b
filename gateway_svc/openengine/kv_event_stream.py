"""KV events in OpenEngine's form, and where they are to be had. Pure but for the look-up of this machine's own address."""

import socket
import time
from collections.abc import Iterator, Sequence

from gateway_svc.cell.kv_formats import parent_of, runs
from gateway_svc.cell.kv_publisher import KvEndpoints
from protos.engine.v1 import engine_pb2
from protos.routers.v1 import openengine_pb2 as pb

_HASH_BYTES = 8
_TCP = "tcp://"
_WILDCARDS = ("*", "0.0.0.0", "[::]", "::", "")


class OpenEngineKvBatches:
    """Batches of one stream, numbered from `first` on. The first one begins with AllBlocksCleared."""

    def __init__(self, first: int) -> None:
        self._number = first
        self._is_first = True

    def batch(self, change: engine_pb2.SubscribeKvEventsResponse) -> pb.KvEventBatch:
        """The batch with this change."""
        batch = pb.KvEventBatch(
            sequence_number=self._number, timestamp_unix_nanos=time.time_ns(), events=self._events(change)
        )
        self._number, self._is_first = self._number + 1, False
        return batch

    def _events(self, change: engine_pb2.SubscribeKvEventsResponse) -> Iterator[pb.KvEvent]:
        if self._is_first:
            yield pb.KvEvent(all_blocks_cleared=pb.AllBlocksCleared())
        if change.removed:
            hashes = map(_hash, change.removed)
            yield pb.KvEvent(block_removed=pb.BlockRemoved(block_hashes=hashes, medium=pb.STORAGE_MEDIUM_GPU))
        for run in runs(change.stored):
            yield pb.KvEvent(block_stored=_stored(run))


def _stored(run: Sequence[engine_pb2.StoredBlock]) -> pb.BlockStored:
    parent = parent_of(run[0])
    return pb.BlockStored(
        block_hashes=[_hash(block.block_hash) for block in run],
        parent_block_hash=None if parent is None else _hash(parent),
        token_ids=[token for block in run for token in block.token_ids],
        block_size=len(run[0].token_ids),
        lora_id=run[0].lora_id,
        medium=pb.STORAGE_MEDIUM_GPU,
    )


def _hash(short: int) -> pb.KvBlockHash:
    return pb.KvBlockHash(value=short.to_bytes(_HASH_BYTES, "big", signed=True), encoding="bytes")


def event_sources(grpc_at: tuple[str, int], published: KvEndpoints | None, own_host: str) -> list[pb.KvEventSource]:
    """The gRPC stream of this gateway, and its ZeroMQ publisher (None = none) where that listens on TCP.

    `own_host`: what a wildcard stands for; without it, such sources are left out.
    """
    sources = []
    if host := _routable(grpc_at[0], own_host):
        own = pb.KvEndpoint(host=host, port=grpc_at[1], protocol="grpc")
        sources.append(pb.KvEventSource(transport="grpc", endpoint_addr=own, data_parallel_rank=0, encoding="protobuf"))
    if published is not None and (at := _tcp_endpoint(published.batches, own_host)) is not None:
        replay = _tcp_endpoint(published.replay, own_host)
        sources.append(
            pb.KvEventSource(
                transport="zmq",
                endpoint_addr=at,
                topic=published.topic,
                replay_endpoint="" if replay is None else f"{_TCP}{replay.host}:{replay.port}",
                data_parallel_rank=0,
                encoding="msgpack",
            )
        )
    return sources


def _tcp_endpoint(endpoint: str, own_host: str) -> pb.KvEndpoint | None:
    host, _, port = endpoint.removeprefix(_TCP).rpartition(":")
    routable = _routable(host, own_host)
    if not endpoint.startswith(_TCP) or not routable or not port.isdigit():
        return None
    return pb.KvEndpoint(host=routable, port=int(port), protocol="tcp")


def _routable(host: str, own_host: str) -> str:
    return own_host if host in _WILDCARDS else host


def own_address() -> str:
    """Address of this machine's own name, which in a pod is the pod's; empty if it has none but loopback."""
    try:
        found = socket.gethostbyname(socket.gethostname())
    except OSError:
        return ""
    return "" if found.startswith("127.") else found
