"""A process's place in its group: rank, what it exchanges with the others, what sums are made with, and checksums by which
ranks find that they are no longer equal.
"""

import platform
import threading
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from paged_kernels.backend import KernelBackend
from paged_kernels.ranks import PeerLost, RankSums, SharedFile, SharedSums, TorchSums, shared_bytes, torch_store
from paged_kernels.registry import shared_library
from protos.worker.v1 import worker_pb2
from worker_svc.ranks.channel import Channel, MessageKind, config_error
from worker_svc.rows.changes import is_repetition
from worker_svc.rows.table import RowTable

_JOIN_S = 60.0


class RankPlace:
    """A group of one; the groups of several derive from it.

    `num_on_host`: ranks that divide this host's processors.
    """

    rank = 0
    size = 1
    num_on_host = 1

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

    def sums_with(self, kernels: KernelBackend) -> RankSums | None:
        """What to sum with over the ranks; None in a group of one. Called once, by all ranks."""
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

    `leader_host`: where the others reach rank 0. `timeout_s`: of waits within a sum.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        channels: Sequence[Channel],
        *,
        num_on_host: int,
        leader_host: str,
        timeout_s: float,
        may_be_plain: bool = True,
    ) -> None:
        self.rank, self.size, self.num_on_host = rank, size, num_on_host
        self._channels = channels
        self._leader_host, self._timeout_s, self._may_be_plain = leader_host, timeout_s, may_be_plain
        self._lock = threading.Lock()
        self._sums: RankSums | None = None
        self.lost: PeerLost | None = None
        """Why the group has ended."""

    @property
    def num_sums(self) -> int:
        """Sums so far, in any unit."""
        return 0 if self._sums is None else self._sums.count

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
        """End the group: sums that wait raise. Callable from any thread; the first reason is kept."""
        with self._lock:
            self.lost = self.lost or why
            if self._sums is not None:
                self._sums.end()

    def sums_with(self, kernels: KernelBackend) -> RankSums:
        """See RankPlace. Through shared memory where all ranks have it, else by torch.distributed."""
        sums = self._shared(kernels) or self._by_torch()
        sums.limit(self._timeout_s)
        with self._lock:
            self._sums = sums
            if self.lost is not None:
                sums.end()
        return sums

    def _shared(self, kernels: KernelBackend) -> SharedSums | None:
        library = shared_library(kernels)
        hosts = self.exchange(b"" if library is None else host_id().encode())
        if library is None or not hosts[0] or len(set(hosts)) > 1:
            return None
        num_bytes = shared_bytes(library, self.size)
        own = _tried(lambda: SharedFile.created(num_bytes)) if self.rank == 0 else None
        path = self.exchange(b"" if own is None else str(own.path).encode())[0].decode()
        shared = own if self.rank == 0 else _tried(lambda: SharedFile.opened(path, num_bytes)) if path else None
        all_have = all(self.exchange(b"1" if shared is not None else b""))
        if own is not None:
            own.unlink()
        return SharedSums(library, shared, self.rank, self.size) if shared is not None and all_have else None

    def _by_torch(self) -> TorchSums:
        if not self._may_be_plain:
            raise config_error(
                "the ranks share no memory, and sums between hosts are not encrypted: put all ranks on one host, or give "
                "--insecure where the network is private"
            )
        store, port = None, 0
        if self.rank == 0:
            store, port = torch_store(self._leader_host, 0, self.size, is_leader=True, timeout_s=_JOIN_S)
        port = int(self.exchange(str(port).encode())[0])
        if store is None:
            store, _ = torch_store(self._leader_host, port, self.size, is_leader=False, timeout_s=_JOIN_S)
        return TorchSums(store, self.rank, self.size, timeout_s=self._timeout_s)


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
        total = zlib.crc32(np.ascontiguousarray(rows.block_tables[occupied, :width]), total)
    return zlib.crc32(occupied.astype(np.int32), total)


def result_digest(result: worker_pb2.WorkerOutputs) -> int:
    """Checksum of a step's tokens and the rows that have them."""
    total = 0
    for column in (result.rows, result.incarnations, result.num_tokens, result.flags, result.token_ids):
        total = zlib.crc32(column, total)
    return zlib.crc32(result.num_computed_tokens.to_bytes(8, "little", signed=True), total)
