"""Memory for the blocks that come next is there before a step writes to them, and no more than that."""

import ctypes
import mmap
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from paged_kernels.host_memory import LARGE_PAGE, host_bytes, make_pages
from tests.support.checkpoints import make_checkpoint
from tests.support.worker.driver import Driver, make_engine
from worker_svc.model.cache import prefault
from worker_svc.model.cache.prefault import PagesAhead

LAYERS, BLOCKS, BLOCK_BYTES = 2, 256, 2**17
PIECE = LARGE_PAGE // BLOCK_BYTES
RUN_BYTES = BLOCKS * BLOCK_BYTES


def resident(memory: torch.Tensor) -> np.ndarray:
    """Of each page of `memory`: whether there is one, by the system's word."""
    seen = np.zeros(memory.numel() * memory.element_size() // mmap.PAGESIZE, np.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(len(seen) * mmap.PAGESIZE)
    assert libc.mincore(*arguments, seen.ctypes.data_as(ctypes.c_void_p)) == 0
    return (seen & 1).astype(bool)


def pool() -> torch.Tensor:
    return host_bytes(LAYERS * 2 * RUN_BYTES).view(torch.int32).view(LAYERS, 2, BLOCKS, BLOCK_BYTES // 4)


def has_pages(memory: torch.Tensor) -> np.ndarray:
    """[LAYERS * 2, BLOCKS]: which blocks have all their pages."""
    return resident(memory).reshape(LAYERS * 2, BLOCKS, -1).all(axis=-1)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The addresses that pages are made for."""
    found: list[tuple[int, int]] = []
    monkeypatch.setattr(prefault, "make_pages", lambda begin, end: found.append((begin, end)) or True)
    return found


@pytest.fixture
def system_can() -> None:
    """Linux 5.14 and later."""
    memory = host_bytes(LARGE_PAGE)
    if not make_pages(memory.data_ptr(), memory.data_ptr() + 1):
        pytest.skip("this system makes no pages ahead")


@pytest.mark.usefixtures("system_can")
def test_pages_for_what_comes_next() -> None:
    """In each layer's keys and values; as blocks are used more follow, up to the last; nothing is written."""
    memory = pool()
    ahead = PagesAhead(memory, ahead_bytes=2 * PIECE * BLOCK_BYTES * LAYERS * 2)
    assert not has_pages(memory)[:, 2 * PIECE :].any(), "nothing is there before"
    ahead.expect(0)
    ahead.join()
    assert has_pages(memory)[:, : 2 * PIECE].all() and not has_pages(memory)[:, 4 * PIECE : -PIECE].any()
    ahead.expect(PIECE // 2)
    ahead.join()
    assert not has_pages(memory)[:, 4 * PIECE : -PIECE].any(), "less than a piece is not worth a thread"
    memory[:, :, :PIECE] = 7
    ahead.expect(PIECE)
    ahead.join()
    assert has_pages(memory)[:, : 3 * PIECE].all() and not has_pages(memory)[:, 5 * PIECE : -PIECE].any()
    ahead.expect(BLOCKS)
    ahead.expect(BLOCKS - 1)
    ahead.join()
    assert (memory[:, :, :PIECE] == 7).all() and not memory[:, :, PIECE:].any()


@pytest.mark.usefixtures("system_can")
def test_blocks_in_use_are_left_to_their_writers() -> None:
    """After a jump only what lies ahead of it is made."""
    memory = pool()
    ahead = PagesAhead(memory, ahead_bytes=PIECE * BLOCK_BYTES * LAYERS * 2)
    ahead.expect(8 * PIECE)
    ahead.join()
    found = has_pages(memory)
    assert found[:, 8 * PIECE : 9 * PIECE].all() and not found[:, PIECE : 7 * PIECE].any()


def test_the_last_blocks_too(asked: list[tuple[int, int]]) -> None:
    """A rest that is smaller than a piece is made; then there is nothing more to do. Each byte once."""
    memory = pool()[:, :, : 2 * PIECE + 3].contiguous()
    ahead = PagesAhead(memory, ahead_bytes=PIECE * BLOCK_BYTES * LAYERS * 2)
    for num_used in (0, 1, PIECE, PIECE + 3, PIECE + 4, 2 * PIECE, 2 * PIECE + 3):
        ahead.expect(num_used)
        ahead.join()
    assert sum(end - begin for begin, end in asked) == memory.nbytes
    assert len({begin for begin, _ in asked}) == len(asked) == 3 * LAYERS * 2


@pytest.mark.parametrize("ends_by", ["rest", "need"])
def test_pages_wait_while_the_process_computes(
    asked: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch, ends_by: str
) -> None:
    """Those needed at once are made; further ones when the process rests, or when they are needed soon."""
    computes, looked = threading.Event(), threading.Event()
    computes.set()

    def is_busy() -> bool:
        looked.set()
        return computes.wait(0.001)

    monkeypatch.setattr(prefault, "_is_busy", is_busy)
    ahead = PagesAhead(pool(), ahead_bytes=2 * PIECE * BLOCK_BYTES * LAYERS * 2)
    ahead.expect(0)
    assert looked.wait(60) and len(asked) == LAYERS * 2
    if ends_by == "rest":
        computes.clear()
    else:
        ahead.expect(PIECE - PIECE // 4)
    ahead.join()
    assert len(asked) == 2 * LAYERS * 2


@pytest.mark.parametrize("computes", [True, False])
def test_what_counts_as_computing(*, computes: bool) -> None:
    """The processor time of all threads; a few looks, since another process may take the cores meanwhile."""
    over = threading.Event()

    def compute() -> None:
        while computes and not over.is_set():
            sum(range(1000))

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        assert any(prefault._is_busy() is computes for _ in range(500))
    finally:
        over.set()
        thread.join()


def test_a_system_that_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked once; pages come as they are written."""
    calls: list[int] = []
    monkeypatch.setattr(prefault, "make_pages", lambda begin, end: bool(calls.append(begin)))
    ahead = PagesAhead(pool(), ahead_bytes=PIECE * BLOCK_BYTES * LAYERS * 2)
    for num_used in (0, PIECE, 2 * PIECE):
        ahead.expect(num_used)
        ahead.join()
    assert len(calls) == 1


def test_a_step_tells_how_far_it_goes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With what joins and what grows; steps that change nothing tell nothing."""
    driver = Driver(make_engine(make_checkpoint("llama", tmp_path / "llama")))
    told: list[int] = []
    monkeypatch.setattr(PagesAhead, "expect", lambda _self, num_used: told.append(num_used))
    driver.add("first", [1, 2, 3], blocks=[7], room=8)
    driver.run()
    driver.run()
    assert told == [8]
    driver.add("second", [1, 2, 3], blocks=[5, 30, 9])
    driver.run()
    assert told == [8, 31]
    driver.compute("first", room=40)
    driver.run()
    assert told == [8, 31, max(driver.rows["first"].blocks[1:]) + 1]
