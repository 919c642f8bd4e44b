"""Cache rules of vLLM V1: allocate what the step needs, register full blocks at once, free in reverse (R134-R138)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from block_manager.hashing import HashChain
from block_manager.ledger import Ledger


class CachedSequence(Protocol):
    """What the rules need to know of a sequence."""

    @property
    def name(self) -> str:
        """Key of its block table."""

    @property
    def token_ids(self) -> Sequence[int]:
        """Known tokens."""

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose KV is in its blocks, or promised to be by a step under way."""

    @property
    def cache_salt(self) -> str:
        """Only equal salts share blocks."""

    @property
    def no_cache_reuse(self) -> bool:
        """Never takes cached blocks."""


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """Blocks of the longest known prefix, in logical order, and how many tokens they hold."""

    block_ids: tuple[int, ...] = ()
    num_tokens: int = 0


class V1PoolRules:
    """Owner of the ledger's device pool under V1's rules; block 0 is the null block and never used (R137)."""

    NUM_RESERVED = 1

    def __init__(self, ledger: Ledger, *, max_model_len: int, prefix_caching: bool) -> None:
        self.ledger = ledger
        self._pool = ledger.gpu
        self._max_model_len = max_model_len
        self._prefix_caching = prefix_caching
        self._chains: dict[str, HashChain] = {}
        self._num_registered: dict[str, int] = {}

    @property
    def num_free_gpu(self) -> int:
        """Free device blocks."""
        return self._pool.num_free

    @property
    def num_free_cpu(self) -> int:
        """Free host blocks."""
        return self.ledger.cpu.num_free

    @property
    def capacity_tokens(self) -> int:
        """Tokens that one sequence could hold with the whole pool to itself."""
        return self._pool.num_usable * self.ledger.block_size

    def lookup(self, sequence: CachedSequence) -> PrefixHit:
        """The longest cached prefix that leaves at least one token to compute (R134)."""
        if not self._prefix_caching or sequence.no_cache_reuse:
            return PrefixHit()
        most = (len(sequence.token_ids) - 1) // self.ledger.block_size
        blocks: list[int] = []
        for block_hash in self._chain(sequence).upto(sequence.token_ids, most)[:most]:
            block = self._pool.lookup(block_hash)
            if block is None:
                break
            blocks.append(block)
        return PrefixHit(tuple(blocks), len(blocks) * self.ledger.block_size)

    def can_admit(self, sequence: CachedSequence, hit: PrefixHit, num_new_tokens: int) -> bool:
        """Whether `admit` has the blocks it needs (R136)."""
        return self._num_needed(sequence, hit, num_new_tokens) <= self._pool.num_free

    def admit(self, sequence: CachedSequence, hit: PrefixHit, num_new_tokens: int) -> list[int]:
        """Gives a sequence without blocks its hits and room for `num_new_tokens` behind them; its whole table."""
        self._pool.share(hit.block_ids)
        self.ledger.tables[sequence.name] = list(hit.block_ids)
        self._num_registered[sequence.name] = len(hit.block_ids)
        self._grow(sequence, hit.num_tokens + num_new_tokens)
        return list(self.ledger.tables[sequence.name])

    def can_extend(self, sequence: CachedSequence, num_new_tokens: int) -> bool:
        """Whether `extend` has the blocks it needs."""
        return self._num_needed(sequence, PrefixHit(), num_new_tokens) <= self._pool.num_free

    def extend(self, sequence: CachedSequence, num_new_tokens: int) -> list[int]:
        """Room for `num_new_tokens` more; the blocks that were added."""
        return self._grow(sequence, sequence.num_computed_tokens + num_new_tokens)

    def retract(self, sequence: CachedSequence, num_computed_tokens: int) -> None:
        """The step that was to compute its tokens from that offset on never did: nobody may find them. No table: no-op."""
        first = num_computed_tokens // self.ledger.block_size
        for block in self.ledger.tables.get(sequence.name, [])[first:]:
            self._pool.unregister(block)

    def release(self, sequence: CachedSequence) -> None:
        """Frees its blocks, last first, so that the front of a prefix is evicted last (R137). No table: no-op (R97)."""
        self._pool.release(reversed(self.ledger.tables.pop(sequence.name, [])))
        self._num_registered.pop(sequence.name, None)

    def forget(self, sequence: CachedSequence) -> None:
        """The sequence is over: drops what was remembered for it besides blocks."""
        self._chains.pop(sequence.name, None)

    def reset_prefixes(self) -> None:
        """The worker's memory is gone: no block holds what it held."""
        self._pool.reset_prefixes()

    # --- inside ----------------------------------------------------------------------------------------------------

    def _chain(self, sequence: CachedSequence) -> HashChain:
        chain = self._chains.get(sequence.name)
        if chain is None:
            chain = self._chains[sequence.name] = HashChain(self.ledger.block_size, sequence.cache_salt)
        return chain

    def _num_needed(self, sequence: CachedSequence, hit: PrefixHit, num_new_tokens: int) -> int:
        upto = min(sequence.num_computed_tokens + hit.num_tokens + num_new_tokens, self._max_model_len)
        owned = len(self.ledger.tables.get(sequence.name, ()))
        revived = sum(self._pool.refs[b] == 0 for b in hit.block_ids)
        return max(0, self.ledger.blocks_for(upto) - len(hit.block_ids) - owned) + revived

    def _grow(self, sequence: CachedSequence, upto: int) -> list[int]:
        table = self.ledger.tables[sequence.name]
        missing = self.ledger.blocks_for(min(upto, self._max_model_len)) - len(table)
        added = self._pool.allocate(missing) if missing > 0 else []
        table += added
        if self._prefix_caching:
            self._register_full(sequence, min(upto, len(sequence.token_ids)))
        return added

    def _register_full(self, sequence: CachedSequence, num_tokens: int) -> None:
        full, first = num_tokens // self.ledger.block_size, self._num_registered[sequence.name]
        if full <= first:
            return
        hashes = self._chain(sequence).upto(sequence.token_ids, full)
        table = self.ledger.tables[sequence.name]
        for i in range(first, full):
            self._pool.register(table[i], hashes[i])
        self._num_registered[sequence.name] = full
