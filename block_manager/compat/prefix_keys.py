"""Keys by which block contents are found: equal only for equal prefixes.

Adapter and tenant are part of every key: their KV differs or must stay separate, so only equal ones share
blocks.
"""

import hashlib
from collections.abc import Sequence
from typing import Protocol

from block_manager.cache_rules import CachedSequence
from block_manager.hashing import HashChain, HashRename, chain_salt, little_endian
from block_manager.pool import BlockPool


class BlockKeys(Protocol):
    """Keys of blocks."""

    block_size: int

    def of(self, sequence: CachedSequence, index: int) -> bytes | None:
        """Key of its block `index`; None if it must stay private."""


class _Chains:
    """Owner of the hash chain of every live sequence. `rename`: mapping of tokens and salts before hashing.

    `chains`: shared by keys of equal block sizes; None: chains of its own.
    """

    def __init__(self, block_size: int, rename: HashRename | None, chains: dict[str, HashChain] | None) -> None:
        self._block_size = block_size
        self._rename = rename
        self._chains: dict[str, HashChain] = {} if chains is None else chains

    def full(self, sequence: CachedSequence, index: int) -> bytes:
        """Key of a block that must be full."""
        chain = self._chains.get(sequence.name)
        if chain is None:
            chain = self._chains[sequence.name] = HashChain(self._block_size, self._salt(sequence), self._rename)
        return chain.upto(sequence.token_ids, index + 1)[index]

    def root(self, sequence: CachedSequence) -> bytes:
        """Chain start: the key before its first block."""
        return hashlib.sha256(self._salt(sequence).encode()).digest()

    def tail(self, token_ids: Sequence[int]) -> bytes:
        """The tokens of a partial block, in the form in which they are hashed."""
        data = little_endian(token_ids)
        return data if self._rename is None else self._rename.tokens(data)

    def forget(self, name: str) -> None:
        self._chains.pop(name, None)

    def _salt(self, sequence: CachedSequence) -> str:
        return chain_salt(sequence.lora_id, sequence.cache_salt, self._rename)


class FullBlockKeys:
    """Keys of vLLM 0.6.3: a full block by its tokens and the key of the block before it; partial blocks have none."""

    def __init__(
        self,
        block_size: int,
        *,
        enabled: bool,
        rename: HashRename | None = None,
        chains: dict[str, HashChain] | None = None,
    ) -> None:
        self.block_size = block_size
        self._enabled = enabled
        self._chains = _Chains(block_size, rename, chains)

    def of(self, sequence: CachedSequence, index: int) -> bytes | None:
        """Key of its full block `index`; None when caching is off."""
        return self._chains.full(sequence, index) if self._enabled else None

    def forget(self, name: str) -> None:
        """Drop the hash chain of a sequence that ended."""
        self._chains.forget(name)


class SplitPrefixKeys:
    """Keys of vLLM 2023: a block, full or not, by all tokens up to its end and by where they split into prompt and
    output.

    So blocks filled during decode are found only by sequences with the same split (a quirk of that version),
    and equal prompts share even their partial last block.
    """

    def __init__(
        self,
        block_size: int,
        *,
        enabled: bool,
        rename: HashRename | None = None,
        chains: dict[str, HashChain] | None = None,
    ) -> None:
        self.block_size = block_size
        self._enabled = enabled
        self._chains = _Chains(block_size, rename, chains)

    def of(self, sequence: CachedSequence, index: int) -> bytes | None:
        """Key of its block `index`; None if it must stay private: caching is off, or the sequence must not use
        cached blocks.
        """
        if not self._enabled or sequence.no_cache_reuse:
            return None
        end = (index + 1) * self.block_size
        contents = self._chains.full if end <= len(sequence.token_ids) else self._partial
        return contents(sequence, index) + _split(sequence.num_prompt_tokens, end)

    def forget(self, name: str) -> None:
        """Drop the hash chain of a sequence that ended."""
        self._chains.forget(name)

    def _partial(self, sequence: CachedSequence, index: int) -> bytes:
        before = self._chains.full(sequence, index - 1) if index else self._chains.root(sequence)
        tail = self._chains.tail(sequence.token_ids[index * self.block_size :])
        return hashlib.sha256(b"quire partial block\0" + before + tail).digest()


def num_cached_blocks(keys: BlockKeys, sequence: CachedSequence, pool: BlockPool) -> int:
    """Leading full blocks of a sequence that `pool` caches, leaving at least one token to compute."""
    num_blocks = 0
    for index in range((len(sequence.token_ids) - 1) // keys.block_size):
        key = keys.of(sequence, index)
        if key is None or sequence.no_cache_reuse or pool.lookup(key) is None:
            break
        num_blocks += 1
    return num_blocks


def _split(num_prompt_tokens: int, end: int) -> bytes:
    return num_prompt_tokens.to_bytes(8, "little") if end > num_prompt_tokens else b"prompt"
