"""Random lives under the rules of 0.6.3 and of 2023, against a model of what a worker would have written into each block."""

from collections.abc import Callable

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from block_manager import integrity
from block_manager.cache_rules import AllocStatus, Pair, PrefixHit, try_reset_prefixes
from block_manager.compat.vllm_063 import Vllm063Rules
from block_manager.compat.vllm_2023 import Vllm2023Rules
from tests.support.core.sequences import KnownSequence, prompt

SIZE = 4
Group = list[KnownSequence]
Slots = dict[int, tuple[object, ...]]


class V0Lives(RuleBasedStateMachine):
    """Groups start, fork, grow, lose samples, move, are recomputed, fail and end, one group a step, on small devices.

    Between steps every live sequence has one token that is not in its blocks yet. `contents` says for every slot the prefix whose
    KV a worker would have written there; the worker never skips what is said to be computed, but what is said must be true.
    """

    make: Callable[..., Vllm063Rules | Vllm2023Rules]
    most_lookahead = 0

    @initialize(
        num_gpu=st.integers(2, 12),
        num_cpu=st.integers(0, 10),
        caching=st.booleans(),
        watermark=st.integers(0, 2),
        num_lookahead=st.integers(0, 5),
        sliding=st.sampled_from([None, None, 4, 6]),
    )
    def build(self, num_gpu, num_cpu, caching, watermark, num_lookahead, sliding) -> None:
        self.rules = type(self).make(
            block_size=SIZE, num_gpu_blocks=num_gpu, num_cpu_blocks=num_cpu, max_model_len=64,
            prefix_caching=caching, watermark_blocks=watermark, sliding_window=sliding,
        )  # fmt: skip
        self.caching = caching
        self.num_lookahead = min(num_lookahead, self.most_lookahead)
        self.contents: dict[tuple[str, int], Slots] = {}
        self.running: list[Group] = []
        self.swapped: list[Group] = []
        self.waiting: list[Group] = []
        self.num_dropped: dict[str, int] = {}
        self.num_named = self.now = 0

    # --- what a worker would do, and what a step does ---

    def _prefix(self, sequence: KnownSequence, position: int) -> tuple[object, ...]:
        return (sequence.lora_id, sequence.cache_salt, *sequence.token_ids[: position + 1])

    def _move(self, pairs: list[Pair], source: str, target: str) -> None:
        moved = {(target, b): dict(self.contents.get((source, a), {})) for a, b in pairs}
        assert len(moved) == len(pairs) or self.caching
        self.contents.update(moved)

    def _holds(self, sequence: KnownSequence, device: str, table: list[int], positions: range) -> None:
        null = self.rules.ledger.gpu.reserved
        for p in positions:
            if device == "c" or table[p // SIZE] not in null:
                slots = self.contents.get((device, table[p // SIZE]), {})
                assert slots.get(p % SIZE) == self._prefix(sequence, p), (sequence.name, p)

    def _run(self, group: Group, copies: list[Pair], fails: bool) -> None:
        """The rest of a step that schedules all tokens of a group that are not computed yet."""
        self.now += 1
        for sequence in group:
            sequence.num_scheduled_tokens = len(sequence.token_ids) - sequence.num_computed_tokens
        num_computed_blocks = self.rules.num_computed_blocks(group)
        self.rules.commit(group, float(self.now))
        if fails:
            for sequence in group:
                self.rules.retract(sequence, sequence.num_computed_tokens)
            self._recompute(group)
            return
        self._move(copies, "g", "g")
        tables = self.rules.ledger.tables
        assert num_computed_blocks < min(len(tables[s.name]) for s in group)
        if len(group) == 1:
            self._holds(group[0], "g", tables[group[0].name], range(num_computed_blocks * SIZE))
        for sequence in group:
            for p in range(sequence.num_computed_tokens, len(sequence.token_ids)):
                slots = self.contents.setdefault(("g", tables[sequence.name][p // SIZE]), {})
                slots[p % SIZE] = self._prefix(sequence, p)
            sequence.num_computed_tokens = len(sequence.token_ids)
        self.running.append(group)

    def _results(self, group: Group, tokens: list[int]) -> None:
        for sequence, token in zip(group, tokens, strict=False):
            sequence.token_ids.append(token)

    def _recompute(self, group: Group) -> None:
        for sequence in group:
            self.rules.release(sequence)
            sequence.num_computed_tokens = 0
        self.waiting.append(group)

    def _pick(self, groups: list[Group], data: st.DataObject) -> Group:
        return groups.pop(data.draw(st.integers(0, len(groups) - 1)))

    # --- lives ---

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=14), kind=st.integers(0, 6))
    def arrive(self, tokens: list[int], kind: int) -> None:
        self.num_named += 1
        self.waiting.append([
            prompt(
                f"r{self.num_named}/0", tokens,
                lora_id=int(kind == 1), cache_salt="t" if kind == 2 else "", no_cache_reuse=kind == 3,
            )
        ])  # fmt: skip

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), fails=st.booleans(), results=st.lists(st.integers(0, 1), min_size=8, max_size=8))
    def admit(self, data: st.DataObject, fails: bool, results: list[int]) -> None:
        group = self._pick(self.waiting, data)
        status = self.rules.can_admit(group, PrefixHit(), len(group[0].token_ids))
        if status is not AllocStatus.OK:
            assert status is AllocStatus.NEVER or self.running, "LATER on an empty device would wait for ever"
            if status is AllocStatus.LATER:
                self.waiting.append(group)
            return
        self.rules.admit(group, PrefixHit(), len(group[0].token_ids))
        if group[0].no_cache_reuse:
            num_shared = group[0].num_prompt_tokens // SIZE if len(group) > 1 else 0
            refs = [self.rules.ledger.gpu.refs[b] for b in self.rules.ledger.tables[group[0].name]]
            assert refs[:num_shared] == [len(group)] * num_shared and set(refs[num_shared:]) <= {1}
        self._run(group, [], fails)
        if not fails:
            self._results(group, results)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), fails=st.booleans(), results=st.lists(st.integers(0, 1), min_size=8, max_size=8))
    def extend(self, data: st.DataObject, fails: bool, results: list[int]) -> None:
        group = self._pick(self.running, data)
        if not self.rules.can_extend(group, 1, self.num_lookahead):
            self._recompute(group)
            return
        self._run(group, self._append(group), fails and results[0] == 0)
        if group in self.running:
            self._results(group, results)

    def _append(self, group: Group) -> list[Pair]:
        copies: list[Pair] = []
        for sequence in group:
            before = list(self.rules.ledger.tables[sequence.name])
            growth = self.rules.extend(sequence, 1, self.num_lookahead)
            after = self.rules.ledger.tables[sequence.name]
            assert growth.added == after[len(before) :]
            assert growth.rewritten == (after[: len(before)] != before)
            copies += growth.copies
        return copies

    @precondition(lambda self: any(len(g) < 4 for g in self.running))
    @rule(data=st.data(), token=st.integers(2, 3))
    def fork(self, data: st.DataObject, token: int) -> None:
        """A child with another last token, as for samples and beams."""
        group = data.draw(st.sampled_from([g for g in self.running if len(g) < 4]))
        parent = data.draw(st.sampled_from(group))
        self.num_named += 1
        child = KnownSequence(
            f"{group[0].name}-{self.num_named}", [*parent.token_ids[:-1], token],
            parent.num_prompt_tokens, parent.num_computed_tokens,
            cache_salt=parent.cache_salt, lora_id=parent.lora_id, no_cache_reuse=parent.no_cache_reuse,
        )  # fmt: skip
        self.rules.fork(parent, child)
        group.append(child)

    @precondition(lambda self: self.running or self.swapped)
    @rule(data=st.data())
    def end_one(self, data: st.DataObject) -> None:
        """A sample ends, wherever it is; twice is as good as once (R97, R206)."""
        group = data.draw(st.sampled_from(self.running + self.swapped))
        sequence = group.pop(data.draw(st.integers(0, len(group) - 1)))
        self.rules.release(sequence)
        self.rules.release(sequence)
        self.rules.forget(sequence)
        self.running = [g for g in self.running if g]
        self.swapped = [g for g in self.swapped if g]

    @precondition(lambda self: self.running)
    @rule(data=st.data(), swap=st.booleans())
    def preempt(self, data: st.DataObject, swap: bool) -> None:
        group = self._pick(self.running, data)
        if not swap or not self.rules.can_swap_out(group):
            self._recompute(group)
            return
        for sequence in group:
            table = self.rules.ledger.tables[sequence.name]
            self.num_dropped[sequence.name] = sum(b in self.rules.ledger.gpu.reserved for b in table)
        self._move(self.rules.swap_out(group), "g", "c")
        self.swapped.append(group)

    @precondition(lambda self: self.swapped)
    @rule(data=st.data(), fails=st.booleans(), results=st.lists(st.integers(0, 1), min_size=8, max_size=8))
    def come_back(self, data: st.DataObject, fails: bool, results: list[int]) -> None:
        group = self._pick(self.swapped, data)
        status = self.rules.can_swap_in(group, self.num_lookahead)
        if status is not AllocStatus.OK:
            assert status is AllocStatus.NEVER or self.running, "LATER on an empty device would wait for ever"
            self.swapped.append(group)
            return
        self._move(self.rules.swap_in(group), "c", "g")
        self._run(group, self._append(group), fails and results[0] == 0)
        if group in self.running:
            self._results(group, results)

    @rule()
    def reset(self) -> None:
        in_use = bool(self.running or self.swapped)
        assert try_reset_prefixes(self.rules) is not in_use
        if not in_use:
            assert self.rules.ledger.gpu.counts().cached == 0

    @invariant()
    def all_is_well(self) -> None:
        if not hasattr(self, "rules"):
            return
        assert integrity.check(self.rules.ledger) == []
        for device, groups, tables in (
            ("g", self.running, self.rules.ledger.tables),
            ("c", self.swapped, self.rules.ledger.host_tables),
        ):
            assert sorted(tables) == sorted(s.name for g in groups for s in g)
            for sequence in (s for g in groups for s in g):
                table = tables[sequence.name]
                dropped = 0 if device == "g" else self.num_dropped[sequence.name]
                reach = range(dropped * SIZE, sequence.num_computed_tokens)
                self._holds(sequence, device, [-1] * dropped + table, reach)

    def teardown(self) -> None:
        if hasattr(self, "rules"):
            for sequence in (s for g in self.running + self.swapped for s in g):
                self.rules.release(sequence)
            ledger = self.rules.ledger
            assert ledger.gpu.num_free == ledger.gpu.num_usable >= ledger.gpu.num_blocks - 1
            assert ledger.cpu.num_free == ledger.cpu.num_usable == ledger.cpu.num_blocks
            assert integrity.check(ledger) == []


class Lives063(V0Lives):
    """Under 0.6.3."""

    make = Vllm063Rules.make
    most_lookahead = 5


class Lives2023(V0Lives):
    """Under 2023."""

    make = Vllm2023Rules.make


def _case(machine: type[V0Lives], examples: int, steps: int) -> type:
    case = type("Case", (machine,), {}).TestCase
    case.settings = settings(max_examples=examples, stateful_step_count=steps, deadline=None)
    return case


class TestLives063(_case(Lives063, 25, 40)):
    """R16, R17, R19, R20, R21, R22, R73, R74, R97, R100, R102, R103, R117, R118, R121, R200, R203, R206."""


class TestLives2023(_case(Lives2023, 25, 40)):
    """R16, R17, R19, R20, R21, R22, R73, R74, R97, R100, R102, R103, R109, R110, R113, R114, R200, R203, R206."""


@pytest.mark.long
class TestLongLives063(_case(Lives063, 2500, 60)):
    """The same for longer."""


@pytest.mark.long
class TestLongLives2023(_case(Lives2023, 2500, 60)):
    """The same for longer."""
