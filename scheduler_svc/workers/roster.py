"""The lanes to workers, which follow the addresses in a directory."""

from collections.abc import Callable

from scheduler_svc.workers.lane import WorkerLane
from svc_common.net.names import AddressDirectory

LaneMaker = Callable[[int, str], WorkerLane]


class WorkerRoster:
    """Owner of `lanes`, one for each address ever seen; a lane keeps its number when its address vanishes and comes back.

    `make(number, address)`: makes a lane.
    """

    def __init__(self, directory: AddressDirectory, make: LaneMaker) -> None:
        self.lanes: list[WorkerLane] = []
        self._directory = directory
        self._make = make
        self._addresses: list[str] | None = None
        self._on_news: Callable[[], None] = lambda: None

    def listen(self, on_news: Callable[[], None]) -> None:
        """Call `on_news` when a lane has something to take, and when addresses change."""
        self._on_news = self._directory.on_change = on_news
        self.follow()

    @property
    def wanted(self) -> list[WorkerLane]:
        """The lanes that are not removed."""
        return [lane for lane in self.lanes if not lane.is_gone]

    def follow(self) -> list[WorkerLane]:
        """Take up the addresses as they are now. Returns the lanes that were made."""
        addresses = self._directory.addresses
        if addresses == self._addresses:
            return []
        self._addresses = addresses
        known = {lane.address: lane for lane in self.lanes}
        for address in addresses:
            if address in known:
                known[address].is_gone = False
        new = [self._make(len(self.lanes) + i, a) for i, a in enumerate(a for a in addresses if a not in known)]
        for lane in new:
            lane.listen(self._on_news)
        self.lanes += new
        return new

    def vanished(self) -> list[WorkerLane]:
        """The lanes to remove: their addresses are no worker's any more."""
        return [lane for lane in self.wanted if lane.address not in (self._addresses or ())]
