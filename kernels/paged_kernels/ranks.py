"""Sums over the processes (ranks) of a group, each of which computes a part of every product.

`SharedSums` sums through shared memory on one host (cpu/ranks.h); `TorchSums` by torch.distributed between hosts.
Both add in rank order, so that all ranks get the same bits. `DeviceSums`: by NCCL, on CUDA devices.
"""

import ctypes
import mmap
import os
import secrets
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist

_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
_LOST, _TIMED_OUT = 1, 2
_WHY = {
    _LOST: "another rank of the group is lost",
    _TIMED_OUT: "another rank of the group did not send its part of a sum in time",
    3: "the ranks of the group sum tensors of different sizes",
}
_FOLDER = Path("/dev/shm")


class PeerLost(Exception):
    """The group has ended: a rank died, hangs or `differs`. No rank of it can go on."""

    def __init__(self, message: str, *, differs: bool = False) -> None:
        super().__init__(message)
        self.message, self.differs = message, differs


class RankSums(Protocol):
    """Sums over the ranks of a group. All ranks call it equally often, in the same order, with equal sizes."""

    in_programs: bool
    """True if a decoder's program (`program.Reduce`) can use it."""
    count: int
    """Sums so far by `all_reduce`."""

    def all_reduce(self, values: torch.Tensor) -> None:
        """Replace `values` by the sum of all ranks' values, the same bits on all ranks. Raises PeerLost.

        On the host they are added in rank order in float32.
        """
        ...

    def all_gather(self, values: torch.Tensor) -> torch.Tensor:
        """All ranks' `values` [..., columns] side by side: [..., ranks * columns]. Raises PeerLost."""
        ...

    def check(self) -> None:
        """Raise PeerLost if the group has ended."""
        ...

    def end(self) -> None:
        """End the group: sums that wait, and later ones, raise PeerLost. Callable from any thread."""
        ...

    def limit(self, timeout_s: float) -> None:
        """Bound the wait for another rank in a sum; there is no bound before."""
        ...


class SharedFile:
    """Memory that processes of one host share, as a file in /dev/shm. `path` until `unlink`. Raises OSError."""

    def __init__(self, path: Path, num_bytes: int, *, creates: bool) -> None:
        self.path = path
        flags = os.O_RDWR | (os.O_CREAT | os.O_EXCL if creates else os.O_NOFOLLOW)
        number = os.open(path, flags, 0o600)
        try:
            if creates:
                os.posix_fallocate(number, 0, num_bytes)
            self.memory = mmap.mmap(number, num_bytes)
        finally:
            os.close(number)

    @classmethod
    def created(cls, num_bytes: int) -> "SharedFile":
        """New memory, zero. Only processes of this user can open it."""
        return cls(_FOLDER / f"quire-{secrets.token_hex(16)}", num_bytes, creates=True)

    @classmethod
    def opened(cls, path: str, num_bytes: int) -> "SharedFile":
        """The memory that another process created. Raises ValueError for one of another size."""
        return cls(Path(path), num_bytes, creates=False)

    def unlink(self) -> None:
        """Remove the name; the memory lives as long as a process maps it."""
        self.path.unlink()


class CpuRanks(ctypes.Structure):
    """QuireRanks of cpu/ranks.h."""

    _fields_ = [
        ("memory", ctypes.c_void_p),
        ("next", ctypes.c_int64),
        ("timeout_ns", ctypes.c_int64),
        ("rank", ctypes.c_int32),
        ("size", ctypes.c_int32),
    ]


def shared_bytes(library: ctypes.CDLL, size: int) -> int:
    """Bytes of memory that a group of `size` ranks shares."""
    library.quire_ranks_bytes.restype, library.quire_ranks_bytes.argtypes = ctypes.c_int64, [ctypes.c_int]
    return int(library.quire_ranks_bytes(size))


class SharedSums:
    """`RankSums` through a `SharedFile` of `shared_bytes`. `native`: for a program's operators."""

    in_programs = True

    def __init__(self, library: ctypes.CDLL, shared: SharedFile, rank: int, size: int) -> None:
        self._shared = shared
        self._memory = ctypes.c_char.from_buffer(shared.memory)
        self.native = CpuRanks(ctypes.addressof(self._memory), 0, 0, rank, size)
        self._end = library.quire_ranks_end
        self._end.argtypes, self._end.restype = [ctypes.POINTER(CpuRanks), ctypes.c_int], ctypes.c_int
        self._sums = {dtype: library[f"quire_all_reduce_{name}"] for dtype, name in _NAMES.items()}
        for function in self._sums.values():
            function.argtypes = [ctypes.POINTER(CpuRanks), ctypes.c_void_p, ctypes.c_int64, ctypes.c_int]
            function.restype = None
        self._gathers = {dtype: library[f"quire_all_gather_{name}"] for dtype, name in _NAMES.items()}
        for function in self._gathers.values():
            function.argtypes = [
                ctypes.POINTER(CpuRanks),
                ctypes.c_void_p,
                ctypes.c_int64,
                ctypes.c_int64,
                ctypes.c_int,
            ]
            function.restype = None

    @property
    def count(self) -> int:
        """See RankSums: pieces, also those of programs."""
        return int(self.native.next)

    def all_reduce(self, values: torch.Tensor) -> None:
        """See RankSums. `values` must be contiguous."""
        assert values.is_contiguous()
        add = self._sums[values.dtype]
        add(ctypes.byref(self.native), values.data_ptr(), values.numel(), torch.get_num_threads())
        self.check()

    def all_gather(self, values: torch.Tensor) -> torch.Tensor:
        """See RankSums."""
        columns, ranks = values.shape[-1], self.native
        out = values.new_empty(*values.shape[:-1], ranks.size * columns)
        out[..., ranks.rank * columns : (ranks.rank + 1) * columns] = values
        gather = self._gathers[values.dtype]
        gather(ctypes.byref(ranks), out.data_ptr(), values.numel() // columns, columns, torch.get_num_threads())
        self.check()
        return out

    def check(self) -> None:
        """See RankSums."""
        if why := self._end(ctypes.byref(self.native), 0):
            raise PeerLost(_WHY[why])

    def end(self) -> None:
        """See RankSums."""
        self._end(ctypes.byref(self.native), _LOST)

    def limit(self, timeout_s: float) -> None:
        """See RankSums."""
        self.native.timeout_ns = int(timeout_s * 1e9)


class TorchSums:
    """`RankSums` by a process group of torch.distributed: gathered from all ranks, then added here.

    Slow, for ranks on different hosts. `store`: from `torch_store`.
    """

    in_programs = False

    def __init__(self, store: dist.Store, rank: int, size: int, *, timeout_s: float) -> None:
        self.count = 0
        self._size, self._is_ended = size, False
        self._group = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout_s))

    def all_reduce(self, values: torch.Tensor) -> None:
        """See RankSums."""
        parts = self._gathered(values)
        total = parts[0].float()
        for part in parts[1:]:
            total += part
        values.copy_(total)

    def all_gather(self, values: torch.Tensor) -> torch.Tensor:
        """See RankSums."""
        return torch.cat(self._gathered(values.contiguous()), -1)

    def _gathered(self, values: torch.Tensor) -> list[torch.Tensor]:
        self.check()
        self.count += 1
        parts = [torch.empty_like(values) for _ in range(self._size)]
        try:
            self._group.allgather([parts], [values]).wait()
        except RuntimeError as error:
            self._is_ended = True
            raise PeerLost(f"{_WHY[_LOST]}: {str(error).partition(chr(10))[0]}") from error
        return parts

    def check(self) -> None:
        """See RankSums."""
        if self._is_ended:
            raise PeerLost(_WHY[_LOST])

    def end(self) -> None:
        """See RankSums. A sum that waits ends when the other rank's connection does, or with its timeout."""
        self._is_ended = True

    def limit(self, timeout_s: float) -> None:
        """See RankSums: set once, when the group is made."""


class Collectives(Protocol):
    """What `DeviceSums` needs of a process group of torch.distributed."""

    def allreduce(self, tensors: list[torch.Tensor]) -> dist.Work:
        """Begin to replace each tensor by the sum of all ranks'."""
        ...

    def _allgather_base(self, output: torch.Tensor, given: torch.Tensor) -> dist.Work:
        """Begin to put `given` of all ranks into `output`, rank by rank."""
        ...

    def abort(self) -> None:
        """End what waits, and refuse what follows."""
        ...


def nccl(store: dist.Store, rank: int, size: int, *, timeout_s: float) -> Collectives:
    """NCCL's. Raises RuntimeError for a torch without it."""
    if not dist.is_nccl_available():
        raise RuntimeError("this torch is built without NCCL")
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    return dist.ProcessGroupNCCL(store, rank, size, options)


class DeviceSums:
    """`RankSums` on CUDA devices, in the order of the current stream: a recording (CUDA graph) may contain them.

    Sums are rounded to the dtype of the values, in the order of the library. A wait in a recording has no timeout: the
    group ends when its step is late.
    """

    in_programs = True

    def __init__(self, group: Collectives, size: int) -> None:
        self.count = 0
        self._group, self._size, self._is_ended = group, size, False

    def all_reduce(self, values: torch.Tensor) -> None:
        """See RankSums. `values` must be contiguous."""
        assert values.is_contiguous()
        self._do(lambda: self._group.allreduce([values]))

    def all_gather(self, values: torch.Tensor) -> torch.Tensor:
        """See RankSums."""
        rows, columns = values.numel() // values.shape[-1], values.shape[-1]
        parts = values.new_empty(self._size, rows, columns)
        self._do(lambda: self._group._allgather_base(parts, values.contiguous()))
        return parts.transpose(0, 1).reshape(*values.shape[:-1], self._size * columns)

    def _do(self, begin: Callable[[], dist.Work]) -> None:
        self.check()
        self.count += 1
        try:
            begin().wait()  # the stream waits, not the host
        except RuntimeError as error:
            self._is_ended = True
            raise PeerLost(f"{_WHY[_LOST]}: {str(error).partition(chr(10))[0]}") from error

    def check(self) -> None:
        """See RankSums."""
        if self._is_ended:
            raise PeerLost(_WHY[_LOST])

    def end(self) -> None:
        """See RankSums."""
        if not self._is_ended:
            self._is_ended = True
            self._group.abort()

    def limit(self, timeout_s: float) -> None:
        """See RankSums: set once, when the group is made."""


def torch_store(host: str, port: int, size: int, *, is_leader: bool, timeout_s: float) -> tuple[dist.Store, int]:
    """Where ranks find each other, kept by the leader, and its port (`port` 0 = any free one)."""
    store = dist.TCPStore(
        host, port, size, is_leader, timeout=timedelta(seconds=timeout_s), wait_for_workers=False
    )  # fmt: skip
    return store, store.port
