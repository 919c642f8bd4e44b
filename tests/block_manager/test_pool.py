"""The pool and its parts against brute-force models (R99, R109, R110, R137, R200)."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from block_manager import integrity
from block_manager.eviction_queue import EvictionQueue
from block_manager.hashing import HashChain
from block_manager.ledger import Ledger
from block_manager.pool import BlockPool


@given(st.lists(st.integers(0, 9), max_size=60))
def test_free_queue_is_a_list_with_fast_removal(ops: list[int]) -> None:
    """Every operation agrees with a plain list."""
    queue, model = EvictionQueue(8, 1), list(range(1, 8))
    for op in ops:
        if op == 9 and model:
            assert queue.pop_many(1) == [model.pop(0)]
        elif op in model:
            queue.remove([op])
            model.remove(op)
        elif 1 <= op < 8:
            queue.extend([op])
            model.append(op)
        assert list(queue) == model and len(queue) == len(model)


def test_an_empty_pool_says_so() -> None:
    """IndexError, not a wrong block."""
    with pytest.raises(IndexError):
        BlockPool(1, num_reserved=1).allocate(1)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=40), st.integers(1, 5))
def test_equal_hashes_mean_equal_prefixes(tokens: list[int], size: int) -> None:
    """R107, R138: growing in steps gives the hashes of growing at once; one other token changes all behind it."""
    blocks = len(tokens) // size
    at_once = HashChain(size).upto(tokens, blocks)
    stepwise = HashChain(size)
    for n in range(1, blocks + 1):
        stepwise.upto(tokens[: n * size + 1], n)
    assert stepwise.upto(tokens, blocks) == at_once
    other = HashChain(size).upto([99, *tokens[1:]], blocks)
    assert not set(other) & set(at_once)
    assert not set(HashChain(size, "tenant").upto(tokens, blocks)) & set(at_once)


class PoolMachine(RuleBasedStateMachine):
    """Tables that allocate, share and release; after each rule everything is counted anew."""

    @initialize(blocks=st.integers(2, 9), reserved=st.integers(0, 1))
    def build(self, blocks: int, reserved: int) -> None:
        self.ledger = Ledger(4, BlockPool(blocks, num_reserved=reserved), BlockPool(0))
        self.pool = self.ledger.gpu
        self.count = 0

    @rule(n=st.integers(1, 3))
    def allocate(self, n: int) -> None:
        if n > self.pool.num_free:
            with pytest.raises(IndexError):
                self.pool.allocate(n)
            return
        expected = list(self.pool.free_blocks)[:n]
        self.count += 1
        self.ledger.tables[f"t{self.count}"] = self.pool.allocate(n)
        assert self.ledger.tables[f"t{self.count}"] == expected
        for block in expected:
            self.pool.register(block, bytes([block % 3]))

    @precondition(lambda self: self.ledger.tables)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.ledger.tables)))
        self.count += 1
        self.pool.share(self.ledger.tables[name])
        self.ledger.tables[f"t{self.count}"] = list(self.ledger.tables[name])

    @rule(key=st.integers(0, 2))
    def hit(self, key: int) -> None:
        block = self.pool.lookup(bytes([key]))
        if block is not None:
            assert self.pool.hash_of[block] == bytes([key])
            self.count += 1
            self.pool.share([block])
            self.ledger.tables[f"t{self.count}"] = [block]

    @precondition(lambda self: self.ledger.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        table = self.ledger.tables.pop(data.draw(st.sampled_from(sorted(self.ledger.tables))))
        self.pool.release(reversed(table))

    @rule()
    def reset(self) -> None:
        self.pool.reset_prefixes()
        assert self.pool.counts().cached == 0

    @invariant()
    def adds_up(self) -> None:
        assert integrity.check(self.ledger) == []


PoolMachine.TestCase.settings = settings(max_examples=20, stateful_step_count=40, deadline=None)
TestPool = PoolMachine.TestCase


@pytest.mark.long
class TestPoolForLonger(PoolMachine.TestCase):
    """The same, longer."""

    settings = settings(max_examples=1_000, stateful_step_count=60, deadline=None)


def _break_count(ledger: Ledger) -> None:
    ledger.gpu.refs[1] += 1


def _break_table(ledger: Ledger) -> None:
    ledger.tables["a"].pop()


def _break_free(ledger: Ledger) -> None:
    ledger.gpu.free_blocks.extend([1], ledger.gpu)


@pytest.mark.parametrize("damage", [_break_count, _break_table, _break_free])
def test_the_check_finds_damage(damage) -> None:
    """A check that cannot fail would be none."""
    ledger = Ledger(4, BlockPool(5), BlockPool(0))
    ledger.tables["a"] = ledger.gpu.allocate(2)
    assert ledger.tables["a"] == [0, 1]
    damage(ledger)
    assert integrity.check(ledger)
