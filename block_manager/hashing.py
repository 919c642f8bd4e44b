"""Hashes of full blocks, chained so that equal hashes mean equal prefixes from position 0 (R107, R138).

SHA-256 rather than Python's hash(): a tenant must not be able to construct a collision (operations.md 5.5).
"""

import hashlib
import struct
from collections.abc import Sequence
from typing import Protocol


class Rename(Protocol):
    """Other names for what is hashed: where contents are recorded under these, the hashes fit them (equal stays equal)."""

    def tokens(self, data: bytes) -> bytes:
        """Token ids as little-endian int32, renamed one by one."""

    def salt(self, text: str) -> str:
        """A tenant's salt."""


class HashChain:
    """The block hashes of one sequence, grown as its tokens grow.

    `salt` (tenant, adapter) goes into the first block and through the chain into all others. `rename`: tokens are hashed under
    their other names; None: as they are.
    """

    __slots__ = ("_block_size", "_hashes", "_parent", "_rename")

    def __init__(self, block_size: int, salt: str = "", rename: Rename | None = None) -> None:
        self._block_size = block_size
        self._rename = rename
        self._parent = hashlib.sha256(b"quire block\0" + salt.encode()).digest()
        self._hashes: list[bytes] = []

    def upto(self, token_ids: Sequence[int], num_blocks: int) -> list[bytes]:
        """Hashes of the first `num_blocks` blocks; all of them must be full in `token_ids`. The list is the chain's own."""
        have = len(self._hashes)
        if num_blocks > have:
            self._grow(token_ids[have * self._block_size : num_blocks * self._block_size])
        return self._hashes

    def block(self, index: int, data: bytes) -> bytes:
        """The hash of the block at that place, whose tokens as little-endian int32 are `data` (renamed); known, or the next one."""
        if index == len(self._hashes):
            self._parent = hashlib.sha256(self._parent + data).digest()
            self._hashes.append(self._parent)
        return self._hashes[index]

    def _grow(self, token_ids: Sequence[int]) -> None:
        data = little_endian(token_ids)
        if self._rename is not None:
            data = self._rename.tokens(data)
        parent, sha256, add = self._parent, hashlib.sha256, self._hashes.append
        for block in blocks_in(data, self._block_size):
            parent = sha256(parent + block).digest()
            add(parent)
        self._parent = parent


def little_endian(token_ids: Sequence[int]) -> bytes:
    """Token ids as int32, little-endian, so that hashes are the same on every machine."""
    return struct.pack(f"<{len(token_ids)}i", *token_ids)


def blocks_in(data: bytes, block_size: int) -> list[bytes]:
    """`data`, which is int32 [blocks, block_size], cut into blocks."""
    return [block for (block,) in struct.iter_unpack(f"{4 * block_size}s", data)]


def chain_salt(lora_id: int, cache_salt: str, rename: Rename | None) -> str:
    """What a sequence's chain starts from: only equal adapters of equal tenants share blocks."""
    return f"{lora_id}:{cache_salt if rename is None else rename.salt(cache_salt)}"
