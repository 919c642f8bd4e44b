"""Host memory for kernels: pieces of shared mappings, and pages of files given back."""

import mmap
from pathlib import Path

import numpy as np
import pytest
import torch

from paged_kernels.host_memory import CleanFilePages, HostArena

PAGES = 64


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[2]) * mmap.PAGESIZE


def mapped(path: Path, access: int = mmap.ACCESS_COPY) -> torch.Tensor:
    """A private mapping of the file, as safetensors makes one; all its pages read."""
    with path.open("rb") as file:
        held = mmap.mmap(file.fileno(), 0, access=access)
    return torch.from_numpy(np.frombuffer(held, np.uint8))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(bytes(range(256)) * (PAGES * mmap.PAGESIZE // 256))
    return path


def test_pieces_do_not_overlap() -> None:
    """Zeroed, aligned, of the sizes asked for; a piece larger than a mapping has its own."""
    arena = HostArena()
    pieces = [arena.bytes(count) for count in (1, 64, 65, 100 * 2**20, 7)]
    for number, piece in enumerate(pieces):
        assert not piece.any() and piece.data_ptr() % 64 == 0
        piece.fill_(number + 1)
    assert [int(piece.min()) for piece in pieces] == [int(piece.max()) for piece in pieces] == [1, 2, 3, 4, 5]
    assert [len(piece) for piece in pieces] == [1, 64, 65, 100 * 2**20, 7]


def test_dropped_pages_are_read_again(file: Path) -> None:
    """Less memory is resident afterwards, and the contents are the same."""
    weights = mapped(file)
    total = int(weights.sum())
    before = resident_bytes()
    CleanFilePages.of_process().drop(weights)
    assert before - resident_bytes() >= (PAGES - 2) * mmap.PAGESIZE
    assert int(weights.sum()) == total


def test_written_pages_are_kept(file: Path) -> None:
    """A mapping that was written to differs from its file."""
    weights = mapped(file)
    weights[:] = 7
    CleanFilePages.of_process().drop(weights)
    assert bool((weights == 7).all())


def test_other_memory_is_kept() -> None:
    """Of the heap, of anonymous mappings, and with nothing known of the process."""
    arena = HostArena().bytes(PAGES * mmap.PAGESIZE)
    heap = torch.full((PAGES * mmap.PAGESIZE,), 7, dtype=torch.uint8)
    arena.fill_(7)
    for memory in (arena, heap):
        CleanFilePages.of_process().drop(memory)
        CleanFilePages().drop(memory)
        assert bool((memory == 7).all())
