"""Sums over processes through shared memory: exact, in rank order, and ended when a rank is lost, late or differs."""

import ctypes
import os
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from paged_kernels.cpu_library import load_library
from paged_kernels.ranks import PeerLost, SharedFile, SharedSums, shared_bytes


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    return load_library(os.environ, lambda _line: None)


def group(library: ctypes.CDLL, size: int) -> list[SharedSums]:
    """Each rank with a mapping of its own."""
    num_bytes = shared_bytes(library, size)
    files = [SharedFile.created(num_bytes)]
    files += [SharedFile.opened(str(files[0].path), num_bytes) for _ in range(size - 1)]
    files[0].unlink()
    return [SharedSums(library, file, rank, size) for rank, file in enumerate(files)]


def all_reduced(ranks: list[SharedSums], parts: list[torch.Tensor]) -> None:
    threads = [threading.Thread(target=one.all_reduce, args=(part,)) for one, part in zip(ranks, parts, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request: pytest.FixtureRequest, library: ctypes.CDLL) -> Iterator[list[SharedSums]]:
    yield group(library, request.param)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("count", [1, 17, 576, 64 * 576, 300_000])
def test_sums_are_exact_and_equal(ranks: list[SharedSums], dtype: torch.dtype, count: int) -> None:
    """float32 in rank order, rounded once: bit for bit on every rank, also where the memory is used several times over."""
    torch.manual_seed(count)
    parts = [torch.randn(count).to(dtype) for _ in ranks]
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    all_reduced(ranks, parts)
    assert all(torch.equal(part, total.to(dtype)) for part in parts)


def test_a_sum_that_waits_ends_with_its_group(library: ctypes.CDLL) -> None:
    """The other rank never comes: a watcher ends the wait, and all later sums."""
    ranks = group(library, 2)
    timer = threading.Timer(0.2, ranks[1].end)
    timer.start()
    begin = time.monotonic()
    with pytest.raises(PeerLost, match="another rank of the group is lost"):
        ranks[0].all_reduce(torch.ones(5))
    assert 0.1 < time.monotonic() - begin < 2
    with pytest.raises(PeerLost):
        ranks[1].all_reduce(torch.ones(5))


def test_a_rank_that_hangs_is_noticed(library: ctypes.CDLL) -> None:
    """After the limit."""
    ranks = group(library, 2)
    ranks[0].limit(0.2)
    begin, used = time.monotonic(), time.process_time()
    with pytest.raises(PeerLost, match="did not send its part of a sum in time"):
        ranks[0].all_reduce(torch.ones(5))
    assert 0.15 < time.monotonic() - begin < 2
    assert time.process_time() - used < 0.1, "a long wait sleeps"


def test_other_sizes_end_the_group(library: ctypes.CDLL) -> None:
    """Ranks that are at different sums have no result."""
    ranks = group(library, 2)
    errors: list[PeerLost] = []

    def work(one: SharedSums, count: int) -> None:
        try:
            one.all_reduce(torch.ones(count))
        except PeerLost as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(one, count)) for one, count in zip(ranks, (5, 6), strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(5)
    assert len(errors) == 2 and all("tensors of different sizes" in str(error) for error in errors)


def test_the_memory_has_no_name_and_is_private(library: ctypes.CDLL) -> None:
    """What another user could open, or what a killed process would leave behind."""
    shared = SharedFile.created(shared_bytes(library, 2))
    assert shared.path.stat().st_mode & 0o777 == 0o600
    shared.unlink()
    assert not shared.path.exists()
