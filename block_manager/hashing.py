"""Hashes of full blocks, chained so that equal hashes mean equal prefixes from position 0; a journal of what is behind them.

SHA-256 rather than Python's hash(): a tenant must not be able to construct a collision.
"""

import hashlib
import itertools
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol


class HashRename(Protocol):
    """A mapping applied before hashing, to reproduce hashes of a recording that was made under other token ids and
    salts.
    """

    def tokens(self, data: bytes) -> bytes:
        """Map token ids given as little-endian int32, one by one."""

    def salt(self, text: str) -> str:
        """Map a tenant's salt."""


Hasher = type(hashlib.sha256())


class HashChain:
    """The block hashes of one sequence, extended as its tokens grow: of block i SHA-256 of all tokens up to its end.

    `salt` (tenant, adapter) is hashed before the tokens. `rename`: mapping of tokens before hashing; None: no
    mapping.
    """

    __slots__ = ("_block_size", "_hasher", "_hashes", "_rename", "_seed")

    def __init__(self, block_size: int, salt: str = "", rename: HashRename | None = None) -> None:
        self._block_size = block_size
        self._rename = rename
        self._seed = hashlib.sha256(b"quire block\0" + salt.encode()).digest()
        self._hashes: list[bytes] = []
        self._hasher: hashlib._Hash | None = hashlib.sha256(self._seed)  # None in a chain read from a snapshot

    @property
    def seed(self) -> bytes:
        """Equal for chains with equal salts."""
        return self._seed

    def hash_at(self, index: int) -> bytes:
        """Hash of a block that is hashed already."""
        return self._hashes[index]

    def upto(self, token_ids: Sequence[int], num_blocks: int) -> list[bytes]:
        """Hashes of at least the first `num_blocks` blocks, which must be full in `token_ids`. Returns the
        internal list.
        """
        have, size = len(self._hashes), self._block_size
        if self._hasher is None:
            self._hasher = hashlib.sha256(self._seed + self._data(token_ids[: have * size]))
        if num_blocks > have:
            update, digest = self._hasher.update, self._hasher.digest
            blocks = blocks_in(self._data(token_ids[have * size : num_blocks * size]), size)
            self._hashes += [digest() for _ in map(update, blocks)]  # each digest follows the update with its block
        return self._hashes

    def block(self, index: int, data: bytes) -> bytes:
        """Hash of the block at `index`, which is hashed already or the next one. `data`: its tokens as
        little-endian int32, mapped. A chain read from a snapshot needs a call of `upto` before.
        """
        if index == len(self._hashes):
            assert self._hasher is not None
            self._hasher.update(data)
            self._hashes.append(self._hasher.digest())
        return self._hashes[index]

    def _data(self, token_ids: Sequence[int]) -> bytes:
        data = little_endian(token_ids)
        return data if self._rename is None else self._rename.tokens(data)


def little_endian(token_ids: Sequence[int]) -> bytes:
    """Token ids as little-endian int32, so that hashes are equal on every machine."""
    return struct.pack(f"<{len(token_ids)}i", *token_ids)


def blocks_in(data: bytes, block_size: int) -> Iterator[bytes]:
    """Split int32 [blocks, block_size] data into blocks."""
    return itertools.chain.from_iterable(struct.iter_unpack(f"{4 * block_size}s", data))


def chain_salt(lora_id: int, cache_salt: str, rename: HashRename | None) -> str:
    """Start value of a sequence's chain: only sequences with equal adapter and tenant share blocks."""
    return f"{lora_id}:{cache_salt if rename is None else rename.salt(cache_salt)}"


@dataclass(frozen=True, slots=True)
class BlockContents:
    """Tokens of a registered block, little-endian int32, at `index` in its sequence. `parent`: hash of the block before it."""

    parent: bytes | None
    index: int
    tokens: bytes
    lora_id: int


class PrefixJournal:
    """Owner of the contents of one pool's registered blocks. `changed`: hashes since `take`, in order, known now or not.

    Blocks of chains that were not admitted have no contents here. It is there only with `--kv-events`.
    """

    def __init__(self) -> None:
        self.contents: dict[bytes, BlockContents] = {}
        self.changed: dict[bytes, None] = {}
        self._adapters: dict[bytes, int] = {}

    def admit(self, chain: HashChain, lora_id: int) -> None:
        """Note the contents of this chain's blocks from now on."""
        self._adapters[chain.seed] = lora_id

    def note(self, chain: HashChain, first: int, data: bytes, block_size: int) -> None:
        """Note the contents of the chain's blocks from `first` on, which are hashed. `data`: their tokens, int32."""
        lora_id = self._adapters.get(chain.seed)
        if lora_id is not None:
            for index, tokens in enumerate(blocks_in(data, block_size), first):
                parent = chain.hash_at(index - 1) if index else None
                self.contents[chain.hash_at(index)] = BlockContents(parent, index, tokens, lora_id)

    def take(self) -> list[bytes]:
        """Return the hashes that changed, and forget that they did."""
        taken, self.changed = list(self.changed), {}
        return taken
