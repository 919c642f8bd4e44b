"""The seams of a policy (design.md 4): each part is a small object behind one of these protocols.

A policy is an ordering, a list of phases, admission checks, a preemption, a placement, cache rules and a progress. Parts never ask
for a preset's name; what differs between presets is which parts they are made of. What a part has learned and must keep when the
policy is changed live it names in a class attribute `MEMORY`. Phases, admission, preemption and outputs, which see the whole state,
have their seams in `policy.py`; cache rules theirs in `block_manager.cache_rules`.
"""

from typing import Any, Protocol

from block_manager.cache_rules import CacheRules
from scheduler_svc.core.request import Group, Sequence

Key = tuple[float | int, ...]


class Ordering(Protocol):
    """Who comes first, asked per queue."""

    sorts_waiting: bool

    def key(self, group: Group) -> Key:
        """Smaller = sooner."""


class Placement(Protocol):
    """Which lane (worker group and in-flight slot) takes the next plan."""

    has_worker_per_lane: bool

    @property
    def depth(self) -> int:
        """Plans that a lane can have under way."""

    def free_lanes(self) -> list[int]:
        """Lanes that can take a plan now."""

    def on_planned(self, lane: int, step: int) -> None:
        """The lane got a plan with work, or one that takes it all the same."""

    def on_result(self, step: int) -> None:
        """The plan of that step is done or failed, or had no work."""

    def reset(self) -> None:
        """Nothing is in flight any more: the workers lost it."""

    def lose(self, lane: int) -> None:
        """The worker of that lane is gone. AssertionError where lanes have no worker each."""

    def take_back(self, lane: int) -> None:
        """That lane has a worker again."""


class View(Protocol):
    """A part that shows what it remembers."""

    def view(self) -> dict[str, Any]:
        """By name, as plain data; changes nothing that a plan depends on."""


class Progress(Protocol):
    """When tokens count as computed."""

    def num_pending(self, sequence: Sequence) -> int:
        """Tokens it could compute now: known, promised and guessed ones less computed ones; 0 when it must wait for a result."""

    def may_resume(self, sequence: Sequence) -> bool:
        """Whether a preempted sequence may start again before all that is under way of it came back."""

    def on_preempted(self, sequence: Sequence) -> None:
        """It lost its blocks and starts again later."""

    def on_scheduled(self, sequence: Sequence, num_tokens: int, num_drafts: int) -> None:
        """A step was planned with `num_tokens` of it, the last `num_drafts` of them guesses."""

    def on_result(self, sequence: Sequence, num_tokens: int) -> None:
        """That step came back, whatever it gave; called before its tokens are appended."""

    def on_tokens(self, sequence: Sequence, num_new: int, num_taken: int, num_drafts: int) -> None:
        """It gave `num_new` tokens where `num_drafts` guesses had been scheduled; `num_taken` of them were appended."""

    def settle(self, sequence: Sequence, cache: CacheRules) -> None:
        """It gained tokens while it ran: what they made full may be found by others, if that is not left to its next step."""
