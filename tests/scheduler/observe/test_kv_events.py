"""KV events in random lives of the core: what a subscriber was told is what prefix hits can use, at each moment."""

import random
from collections.abc import Callable

import pytest

from block_manager.hashing import BlockContents, HashChain, chain_salt
from scheduler_svc.observe import kv_events
from scheduler_svc.observe.kv_events import KvEvents, KvSubscription
from scheduler_svc.observe.recording.token_alias import TokenAlias
from svc_common.errors import FailedPrecondition
from tests.support.core.lives import FATES, Life
from tests.support.core.random_policies import random_setting

ALIAS = TokenAlias.drawn()
"""As in a scheduler that records: hashes are of other token ids than those told."""
POLICIES = ("quire", "vllm-v1", "vllm-v1-async")


class Picture:
    """What a subscriber knows. `whole`: all tokens up to the end of each block that it ever knew, as int32."""

    def __init__(self, subscription: KvSubscription, block_size: int) -> None:
        self.subscription = subscription
        self.known: set[bytes] = set()
        self.whole: dict[bytes, bytes] = {}
        self.size = block_size

    def read(self) -> None:
        """Take all that is new; removed blocks were known, stored ones were not, and hashes are those of the tokens."""
        while self.subscription.wake.is_set():
            change = self.subscription.take()
            assert self.known.issuperset(change.removed) and not self.known & change.stored.keys()
            self.known -= set(change.removed)
            for key, contents in change.stored.items():
                self._store(key, contents)

    def _store(self, key: bytes, contents: BlockContents) -> None:
        assert len(contents.tokens) == 4 * self.size
        assert (contents.parent is None) == (contents.index == 0)
        self.known.add(key)
        before = b"" if contents.parent is None else self.whole.get(contents.parent)
        if before is not None:
            whole = self.whole[key] = before + contents.tokens
            ids = list(memoryview(whole).cast("i"))
            chain = HashChain(self.size, chain_salt(contents.lora_id, "", ALIAS), ALIAS)
            assert chain.upto(ids, contents.index + 1)[contents.index] == key


def live(policy: str, seed: int, num_happenings: int) -> int:
    """One life with a subscriber that reads at once, and one that reads seldom; returns how many blocks it stored."""
    rng = random.Random(f"{policy} {seed}")
    life = Life(random_setting(policy, rng), salts=[""], rename=ALIAS)
    events = KvEvents(is_enabled=True)
    events.watch(life.core.states)
    try:
        size = life.core.limits.block_size
        fast, slow = (Picture(events.subscribe(), size) for _ in range(2))
    except FailedPrecondition:
        assert not all(state.cache.journals_prefixes for state in life.core.states)
        return 0
    for _ in range(num_happenings):
        pools = [state.cache.ledger.gpu for state in life.core.states]
        happen(life, rng)
        states = life.core.states
        if [id(state.cache.ledger.gpu) for state in states] != list(map(id, pools)):
            events.watch(states)
        events.flush()
        fast.read()
        assert fast.known == reusable(life)
        if rng.random() < 0.1:
            slow.read()
            assert slow.known == fast.known
    late = Picture(events.subscribe(), size)
    late.read()
    assert late.known == fast.known
    return len(fast.whole)


def happen(life: Life, rng: random.Random) -> None:
    """Something."""
    dice = rng.random()
    if dice < 0.3:
        life.arrive(rng)
    elif dice < 0.7 and life.can_schedule:
        life.schedule(rng.choice(FATES))
    elif dice < 0.9 and life.num_underway:
        life.finish()
    elif dice < 0.94:
        life.abort(rng.randrange(12))
    elif dice < 0.96:
        life.change_workers(rng)
    elif dice < 0.97:
        life.reset_prefixes()
    elif dice < 0.98:
        life.lose_worker()


def reusable(life: Life) -> set[bytes]:
    """Hashes under which any pool has a block."""
    return {key for state in life.core.states for key in state.cache.ledger.gpu.hash_of if key is not None}


@pytest.mark.parametrize("policy", POLICIES)
def test_subscribers_know_what_is_reusable(policy: str) -> None:
    """After everything that happens."""
    assert sum(live(policy, seed, 60) for seed in range(6)) > 0


@pytest.mark.long
@pytest.mark.parametrize("policy", POLICIES)
def test_subscribers_know_what_is_reusable_in_long_lives(
    policy: str, record_property: Callable[[str, object], None]
) -> None:
    """The same, more and longer."""
    record_property("size", sum(live(policy, seed, 400) for seed in range(100, 140)))


def test_a_subscriber_that_does_not_read_costs_no_more_than_the_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of blocks that came and went unread nothing is kept; changes are told in parts, parents first."""
    monkeypatch.setattr(kv_events, "MAX_BLOCKS", 4)
    stored: dict[bytes, BlockContents] = {}
    subscription = KvSubscription(stored)
    for i in range(100):
        key = b"%d" % i
        stored[key] = BlockContents(None, 99 - i, b"", 0)
        subscription.note([key])
        if i < 90:
            del stored[key]
            subscription.note([key])
        assert len(subscription._changed) <= 2 * len(stored) + 8
    told = [change.stored for change in iter(subscription.take, kv_events.KvChange({}, []))]
    assert list(map(len, told)) == [4, 4, 2]
    assert [contents.index for part in told for contents in part.values()] == list(range(10))


def test_blocks_under_a_salt_are_not_told() -> None:
    """Which requests may use them is not for a router to know."""
    assert sum(map(num_salted, range(5))) > 0


def num_salted(seed: int) -> int:
    """Blocks with a hash after a life in which all requests have a salt."""
    rng = random.Random(seed)
    life, events = Life(random_setting("quire", rng), salts=["x"]), KvEvents(is_enabled=True)
    events.watch(life.core.states)
    for _ in range(20):
        life.arrive(rng)
        if life.can_schedule:
            life.schedule("ok")
        if life.num_underway:
            life.finish()
        events.flush()
        assert not events.stored
    return len(reusable(life)) if life.core.state.cache.journals_prefixes else 0


def test_subscriptions_are_refused_where_nothing_is_kept() -> None:
    """By default, and then pools have no journal."""
    life = Life(random_setting("quire", random.Random(1)))
    events = KvEvents(is_enabled=False)
    events.watch(life.core.states)
    assert all(state.cache.ledger.gpu.journal is None for state in life.core.states)
    with pytest.raises(FailedPrecondition, match="--kv-events") as caught:
        events.subscribe()
    assert caught.value.reason == "KV_EVENTS_OFF"
