"""What cache rules over one device pool have in common: exact needs, compared with the pool's free blocks."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import chain
from typing import Self

from block_manager.cache_rules import AllocStatus, CachedSequence, Pair, PrefixHit, StateMoves
from block_manager.ledger import Ledger


class NoSwap:
    """Cache rules without swap. The questions may be asked; calling `swap_out` or `swap_in` is a bug of the caller."""

    def can_swap_out(self, sequences: Sequence[CachedSequence]) -> bool:
        """Return False."""
        return False

    def swap_out(self, sequences: Sequence[CachedSequence]) -> list[Pair]:
        """Raise AssertionError."""
        raise AssertionError("these cache rules do not swap")

    def can_swap_in(self, sequences: Sequence[CachedSequence], num_lookahead: int = 0) -> AllocStatus:
        """Return NEVER."""
        return AllocStatus.NEVER

    def num_blocks_to_swap_in(self, sequences: Sequence[CachedSequence], num_lookahead: int = 0) -> int:
        """Return 0."""
        return 0

    def swap_in(self, sequences: Sequence[CachedSequence]) -> list[Pair]:
        """Raise AssertionError."""
        raise AssertionError("these cache rules do not swap")


class PoolRules(NoSwap, ABC):
    """Base of rules that say what they need in blocks. `watermark_blocks`: see `CacheRules`."""

    journals_prefixes = False

    def __init__(self, ledger: Ledger, watermark_blocks: int = 0) -> None:
        self.ledger = ledger
        self._pool = ledger.gpu
        self.watermark_blocks = watermark_blocks

    # --- what subclasses say ----------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def has_windows(self) -> bool:
        """True if `free_out_of_window` frees blocks."""

    @abstractmethod
    def num_to_admit(self, sequences: Sequence[CachedSequence], hit: PrefixHit, num_new_tokens: int) -> int:
        """Free blocks that a group takes to start with `num_new_tokens` of its first sequence behind the hit."""

    @abstractmethod
    def num_alone(self, sequences: Sequence[CachedSequence], num_new_tokens: int, num_lookahead: int) -> int:
        """Blocks without which a group could not even run alone, nothing being cached; it starts with `num_new_tokens`."""

    @abstractmethod
    def num_to_extend(self, sequences: Sequence[CachedSequence], num_new_tokens: int) -> int:
        """Free blocks that so many more tokens of each take, copies of shared blocks included."""

    @abstractmethod
    def take_out_of_window(self, sequence: CachedSequence, num_tokens: int) -> list[int]:
        """Take the blocks that `free_out_of_window` frees out of its table, lowest first; the caller releases them.

        The null block replaces them. None without a window or without a table.
        """

    # --- the pool ---------------------------------------------------------------------------------------------------

    @property
    def device_pool(self) -> Self:
        """These rules."""
        return self

    @property
    def num_free_gpu(self) -> int:
        """Free device blocks."""
        return self._pool.num_free

    @property
    def num_free_cpu(self) -> int:
        """Free host blocks."""
        return self.ledger.cpu.num_free

    @property
    def capacity_blocks(self) -> int:
        """Blocks that can ever be allocated."""
        return self._pool.num_usable

    def resize(self, num_gpu_blocks: int, num_cpu_blocks: int) -> None:
        """Change the pool sizes. ValueError if blocks in use would be removed."""
        self.ledger.resize(num_gpu_blocks, num_cpu_blocks)

    def free_out_of_window(self, sequences: Sequence[CachedSequence], num_tokens: Sequence[int]) -> list[int]:
        """Free blocks of each sequence outside the sliding windows of the tokens behind so many first ones, which must be
        computed; returns how many. They stay cached.
        """
        taken = list(map(self.take_out_of_window, sequences, num_tokens))
        self._pool.release(chain.from_iterable(taken))
        return list(map(len, taken))

    def reset_prefixes(self) -> None:
        """Drop all cached prefixes."""
        self._pool.reset_prefixes()

    # --- needs ------------------------------------------------------------------------------------------------------

    def can_admit(
        self, sequences: Sequence[CachedSequence], hit: PrefixHit, num_new_tokens: int, num_lookahead: int = 0
    ) -> AllocStatus:
        """NEVER if the pool is too small even for the group alone (`num_alone`), whatever runs and whatever is cached."""
        if self.num_alone(sequences, num_new_tokens, num_lookahead) > self._pool.num_usable:
            return AllocStatus.NEVER
        return self._when(self.num_to_admit(sequences, hit, num_new_tokens + num_lookahead))

    def num_blocks_to_admit(
        self, sequences: Sequence[CachedSequence], hit: PrefixHit, num_new_tokens: int, num_lookahead: int = 0
    ) -> int:
        """Free blocks that a group takes to start with `num_new_tokens` of the first sequence behind its hit."""
        return self.num_to_admit(sequences, hit, num_new_tokens + num_lookahead)

    def can_extend(self, sequences: Sequence[CachedSequence], num_new_tokens: int, num_lookahead: int = 0) -> bool:
        """Whether blocks suffice for `num_new_tokens` more tokens of each, copies of shared blocks included."""
        return self.num_to_extend(sequences, num_new_tokens + num_lookahead) <= self._pool.num_free

    def fits_exactly(self, sequences: Sequence[CachedSequence], num_new_tokens: int, num_lookahead: int = 0) -> bool:
        """Same as `can_extend`: needs are exact here."""
        return self.can_extend(sequences, num_new_tokens, num_lookahead)

    def num_blocks_needed(self, sequence: CachedSequence, num_new_tokens: int) -> int:
        """Blocks that so many more tokens take, copies of shared blocks included."""
        return self.num_to_extend([sequence], num_new_tokens)

    def num_blocks_to_extend(self, sequences: Sequence[CachedSequence], num_new_tokens: int) -> int:
        """Free blocks that so many more tokens of each take, copies of shared blocks included."""
        return self.num_to_extend(sequences, num_new_tokens)

    def _when(self, num_needed: int) -> AllocStatus:
        return AllocStatus.OK if self._has_room(num_needed) else AllocStatus.LATER

    def _has_room(self, num_needed: int) -> bool:
        """True if so many blocks are free beside the watermark, which is waived on an empty device."""
        return self._pool.num_free - num_needed >= (self.watermark_blocks if self.ledger.tables else 0)

    # --- what needs no blocks -----------------------------------------------------------------------------------------

    def commit(self, sequences: Sequence[CachedSequence], now: float) -> StateMoves | None:
        """No-op: blocks are registered when they are allocated, and reused in the order in which they were freed."""
        return None

    def num_computed_blocks(self, sequences: Sequence[CachedSequence]) -> int:
        """Return 0: cached tokens are never scheduled here, so hits save token budget instead."""
        return 0
