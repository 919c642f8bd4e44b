"""Where the states of a sequence are: in blocks of the KV cache's pool, the same number for each sequence. Arithmetic only.

A block holds so many bytes for each layer of a cache group. State layers form groups of as many layers, and a group takes as
many blocks as its largest layer needs: each layer has its own index of them, as a layer has of the blocks of its keys and values.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from worker_svc.model.decoder.module_states import StateKey

HEADER_BYTES = 16
"""Before the states of the first layer: how many tokens they have taken in, an int64."""
_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class StateShape:
    """One sequence's state."""

    key: StateKey
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of one sequence."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class StatePlace:
    """Where one module's states are in a sequence's blocks of states.

    `index`: in the pool's first dimension. `first`, `count`: which of the blocks. `offsets`: of each state in the bytes of these
    blocks at that index.
    """

    index: int
    first: int
    count: int
    offsets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StateLayout:
    """`places`: of each module, in the order in which modules run. `num_blocks`: of a sequence's states."""

    places: tuple[StatePlace, ...] = ()
    num_blocks: int = 0


def layout_of(modules: Sequence[Sequence[StateShape]], num_layers: int, index_bytes: int) -> StateLayout:
    """The layout of the states of modules, in the order in which they run.

    `num_layers`: of a block; `index_bytes`: what it has for each.
    """
    offsets = [_offsets(states, HEADER_BYTES if number == 0 else 0) for number, states in enumerate(modules)]
    counts = [-(-ends[-1] // index_bytes) for ends in offsets]
    # Modules with states of equal size share blocks, so that little of these is unused.
    order = sorted(range(len(modules)), key=lambda number: (-counts[number], number))
    places, num_blocks = dict[int, StatePlace](), 0
    for begin in range(0, len(order), num_layers):
        group = order[begin : begin + num_layers]
        count = counts[group[0]]
        for index, number in enumerate(group):
            places[number] = StatePlace(index, num_blocks, count, tuple(offsets[number][:-1]))
        num_blocks += count
    return StateLayout(tuple(places[number] for number in range(len(modules))), num_blocks)


def default_checkpoint_tokens(num_blocks: int, num_groups: int, block_size: int) -> int:
    """Distance of checkpoints at which one takes as many blocks as the keys and values of so many tokens; 0 without states."""
    return -(-num_blocks // num_groups) * block_size


def _offsets(states: Sequence[StateShape], begin: int) -> list[int]:
    """Aligned beginnings of the states, and the end."""
    offsets = [begin]
    for state in states:
        offsets.append(-(-(offsets[-1] + state.num_bytes) // _ALIGNMENT) * _ALIGNMENT)
    return offsets
