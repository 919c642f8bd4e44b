"""The fake device refuses what CUDA refuses, and gives the host's results for the rest."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
import triton

from paged_kernels.gpu import token_draws
from tests.worker.fake_cuda.ledger import LEDGER
from tests.worker.fake_cuda.tensors import DEVICE, WAITS, WrongDevice

HERE = torch.arange(6.0)
ROWS = torch.tensor([0, 2])
REFUSED: dict[str, Callable[[torch.Tensor], object]] = {
    "add": lambda there: there + HERE,
    "add to the host": HERE.add_,
    "where": lambda there: torch.where(HERE > 1, there, there),
    "product": lambda there: torch.nn.functional.linear(there, HERE[None]),
    "product with a single value": lambda there: torch.cat([there, torch.tensor(1.0)[None]]),
    "concatenation": lambda there: torch.cat([there, HERE]),
    "rows by index_select": lambda there: there.index_select(0, ROWS),
    "rows of a tensor on the host": lambda there: HERE[ROWS.to(DEVICE)],
    "writing rows": lambda there: there.__setitem__(ROWS, HERE[:2]),
    "equality": lambda there: torch.equal(there, HERE),
    "a generator of the host": lambda _: torch.randn(3, generator=torch.Generator(), device=DEVICE),
    "a kernel": lambda there: token_draws.chosen_logprobs(there[None], torch.tensor([1]), torch.tensor([True])),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cuda_refuses(name: str) -> None:
    """Tensors of host and device do not mix."""
    there = HERE.to(DEVICE)
    with pytest.raises(WrongDevice):
        REFUSED[name](there)
    assert there.tolist() == HERE.tolist()


def test_numpy_does_not_see_it() -> None:
    """As numpy sees no tensor on a GPU."""
    there = HERE.to(DEVICE)
    for read in (there.numpy, lambda: np.asarray(there)):
        with pytest.raises((RuntimeError, TypeError), match="numpy"):
            read()


def test_what_cuda_takes() -> None:
    """Single values and index tensors of the host, copies either way, views that share memory."""
    there = HERE.clone().to(DEVICE)
    assert (there.device, there.cpu().device.type) == (DEVICE, "cpu")
    assert (there + torch.tensor(1.0)).tolist() == (HERE + 1).tolist()
    assert there[ROWS].tolist() == HERE[ROWS].tolist()
    there[ROWS] = torch.tensor(9.0)
    view = there.view(2, 3)[1]
    view[0] = 7.0
    back = torch.zeros(6)
    back.copy_(there)
    assert back.tolist() == there.tolist() == [9.0, 1.0, 9.0, 7.0, 4.0, 5.0]
    assert there.to(DEVICE) is there
    with torch.inference_mode():
        assert torch.arange(3, device=DEVICE)[None].expand(2, 3).sum().item() == 6


def test_waits_are_noted() -> None:
    """Where the host reads a value, or a result's size depends on values, it waits for the device."""
    there = HERE.to(DEVICE)
    WAITS.seen.clear()
    _ = (there * 2).sum(), there[ROWS.to(DEVICE)]
    assert not WAITS.seen
    for wait in (lambda: there.sum().item(), lambda: there[there > 2], there.cpu, lambda: bool((there > 1).all())):
        WAITS.seen.clear()
        wait()
        assert WAITS.seen


def test_memory_is_counted() -> None:
    """By storage, views not twice, until the last reference is gone."""
    before = LEDGER.begin_peak()
    there = torch.zeros(1000, device=DEVICE)
    view = there[10:]
    assert LEDGER.num_bytes == before + 4000
    del there
    assert LEDGER.num_bytes == before + 4000
    del view
    assert (LEDGER.num_bytes, LEDGER.peak_bytes) == (before, before + 4000)


def test_kernels_compute_on_it() -> None:
    """A kernel of ours, interpreted, writes the device's memory."""
    assert not isinstance(token_draws.logprob_kernel, triton.JITFunction)
    logits = torch.tensor([[0.0, 1.0, 2.0]], device=DEVICE)
    found = token_draws.chosen_logprobs(logits, torch.tensor([1], device=DEVICE), torch.tensor([True], device=DEVICE))
    assert found.device == DEVICE
    assert found.item() == pytest.approx(torch.log_softmax(logits.cpu(), -1)[0, 1].item())
