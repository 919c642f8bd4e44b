"""Block moves: R123, R124."""

import torch

from paged_kernels.backend import TORCH_BLOCKS, copy_blocks, swap_blocks


def pool(num_blocks: int) -> torch.Tensor:
    return torch.arange(2 * 2 * num_blocks * 3, dtype=torch.float32).view(2, 2, num_blocks, 3).clone()


def test_copies_read_the_state_before():
    """R124: one source to several destinations, and a destination that is a source gives its old content."""
    before = pool(5)
    after = before.clone()
    copy_blocks(after, [(0, 1), (0, 2), (1, 3)])
    for destination, source in ((0, 0), (1, 0), (2, 0), (3, 1), (4, 4)):
        assert torch.equal(after[:, :, destination], before[:, :, source])


def test_swap_moves_all_layers_both_ways():
    """R123: blocks by id between pools of different sizes; others stay."""
    device, host = pool(5), torch.zeros(2, 2, 3, 3)
    original = device.clone()
    swap_blocks(device, host, [(4, 0), (1, 2)])
    assert torch.equal(host[:, :, 0], original[:, :, 4])
    assert torch.equal(host[:, :, 2], original[:, :, 1])
    assert not host[:, :, 1].any()
    swap_blocks(host, device, [(0, 3)])
    assert torch.equal(device[:, :, 3], original[:, :, 4])
    assert torch.equal(device[:, :, :3], original[:, :, :3])


def test_gather_and_scatter_are_each_others_reverse():
    """R123: blocks in the order of their ids, all layers of a block in one run of memory; others stay."""
    device, ids, staged = pool(5), torch.tensor([3, 0]), torch.zeros(2, 2, 2, 3)
    original = device.clone()
    TORCH_BLOCKS.gather(device, ids, staged)
    assert all(torch.equal(staged[i], original[:, :, block]) for i, block in enumerate(ids.tolist()))
    device.zero_()
    TORCH_BLOCKS.scatter(staged, device, ids)
    assert torch.equal(device[:, :, ids], original[:, :, ids])
    assert not device[:, :, [1, 2, 4]].any()


def test_nothing_to_do():
    """No pairs, no change."""
    device = pool(2)
    copy_blocks(device, [])
    swap_blocks(device, torch.zeros(2, 2, 0, 3), [])
    assert torch.equal(device, pool(2))
