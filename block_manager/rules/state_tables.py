"""Blocks with the states of sequences, for layers with recurrent states or convolutions, and checkpoints of them.

A state takes in each token once, so it cannot be shared as KV is: a sequence has a fixed number of blocks that change
with every step, however long it is. A cached prefix ends at a *checkpoint*, a copy of the states after so many tokens
that no step changes: a multiple of some distance, or the last end of a block that a repeated prompt can hit. Checkpoints
are taken from blocks that are free when a step is planned, and are free again once it is: cached blocks, evicted as such.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from block_manager.cache_rules import CachedSequence, Pair, StateBlocks, StateMoves
from block_manager.ledger import Ledger
from block_manager.rules.prefix_book import PrefixBook

_FIRST_MARK = 1 << 15
"""Keys of checkpoints end with a number as those of cache groups do, above all of these."""


class StateTables:
    """Owner of the states' blocks of every sequence, and of checkpoints until they are cached.

    `num_blocks`: of one sequence; 0 = the model has no states. `checkpoint_tokens`: distance of checkpoints, a multiple of
    the block size. `prefixes`: hashes of prefixes. `keeps_unknown`: checkpoints may end with tokens that steps in flight
    are to generate; False where these may be draft tokens, which may be rejected. `reading`: by sequence, the blocks of a
    checkpoint with which it begins, referenced until the step that does so is planned.
    """

    def __init__(
        self, ledger: Ledger, num_blocks: int, checkpoint_tokens: int, prefixes: PrefixBook, *, keeps_unknown: bool
    ) -> None:
        self.ledger = ledger
        self.num_blocks = num_blocks
        self.reading: dict[str, list[int]] = {}
        self._checkpoint_tokens = checkpoint_tokens
        self._prefixes = prefixes
        self._keeps_unknown = keeps_unknown
        self._pool = ledger.gpu
        self._unnamed: dict[str, list[StateBlocks]] = {}

    @property
    def checkpoint_tokens(self) -> int:
        """Distance of the checkpoints that steps keep; 0 = they keep none."""
        return self._checkpoint_tokens if self.num_blocks and self._prefixes.enabled else 0

    # --- hits ---------------------------------------------------------------------------------------------------------

    def longest_hit(self, sequence: CachedSequence, num_blocks: int) -> int:
        """The most of its first blocks behind which there is a checkpoint; all of them without states.

        None where siblings start with it: each would have to read the checkpoint, in steps of its own.
        """
        if not self.num_blocks:
            return num_blocks
        if not self._prefixes.enabled or sequence.no_cache_reuse or sequence.has_siblings:
            return 0
        return next((length for length in range(num_blocks, 0, -1) if self.checkpoint(sequence, length)), 0)

    def checkpoint(self, sequence: CachedSequence, num_blocks: int) -> list[int]:
        """The blocks of the checkpoint behind its first blocks; none if one of them is missing."""
        found = self._pool.find_run(self._keys(sequence, num_blocks)) if num_blocks else []
        return found if len(found) == self.num_blocks else []

    # --- a group starts and continues -----------------------------------------------------------------------------------

    def num_to_admit(self, num_sequences: int, checkpoint: Sequence[int]) -> int:
        """Blocks of their own, and those of the checkpoint that are free."""
        return self.num_blocks * num_sequences + self._num_free(checkpoint)

    def is_free(self, checkpoint: Sequence[int]) -> bool:
        """True for a checkpoint that no other sequence is about to begin with."""
        return bool(checkpoint) and self._num_free(checkpoint) == len(checkpoint)

    def start(self, sequences: Sequence[CachedSequence], checkpoint: Sequence[int], *, in_place: bool) -> None:
        """Create their tables. `checkpoint`: the first one begins with it; referenced already.

        `in_place`: it goes on in these blocks, which are no checkpoint any more.
        """
        first, tables = sequences[0], self.ledger.tables
        if in_place:
            tables[first.name] = list(checkpoint)
            self._unregister(checkpoint)
        elif checkpoint:
            self.reading[first.name] = list(checkpoint)
        for sequence in sequences[in_place:]:
            tables[sequence.name] = self._pool.allocate(self.num_blocks)

    def num_to_extend(
        self, sequences: Iterable[CachedSequence], tables: Mapping[str, list[int]], refs: Sequence[int]
    ) -> int:
        """Blocks for copies of states that they share, except by their last owner. All of a table are shared, or none."""
        writers = Counter(block for sequence in sequences for block in tables[sequence.name][:1])
        return self.num_blocks * sum(min(num, refs[block] - 1) for block, num in writers.items())

    def is_shared(self, sequence: CachedSequence) -> bool:
        """True if its next step copies its states first."""
        table = self.ledger.tables[sequence.name]
        return bool(table) and self._pool.refs[table[0]] > 1

    def extend(self, sequence: CachedSequence) -> list[Pair]:
        """Give it states of its own before it computes; returns the pairs to be copied."""
        if not self.is_shared(sequence):
            return []
        shared = self.ledger.tables[sequence.name]
        own = self.ledger.tables[sequence.name] = self._pool.allocate(self.num_blocks)
        self._pool.release(shared)
        return list(zip(shared, own, strict=True))

    def fork(self, parent: CachedSequence, child: CachedSequence) -> None:
        """Let the child share the parent's states, on the device or on the host."""
        for tables, pool in ((self.ledger.tables, self.ledger.gpu), (self.ledger.host_tables, self.ledger.cpu)):
            if parent.name in tables:
                tables[child.name] = list(tables[parent.name])
                pool.share(tables[child.name])

    # --- checkpoints ----------------------------------------------------------------------------------------------------

    def commit(self, sequences: Iterable[CachedSequence]) -> StateMoves:
        """What a step with these sequences reads and keeps. Nothing that it reads or keeps is overwritten by it: all blocks
        are taken before any is released.
        """
        planned = [sequence for sequence in sequences if sequence.num_scheduled_tokens]
        moves = StateMoves([self._begin(s) for s in planned if s.name in self.reading])
        for sequence in planned:
            start = sequence.num_computed_tokens
            for num_tokens in self._places(sequence, start, start + sequence.num_scheduled_tokens):
                moves.to_keep.extend(self._keep(sequence, num_tokens))
        for blocks in (*moves.to_keep, *moves.to_read):
            self._pool.release(blocks.block_ids)
        return moves

    def confirm(self, sequence: CachedSequence) -> None:
        """Make checkpoints available as prefixes, as far as their last tokens are known now."""
        for kept in self._unnamed.pop(sequence.name, []):
            if kept.num_tokens > len(sequence.token_ids):
                self._unnamed.setdefault(sequence.name, []).append(kept)
            elif self._drop_unnamed(kept) and not self.checkpoint(sequence, self._at(kept.num_tokens)):
                self._pool.share(kept.block_ids)
                self._register(kept, list(self._keys(sequence, self._at(kept.num_tokens))))
                self._pool.release(kept.block_ids)

    def has_unnamed(self, sequence: CachedSequence) -> bool:
        """True if a checkpoint of it waits for `confirm`."""
        return sequence.name in self._unnamed

    def retract(self, sequence: CachedSequence, num_tokens: int) -> None:
        """Drop the checkpoints that its steps planned so far were to take behind that token offset."""
        if sequence.name not in self.ledger.tables:
            return
        for at in self._places(sequence, num_tokens, min(sequence.num_computed_tokens, len(sequence.token_ids))):
            for key in self._keys(sequence, self._at(at)):
                while (block := self._pool.lookup(key)) is not None:
                    self._unregister([block])
        for kept in self._unnamed.pop(sequence.name, []):
            if kept.num_tokens > num_tokens:
                self._drop_unnamed(kept)
            else:
                self._unnamed.setdefault(sequence.name, []).append(kept)

    # --- a group moves or ends --------------------------------------------------------------------------------------------

    def num_to_swap_out(self, sequences: Iterable[CachedSequence]) -> int:
        """Host blocks for their states."""
        return len(self._distinct(sequences, self.ledger.tables))

    def swap_out(self, sequences: Sequence[CachedSequence]) -> list[Pair]:
        """Move their states to the host, shared ones once."""
        placed: dict[int, int] = {}
        for sequence in sequences:
            blocks = self.ledger.tables.pop(sequence.name)
            self.ledger.host_tables[sequence.name] = [self.ledger.cpu.place(block, placed) for block in blocks]
            self._pool.release(blocks)
        return list(placed.items())

    def num_to_swap_in(self, sequences: Sequence[CachedSequence]) -> int:
        """Device blocks for their states, and for the copies that their next step makes."""
        tables = self.ledger.host_tables
        return len(self._distinct(sequences, tables)) + self.num_to_extend(sequences, tables, self.ledger.cpu.refs)

    def swap_in(self, sequences: Sequence[CachedSequence]) -> list[Pair]:
        """Move their states back, shared ones once."""
        placed: dict[int, int] = {}
        for sequence in sequences:
            blocks = self.ledger.host_tables.pop(sequence.name)
            self.ledger.tables[sequence.name] = [self._pool.place(block, placed) for block in blocks]
            self.ledger.cpu.release(blocks)
        return list(placed.items())

    def release(self, sequence: CachedSequence) -> None:
        """Free its states, on either device, and what it would have begun with."""
        self.ledger.cpu.release(self.ledger.host_tables.pop(sequence.name, []))
        self._pool.release(self.ledger.tables.pop(sequence.name, []))
        self._pool.release(self.reading.pop(sequence.name, []))
        for kept in self._unnamed.pop(sequence.name, []):
            self._drop_unnamed(kept)

    # --- internals --------------------------------------------------------------------------------------------------------

    @staticmethod
    def _distinct(sequences: Iterable[CachedSequence], tables: Mapping[str, list[int]]) -> set[int]:
        return {block for sequence in sequences for block in tables[sequence.name]}

    def _num_free(self, blocks: Sequence[int]) -> int:
        return [self._pool.refs[block] for block in blocks].count(0)

    def _at(self, num_tokens: int) -> int:
        return num_tokens // self.ledger.block_size

    def _begin(self, sequence: CachedSequence) -> StateBlocks:
        return StateBlocks(sequence.name, sequence.num_computed_tokens, tuple(self.reading.pop(sequence.name)))

    def _places(self, sequence: CachedSequence, start: int, end: int) -> list[int]:
        """Numbers of tokens behind `start`, up to `end`, at which a checkpoint is taken; the longest prefix first."""
        step, size = self.checkpoint_tokens, self.ledger.block_size
        if not step:
            return []
        of_prompt = (sequence.num_prompt_tokens - 1) // size * size
        places = {of_prompt, *range(start // step * step + step, end + 1, step)}
        return sorted((place for place in places if start < place <= end), reverse=True)

    def _keep(self, sequence: CachedSequence, num_tokens: int) -> list[StateBlocks]:
        """A checkpoint, which stays referenced; none if there is one already, too few blocks are free, or its tokens may change.

        Where the last tokens are still to be generated by steps in flight, it has keys of its own until they are known.
        """
        is_known = num_tokens <= len(sequence.token_ids)
        if self._pool.num_free < self.num_blocks or not (is_known or self._keeps_unknown):
            return []
        if is_known and self.checkpoint(sequence, self._at(num_tokens)):
            return []
        kept = StateBlocks(sequence.name, num_tokens, tuple(self._pool.allocate(self.num_blocks)))
        if is_known:
            self._register(kept, list(self._keys(sequence, self._at(num_tokens))))
        else:
            self._register(kept, _unnamed_keys(kept))
            self._unnamed.setdefault(sequence.name, []).append(kept)
        return [kept]

    def _keys(self, sequence: CachedSequence, num_blocks: int) -> Iterator[bytes]:
        """Keys in the pool of the checkpoint behind its first blocks, which must be full."""
        return _marked(self._prefixes.hashes(sequence, num_blocks)[num_blocks - 1], self.num_blocks)

    def _register(self, kept: StateBlocks, keys: list[bytes]) -> None:
        self._pool.register_all(list(kept.block_ids), keys)

    def _drop_unnamed(self, kept: StateBlocks) -> bool:
        """Unregister what is left of a checkpoint with keys of its own. Returns whether all of it was."""
        keys = _unnamed_keys(kept)
        left = [b for b, key in zip(kept.block_ids, keys, strict=True) if self._pool.hash_of[b] == key]
        self._unregister(left)
        return len(left) == self.num_blocks

    def _unregister(self, blocks: Sequence[int]) -> None:
        """Drop the hashes of blocks, which may be free."""
        self._pool.share(blocks)
        for block in blocks:
            self._pool.unregister(block)
        self._pool.release(blocks)


def _marked(prefix: bytes, num_blocks: int) -> Iterator[bytes]:
    """Keys of so many blocks with the states behind a prefix."""
    return (prefix + (_FIRST_MARK + index).to_bytes(2, "little") for index in range(num_blocks))


def _unnamed_keys(kept: StateBlocks) -> list[bytes]:
    """Keys by which no sequence finds a checkpoint."""
    name = hashlib.sha256(f"quire states\0{kept.num_tokens}\0{kept.name}".encode()).digest()
    return list(_marked(name, len(kept.block_ids)))
