"""Output of the simulated model: tokens that depend only on their sequence and position.

So a run with faults must give the same tokens as one without, and a token of another sequence can be
detected.
"""

import zlib
from collections.abc import Mapping
from typing import Protocol

EOS = 0
_MASK = (1 << 61) - 1


class TokenModel(Protocol):
    """`index`: of the sequence in its request; `offset`: number of its output tokens so far."""

    def token(self, request_id: str, index: int, offset: int, choice: int = 0) -> int:
        """The next token; `choice`: which of several children that start there."""

    def guess(self, request_id: str, index: int, offset: int) -> int:
        """A draft token, not always right."""

    def candidates(self, request_id: str, index: int, offset: int, width: int) -> list[tuple[int, float]]:
        """2 * `width` different next tokens of a beam with log probabilities, best first."""


def mix(*parts: int) -> int:
    """Pseudo-random number that depends only on all parts; the same in every process."""
    value = 88172645463325252
    for part in parts:
        value = ((value ^ part) * 0x2545F4914F6CDD1D + 0x9E3779B97F4A7C15) & _MASK
        value ^= value >> 29
    return value


class PseudoTokens:
    """Pseudo-random tokens 1 to `vocab_size` - 1. A sequence with a planned length in `num_output_tokens`
    ends with EOS as its last token; for others one token in `eos_every` is EOS (0 = never)."""

    def __init__(
        self,
        seed: int = 0,
        num_output_tokens: Mapping[str, int] | None = None,
        *,
        eos_every: int = 0,
        vocab_size: int = 30_000,
    ) -> None:
        self._seed = seed
        self._lengths = num_output_tokens or {}
        self._eos_every = eos_every
        self._vocab_size = vocab_size
        self._keys: dict[str, int] = {}

    def token(self, request_id: str, index: int, offset: int, choice: int = 0) -> int:
        """See `TokenModel`."""
        length = self._lengths.get(request_id)
        if length is not None and offset + 1 >= length:
            return EOS
        value = mix(self._key(request_id), offset, 4 * index + 1024 * choice)
        if length is None and self._eos_every and value % self._eos_every == 0:
            return EOS
        return 1 + (value >> 8) % (self._vocab_size - 1)

    def guess(self, request_id: str, index: int, offset: int) -> int:
        """A draft token, right two times of three."""
        token = self.token(request_id, index, offset)
        return token if mix(self._key(request_id), index, offset, 7) % 3 else token + 1

    def candidates(self, request_id: str, index: int, offset: int, width: int) -> list[tuple[int, float]]:
        """See `TokenModel`; a planned length does not apply to beams."""
        first = mix(self._key(request_id), index, offset, 11)
        return [((first + 7 * k) % 61, -0.1 * (1 + k) - first % 5 / 7) for k in range(2 * width)]

    def _key(self, request_id: str) -> int:
        key = self._keys.get(request_id)
        if key is None:
            key = self._keys[request_id] = mix(self._seed, zlib.crc32(request_id.encode()))
        return key
