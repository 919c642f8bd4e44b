"""Other names for tokens: a secret one-to-one map, so that a recording says which tokens are equal and not what they are."""

import hashlib
import secrets
from typing import Self

import numpy as np
from numpy.typing import NDArray

_BITS = 31
_MASK = np.uint32(2**_BITS - 1)
_NUM_ROUNDS = 4
_SHIFTS = (15, 13, 16, 14)
_I32 = np.dtype("<i4")


class Alias:
    """A bijection on 0..2^31-1 drawn from `key`; negative ids, which mean "no token yet", stay as they are.

    Every token of a recording goes through the same alias: equality, lengths and stop rules hold as before. Someone who knows how
    often which token occurs can guess at it all the same. The key never leaves the process.
    """

    def __init__(self, key: bytes) -> None:
        numbers = np.frombuffer(hashlib.blake2b(b"quire alias\0" + key, digest_size=8 * _NUM_ROUNDS).digest(), "<u4")
        self._key = key
        self._factors = [np.uint32(n | 1) for n in numbers[:_NUM_ROUNDS].tolist()]
        self._terms = list(numbers[_NUM_ROUNDS:])

    @classmethod
    def drawn(cls) -> Self:
        """One with a key of its own, which nobody knows."""
        return cls(secrets.token_bytes(32))

    def tokens(self, data: bytes) -> bytes:
        """Little-endian int32 ids under their other names, as long and in the same order."""
        if not data:
            return data
        ids = np.frombuffer(data, _I32)
        named: NDArray[np.int32] = self._map(ids.astype(np.uint32)).astype(_I32)
        return np.where(ids < 0, ids, named).astype(_I32).tobytes()

    def salt(self, text: str) -> str:
        """Another name for a tenant's salt; none stays none."""
        return hashlib.blake2b(text.encode(), key=self._key, digest_size=16).hexdigest() if text else text

    def _map(self, x: NDArray[np.uint32]) -> NDArray[np.uint32]:
        """Each operation can be undone in 31 bits: an odd factor, a term, an xor with the number's own upper bits."""
        for factor, term, shift in zip(self._factors, self._terms, _SHIFTS, strict=True):
            x = (x * factor + term) & _MASK
            x ^= x >> np.uint32(shift)
        return x
