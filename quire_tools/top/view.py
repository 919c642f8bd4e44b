"""What the user chose to see: sort order, scroll offset, pause. Pure."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from quire_tools.top.keys import BoundKey
from quire_tools.top.numbers import RequestRow

SORTS: dict[str, Callable[[RequestRow], tuple[float, ...]]] = {
    "waiting": lambda row: (not row.is_waiting, -row.age_s),
    "age": lambda row: (-row.age_s,),
    "prompt": lambda row: (-row.prompt_tokens,),
    "output": lambda row: (-row.output_tokens,),
    "preempted": lambda row: (-row.num_preemptions, -row.age_s),
    "priority": lambda row: (-row.priority, -row.age_s),
}
"""Sort keys by name; smallest first."""
_NAMES = tuple(SORTS)


@dataclass(frozen=True, slots=True)
class TopView:
    """`sort`: one of SORTS. `offset`: rows scrolled past."""

    sort: str = _NAMES[0]
    offset: int = 0
    is_paused: bool = False
    is_over: bool = False

    def after(self, key: BoundKey) -> "TopView":
        """The view after a key press."""
        change = _CHANGES.get(key)
        return change(self) if change else self

    def _turned(self, by: int) -> "TopView":
        return replace(self, sort=_NAMES[(_NAMES.index(self.sort) + by) % len(_NAMES)], offset=0)

    def _moved(self, by: int) -> "TopView":
        return replace(self, offset=max(0, self.offset + by))


_CHANGES: dict[BoundKey, Callable[[TopView], TopView]] = {
    BoundKey.QUIT: lambda view: replace(view, is_over=True),
    BoundKey.PAUSE: lambda view: replace(view, is_paused=not view.is_paused),
    BoundKey.SORT: lambda view: view._turned(1),
    BoundKey.RIGHT: lambda view: view._turned(1),
    BoundKey.LEFT: lambda view: view._turned(-1),
    BoundKey.DOWN: lambda view: view._moved(1),
    BoundKey.UP: lambda view: view._moved(-1),
    BoundKey.PAGE_DOWN: lambda view: view._moved(10),
    BoundKey.PAGE_UP: lambda view: view._moved(-10),
}
