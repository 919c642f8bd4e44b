"""Runs state modules on packed rows: sequence by sequence, with states from blocks of the KV cache's pool and back into them."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from svc_common.errors import FailedPrecondition
from worker_svc.model.decoder.module_states import ModuleStates
from worker_svc.model.states.batches import PassStates, SequenceBatch, batches_of
from worker_svc.model.states.layout import StateLayout, StatePlace
from worker_svc.model.states.possible_ends import PossibleEnds
from worker_svc.model.states.probe import StateModule
from worker_svc.model.states.tensors import mapped, tensors_in

_MOST_BYTES = 128 * 2**20
"""Of states that a module computes at a time; they are in memory a few times over beside the pool."""
_COUNT_BYTES = 8
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)

Within = Callable[[NDArray[np.int64]], AbstractContextManager[None]]
"""Inside the block, modules see these places of the packed row alone; for adapters."""


@dataclass(frozen=True, slots=True)
class _Work:
    """A batch with its tensors on the device: `ids` of blocks are int64 [sequences, blocks]."""

    batch: SequenceBatch
    places: torch.Tensor
    sources: torch.Tensor | None
    begins: torch.Tensor
    ends: torch.Tensor
    owners: torch.Tensor
    targets: torch.Tensor
    open_ends: torch.Tensor


class SequenceStates:
    """The states of all sequences. Call `bind` for each pool and `begin` before each forward pass.

    Takes the place of the forward pass of each of `modules`. `states`: of the module that runs, which it asks for them.
    """

    def __init__(
        self, modules: Sequence[StateModule], layout: StateLayout, states: ModuleStates, within: Within
    ) -> None:
        self.layout = layout
        self.states, self.within = states, within
        self.batches: list[_Work] = []
        self.continues = all(each.continues for each in modules)
        """False if tokens that follow a state are computed one by one."""
        self.ends = PossibleEnds()
        self.num_bytes = sum(each.num_bytes for each in modules)
        """Of one sequence's states."""
        self._most = max(1, _MOST_BYTES // max(each.num_bytes for each in modules))
        self._pool = torch.empty(0)
        for each, place in zip(modules, layout.places, strict=True):
            each.module.forward = _BySequence(each, place, self)  # type: ignore[method-assign]

    def bind(self, pool: torch.Tensor) -> None:
        """Keep states in `pool`, [num_layers, 2, num_blocks, block_elements], from now on."""
        plane_bytes = pool.shape[3] * pool.element_size()
        word = next(dtype for dtype in _WORDS if plane_bytes % dtype.itemsize == 0)
        self._pool = pool.view(word).transpose(1, 2)

    def begin(self, work: PassStates) -> None:
        """Set the sequences of the next forward pass."""
        batches = batches_of(work, continues=self.continues, most=self._most)
        self.batches = [self._uploaded(batch) for batch in batches]
        for batch in batches:
            self.ends.expect(batch.rows[batch.open_ends], batch.ends[batch.open_ends])

    def _uploaded(self, batch: SequenceBatch) -> _Work:
        def here(values: NDArray[np.int64]) -> torch.Tensor:
            return torch.from_numpy(values).to(self._pool.device, non_blocking=True)

        return _Work(
            batch,
            here(batch.places),
            None if batch.sources is None else here(batch.sources),
            here(batch.begins),
            here(batch.ends),
            here(batch.owners),
            here(batch.targets),
            here(batch.open_ends),
        )

    def read(self, place: StatePlace, blocks: torch.Tensor) -> torch.Tensor:
        """uint8 [sequences, bytes of a module's states]; `blocks` [sequences, blocks]."""
        ids = blocks[:, place.first : place.first + place.count]
        return self._pool[place.index].index_select(0, ids.reshape(-1)).view(torch.uint8).reshape(len(ids), -1)

    def write(self, place: StatePlace, blocks: torch.Tensor, content: torch.Tensor) -> None:
        """Reverse of `read`."""
        ids = blocks[:, place.first : place.first + place.count].reshape(-1)
        pool = self._pool[place.index]
        pool.index_copy_(0, ids, content.reshape(len(ids), 2, -1).view(pool.dtype))

    def drop(self, blocks: NDArray[np.int32]) -> None:
        """Make the states in `blocks` [sequences, blocks] those of no number of tokens."""
        place, ids = self.layout.places[0], torch.from_numpy(blocks.astype(np.int64)).to(self._pool.device)
        content = self.read(place, ids)
        content[:, :_COUNT_BYTES] = 255
        self.write(place, ids, content)

    def settle(self, rows: NDArray[np.int32], num_tokens: NDArray[np.int32], blocks: NDArray[np.int32]) -> None:
        """Make the states of `rows` [n] those after `num_tokens` [n], their draft tokens behind these being wrong.

        `blocks`: their own, [n, blocks]. States of other possible ends are freed.
        """
        self.ends.settle(rows, num_tokens, blocks, self.write)

    def empty(self, place: StatePlace, count: int) -> torch.Tensor:
        """What `read` returns, without states."""
        pool = self._pool
        num_bytes = place.count * 2 * pool.shape[3] * pool.element_size()
        return torch.zeros(count, num_bytes, dtype=torch.uint8, device=pool.device)


class _BySequence:
    """The forward pass of a state module on a packed row [1, T, ...]; as before where no sequences are set."""

    def __init__(self, module: StateModule, place: StatePlace, owner: SequenceStates) -> None:
        self._inner, self._shapes, self._place, self._owner = module.module.forward, module.states, place, owner
        self._has_counts = place is owner.layout.places[0]

    def __call__(self, *given: Any, **options: Any) -> Any:
        if not self._owner.batches:
            return self._inner(*given, **options)
        num_tokens, whole = next(tensors_in((given, options))).shape[1], None
        for work in self._owner.batches:
            with self._owner.within(work.batch.places.reshape(-1)):
                result, states = self._run(work, *_cut((given, options), work.places, num_tokens))
            if whole is None:
                whole = mapped(result, lambda x: x.new_zeros(1, num_tokens, *x.shape[2:]))
            for packed, made in zip(tensors_in(whole), tensors_in(result), strict=True):
                packed[0].index_copy_(0, work.places.view(-1), made.flatten(0, 1))
            kept = states if len(work.owners) == len(states) else states.index_select(0, work.owners)
            self._owner.write(self._place, work.targets, kept)
            if len(work.open_ends):
                self._owner.ends.add(self._place, states.index_select(0, work.open_ends))
        return whole

    def _run(self, work: _Work, given: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, torch.Tensor]:
        """The module's result for a batch, and the bytes of the states after it."""
        owner, places = self._owner, work.places
        if work.sources is None:
            content, owner.states.values = owner.empty(self._place, len(places)), {}
        else:
            content = owner.read(self._place, work.sources)
            owner.states.values = {
                shape.key: self._bytes(content, i)
                .clone(memory_format=torch.contiguous_format)
                .view(shape.dtype)
                .view(-1, *shape.shape)
                for i, shape in enumerate(self._shapes)
            }
        if self._has_counts and work.sources is not None:
            given, options = self._checked(work, content, given, options)
        result = self._inner(*given, **options)
        for i, shape in enumerate(self._shapes):
            value = owner.states.values[shape.key].to(shape.dtype).contiguous()
            self._bytes(content, i).copy_(value.view(len(places), -1).view(torch.uint8))
        owner.states.values = {}
        if self._has_counts:
            content[:, :_COUNT_BYTES] = work.ends[:, None].view(torch.uint8)
        return result, content

    def _bytes(self, content: torch.Tensor, i: int) -> torch.Tensor:
        begin = self._place.offsets[i]
        return content[:, begin : begin + self._shapes[i].num_bytes]

    def _checked(
        self, work: _Work, content: torch.Tensor, given: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The same arguments, if the states have taken in the tokens before these and no others.

        Raises FailedPrecondition on the host. On a device, where that would wait for it, rows with other states become NaN,
        which fails them when they are sampled.
        """
        found = content[:, :_COUNT_BYTES].contiguous().view(torch.int64)[:, 0]
        good = found == work.begins
        if _waits_for(content):
            _check_counts(work.batch, found, good)
            return given, options
        return _spoiled(given, good), _spoiled(options, good)


def _waits_for(content: torch.Tensor) -> bool:
    """True if reading it takes no longer than on the host."""
    return content.device.type == "cpu"


def _check_counts(batch: SequenceBatch, found: torch.Tensor, good: torch.Tensor) -> None:
    if bool(good.all()):
        return
    i = int((~good).nonzero()[0])
    raise FailedPrecondition(
        f"row {int(batch.rows[i])}: its states have taken in {int(found[i])} tokens, and the step begins at token "
        f"{int(batch.begins[i])}; compute the row anew, from its first token or from a checkpoint",
        reason="STATES_OUT_OF_STEP",
    )


def _cut(values: Any, places: torch.Tensor, num_tokens: int) -> Any:
    """The same arguments with tensors [1, T, ...] as [sequences, tokens, ...]."""

    def taken(x: torch.Tensor) -> torch.Tensor:
        if x.shape[:2] != (1, num_tokens):
            raise AssertionError(f"a state module gets a tensor {tuple(x.shape)} with {num_tokens} packed tokens")
        return x[0].index_select(0, places.view(-1)).view(*places.shape, *x.shape[2:])

    return mapped(values, taken)


def _spoiled(values: Any, good: torch.Tensor) -> Any:
    """The same arguments with NaN for sequences that are not good; `good` [sequences]."""
    factor = torch.where(good, 1.0, torch.nan)
    return mapped(
        values, lambda x: x * factor.to(x.dtype).view(-1, *[1] * (x.ndim - 1)) if x.is_floating_point() else x
    )
