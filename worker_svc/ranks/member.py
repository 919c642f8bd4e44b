"""A process's place in its group: rank, what it exchanges with the others, what sums are made with, and checksums by which
ranks find that they are no longer equal.
"""

import platform
import threading
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch.distributed import PrefixStore, Store

from paged_kernels import ranks
from paged_kernels.backend import KernelBackend
from paged_kernels.ranks import (
    DeviceSums,
    PeerLost,
    RankSums,
    SharedFile,
    SharedSums,
    TorchSums,
    shared_bytes,
    torch_store,
)
from paged_kernels.registry import shared_library
from protos.worker.v1 import worker_pb2
from svc_common.net.tls_settings import PeerSettings
from worker_svc.ranks.channel import Channel, MessageKind, config_error
from worker_svc.ranks.linking import Linking
from worker_svc.ranks.links import StageLinks
from worker_svc.ranks.stage_tokens import StageTokens, tokens_of
from worker_svc.rows.changes import is_repetition
from worker_svc.rows.table import RowTable

T = TypeVar("T")

_JOIN_S = 60.0


class RankPlace:
    """A group of one; the groups of several derive from it.

    `num_on_host`: ranks that divide this host's processors. A group has `num_stages` stages of `tensor_size` ranks, stage by
    stage.
    """

    rank = 0
    size = 1
    num_on_host = 1
    tensor_size = 1

    @property
    def num_stages(self) -> int:
        """Stages of the decoder's layers."""
        return self.size // self.tensor_size

    @property
    def stage(self) -> int:
        """This rank's stage."""
        return self.rank // self.tensor_size

    @property
    def is_last_stage(self) -> bool:
        """True if this rank draws tokens."""
        return self.stage == self.num_stages - 1

    @property
    def tensor_rank(self) -> int:
        """This rank's number within its stage."""
        return self.rank % self.tensor_size

    def exchange(self, own: bytes) -> list[bytes]:
        """What every rank gives, in rank order. All ranks call it, and each waits for the others. Raises PeerLost."""
        return [own]

    def agree(self, what: str, own: str) -> None:
        """Raise ConfigError, with both values, if a rank has another one."""
        for rank, value in enumerate(self.exchange(own.encode())):
            if value.decode() != own:
                raise config_error(
                    f"{what} is {value.decode()} at rank {rank} and {own} at rank {self.rank}: start all ranks with the same"
                )

    def all_have(self, own: bool) -> bool:
        """True if it is True of every rank. All ranks call it."""
        return all(self.exchange(b"1" if own else b""))

    def sums_with(self, kernels: KernelBackend, device: torch.device) -> RankSums | None:
        """What to sum with over the ranks of the stage; None if that is one. Called once, by all ranks."""
        return None

    def connect_stages(self) -> tuple[StageLinks, StageTokens] | None:
        """Connections to other stages; None in a single stage. Called once, by all ranks."""
        return None


ALONE = RankPlace()


def host_id() -> str:
    """Of the machine since its start; processes with the same one may share memory."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def arithmetic_id() -> str:
    """What the last bits of a product depend on: processor, vector instructions, threads and torch."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
    threads, vectors = torch.get_num_threads(), torch.backends.cpu.get_cpu_capability()
    return f"{name} ({vectors}), {threads} threads, torch {torch.__version__}"


class GroupRanks(RankPlace):
    """One of several ranks. `channels`: at rank 0 to all others in rank order, elsewhere to rank 0.

    `tensor_size`: ranks of each stage. `leader_host`: where the others reach rank 0; `host`: where others reach this one.
    `timeout_s`: of waits for other ranks within a step. `peers`: how connections are encrypted.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        channels: Sequence[Channel],
        *,
        tensor_size: int,
        num_on_host: int,
        leader_host: str,
        host: str,
        timeout_s: float,
        peers: PeerSettings,
    ) -> None:
        self.rank, self.size, self.tensor_size, self.num_on_host = rank, size, tensor_size, num_on_host
        self._channels = channels
        self._leader_host, self._host, self._timeout_s, self._peers = leader_host, host, timeout_s, peers
        self._lock = threading.Lock()
        self._sums: RankSums | None = None
        self._links: StageLinks | None = None
        self._store: Store | None = None
        self.lost: PeerLost | None = None
        """Why the group has ended."""

    @property
    def num_transfers(self) -> int:
        """Sums, and passes of hidden states, so far, in any unit. An error after one leaves ranks unequal."""
        num_sums = 0 if self._sums is None else self._sums.count
        return num_sums + (0 if self._links is None else self._links.count)

    def exchange(self, own: bytes) -> list[bytes]:
        """See RankPlace."""
        if self.rank:
            self._channels[0].send(MessageKind.EXCHANGE, own)
            return _split(self._channels[0].expect(MessageKind.EXCHANGE), self.size)
        found = [own, *(channel.expect(MessageKind.EXCHANGE) for channel in self._channels)]
        joined = b"".join(len(part).to_bytes(4, "little") + part for part in found)
        for channel in self._channels:
            channel.send(MessageKind.EXCHANGE, joined)
        return found

    def lose(self, why: PeerLost) -> None:
        """End the group: what waits for a rank raises. Callable from any thread; the first reason is kept."""
        with self._lock:
            self.lost = self.lost or why
            for connected in (self._sums, self._links):
                if connected is not None:
                    connected.end()

    def connect_stages(self) -> tuple[StageLinks, StageTokens] | None:
        """See RankPlace."""
        if self.num_stages == 1:
            return None
        linking = Linking(self.rank, self.tensor_size, self.num_stages, self._host, self._peers, self.exchange)
        links = linking.links(self._timeout_s)
        with self._lock:
            self._links = links
            if self.lost is not None:
                links.end()
        return links, tokens_of(self.rank, self.tensor_size, self.size, self._channels, links, self._timeout_s)

    def sums_with(self, kernels: KernelBackend, device: torch.device) -> RankSums | None:
        """See RankPlace. By NCCL on CUDA devices; else through shared memory where all ranks have it, or by torch.distributed."""
        if self.tensor_size == 1:
            return None
        sums = self._on_host(kernels) if device.type == "cpu" else self._on_device(device)
        sums.limit(self._timeout_s)
        with self._lock:
            self._sums = sums
            if self.lost is not None:
                sums.end()
        return sums

    def _on_device(self, device: torch.device) -> RankSums:
        hosts = self.exchange(host_id().encode())
        if len(set(self._of_stage(hosts))) > 1:
            self._check_plain_sums()
        port = self._port_of_store()
        try:
            store = self._store_of_stage(port)
            group = ranks.nccl(store, self.tensor_rank, self.tensor_size, timeout_s=self._timeout_s)
            sums = DeviceSums(group, self.tensor_size)
            sums.all_reduce(torch.ones(1, device=device))  # connects; not while a step is recorded
        except (RuntimeError, PeerLost) as error:
            raise config_error(
                f"rank {self.rank} on {device} cannot sum with the other ranks: {str(error).partition(chr(10))[0]}; each rank "
                "needs a GPU of its own (--device cuda:N), and torch built with NCCL"
            ) from error
        return sums

    def _on_host(self, kernels: KernelBackend) -> RankSums:
        shared = self._shared(kernels)
        have = self.exchange(b"1" if shared is not None else b"")
        own = shared if all(self._of_stage(have)) else None
        return own if own is not None and all(have) else self._by_torch(own)

    def _of_stage(self, found: Sequence[T]) -> Sequence[T]:
        """What the ranks of this stage gave."""
        begin = self.rank - self.tensor_rank
        return found[begin : begin + self.tensor_size]

    def _shared(self, kernels: KernelBackend) -> SharedSums | None:
        """Sums through memory that all ranks of the stage may share."""
        library = shared_library(kernels)
        hosts = self._of_stage(self.exchange(b"" if library is None else host_id().encode()))
        may_share = library is not None and bool(hosts[0]) and len(set(hosts)) == 1
        num_bytes, is_first = 0 if library is None else shared_bytes(library, self.tensor_size), self.tensor_rank == 0
        own = _tried(lambda: SharedFile.created(num_bytes)) if may_share and is_first else None
        path = self._of_stage(self.exchange(b"" if own is None else str(own.path).encode()))[0].decode()
        shared = own if is_first else _tried(lambda: SharedFile.opened(path, num_bytes)) if path else None
        self.exchange(b"")  # all have opened it
        if own is not None:
            own.unlink()
        if library is None or shared is None:
            return None
        return SharedSums(library, shared, self.tensor_rank, self.tensor_size)

    def _by_torch(self, shared: SharedSums | None) -> RankSums:
        """Sums by torch.distributed, unless the ranks of the stage have `shared`; all ranks of the group call it."""
        port = self._port_of_store()
        if shared is not None:
            return shared
        self._check_plain_sums()
        return TorchSums(self._store_of_stage(port), self.tensor_rank, self.tensor_size, timeout_s=self._timeout_s)

    def _port_of_store(self) -> int:
        """Where the ranks find each other; rank 0 keeps it. All ranks of the group call it."""
        port = 0
        if self.rank == 0:
            self._store, port = torch_store(self._leader_host, 0, self.size, is_leader=True, timeout_s=_JOIN_S)
        return int(self.exchange(str(port).encode())[0])

    def _store_of_stage(self, port: int) -> Store:
        if self._store is None:
            self._store, _ = torch_store(self._leader_host, port, self.size, is_leader=False, timeout_s=_JOIN_S)
        return PrefixStore(f"stage {self.stage}", self._store)

    def _check_plain_sums(self) -> None:
        """Raise ConfigError if sums would leave this host in plain text without leave to."""
        if self._peers.encrypted and not self._peers.insecure:
            raise config_error(
                "the ranks share no memory, and sums between hosts are not encrypted: put all ranks of a stage on one host, or "
                "give --insecure where the network is private"
            )


def _tried(make: Callable[[], SharedFile]) -> SharedFile | None:
    try:
        return make()
    except (OSError, ValueError):
        return None


def _split(joined: bytes, count: int) -> list[bytes]:
    parts, at = [], 0
    for _ in range(count):
        size = int.from_bytes(joined[at : at + 4], "little")
        parts.append(joined[at + 4 : at + 4 + size])
        at += 4 + size
    return parts


def rows_digest(rows: RowTable, outputs: worker_pb2.SchedulerOutputs) -> int:
    """Checksum of the occupied rows and their numbers of tokens; of their block tables too unless `outputs` repeats rows."""
    occupied = np.flatnonzero(rows.occupied)
    total = 0
    for column in (rows.incarnations, rows.num_computed, rows.num_blocks):
        total = zlib.crc32(np.ascontiguousarray(column[occupied]), total)
    if not is_repetition(outputs) and len(occupied):
        width = int(rows.num_blocks[occupied].max())
        total = zlib.crc32(np.ascontiguousarray(rows.block_tables[:, occupied, :width]), total)
    return zlib.crc32(occupied.astype(np.int32), total)


def result_digest(result: worker_pb2.WorkerOutputs) -> int:
    """Checksum of a step's tokens and the rows that have them."""
    total = 0
    for column in (result.rows, result.incarnations, result.num_tokens, result.flags, result.token_ids):
        total = zlib.crc32(column, total)
    return zlib.crc32(result.num_computed_tokens.to_bytes(8, "little", signed=True), total)
