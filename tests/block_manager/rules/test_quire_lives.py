"""Random lives under Quire's rules, of one cache group and of several, against a model of what a worker would have written
into each block.
"""

import copy

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from block_manager import integrity
from block_manager.cache_rules import AllocStatus, Growth, Pair, try_reset_prefixes
from block_manager.rules.grouped_rules import GroupedQuireRules
from block_manager.rules.quire_rules import QuireRules
from tests.support.core.sequences import KnownSequence, prompt

SIZE = 4
Contents = dict[tuple[str, int], dict[int, tuple[object, ...]]]
Windows = tuple[int | None, ...]
ONE_GROUP: list[Windows] = [(None,), (None,), (3,), (6,)]
GROUPS: list[Windows] = [(None, 3), (6, None), (None, 6, 3), (None, 5, 5), (3, 6), (1, None), (None, None)]
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=14) | st.builds(
    lambda length, end: [2] * length + end, st.integers(1, 24), st.lists(st.integers(0, 1), max_size=2)
)


class QuireLives(RuleBasedStateMachine):
    """Groups start, fork, grow, lose samples, move, are recomputed, fail and end, in any order, on small devices.

    `self.contents` says for every slot of every block the prefix whose KV a worker would have written there, stale ones
    included, and the cache group. What a table says must be found in it, so a wrong share, hit, copy or swap shows (R200).
    """

    some_windows = ONE_GROUP
    num_states = 0

    @initialize(
        usable=st.integers(3, 12),
        host=st.integers(0, 8),
        caching=st.booleans(),
        watermark=st.integers(0, 2),
        data=st.data(),
    )
    def build(self, usable: int, host: int, caching: bool, watermark: int, data: st.DataObject) -> None:
        self.windows = data.draw(st.sampled_from(self.some_windows))
        self.num_groups = len(self.windows)
        sizes = {"num_gpu_blocks": self.num_groups * usable + 1, "num_cpu_blocks": self.num_groups * host}
        values = {"max_model_len": 64, "prefix_caching": caching, "watermark_blocks": watermark, **sizes}
        self.rules: GroupedQuireRules | QuireRules
        if self.num_groups > 1:
            self.rules = GroupedQuireRules.make(self.windows, block_size=SIZE, num_ahead_tokens=64, **values)
            self.chains = self.rules._groups[0]._prefixes._chains
        else:
            self.rules = QuireRules.make(block_size=SIZE, window=self.windows[0], **values)
            self.chains = self.rules._prefixes._chains
        self.contents: Contents = {}
        self.groups: list[list[KnownSequence]] = []
        self.swapped: list[list[KnownSequence]] = []
        self.waiting: list[list[KnownSequence]] = []
        self.count = 0

    # --- what a worker would do ---

    def _write(self, sequence: KnownSequence, upto: int) -> None:
        table = self.rules.ledger.tables[sequence.name][self.num_states :]
        for p in range(sequence.num_computed_tokens, upto):
            for group in range(self.num_groups):
                block = table[p // SIZE * self.num_groups + group]
                self.contents.setdefault(("g", block), {})[p % SIZE] = self._content(sequence, p, group)
        sequence.num_computed_tokens = upto

    @staticmethod
    def _content(sequence: KnownSequence, p: int, group: int) -> tuple[object, ...]:
        return group, sequence.lora_id, sequence.cache_salt, *sequence.token_ids[: p + 1]

    def _move(self, pairs: list[Pair], source: str, target: str) -> None:
        moved = {(target, b): dict(self.contents.get((source, a), {})) for a, b in pairs}
        assert len(moved) == len(pairs)
        self.contents.update(moved)

    def _extend(self, sequence: KnownSequence, num_tokens: int, num_lookahead: int = 0) -> Growth:
        before = list(self.rules.ledger.tables[sequence.name])
        growth = self.rules.extend(sequence, num_tokens, num_lookahead)
        after = self.rules.ledger.tables[sequence.name]
        assert growth.rewritten == (after[: len(before)] != before) == bool(growth.copies)
        assert growth.added == after[len(before) :]
        self._move(growth.copies, "g", "g")
        self._write(sequence, sequence.num_computed_tokens + num_tokens)
        return growth

    # --- lives ---

    @rule(tokens=PROMPTS, kind=st.integers(0, 5), fails=st.booleans())
    def arrive(self, tokens: list[int], kind: int, fails: bool) -> None:
        self.count += 1
        alike = [g[0] for g in self.groups if g[0].token_ids[: g[0].num_prompt_tokens] == tokens]
        older = tuple(s.name for s in alike if not s.lora_id and not s.cache_salt)
        sequence = prompt(
            f"r{self.count}/0",
            tokens,
            lora_id=int(kind == 1),
            cache_salt="s" if kind == 2 else "",
            no_cache_reuse=kind == 3,
            sibling_names=older if kind == 4 else (),
        )
        self._start([sequence], fails=fails and kind == 5)

    def _start(self, group: list[KnownSequence], *, fails: bool = False) -> None:
        first = group[0]
        first.has_siblings = len(group) > 1
        hit = self.rules.lookup(first)
        num_tokens = len(first.token_ids) - hit.num_tokens
        if self.rules.can_admit(group, hit, num_tokens) is not AllocStatus.OK:
            self.waiting.append(group)
            return
        free, needed = self.rules.num_free_gpu, self.rules.num_blocks_to_admit(group, hit, num_tokens)
        self.rules.admit(group, hit, num_tokens)
        assert self.rules.num_free_gpu == free - needed
        first.num_computed_tokens = hit.num_tokens
        if fails:
            self.rules.retract(first, hit.num_tokens)
            self.rules.release(first)
            self.rules.forget(first)
            return
        self._write(first, len(first.token_ids))
        for other in group[1:]:
            other.num_computed_tokens = 0 if self.num_states else other.num_prompt_tokens // SIZE * SIZE
            growth = self._extend(other, len(other.token_ids) - other.num_computed_tokens)
            assert not growth.added
            assert not growth.copies
        self.groups.append(group)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def start_again(self, data: st.DataObject) -> None:
        self._start(self.waiting.pop(data.draw(st.integers(0, len(self.waiting) - 1))))

    @precondition(lambda self: self.groups)
    @rule(data=st.data())
    def fork_one(self, data: st.DataObject) -> None:
        group = data.draw(st.sampled_from(self.groups))
        if len(group) < 4:
            self.count += 1
            parent = data.draw(st.sampled_from(group))
            child = copy.copy(parent)
            child.name, child.token_ids = f"{parent.name.partition('/')[0]}/{self.count}", list(parent.token_ids)
            self.rules.fork(parent, child)
            group.append(child)

    @precondition(lambda self: self.groups)
    @rule(data=st.data(), num_lookahead=st.integers(0, 5))
    def decode(self, data: st.DataObject, num_lookahead: int) -> None:
        group = data.draw(st.sampled_from(self.groups))
        if len(group[0].token_ids) + num_lookahead >= 40:
            return
        for sequence in group:
            sequence.token_ids.append(data.draw(st.integers(0, 1)))
        hashers = [chain._hasher for chain in self.chains.values()]
        trial = copy.deepcopy(self.rules, {id(hasher): hasher.copy() for hasher in hashers if hasher is not None})
        fits = self.rules.can_extend(group, 1, num_lookahead)
        assert fits == self.rules.fits_exactly(group, 1, num_lookahead)
        try:
            for sequence in group:
                trial.extend(sequence, 1, num_lookahead)
        except IndexError:
            assert not fits
        else:
            assert fits
        if fits:
            for sequence in group:
                self._extend(sequence, 1, num_lookahead)
                self.rules.commit_sampled(sequence)
        else:
            self._drop_blocks(group)

    @precondition(lambda self: self.groups)
    @rule(data=st.data())
    def look_ahead(self, data: st.DataObject) -> None:
        """R105: blocks behind the windows may be given to other sequences from now on."""
        sequence = data.draw(st.sampled_from(data.draw(st.sampled_from(self.groups))))
        free, num_freed = self.rules.num_free_gpu, 0
        after = [self._first_in_sight(sequence, group) for group in range(self.num_groups)]
        table = self.rules.ledger.tables[sequence.name][self.num_states :]
        for group, window in enumerate(self.windows):
            if window is not None:
                before = after[group]
                after[group] = max(before, (max(0, len(sequence.token_ids) - window + 1)) // SIZE * SIZE)
                gone = table[group :: self.num_groups][before // SIZE : after[group] // SIZE]
                num_freed += sum(self.rules.ledger.gpu.refs[block] == 1 for block in gone)
        self.rules.free_out_of_window([sequence], [len(sequence.token_ids)])
        assert after == [self._first_in_sight(sequence, group) for group in range(self.num_groups)]
        assert self.rules.num_free_gpu == free + num_freed

    def _first_in_sight(self, sequence: KnownSequence, group: int) -> int:
        """Its first token that is in a block of its own: null blocks come first in a table, if at all."""
        ledger = self.rules.ledger
        table = ledger.tables.get(sequence.name) or ledger.host_tables.get(sequence.name) or []
        own = table[self.num_states + group :: self.num_groups]
        has_null = self.windows[group] is not None
        assert not has_null or 0 not in own[own.count(0) :]
        return SIZE * (own.count(0) if has_null else 0)

    @precondition(lambda self: self.groups)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        self._drop_blocks(data.draw(st.sampled_from(self.groups)))

    def _drop_blocks(self, group: list[KnownSequence]) -> None:
        self.groups.remove(group)
        for sequence in group:
            self.rules.release(sequence)
            sequence.num_computed_tokens = 0
        self.waiting.append(group)

    @precondition(lambda self: self.groups)
    @rule(data=st.data())
    def swap_out(self, data: st.DataObject) -> None:
        group = data.draw(st.sampled_from(self.groups))
        tables = [self.rules.ledger.tables[s.name] for s in group]
        distinct = {block for table in tables for block in table if block}
        has_null_block = any(0 in table for table in tables) and not self.rules.ledger.cpu.reserved
        assert self.rules.can_swap_out(group) == (len(distinct) <= self.rules.num_free_cpu and not has_null_block)
        if self.rules.can_swap_out(group):
            pairs = self.rules.swap_out(group)
            assert {a for a, _ in pairs} == distinct
            self._move(pairs, "g", "c")
            self.groups.remove(group)
            self.swapped.append(group)

    @precondition(lambda self: self.swapped)
    @rule(data=st.data())
    def swap_in(self, data: st.DataObject) -> None:
        group = data.draw(st.sampled_from(self.swapped))
        if self.rules.can_swap_in(group) is AllocStatus.OK:
            self._move(self.rules.swap_in(group), "c", "g")
            self.swapped.remove(group)
            self.groups.append(group)

    @precondition(lambda self: self.groups or self.swapped)
    @rule(data=st.data())
    def end_a_sample(self, data: st.DataObject) -> None:
        queue = data.draw(st.sampled_from([q for q in (self.groups, self.swapped) if q]))
        group = data.draw(st.sampled_from(queue))
        sequence = group.pop(data.draw(st.integers(0, len(group) - 1)))
        self.rules.release(sequence)
        self.rules.forget(sequence)
        if not group:
            queue.remove(group)

    @rule()
    def reset_prefixes(self) -> None:
        in_use = self.rules.ledger.report().refs
        assert try_reset_prefixes(self.rules) == (not in_use)

    # --- what must hold ---

    @invariant()
    def the_ledger_is_whole(self) -> None:
        assert integrity.check(self.rules.ledger) == []
        assert self.rules.ledger.gpu.hash_of[0] is None

    @invariant()
    def tables_hold_what_was_computed(self) -> None:
        tables = [("g", self.rules.ledger.tables, self.groups), ("c", self.rules.ledger.host_tables, self.swapped)]
        for device, held, groups in tables:
            for s in (s for group in groups for s in group):
                for group, window in enumerate(self.windows):
                    first = self._first_in_sight(s, group)
                    assert window is None or first <= max(0, s.num_computed_tokens - window + 1)
                    for p in range(first, s.num_computed_tokens):
                        block = held[s.name][self.num_states + p // SIZE * self.num_groups + group]
                        assert self.contents[(device, block)][p % SIZE] == self._content(s, p, group)

    def teardown(self) -> None:
        if hasattr(self, "rules"):
            for group in [*self.groups, *self.swapped]:
                for sequence in group:
                    self.rules.release(sequence)
            ledger = self.rules.ledger
            assert (ledger.gpu.num_free, ledger.cpu.num_free) == (ledger.gpu.num_usable, ledger.cpu.num_usable)
            assert integrity.check(ledger) == []


TestQuireLives = QuireLives.TestCase
TestQuireLives.settings = settings(max_examples=30, stateful_step_count=50, deadline=None)


class GroupedLives(QuireLives):
    """The same with several cache groups, whose blocks are in one pool."""

    some_windows = GROUPS


TestGroupedLives = GroupedLives.TestCase
TestGroupedLives.settings = settings(max_examples=250, stateful_step_count=50, deadline=None)


@pytest.mark.long
class TestManyQuireLives(QuireLives.TestCase):
    """The same, longer."""

    settings = settings(max_examples=2500, stateful_step_count=80, deadline=None)


@pytest.mark.long
class TestManyGroupedLives(GroupedLives.TestCase):
    """The same, longer."""

    settings = settings(max_examples=2500, stateful_step_count=80, deadline=None)
