"""Random lives under Quire's rules with states, against a model of the states that a worker would have in each block."""

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import initialize, invariant

from block_manager.cache_rules import PrefixHit
from block_manager.rules.cache_groups import longest_hit
from block_manager.rules.grouped_rules import GroupedQuireRules
from tests.block_manager.rules.test_quire_lives import GROUPS, SIZE, QuireLives, Windows
from tests.support.core.sequences import KnownSequence

WITH_STATES: list[Windows] = [(None,), (None,), (6,), *GROUPS]
STATE = -1
"""The slot of a block that holds states."""


class StateLives(QuireLives):
    """The same with states: each sequence begins every step with the states after its own tokens, which checkpoints and
    copies may have brought into its blocks.
    """

    some_windows = WITH_STATES

    @initialize(
        usable=st.integers(3, 12),
        host=st.integers(0, 8),
        num_states=st.integers(1, 3),
        distance=st.integers(1, 3),
        caching=st.sampled_from([True, True, False]),
        watermark=st.integers(0, 2),
        data=st.data(),
    )
    def build(
        self,
        usable: int,
        host: int,
        num_states: int,
        distance: int,
        caching: bool,
        watermark: int,
        data: st.DataObject,
    ) -> None:
        self.windows = data.draw(st.sampled_from(self.some_windows))
        self.num_groups, self.num_states = len(self.windows), num_states
        self.rules = GroupedQuireRules.make(
            self.windows,
            block_size=SIZE,
            num_gpu_blocks=self.num_groups * usable + 2 * num_states + 1,
            num_cpu_blocks=self.num_groups * host + num_states,
            num_ahead_tokens=64,
            max_model_len=64,
            prefix_caching=caching,
            watermark_blocks=watermark,
            num_state_blocks=num_states,
            checkpoint_tokens=distance * SIZE,
        )
        self.chains = self.rules._groups[0]._prefixes._chains
        self.contents = {}
        self.groups, self.swapped, self.waiting = [], [], []
        self.count = 0

    def _start(self, group: list[KnownSequence], *, fails: bool = False) -> None:
        first = group[0]
        first.has_siblings = len(group) > 1
        assert self.rules.lookup(first).num_tokens == self._longest_hit(first)
        super()._start(group, fails=fails)

    def _longest_hit(self, sequence: KnownSequence) -> int:
        """By trying all lengths: all groups have what the next token attends to, and each block of a checkpoint is there."""
        if sequence.has_siblings or sequence.no_cache_reuse or not self.rules._groups[0]._prefixes.enabled:
            return 0
        pool = self.rules.ledger.gpu
        for length in range((len(sequence.token_ids) - 1) // SIZE, 0, -1):
            found = [rules._prefixes.find_each(sequence, length) for rules in self.rules._groups]
            fits = [
                None not in blocks if window is None else longest_hit(blocks, window, SIZE) == length
                for blocks, window in zip(found, self.windows, strict=True)
            ]
            prefix = self.rules._groups[0]._prefixes.hashes(sequence, length)[length - 1]
            keys = [prefix + (2**15 + index).to_bytes(2, "little") for index in range(self.num_states)]
            if all(fits) and None not in map(pool.lookup, keys):
                return length * SIZE
        return 0

    def _write(self, sequence: KnownSequence, upto: int) -> None:
        """One step of a worker: it begins with states, computes, and keeps checkpoints."""
        start, free = sequence.num_computed_tokens, self.rules.num_free_gpu
        sequence.num_scheduled_tokens = upto - start
        moves = self.rules.commit([sequence], 0.0)
        assert moves is not None and self.rules.num_free_gpu >= free, "checkpoints are free again, and what was read"
        own = self.rules.ledger.tables[sequence.name][: self.num_states]
        begins_with = list(moves.to_read[0].block_ids) if moves.to_read else own
        if start and sequence.num_scheduled_tokens:
            found = [self.contents.get(("g", block), {}).get(STATE) for block in begins_with]
            assert found == self._states(sequence, start)
        assert [read.num_tokens for read in moves.to_read] in ([], [start])
        kept = [block for keep in moves.to_keep for block in keep.block_ids]
        assert len({*kept, *begins_with, *own}) == len(kept) + len({*begins_with, *own})
        super()._write(sequence, upto)
        for position in range(start, upto):
            for group in range(self.num_groups):
                at = self.num_states + position // SIZE * self.num_groups + group
                self.contents["g", self.rules.ledger.tables[sequence.name][at]].pop(STATE, None)
        for num_tokens, blocks in ((upto, own), *((keep.num_tokens, keep.block_ids) for keep in moves.to_keep)):
            assert start < num_tokens <= upto or not sequence.num_scheduled_tokens
            for block, content in zip(blocks, self._states(sequence, num_tokens), strict=True):
                self.contents["g", block] = {STATE: content}

    def _states(self, sequence: KnownSequence, num_tokens: int) -> list[tuple[object, ...]]:
        past = (sequence.lora_id, sequence.cache_salt, *sequence.token_ids[:num_tokens])
        return [(index, *past) for index in range(self.num_states)]

    @invariant()
    def states_are_those_of_their_tokens(self) -> None:
        tables = [("g", self.rules.ledger.tables, self.groups), ("c", self.rules.ledger.host_tables, self.swapped)]
        for device, held, groups in tables:
            for s in (s for group in groups for s in group):
                found = [self.contents[(device, block)].get(STATE) for block in held[s.name][: self.num_states]]
                assert found == self._states(s, s.num_computed_tokens)

    @invariant()
    def nothing_waits_to_be_read(self) -> None:
        assert not self.rules.ledger.reading

    @invariant()
    def what_fits_an_empty_device_is_admitted_there(self) -> None:
        """A hit never needs more than no hit where nothing else has blocks."""
        if self.rules.ledger.tables:
            return
        for group in self.waiting:
            group[0].has_siblings = len(group) > 1
            hit = self.rules.lookup(group[0])
            num_tokens = len(group[0].token_ids) - hit.num_tokens
            assert self.rules.can_admit(group, hit, num_tokens) is self.rules.can_admit(
                group, PrefixHit(), len(group[0].token_ids)
            )


TestStateLives = StateLives.TestCase
TestStateLives.settings = settings(max_examples=250, stateful_step_count=50, deadline=None)


@pytest.mark.long
class TestManyStateLives(StateLives.TestCase):
    """The same, longer."""

    settings = settings(max_examples=2500, stateful_step_count=80, deadline=None)
