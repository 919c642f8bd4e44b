"""How what was drawn gets from the last stage to all others: to rank 0 at once, and from there when rank 0 takes it in."""

from collections.abc import Sequence
from typing import Protocol

from worker_svc.ranks.channel import Channel, MessageKind
from worker_svc.ranks.links import StageLinks


class StageTokens(Protocol):
    """Carries what was drawn from the last stage to the others. Decode steps are numbered from 1, equally on all ranks."""

    is_last: bool
    """True on a rank of the last stage."""

    def tell(self, number: int, content: bytes) -> None:
        """Send what this rank drew. On the last stage. Raises PeerLost."""
        ...

    def wait(self, number: int) -> None:
        """Block until `take` would not, if it is rank 0. Callable from any thread. Raises PeerLost."""
        ...

    def take(self, number: int) -> bytes:
        """What the last stage told as `number`; empty on the last stage itself. Numbers ascend. Raises PeerLost."""
        ...


class LastStage:
    """`StageTokens` of a rank of the last stage. `links`: of the one that tells rank 0, else None."""

    is_last = True

    def __init__(self, links: StageLinks | None) -> None:
        self._links = links

    def tell(self, number: int, content: bytes) -> None:
        """See StageTokens."""
        if self._links is not None:
            self._links.tell(number, content)

    def wait(self, number: int) -> None:
        """See StageTokens. No-op."""

    def take(self, number: int) -> bytes:
        """See StageTokens."""
        return b""


class Leader:
    """`StageTokens` of rank 0. `others`: to the other ranks that are not of the last stage."""

    is_last = False

    def __init__(self, links: StageLinks, others: Sequence[Channel]) -> None:
        self._links, self._others = links, others

    def tell(self, number: int, content: bytes) -> None:
        """Never called."""
        raise AssertionError("only the last stage draws")

    def wait(self, number: int) -> None:
        """See StageTokens."""
        self._links.wait(number)

    def take(self, number: int) -> bytes:
        """See StageTokens. The others take it in at the same point of their work."""
        content = self._links.take(number)
        for channel in self._others:
            channel.send(MessageKind.TOKENS, content)
        return content


class Follower:
    """`StageTokens` of the other ranks. `leader`: to rank 0. `timeout_s`: of waits for it."""

    is_last = False

    def __init__(self, leader: Channel, timeout_s: float) -> None:
        self._leader, self._timeout_s = leader, timeout_s

    def tell(self, number: int, content: bytes) -> None:
        """Never called."""
        raise AssertionError("only the last stage draws")

    def wait(self, number: int) -> None:
        """See StageTokens. No-op."""

    def take(self, number: int) -> bytes:
        """See StageTokens."""
        return self._leader.expect(MessageKind.TOKENS, self._timeout_s)


def tokens_of(
    rank: int, tensor_size: int, size: int, channels: Sequence[Channel], links: StageLinks, timeout_s: float
) -> StageTokens:
    """For a rank. `channels`: see GroupRanks."""
    last = size - tensor_size
    if rank >= last:
        return LastStage(links if rank == last else None)
    return Follower(channels[0], timeout_s) if rank else Leader(links, channels[: last - 1])
