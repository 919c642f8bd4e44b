"""Protocols of a policy's parts; each part is a small object.

A policy is an ordering, a list of phases, admission checks, a preemption, a lane choice, a placement, cache rules
and a progress. Parts never ask for a preset's name: presets differ by the parts they are made of. State that a part
must keep when the policy is changed live is named in its class attribute `MEMORY`. The protocols of phases,
admission, preemption and placement, which see the whole state, are in `phases.py`, that of output rules in `outputs.py`,
that of cache rules in `block_manager.cache_rules`.
"""

from typing import Any, Protocol

from block_manager.cache_rules import CacheRules
from scheduler_svc.core.request import Group, Sequence

Key = tuple[float | int, ...]


class Ordering(Protocol):
    """Order of groups in a queue."""

    sorts_waiting: bool

    def key(self, group: Group) -> Key:
        """Sort key; smaller = sooner."""


class LaneChoice(Protocol):
    """Chooses the lane (in-flight slot, or data-parallel rank) of the next plan of a worker group.

    `keeps_groups`: a group has a place in one lane until it ends.
    """

    has_worker_per_lane: bool
    keeps_groups: bool
    num_lanes: int

    @property
    def depth(self) -> int:
        """Plans that a lane can have in flight."""

    def free_lanes(self) -> list[int]:
        """Lanes that can take a plan now."""

    def on_planned(self, lane: int, step: int) -> None:
        """A plan with work, or an empty one that still occupies the lane, was made."""

    def on_result(self, step: int) -> None:
        """The plan of that step finished, failed or was empty."""

    def reset(self) -> None:
        """Drop all plans in flight: the workers lost them."""

    def lose(self, lane: int) -> None:
        """The worker of that lane was lost. AssertionError where lanes have no worker of their own."""

    def take_back(self, lane: int) -> None:
        """The lane has a worker again."""

    def vacate(self) -> None:
        """Give up the places of all groups: they continue on other worker groups."""


class InspectablePart(Protocol):
    """A part that exposes its internal state."""

    def view(self) -> dict[str, Any]:
        """State by name, as plain data. Calling it does not influence later plans."""


class Progress(Protocol):
    """When tokens count as computed."""

    def num_pending(self, sequence: Sequence) -> int:
        """Tokens it could compute now: known and draft tokens and placeholders, less computed ones; 0 if it must wait for
        a result.
        """

    def may_resume(self, sequence: Sequence) -> bool:
        """Whether a preempted sequence may start again while results of it are still in flight."""

    def on_preempted(self, sequence: Sequence) -> None:
        """The sequence lost its blocks and starts again later."""

    def on_scheduled(self, sequence: Sequence, num_tokens: int, num_drafts: int) -> None:
        """A step was planned with `num_tokens` of it, the last `num_drafts` of them draft tokens."""

    def on_result(self, sequence: Sequence, num_tokens: int) -> None:
        """The result of that step arrived; called before its tokens are appended."""

    def on_tokens(self, sequence: Sequence, num_new: int, num_taken: int, num_drafts: int) -> None:
        """The result had `num_new` tokens where `num_drafts` draft tokens were scheduled; `num_taken` of them were
        appended.
        """

    def commit_sampled(self, sequence: Sequence, cache: CacheRules) -> None:
        """A running sequence gained tokens: register blocks that became full, unless its next step does so."""
