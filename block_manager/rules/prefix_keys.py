"""What a block's contents are addressed by: keys of a sequence's blocks, equal only for equal prefixes (R107, R116).

Adapter and tenant go into every key: their KV differs, so only equal ones share blocks.
"""

import hashlib

import numpy as np

from block_manager.cache_rules import CachedSequence
from block_manager.hashing import HashChain


class _Chains:
    """Owner of the hash chain of every live sequence."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._chains: dict[str, HashChain] = {}

    def full(self, sequence: CachedSequence, index: int) -> bytes:
        """Of a block that must be full."""
        chain = self._chains.get(sequence.name)
        if chain is None:
            chain = self._chains[sequence.name] = HashChain(self._block_size, _salt(sequence))
        return chain.upto(sequence.token_ids, index + 1)[index]

    def root(self, sequence: CachedSequence) -> bytes:
        """What stands before its first block."""
        return hashlib.sha256(_salt(sequence).encode()).digest()

    def forget(self, name: str) -> None:
        self._chains.pop(name, None)


class FullBlockKeys:
    """0.6.3: a full block is addressed by its tokens and the key of the block before it; a partial one by nothing (R112, R116)."""

    def __init__(self, block_size: int, *, enabled: bool) -> None:
        self._enabled = enabled
        self._chains = _Chains(block_size)

    def of(self, sequence: CachedSequence, index: int) -> bytes | None:
        """Key of its full block; None where nothing is cached."""
        return self._chains.full(sequence, index) if self._enabled else None

    def forget(self, name: str) -> None:
        """The sequence is over."""
        self._chains.forget(name)


class SplitPrefixKeys:
    """2023: a block is addressed by all tokens up to its end, full or not, and by where they split into prompt and output.

    So what was filled while generating is found only by sequences with the same split (the quirk of R107), and equal prompts
    share even their partial last block (R112).
    """

    def __init__(self, block_size: int, *, enabled: bool) -> None:
        self._block_size = block_size
        self._enabled = enabled
        self._chains = _Chains(block_size)

    def of(self, sequence: CachedSequence, index: int) -> bytes | None:
        """Key of its block; None for what must stay private: nothing is cached, or it never takes cached blocks."""
        if not self._enabled or sequence.no_cache_reuse:
            return None
        end = (index + 1) * self._block_size
        contents = self._chains.full if end <= len(sequence.token_ids) else self._partial
        return contents(sequence, index) + _split(sequence.num_prompt_tokens, end)

    def forget(self, name: str) -> None:
        """The sequence is over."""
        self._chains.forget(name)

    def _partial(self, sequence: CachedSequence, index: int) -> bytes:
        before = self._chains.full(sequence, index - 1) if index else self._chains.root(sequence)
        tail = np.asarray(sequence.token_ids[index * self._block_size :], dtype="<i4").tobytes()
        return hashlib.sha256(b"quire partial block\0" + before + tail).digest()


def _salt(sequence: CachedSequence) -> str:
    return f"{sequence.lora_id}:{sequence.cache_salt}"


def _split(num_prompt_tokens: int, end: int) -> bytes:
    return num_prompt_tokens.to_bytes(8, "little") if end > num_prompt_tokens else b"prompt"
