"""Cache rules for models with several cache groups, each of which has its own block tables, or with states.

A cache group is a set of layers with one sliding window, or with none. All groups have equally many layers, so that a
block is equally large in each and all take their blocks from one pool, as in vLLM's hybrid KV cache manager
(`kv_cache_coordinator`).
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any, Self

from block_manager.cache_rules import CachedSequence, Growth, Pair, PrefixHit, StateMoves
from block_manager.ledger import Ledger
from block_manager.pool import BlockPool
from block_manager.rules.cache_groups import flat, next_behind, num_behind, take_behind
from block_manager.rules.grouped_ends import GroupedEnds, Rules
from block_manager.rules.grouped_ledger import GroupedLedger
from block_manager.rules.prefix_book import NEVER
from block_manager.rules.quire_rules import QuireRules, SwapNeeds, watermark_for
from block_manager.rules.state_tables import StateTables
from block_manager.rules.v1_rules import V1PoolRules


class GroupedRules(GroupedEnds[Rules]):
    """The rules of all groups as one: needs are summed, and compared once with the common pool.

    A sequence has equally many blocks in each group, null blocks included. Hits, tables and growths are flat: at each
    position there is one block for each group, in order. In tables the states' blocks come first, in hits those of the
    checkpoint.
    """

    def __init__(
        self, groups: Sequence[Rules], states: StateTables, *, num_ahead_tokens: int, watermark_blocks: int = 0
    ) -> None:
        """`groups`, `states`: over the same pools and hash chains. `num_ahead_tokens`: see `GroupedLedger`."""
        windows = [rules.window for rules in groups]
        self._ledger = GroupedLedger([rules.ledger for rules in groups], windows, num_ahead_tokens, states)
        super().__init__(self._ledger, groups, states, watermark_blocks)
        self._whole_first = sorted(range(len(groups)), key=lambda number: windows[number] is not None)
        self._tables = [rules.ledger.tables for rules in groups]
        self._windowed = [(tables, window) for tables, window in zip(self._tables, windows, strict=True) if window]
        self._first = self._groups[self._whole_first[0]]
        self._windows = set(self._ledger.windows)
        self.capacity_tokens = self._capacity_tokens()

    @classmethod
    def make(
        cls,
        windows: Sequence[int | None],
        *,
        block_size: int,
        num_gpu_blocks: int,
        num_cpu_blocks: int,
        num_ahead_tokens: int,
        watermark_blocks: int | None = None,
        num_state_blocks: int = 0,
        checkpoint_tokens: int = 0,
        keeps_unknown: bool = False,
        **values: Any,
    ) -> Self:
        """Rules over new ledgers. `windows`: of each group in tokens, None = the whole sequence; `values`: those of V1's
        rules. `num_gpu_blocks` includes the null block, and so does `num_cpu_blocks` if there is a window.
        `num_state_blocks`, `checkpoint_tokens`, `keeps_unknown`: see `StateTables`.
        """
        cpu = BlockPool(num_cpu_blocks, num_reserved=int(any(windows)))
        gpu = BlockPool(num_gpu_blocks, num_reserved=1)
        values = {**values, "chains": {} if values.get("chains") is None else values["chains"]}
        groups = [
            cls._group(Ledger(block_size, gpu, cpu), window=window, group=number, **values)
            for number, window in enumerate(windows)
        ]
        states = groups[0].states_beside(
            Ledger(block_size, gpu, cpu), num_state_blocks, checkpoint_tokens, keeps_unknown=keeps_unknown
        )
        watermark = cls._watermark(watermark_blocks, num_gpu_blocks)
        return cls(groups, states, num_ahead_tokens=num_ahead_tokens, watermark_blocks=watermark)

    _group: Callable[..., Any] = V1PoolRules

    @staticmethod
    def _watermark(asked: int | None, num_gpu_blocks: int) -> int:
        return 0

    def _capacity_tokens(self) -> int:
        longest, size = self._groups[0].max_model_len, self.ledger.block_size
        lengths = range(0, longest + size, size)
        return lengths[bisect_right(lengths, self._pool.num_usable, key=self.ledger.blocks_for) - 1]

    @property
    def has_windows(self) -> bool:
        """True if a group has a sliding window."""
        return bool(self._ledger.windows)

    @property
    def hits(self) -> tuple[int, int]:
        """(lookups, hits) in positions of block tables, which are those of any group."""
        return self._groups[0].hits

    def resize(self, num_gpu_blocks: int, num_cpu_blocks: int) -> None:
        """Change the pool sizes. ValueError if blocks in use would be removed."""
        super().resize(num_gpu_blocks, num_cpu_blocks)
        self.capacity_tokens = self._capacity_tokens()

    # --- a group starts ---------------------------------------------------------------------------------------------

    def lookup(self, sequence: CachedSequence) -> PrefixHit:
        """The longest prefix of which each group has cached what the next token attends to, with a checkpoint behind it.

        It ends in the prompt if siblings share that, since null blocks behind its end could be in their windows.
        """
        found: dict[int, list[int | None]] = {}
        most = len(sequence.token_ids) - 1
        most = min(most, sequence.num_prompt_tokens) if sequence.has_siblings else most
        length, before = most // self.ledger.block_size, -1
        while length != before:
            before = length
            for number in self._whole_first:
                rules = self._groups[number]
                if number not in found:
                    found[number] = rules.find_blocks(sequence, length)
                length = rules.longest_hit(found[number][:length])
            length = self._states.longest_hit(sequence, length)
        checkpoint = self._states.checkpoint(sequence, length)
        tables = [rules.shared_table(found[number][:length]) for number, rules in enumerate(self._groups)]
        return PrefixHit((*checkpoint, *flat(tables)), length * self.ledger.block_size)

    def first_key(self, sequence: CachedSequence) -> bytes | None:
        """Key of its first block in a group without a window, if there is one: the block is cached longest there."""
        return self._first.first_key(sequence)

    def num_cached_tokens(self, sequence: CachedSequence) -> int:
        """Tokens of its longest cached prefix."""
        return self.lookup(sequence).num_tokens

    def num_to_admit(self, sequences: Sequence[CachedSequence], hit: PrefixHit, num_new_tokens: int) -> int:
        """Blocks behind the hit, those of the hit that are free, in all groups, and the states' blocks."""
        needed = self._num_with_checkpoint(sequences, hit, num_new_tokens)
        return needed - self._goes_on_in_place(hit, needed) * self._states.num_blocks

    def _num_with_checkpoint(self, sequences: Sequence[CachedSequence], hit: PrefixHit, num_new_tokens: int) -> int:
        """The same if the first sequence reads the checkpoint and has blocks of its own besides."""
        of_groups = sum(rules.num_to_admit(sequences, one, num_new_tokens) for rules, one in self._with_hits(hit))
        return of_groups + self._states.num_to_admit(len(sequences), self._checkpoint_of(hit))

    def _goes_on_in_place(self, hit: PrefixHit, needed: int) -> bool:
        """True if the first sequence overwrites the checkpoint, as there is no room for both."""
        return not self._has_room(needed) and self._states.is_free(self._checkpoint_of(hit))

    def _checkpoint_of(self, hit: PrefixHit) -> tuple[int, ...]:
        return hit.block_ids[: self._states.num_blocks]

    def num_alone(self, sequences: Sequence[CachedSequence], num_new_tokens: int, num_lookahead: int) -> int:
        """Blocks for all tokens that they have; of a window, of the first sequence at most those held at once.

        Several sequences start with all blocks of their prompt and of their own outputs.
        """
        first, size, needed = sequences[0], self.ledger.block_size, 0
        num_shared = first.num_prompt_tokens // size if len(sequences) > 1 else 0
        for rules, most in zip(self._groups, self._ledger.most_held, strict=True):
            num_first = len(first.token_ids) + num_lookahead
            if most is not None:
                num_first = min(num_first, (num_shared + most) * size)
            needed += rules.num_to_admit(sequences, PrefixHit(), num_first)
        return needed + self._states.num_to_admit(len(sequences), ())

    def admit(
        self, sequences: Sequence[CachedSequence], hit: PrefixHit, num_new_tokens: int, num_lookahead: int = 0
    ) -> None:
        """Create their tables in all groups. The hits of all are referenced before any group allocates a block."""
        needed = self._num_with_checkpoint(sequences, hit, num_new_tokens + num_lookahead)
        in_place = self._goes_on_in_place(hit, needed)
        self._pool.share(hit.block_ids)
        self._states.start(sequences, self._checkpoint_of(hit), in_place=in_place)
        for rules, one in self._with_hits(hit):
            rules.start(sequences, one, num_new_tokens, num_lookahead)

    def _with_hits(self, hit: PrefixHit) -> list[tuple[Rules, PrefixHit]]:
        step, blocks = len(self._groups), hit.block_ids[self._states.num_blocks :]
        return [(rules, PrefixHit(blocks[number::step], hit.num_tokens)) for number, rules in enumerate(self._groups)]

    # --- a group continues ------------------------------------------------------------------------------------------

    def num_to_extend(self, sequences: Sequence[CachedSequence], num_new_tokens: int) -> int:
        """Blocks behind the ends of their tables and copies, in all groups."""
        taking = [sequence for sequence in sequences if not self._stays_inside(sequence, num_new_tokens)]
        if not taking:
            return 0
        of_states = self._states.num_to_extend(taking, self._states.ledger.tables, self._pool.refs)
        return of_states + sum(rules.num_to_extend(taking, num_new_tokens) for rules in self._groups)

    def extend(self, sequence: CachedSequence, num_new_tokens: int, num_lookahead: int = 0) -> Growth:
        """Allocate blocks for `num_new_tokens` more tokens in all groups. Each copies the blocks that it shares itself."""
        if self._stays_inside(sequence, num_new_tokens + num_lookahead):
            return Growth()
        copies = self._states.extend(sequence)
        growths = [rules.extend(sequence, num_new_tokens, num_lookahead) for rules in self._groups]
        copies += [pair for growth in growths for pair in growth.copies]
        return Growth(flat(growth.added for growth in growths), copies, bool(copies))

    def _stays_inside(self, sequence: CachedSequence, num_new_tokens: int) -> bool:
        """True if so many more output tokens fill no block and go into blocks that the sequence has for itself, in all
        groups: they change no table. Most steps of decode do.
        """
        start, size, refs = sequence.num_computed_tokens, self.ledger.block_size, self._pool.refs
        at = start // size
        if start < sequence.num_prompt_tokens or not start % size or (start + num_new_tokens) // size != at:
            return False
        if self._states.is_shared(sequence):
            return False
        for tables in self._tables:
            if refs[tables[sequence.name][at]] > 1:
                return False
        return not self._first.has_unregistered(sequence, start)

    def fork(self, parent: CachedSequence, child: CachedSequence) -> None:
        """Let the child share all blocks of its parent."""
        self._states.fork(parent, child)
        for rules in self._groups:
            rules.fork(parent, child)

    def commit(self, sequences: Sequence[CachedSequence], now: float) -> StateMoves | None:
        """See `StateTables.commit`."""
        return self._states.commit(sequences) if self._states.num_blocks else None

    def num_common_prefix_blocks(self, sequences: Sequence[CachedSequence]) -> int:
        """Leading positions of the first sequence at which every table has the same blocks; 0 when caching is off."""
        return min(rules.num_common_prefix_blocks(sequences) for rules in self._groups)

    def take_out_of_window(self, sequence: CachedSequence, num_tokens: int) -> list[int]:
        """See `PoolRules.take_out_of_window`; group by group."""
        name, size, blocks = sequence.name, self.ledger.block_size, list[int]()
        behind = {window: num_behind(num_tokens, window, size) for window in self._windows}
        for tables, window in self._windowed:
            if name in tables:
                blocks += take_behind(tables[name], behind[window])
        return blocks

    def next_out_of_window(self, num_tokens: int) -> int:
        """The number of computed tokens from which on blocks are outside a window that were not at `num_tokens`."""
        size = self.ledger.block_size
        return min([next_behind(num_tokens, window, size) for window in self._windows], default=NEVER)

    def commit_sampled(self, sequence: CachedSequence) -> None:
        """Register blocks that a result made full, and checkpoints behind them."""
        self._states.confirm(sequence)
        num_tokens = sequence.num_computed_tokens - sequence.num_placeholders
        if sequence.name in self._first.ledger.tables and self._first.has_unregistered(sequence, num_tokens):
            for rules in self._groups:
                rules.commit_sampled(sequence)

    def retract(self, sequence: CachedSequence, num_computed_tokens: int) -> None:
        """Unregister the blocks from that token offset on: their KV was never computed."""
        self._states.retract(sequence, num_computed_tokens)
        for rules in self._groups:
            rules.retract(sequence, num_computed_tokens)

    # --- a sequence ends --------------------------------------------------------------------------------------------

    def release(self, sequence: CachedSequence) -> None:
        """Free its blocks: those of its states, which hold no prefix, then group by group; those of each last first."""
        self._states.release(sequence)
        for rules in self._groups:
            rules.release(sequence)

    def forget(self, sequence: CachedSequence) -> None:
        """Drop the hash chain of a sequence that ended."""
        for rules in self._groups:
            rules.forget(sequence)


class GroupedQuireRules(GroupedRules[QuireRules], SwapNeeds):
    """The same for Quire's rules: with swap and a watermark."""

    _group = QuireRules

    @staticmethod
    def _watermark(asked: int | None, num_gpu_blocks: int) -> int:
        return watermark_for(num_gpu_blocks) if asked is None else asked

    def can_swap_out(self, sequences: Sequence[CachedSequence]) -> bool:
        """Whether the host has room for the distinct blocks of all groups."""
        needed = sum(rules.num_to_swap_out(sequences) for rules in self._groups)
        needed += self._states.num_to_swap_out(sequences)
        return needed <= self.num_free_cpu and all(rules.can_swap_out(sequences) for rules in self._groups)

    def swap_out(self, sequences: Sequence[CachedSequence]) -> list[Pair]:
        """Move the blocks of states and of all groups to the host."""
        return self._states.swap_out(sequences) + [p for rules in self._groups for p in rules.swap_out(sequences)]

    def count_return(self, sequences: Sequence[CachedSequence], num_lookahead: int) -> tuple[int, int, int]:
        """See `SwapNeeds`; sums over all groups. States are never on the device still."""
        counts = [rules.count_return(sequences, num_lookahead) for rules in self._groups]
        num_new, num_reused, num_revived = (sum(each) for each in zip(*counts, strict=True))
        return num_new + self._states.num_to_swap_in(sequences), num_reused, num_revived

    def swap_in(self, sequences: Sequence[CachedSequence]) -> list[Pair]:
        """Move the blocks of states and of all groups back. What the device still caches is kept first, in all groups."""
        kept = [rules.keep_cached(sequences) for rules in self._groups]
        of_states = self._states.swap_in(sequences)
        of_groups = [rules.move_in(sequences, own) for rules, own in zip(self._groups, kept, strict=True)]
        return of_states + [pair for pairs in of_groups for pair in pairs]
