"""Connections between the stages of a group: hidden states go to the next stage, drawn tokens from the last one to rank 0.

Each rank of a stage sends to the rank of the next stage that has the same part of the weights; all ranks of a stage have the
same states. Both ends count, so that ranks which have parted are found.
"""

import struct
import threading

import torch

from paged_kernels.ranks import PeerLost
from worker_svc.ranks.channel import Channel, MessageKind

_COUNT = struct.Struct("<Q")


class StageLinks:
    """Owner of a rank's connections to other stages.

    `before`, `after`: to neighbouring stages. `tokens`: between rank 0 and the first rank of the last stage. None = none.
    `timeout_s`: of each wait for another rank.
    """

    def __init__(
        self, before: Channel | None, after: Channel | None, tokens: Channel | None, *, timeout_s: float
    ) -> None:
        self.count = 0
        """Forward passes with states that were received; of the first stage: that were sent."""
        self._before, self._after, self._tokens = before, after, tokens
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._received: dict[int, bytes] = {}
        self._last_taken = 0

    # --- hidden states -------------------------------------------------------------------------------------------------

    def receive(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """See StateLinks. Raises PeerLost too if the stage before computed other rows."""
        assert self._before is not None
        self.count += 1
        content = bytearray(self._before.expect(MessageKind.STATES, self._timeout_s))
        number, size, wanted = (
            _COUNT.unpack_from(content)[0],
            len(content) - _COUNT.size,
            shape.numel() * dtype.itemsize,
        )
        if number != self.count or size != wanted:
            raise PeerLost(
                f"{self._before.peer} sent {size} bytes of hidden states for pass {number}, and {wanted} for pass {self.count} "
                "were expected",
                differs=True,
            )
        return torch.frombuffer(content, dtype=dtype, offset=_COUNT.size).view(shape)

    def send(self, states: torch.Tensor) -> None:
        """See StateLinks."""
        assert self._after is not None
        self.count += self._before is None
        content = states.contiguous().view(torch.uint8).numpy().tobytes()
        self._after.send(MessageKind.STATES, _COUNT.pack(self.count) + content, self._timeout_s)

    # --- tokens --------------------------------------------------------------------------------------------------------

    def tell(self, number: int, content: bytes) -> None:
        """Send what was drawn as `number` to rank 0. Numbers ascend."""
        assert self._tokens is not None
        self._tokens.send(MessageKind.TOKENS, _COUNT.pack(number) + content, self._timeout_s)

    def wait(self, number: int) -> None:
        """At rank 0, block until what was drawn as `number` is there. Callable from any thread. Raises PeerLost."""
        if self._is_here(number):  # another thread may wait for a later number
            return
        with self._lock:
            while not self._is_here(number):
                assert self._tokens is not None
                content = self._tokens.expect(MessageKind.TOKENS, self._timeout_s)
                found = _COUNT.unpack_from(content)[0]
                if found > number:
                    raise PeerLost(f"{self._tokens.peer} sent tokens {found} and no tokens {number}", differs=True)
                self._received[found] = content[_COUNT.size :]

    def _is_here(self, number: int) -> bool:
        return number in self._received or number <= self._last_taken

    def take(self, number: int) -> bytes:
        """At rank 0, wait for what was drawn as `number`, and drop what was drawn before. Numbers ascend."""
        self.wait(number)
        self._last_taken = number
        for earlier in [each for each in list(self._received) if each < number]:
            del self._received[earlier]
        return self._received.pop(number)

    def end(self) -> None:
        """Close all connections: what waits, and later calls, raise PeerLost. Callable from any thread."""
        for channel in (self._before, self._after, self._tokens):
            if channel is not None:
                channel.close()
