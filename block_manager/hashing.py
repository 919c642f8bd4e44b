"""Hashes of full blocks, chained so that equal hashes mean equal prefixes from position 0.

SHA-256 rather than Python's hash(): a tenant must not be able to construct a collision.
"""

import hashlib
import itertools
import struct
from collections.abc import Iterator, Sequence
from typing import Protocol


class HashRename(Protocol):
    """A mapping applied before hashing, to reproduce hashes of a recording that was made under other token ids and
    salts.
    """

    def tokens(self, data: bytes) -> bytes:
        """Map token ids given as little-endian int32, one by one."""

    def salt(self, text: str) -> str:
        """Map a tenant's salt."""


class HashChain:
    """The block hashes of one sequence, extended as its tokens grow.

    `salt` (tenant, adapter) enters the first block and, through the chain, all others. `rename`: mapping of
    tokens before hashing; None: no mapping.
    """

    __slots__ = ("_block_size", "_hashes", "_parent", "_rename")

    def __init__(self, block_size: int, salt: str = "", rename: HashRename | None = None) -> None:
        self._block_size = block_size
        self._rename = rename
        self._parent = hashlib.sha256(b"quire block\0" + salt.encode()).digest()
        self._hashes: list[bytes] = []

    def upto(self, token_ids: Sequence[int], num_blocks: int) -> list[bytes]:
        """Hashes of at least the first `num_blocks` blocks, which must be full in `token_ids`. Returns the
        internal list.
        """
        have, size = len(self._hashes), self._block_size
        if num_blocks > have:
            data = little_endian(token_ids[have * size : num_blocks * size])
            if self._rename is not None:
                data = self._rename.tokens(data)
            parent, sha256, add = self._parent, hashlib.sha256, self._hashes.append
            for block in blocks_in(data, size):
                parent = sha256(parent + block).digest()
                add(parent)
            self._parent = parent
        return self._hashes

    def block(self, index: int, data: bytes) -> bytes:
        """Hash of the block at `index`, which is hashed already or the next one. `data`: its tokens as
        little-endian int32, mapped.
        """
        if index == len(self._hashes):
            self._parent = hashlib.sha256(self._parent + data).digest()
            self._hashes.append(self._parent)
        return self._hashes[index]


def little_endian(token_ids: Sequence[int]) -> bytes:
    """Token ids as little-endian int32, so that hashes are equal on every machine."""
    return struct.pack(f"<{len(token_ids)}i", *token_ids)


def blocks_in(data: bytes, block_size: int) -> Iterator[bytes]:
    """Split int32 [blocks, block_size] data into blocks."""
    return itertools.chain.from_iterable(struct.iter_unpack(f"{4 * block_size}s", data))


def chain_salt(lora_id: int, cache_salt: str, rename: HashRename | None) -> str:
    """Start value of a sequence's chain: only sequences with equal adapter and tenant share blocks."""
    return f"{lora_id}:{cache_salt if rename is None else rename.salt(cache_salt)}"
