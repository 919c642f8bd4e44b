"""KV events: which full blocks a prefix hit can use, over all worker groups, for routers in front of several cells.

A router chooses a cell, and the scheduler the worker group: a block counts while any group has it. What a subscriber was
sent is compared with what is true when it can take more, so that one that reads slowly holds up nothing and gets less.
"""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from block_manager.hashing import BlockContents, PrefixJournal
from block_manager.pool import BlockPool
from scheduler_svc.core.plan import StepOutcome, StepPlan
from scheduler_svc.core.state import CoreState
from scheduler_svc.observe.step_observer import StepObserver
from scheduler_svc.observe.step_record import StepOrigin
from scheduler_svc.worker_values import WorkerResult
from svc_common.errors import FailedPrecondition, QuireError

MAX_BLOCKS = 4096
"""Blocks in one change."""


@dataclass(frozen=True, slots=True)
class KvChange:
    """`stored`: blocks by hash, parents first; `removed`: hashes."""

    stored: dict[bytes, BlockContents]
    removed: list[bytes]


class KvSubscription:
    """What one subscriber was sent. `wake` is set when there is more, or the end: `is_over`, with `error` if it is one."""

    def __init__(self, stored: dict[bytes, BlockContents]) -> None:
        self.wake = asyncio.Event()
        self.wake.set()
        self.is_over = False
        self.error: QuireError | None = None
        self._stored = stored
        self._sent: set[bytes] = set()
        self._changed = dict.fromkeys(stored)
        self._prune_at = MAX_BLOCKS

    def note(self, changed: Iterable[bytes]) -> None:
        """Some of these blocks are stored now, the others are not."""
        self._changed.update(dict.fromkeys(changed))
        if len(self._changed) > self._prune_at:
            self._changed = {key: None for key in self._changed if (key in self._stored) != (key in self._sent)}
            self._prune_at = 2 * len(self._changed) + MAX_BLOCKS
        self.wake.set()

    def take(self) -> KvChange:
        """The next change, of at most MAX_BLOCKS new blocks; `wake` stays set if there are more."""
        removed = [key for key in self._changed if key in self._sent and key not in self._stored]
        new = [key for key in self._changed if key in self._stored and key not in self._sent]
        new.sort(key=lambda key: self._stored[key].index)
        self._changed = dict.fromkeys(new[MAX_BLOCKS:])
        if not self._changed:
            self.wake.clear()
        self._sent.difference_update(removed)
        self._sent.update(new[:MAX_BLOCKS])
        return KvChange({key: self._stored[key] for key in new[:MAX_BLOCKS]}, removed)

    def end(self, error: QuireError | None = None) -> None:
        """End the subscription."""
        self.is_over, self.error = True, error
        self.wake.set()


class KvEvents(StepObserver):
    """Owner of `stored`, the blocks that a hit can use now, and of all subscriptions.

    `is_enabled`: False keeps no journal, so that steps pay nothing, and refuses subscriptions.
    """

    def __init__(self, *, is_enabled: bool) -> None:
        self.stored: dict[bytes, BlockContents] = {}
        self._is_enabled = is_enabled
        self._pools: list[tuple[BlockPool, PrefixJournal]] = []
        self._has_contents = True
        self._subscriptions: list[KvSubscription] = []

    def watch(self, states: Sequence[CoreState]) -> None:
        """Follow the pools of these worker groups instead of those before. New ones must not have been used yet."""
        if not self._is_enabled:
            return
        self._has_contents = all(state.cache.journals_prefixes for state in states)
        if not self._has_contents:
            for subscription in self._subscriptions:
                subscription.end(_unsupported())
        self._pools = []
        for pool in (state.cache.ledger.gpu for state in states if self._has_contents):
            if pool.journal is None:
                pool.journal = PrefixJournal()
            self._pools.append((pool, pool.journal))
        self._look_at(list(self.stored))

    def on_plan(self, plan: StepPlan, origin: StepOrigin) -> None:
        """Follow what the plan registered and evicted."""
        self.flush()

    def on_result(self, plan: StepPlan, result: WorkerResult, outcome: StepOutcome) -> None:
        """Follow what a result completed, or a failure took back."""
        self.flush()

    def flush(self) -> None:
        """Bring `stored` up to date."""
        changed: dict[bytes, None] = {}
        for pool, journal in self._pools:
            for key in journal.take():
                changed[key] = None
                if pool.lookup(key) is None:
                    journal.contents.pop(key, None)
        if changed:
            self._look_at(changed)

    def subscribe(self) -> KvSubscription:
        """Begin with all blocks. Raises FailedPrecondition where they are not known."""
        if not self._is_enabled:
            raise FailedPrecondition("KV events are off; start the scheduler with --kv-events", reason="KV_EVENTS_OFF")
        if not self._has_contents:
            raise _unsupported()
        self.flush()
        subscription = KvSubscription(self.stored)
        self._subscriptions.append(subscription)
        return subscription

    def unsubscribe(self, subscription: KvSubscription) -> None:
        """Forget a subscription."""
        self._subscriptions.remove(subscription)

    def close(self) -> None:
        """End all subscriptions: the scheduler stops."""
        for subscription in self._subscriptions:
            subscription.end()

    def _look_at(self, changed: Iterable[bytes]) -> None:
        for key in changed:
            if (contents := self._contents(key)) is not None:
                self.stored[key] = contents
            else:
                self.stored.pop(key, None)
        for subscription in self._subscriptions:
            subscription.note(changed)

    def _contents(self, key: bytes) -> BlockContents | None:
        """Contents of the block with that hash, if a pool has it."""
        for pool, journal in self._pools:
            if pool.lookup(key) is not None and key in journal.contents:
                return journal.contents[key]
        return None


def _unsupported() -> FailedPrecondition:
    return FailedPrecondition(
        "KV events need one cache group without states, prefix caching, and blocks by the cache rules `quire` or `v1_pool`: "
        "elsewhere a stored block does not mean a hit",
        reason="KV_EVENTS_UNSUPPORTED",
    )
