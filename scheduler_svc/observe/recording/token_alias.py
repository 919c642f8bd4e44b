"""Renaming of tokens by a secret one-to-one map, so that a recording shows which tokens are equal but not what they are."""

import hashlib
import secrets
from typing import Self

import numpy as np

_BITS = 31
_MASK = np.uint32(2**_BITS - 1)
_NUM_ROUNDS = 4
_SHIFTS = (15, 13, 16, 14)
_I32 = np.dtype("<i4")


class TokenAlias:
    """A bijection on 0..2^31-1 derived from `key`; negative ids, which mean "no token yet", are unchanged.

    All tokens of a recording go through the same alias, so equality, lengths and stop rules are preserved.
    Token frequencies are visible and allow guesses. The key never leaves the process.
    """

    def __init__(self, key: bytes) -> None:
        numbers = np.frombuffer(hashlib.blake2b(b"quire alias\0" + key, digest_size=8 * _NUM_ROUNDS).digest(), "<u4")
        self._key = key
        self._factors = [np.uint32(n | 1) for n in numbers[:_NUM_ROUNDS].tolist()]
        self._terms = list(numbers[_NUM_ROUNDS:])

    @classmethod
    def drawn(cls) -> Self:
        """An alias with a new random key."""
        return cls(secrets.token_bytes(32))

    def tokens(self, data: bytes) -> bytes:
        """Rename little-endian int32 ids; length and order stay."""
        if not data:
            return data
        ids = np.frombuffer(data, _I32)
        named = ids.astype(np.uint32)
        # Each operation is invertible in 31 bits: an odd factor, a term, an xor with the number's own upper bits.
        for factor, term, shift in zip(self._factors, self._terms, _SHIFTS, strict=True):
            named = (named * factor + term) & _MASK
            named ^= named >> np.uint32(shift)
        return np.where(ids < 0, ids, named.astype(_I32)).astype(_I32).tobytes()

    def salt(self, text: str) -> str:
        """Rename a tenant's salt; an empty one stays empty."""
        return hashlib.blake2b(text.encode(), key=self._key, digest_size=16).hexdigest() if text else text
