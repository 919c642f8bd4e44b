"""Values kept for gateways: bounds, fairness among tenants, expiry. Pure."""

import random
from itertools import pairwise

from scheduler_svc.requests.value_store import ENTRY_BYTES, ValueStore
from svc_common.clock import NS_PER_S

MAX_BYTES = 20 * ENTRY_BYTES
TTL_S = 10.0


class Clock:
    """Monotonic ns, set by the test."""

    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        return self.now_ns

    def advance(self, seconds: float) -> None:
        self.now_ns += int(seconds * NS_PER_S)


def test_values_are_the_tenants() -> None:
    """Same key, other tenant: another value."""
    store = ValueStore(MAX_BYTES, TTL_S, Clock())
    assert store.put("a", "k", b"1") and store.put("b", "k", b"2")
    assert (store.get("a", "k"), store.get("b", "k"), store.get("", "k")) == (b"1", b"2", None)
    assert store.delete("a", "k")
    assert not store.delete("a", "k")
    assert (store.get("a", "k"), store.get("b", "k"), len(store)) == (None, b"2", 1)


def test_a_value_expires() -> None:
    """After its time, which a later put of the same key restarts."""
    clock = Clock()
    store = ValueStore(MAX_BYTES, TTL_S, clock)
    store.put("a", "k", b"1")
    store.put("a", "l", b"1")
    clock.advance(6)
    store.put("a", "k", b"2")
    clock.advance(6)
    assert (store.get("a", "k"), store.get("a", "l"), store.num_expired) == (b"2", None, 1)
    clock.advance(6)
    assert store.get("a", "k") is None
    assert (store.num_bytes, len(store)) == (0, 0)


def test_without_room_the_largest_tenant_gives_way() -> None:
    """Its oldest first; a tenant that keeps little loses nothing, and a value above all the room is refused."""
    store = ValueStore(MAX_BYTES, TTL_S, Clock())
    store.put("small", "k", b"1")
    for i in range(100):
        assert store.put("large", f"{i}", bytes(ENTRY_BYTES))
    assert store.get("small", "k") == b"1"
    assert store.get("large", "99") is not None
    assert store.get("large", "0") is None
    assert store.num_displaced == 100 - (len(store) - 1)
    assert not store.put("large", "x", bytes(MAX_BYTES))
    assert not ValueStore(0, TTL_S, Clock()).put("", "k", b"")


def test_random_operations() -> None:
    """Never above the limit, sizes always add up, and what is there is what was put last."""
    for seed in range(10):
        rng, clock = random.Random(seed), Clock()
        store = ValueStore(MAX_BYTES, TTL_S, clock)
        put: dict[tuple[str, str], tuple[bytes, int]] = {}
        for _ in range(80):
            name = rng.choice("ab"), str(rng.randrange(12))
            match rng.randrange(4):
                case 0 | 1:
                    value = rng.randbytes(rng.randrange(3 * ENTRY_BYTES))
                    assert store.put(*name, value)
                    put[name] = value, clock.now_ns
                case 2:
                    store.delete(*name)
                    put.pop(name, None)
                case _:
                    clock.advance(rng.random() * 4)
            assert store.num_bytes <= MAX_BYTES
            found = {key: store.get(*key) for key in put}
            kept = {key: value for key, value in found.items() if value is not None}
            assert all(value == put[key][0] for key, value in kept.items())
            assert all(clock.now_ns - put[key][1] < TTL_S * NS_PER_S for key in kept)
            assert store.num_bytes == sum(len(key) + len(value) + ENTRY_BYTES for (_, key), value in kept.items())
            for tenant in "ab":
                times = sorted((at, key in kept) for key, (_, at) in put.items() if key[0] == tenant)
                assert all(not before[1] or after[1] or before[0] == after[0] for before, after in pairwise(times))
