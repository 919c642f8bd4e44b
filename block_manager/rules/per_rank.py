"""Cache rules for data-parallel ranks: each rank has its own device, pool and rules; `lane` of a sequence is its rank."""

from collections import ChainMap
from collections.abc import Iterable, Sequence

from block_manager.cache_rules import AllocStatus, CachedSequence, Growth, Pair, PrefixHit, StateMoves
from block_manager.ledger import Ledger, PoolReport
from block_manager.pool import PoolCounts
from block_manager.rules.grouped_rules import GroupedRules
from block_manager.rules.v1_rules import V1PoolRules

RankRules = V1PoolRules | GroupedRules[V1PoolRules]


class PerRankLedger(Ledger):
    """The ledgers of all ranks as one: all tables, summed counts. Block ids are per rank; block names contain the
    rank.

    Its own `gpu` and `cpu` are the pools of rank 0; all ranks have equal sizes.
    """

    def __init__(self, ranks: list[Ledger]) -> None:
        super().__init__(ranks[0].block_size, ranks[0].gpu, ranks[0].cpu)
        self.ranks = ranks
        self.num_groups, self.windows = ranks[0].num_groups, ranks[0].windows
        self.num_state_blocks = ranks[0].num_state_blocks
        self.tables = ChainMap(*[ledger.tables for ledger in ranks])
        self.host_tables = ChainMap(*[ledger.host_tables for ledger in ranks])

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks needed for `num_tokens` tokens on a rank."""
        return self.ranks[0].blocks_for(num_tokens)

    def most_blocks(self, num_tokens: int, num_sequences: int = 1) -> int:
        """Blocks that suffice for so many sequences of one request on a rank."""
        return self.ranks[0].most_blocks(num_tokens, num_sequences)

    def parts(self) -> list[Ledger]:
        """The ledgers, one per rank."""
        return self.ranks

    def named_tables(self) -> dict[str, list[str]]:
        """All tables with block names: block 3 of rank 1 is "g3@1"."""
        return {
            name: [_at(block, rank) for block in blocks]
            for rank, ledger in enumerate(self.ranks)
            for name, blocks in ledger.named_tables().items()
        }

    def cached_blocks(self) -> list[str]:
        """Names of free cached blocks, rank by rank."""
        return [_at(block, rank) for rank, ledger in enumerate(self.ranks) for block in ledger.cached_blocks()]

    def counts(self) -> tuple[PoolCounts, PoolCounts]:
        """Counts summed over all ranks."""
        counts = [ledger.counts() for ledger in self.ranks]
        return _sum(gpu for gpu, _ in counts), _sum(cpu for _, cpu in counts)

    def report(self) -> PoolReport:
        """Counts summed over all ranks; references by block name as in `named_tables`."""
        reports = [ledger.report() for ledger in self.ranks]
        refs = {_at(block, rank): n for rank, report in enumerate(reports) for block, n in report.refs.items()}
        gpu, cpu = _sum(r.gpu for r in reports), _sum(r.cpu for r in reports)
        return PoolReport(self.block_size, gpu, cpu, refs, self.num_state_blocks)


class PerRankRules:
    """Delegates each call to the rules of the sequence's rank. Sequences without a rank hold no blocks."""

    device_pool = None
    journals_prefixes = False

    def __init__(self, ranks: Sequence[RankRules]) -> None:
        self.watermark_blocks = 0
        self._ranks = list(ranks)
        self.ledger: Ledger = PerRankLedger([rules.ledger for rules in ranks])

    @property
    def num_free_gpu(self) -> int:
        """Free device blocks of all ranks."""
        return sum(rules.num_free_gpu for rules in self._ranks)

    @property
    def num_free_cpu(self) -> int:
        """Free host blocks of all ranks."""
        return sum(rules.num_free_cpu for rules in self._ranks)

    @property
    def capacity_blocks(self) -> int:
        """Blocks that sequences of one rank can use."""
        return self._ranks[0].capacity_blocks

    @property
    def capacity_tokens(self) -> int:
        """Tokens of a sequence that has a rank to itself."""
        return self._ranks[0].capacity_tokens

    @property
    def has_windows(self) -> bool:
        """True if `free_out_of_window` frees blocks."""
        return self._ranks[0].has_windows

    @property
    def hits(self) -> tuple[int, int]:
        """(lookups, hits) in blocks, summed over all ranks."""
        each = [rules.hits for rules in self._ranks]
        return sum(lookups for lookups, _ in each), sum(hits for _, hits in each)

    def num_free_of(self, rank: int) -> int:
        """Free device blocks of one rank."""
        return self._ranks[rank].num_free_gpu

    def known_tokens(self, sequence: CachedSequence) -> list[int]:
        """Length of the sequence's cached prefix on each rank, for a sequence without a rank. Leaves no state behind."""
        known = [rules.lookup(sequence).num_tokens for rules in self._ranks]
        for rules in self._ranks:
            rules.forget(sequence)
        return known

    def resize(self, num_gpu_blocks: int, num_cpu_blocks: int) -> None:
        """Change the pool sizes. ValueError if blocks in use would be removed."""
        for rules in self._ranks:
            if rules.ledger.gpu.num_blocks - num_gpu_blocks > rules.num_free_gpu:
                raise ValueError(f"a rank has only {rules.num_free_gpu} free blocks")
        for rules in self._ranks:
            rules.resize(num_gpu_blocks, num_cpu_blocks)

    # --- a group starts and continues -------------------------------------------------------------------------------

    def lookup(self, sequence: CachedSequence) -> PrefixHit:
        """Its longest cached prefix on its rank."""
        return self._of(sequence).lookup(sequence)

    def first_key(self, sequence: CachedSequence) -> bytes | None:
        """Hash of its first block."""
        return self._ranks[0].first_key(sequence)

    def num_cached_tokens(self, sequence: CachedSequence) -> int:
        """The most that a rank has cached of it."""
        return max(self.known_tokens(sequence))

    def can_admit(
        self, sequences: Sequence[CachedSequence], hit: PrefixHit, num_new_tokens: int, num_lookahead: int = 0
    ) -> AllocStatus:
        """Whether its rank has blocks to start the group."""
        return self._of(sequences[0]).can_admit(sequences, hit, num_new_tokens, num_lookahead)

    def admit(
        self, sequences: Sequence[CachedSequence], hit: PrefixHit, num_new_tokens: int, num_lookahead: int = 0
    ) -> None:
        """Create the tables on its rank."""
        self._of(sequences[0]).admit(sequences, hit, num_new_tokens, num_lookahead)

    def can_extend(self, sequences: Sequence[CachedSequence], num_new_tokens: int, num_lookahead: int = 0) -> bool:
        """Whether its rank has blocks for so many more tokens."""
        return self._of(sequences[0]).can_extend(sequences, num_new_tokens, num_lookahead)

    def fits_exactly(self, sequences: Sequence[CachedSequence], num_new_tokens: int, num_lookahead: int = 0) -> bool:
        """Whether its rank has blocks for so many more tokens, exactly."""
        return self._of(sequences[0]).fits_exactly(sequences, num_new_tokens, num_lookahead)

    def extend(self, sequence: CachedSequence, num_new_tokens: int, num_lookahead: int = 0) -> Growth:
        """Allocate blocks on its rank."""
        return self._of(sequence).extend(sequence, num_new_tokens, num_lookahead)

    def num_blocks_to_admit(
        self, sequences: Sequence[CachedSequence], hit: PrefixHit, num_new_tokens: int, num_lookahead: int = 0
    ) -> int:
        """Free blocks of its rank that the group takes to start."""
        return self._of(sequences[0]).num_blocks_to_admit(sequences, hit, num_new_tokens, num_lookahead)

    def num_blocks_to_extend(self, sequences: Sequence[CachedSequence], num_new_tokens: int) -> int:
        """Free blocks of its rank that so many more tokens of each take."""
        return self._of(sequences[0]).num_blocks_to_extend(sequences, num_new_tokens)

    def fork(self, parent: CachedSequence, child: CachedSequence) -> None:
        """Share the parent's blocks on its rank."""
        self._of(parent).fork(parent, child)

    def commit(self, sequences: Sequence[CachedSequence], now: float) -> StateMoves | None:
        """Commit the sequences of a step, which are of one rank."""
        return self._of(sequences[0]).commit(sequences, now) if sequences else None

    def num_computed_blocks(self, sequences: Sequence[CachedSequence]) -> int:
        """Leading blocks that need no computing, on its rank."""
        return self._of(sequences[0]).num_computed_blocks(sequences)

    def num_common_prefix_blocks(self, sequences: Sequence[CachedSequence]) -> int:
        """Leading blocks common to all tables; the sequences are of one rank."""
        return self._of(sequences[0]).num_common_prefix_blocks(sequences) if sequences else 0

    def free_out_of_window(self, sequences: Sequence[CachedSequence], num_tokens: Sequence[int]) -> list[int]:
        """Free blocks outside the sliding windows; see `PoolRules.free_out_of_window`."""
        each = zip(sequences, num_tokens, strict=True)
        return [sum(self._of(sequence).free_out_of_window([sequence], [number])) for sequence, number in each]

    def next_out_of_window(self, num_tokens: int) -> int:
        """See `V1PoolRules.next_out_of_window`; equal on all ranks."""
        return self._ranks[0].next_out_of_window(num_tokens)

    def commit_sampled(self, sequence: CachedSequence) -> None:
        """Register full blocks on its rank."""
        self._of(sequence).commit_sampled(sequence)

    def retract(self, sequence: CachedSequence, num_computed_tokens: int) -> None:
        """Unregister blocks on its rank."""
        self._of(sequence).retract(sequence, num_computed_tokens)

    # --- a group moves or ends --------------------------------------------------------------------------------------

    def can_swap_out(self, sequences: Sequence[CachedSequence]) -> bool:
        """Return False."""
        return self._of(sequences[0]).can_swap_out(sequences)

    def swap_out(self, sequences: Sequence[CachedSequence]) -> list[Pair]:
        """Raise AssertionError."""
        return self._of(sequences[0]).swap_out(sequences)

    def can_swap_in(self, sequences: Sequence[CachedSequence], num_lookahead: int = 0) -> AllocStatus:
        """Return NEVER."""
        return self._of(sequences[0]).can_swap_in(sequences, num_lookahead)

    def num_blocks_to_swap_in(self, sequences: Sequence[CachedSequence], num_lookahead: int = 0) -> int:
        """Return 0."""
        return self._of(sequences[0]).num_blocks_to_swap_in(sequences, num_lookahead)

    def swap_in(self, sequences: Sequence[CachedSequence]) -> list[Pair]:
        """Raise AssertionError."""
        return self._of(sequences[0]).swap_in(sequences)

    def release(self, sequence: CachedSequence) -> None:
        """Free its blocks on its rank; no-op without a rank."""
        self._of(sequence).release(sequence)

    def forget(self, sequence: CachedSequence) -> None:
        """Drop what its rank remembers for it."""
        self._of(sequence).forget(sequence)

    def reset_prefixes(self) -> None:
        """Drop all cached prefixes of all ranks."""
        for rules in self._ranks:
            rules.reset_prefixes()

    def _of(self, sequence: CachedSequence) -> RankRules:
        return self._ranks[sequence.lane or 0]


def _at(block: str, rank: int) -> str:
    return f"{block}@{rank}"


def _sum(counts: Iterable[PoolCounts]) -> PoolCounts:
    each = list(counts)
    return PoolCounts(sum(c.total for c in each), sum(c.free for c in each), sum(c.cached for c in each))
