"""The seams of a policy (design.md 4): each part is a small object behind one of these protocols.

A policy is an ordering, a list of phases, admission checks, a preemption, a placement, cache rules and a progress. Parts never ask
for a preset's name; what differs between presets is which parts they are made of. Phases and admission, which see the whole
state, have their seams in `policy.py`.
"""

from typing import Protocol

from block_manager.ledger import Ledger
from block_manager.rules.v1_pool import PrefixHit
from scheduler_svc.core.request import Sequence

Key = tuple[float | int | str, ...]


class Ordering(Protocol):
    """Who comes first, asked per queue."""

    sorts_waiting: bool

    def key(self, sequence: Sequence) -> Key:
        """Smaller = sooner."""


class Preemption(Protocol):
    """Who leaves when blocks run out, and how."""

    mode: str

    def victim(self, running: list[Sequence]) -> Sequence:
        """One of `running` (not empty)."""


class Placement(Protocol):
    """Which lane (worker group and in-flight slot) takes the next plan."""

    def next_lane(self) -> int | None:
        """A lane that can take a plan now; None when all are busy."""

    def on_planned(self, lane: int, step: int) -> None:
        """The lane got a plan with work."""

    def on_result(self, step: int) -> None:
        """The plan of that step is done or failed."""

    def reset(self) -> None:
        """Nothing is in flight any more: the workers lost it."""


class Progress(Protocol):
    """When tokens count as computed."""

    def num_pending(self, sequence: Sequence) -> int:
        """Tokens it could compute now: known ones (and promised ones) less computed ones."""

    def on_scheduled(self, sequence: Sequence, num_tokens: int) -> None:
        """A step was planned with `num_tokens` of it."""


class CacheRules(Protocol):
    """How blocks are taken and given back, over one ledger. `can_x` asks, `x` does; nothing is done by asking."""

    ledger: Ledger

    @property
    def num_free_gpu(self) -> int:
        """Free device blocks."""

    @property
    def num_free_cpu(self) -> int:
        """Free host blocks."""

    @property
    def capacity_tokens(self) -> int:
        """Tokens that one sequence could hold with everything to itself."""

    def lookup(self, sequence: Sequence) -> PrefixHit:
        """Its longest cached prefix."""

    def can_admit(self, sequence: Sequence, hit: PrefixHit, num_new_tokens: int) -> bool:
        """Whether there are blocks to start it with `num_new_tokens` behind its hit."""

    def admit(self, sequence: Sequence, hit: PrefixHit, num_new_tokens: int) -> list[int]:
        """Starts it; its whole table."""

    def can_extend(self, sequence: Sequence, num_new_tokens: int) -> bool:
        """Whether there are blocks for `num_new_tokens` more."""

    def extend(self, sequence: Sequence, num_new_tokens: int) -> list[int]:
        """Takes them; the blocks that were added."""

    def retract(self, sequence: Sequence, num_computed_tokens: int) -> None:
        """Its tokens from that offset on were promised by a step and never computed: nobody may reuse them."""

    def release(self, sequence: Sequence) -> None:
        """Gives its blocks back; no blocks: no-op (R97)."""

    def forget(self, sequence: Sequence) -> None:
        """The sequence is over."""

    def reset_prefixes(self) -> None:
        """The memory behind the blocks is gone."""
