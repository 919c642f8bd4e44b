"""The protocol `CacheRules`: what schedulers ask of the block ledger.

Rules are asked about the *live* sequences of one group, which act together: a list, oldest first. `can_x` asks
and changes nothing, `x` does it. Nothing here depends on a scheduler's types.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from block_manager.ledger import Ledger

Pair = tuple[int, int]


class CachedSequence(Protocol):
    """What the rules read of a sequence; they never change it."""

    @property
    def name(self) -> str:
        """Key of its block table."""

    @property
    def token_ids(self) -> Sequence[int]:
        """Prompt and output tokens so far."""

    @property
    def num_prompt_tokens(self) -> int:
        """Number of prompt tokens."""

    @property
    def num_computed_tokens(self) -> int:
        """Tokens with KV in its blocks, now or after a step in flight."""

    @property
    def num_scheduled_tokens(self) -> int:
        """Its tokens in the step planned last; read by `commit`."""

    @property
    def num_placeholders(self) -> int:
        """Tokens that steps in flight will generate (asynchronous scheduling)."""

    @property
    def cache_salt(self) -> str:
        """Tenant salt: only sequences with equal salts share blocks."""

    @property
    def lora_id(self) -> int:
        """LoRA adapter, 0 = none. Its KV differs, so only sequences with equal adapters share blocks."""

    @property
    def lane(self) -> int | None:
        """Which of several caches holds its blocks; None if it has no blocks yet, or if there is one cache."""

    @property
    def no_cache_reuse(self) -> bool:
        """True if it must not use cached blocks."""

    @property
    def has_siblings(self) -> bool:
        """True if other sequences of its group start with it, sharing the full blocks of its prompt."""

    @property
    def sibling_names(self) -> Sequence[str]:
        """Names of older samples of its request outside its group; they have the same prompt."""


class AllocStatus(enum.Enum):
    """Whether blocks are available: now, later, or not even from an empty pool."""

    OK = "ok"
    LATER = "later"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """Blocks of the longest cached prefix, in logical order, and the number of tokens they hold.

    As in block tables, there is one block for each cache group at each position, and null blocks stand for those behind
    a sliding window. With states, the blocks of the checkpoint behind that many tokens come first (`rules/state_tables`).
    """

    block_ids: tuple[int, ...] = ()
    num_tokens: int = 0


@dataclass(slots=True)
class Growth:
    """Changes that an append made to a block table.

    `added`: blocks appended. `copies`: (source, destination) pairs of copy-on-write, to be executed before the
    step. `rewritten`: an existing entry changed, so every copy of the table must be replaced.
    """

    added: list[int] = field(default_factory=list)
    copies: list[Pair] = field(default_factory=list)
    rewritten: bool = False


class StateBlocks(NamedTuple):
    """Blocks with the states of a sequence after its first `num_tokens` tokens."""

    name: str
    num_tokens: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StateMoves:
    """What a step reads and writes besides the blocks in tables, for models with states.

    `to_read`: of sequences that begin with the states in these blocks instead of their own. `to_keep`: checkpoints, into
    which states are copied during the step.
    """

    to_read: list[StateBlocks] = field(default_factory=list)
    to_keep: list[StateBlocks] = field(default_factory=list)


class CacheRules(Protocol):
    """How blocks are taken from and returned to one ledger.

    `num_lookahead`: slots to keep free behind the new tokens (vLLM's lookahead slots).
    """

    ledger: Ledger

    @property
    def device_pool(self) -> "DevicePool | None":
        """These rules themselves, if they can report exact needs; else None."""

    journals_prefixes: bool
    """True if a journal of the device pool gets the contents of each block that a prefix hit can use."""

    watermark_blocks: int
    """Device blocks that stay free when a group starts or is swapped in; 0 = none."""

    @property
    def num_free_gpu(self) -> int:
        """Free device blocks."""

    @property
    def num_free_cpu(self) -> int:
        """Free host blocks."""

    @property
    def capacity_blocks(self) -> int:
        """Device blocks that sequences can use."""

    @property
    def capacity_tokens(self) -> int:
        """Tokens of the longest sequence that fits alone."""

    @property
    def hits(self) -> tuple[int, int]:
        """(lookups, hits) in blocks since the start."""

    def resize(self, num_gpu_blocks: int, num_cpu_blocks: int) -> None:
        """Change the pool sizes; the watermark is unchanged. ValueError if blocks in use would be removed."""

    # --- a group starts ---------------------------------------------------------------------------------------------

    def lookup(self, sequence: CachedSequence) -> PrefixHit:
        """The sequence's longest cached prefix, where hits save token budget (V1); else empty."""

    def first_key(self, sequence: CachedSequence) -> bytes | None:
        """Key of its first block in the device pool, by which a cached prefix begins; None if nothing cached is used."""

    def num_cached_tokens(self, sequence: CachedSequence) -> int:
        """Tokens of its longest cached prefix, for a sequence without blocks; for choosing among several caches."""

    def can_admit(
        self, sequences: Sequence[CachedSequence], hit: PrefixHit, num_new_tokens: int, num_lookahead: int = 0
    ) -> AllocStatus:
        """Whether blocks are available to start them with `num_new_tokens` of the first sequence behind its hit."""

    def num_blocks_to_admit(
        self, sequences: Sequence[CachedSequence], hit: PrefixHit, num_new_tokens: int, num_lookahead: int = 0
    ) -> int:
        """Free blocks that `can_admit` requires, without the watermark; for reporting."""

    def admit(
        self, sequences: Sequence[CachedSequence], hit: PrefixHit, num_new_tokens: int, num_lookahead: int = 0
    ) -> None:
        """Create their block tables.

        The first sequence gets blocks for its tokens; the others share the full blocks of the prompt with it
        and get their own for the rest.
        """

    # --- a group continues ------------------------------------------------------------------------------------------

    def can_extend(self, sequences: Sequence[CachedSequence], num_new_tokens: int, num_lookahead: int = 0) -> bool:
        """Whether blocks are available for `num_new_tokens` more tokens of each sequence."""

    def fits_exactly(self, sequences: Sequence[CachedSequence], num_new_tokens: int, num_lookahead: int = 0) -> bool:
        """The same by the blocks that `extend` really takes, where `can_extend` counts a worst case."""

    def extend(self, sequence: CachedSequence, num_new_tokens: int, num_lookahead: int = 0) -> Growth:
        """Allocate blocks for `num_new_tokens` more tokens."""

    def fork(self, parent: CachedSequence, child: CachedSequence) -> None:
        """Let the child share all blocks of its parent; no-op if the parent has no table."""

    def commit(self, sequences: Sequence[CachedSequence], now: float) -> StateMoves | None:
        """Record that the step with these sequences is planned: set access times and count its KV as computed.

        Returns what the step reads and keeps of states; None if the model has none.
        """

    def num_computed_blocks(self, sequences: Sequence[CachedSequence]) -> int:
        """Leading blocks common to all of them that need no computing; never the last block of a table."""

    def num_common_prefix_blocks(self, sequences: Sequence[CachedSequence]) -> int:
        """Leading blocks of the first sequence that every table holds; 0 when caching is off."""

    def commit_sampled(self, sequence: CachedSequence) -> None:
        """Register blocks that a result made full, now that their tokens are confirmed."""

    def retract(self, sequence: CachedSequence, num_computed_tokens: int) -> None:
        """Make blocks from that token offset on unavailable as prefixes: a step was to compute their KV and did not."""

    # --- a group moves between device and host ----------------------------------------------------------------------

    def can_swap_out(self, sequences: Sequence[CachedSequence]) -> bool:
        """Whether the host has room for all their blocks."""

    def swap_out(self, sequences: Sequence[CachedSequence]) -> list[Pair]:
        """Move all their blocks to the host; returns (device, host) pairs in order."""

    def can_swap_in(self, sequences: Sequence[CachedSequence], num_lookahead: int = 0) -> AllocStatus:
        """Whether the device has room for their blocks and for what they append next."""

    def num_blocks_to_swap_in(self, sequences: Sequence[CachedSequence], num_lookahead: int = 0) -> int:
        """Device blocks that `can_swap_in` requires, without the watermark; for reporting."""

    def swap_in(self, sequences: Sequence[CachedSequence]) -> list[Pair]:
        """Move all their blocks back to the device; returns (host, device) pairs in order."""

    # --- a sequence ends --------------------------------------------------------------------------------------------

    def release(self, sequence: CachedSequence) -> None:
        """Free its blocks, on either device; no-op if it has none."""

    def forget(self, sequence: CachedSequence) -> None:
        """Drop what is remembered for a sequence besides blocks, at its end."""

    def reset_prefixes(self) -> None:
        """Drop all cached prefixes: the memory was lost, or a client asked for it."""


def try_reset_prefixes(rules: CacheRules) -> bool:
    """Drop all cached prefixes on request. Returns False, and does nothing, while any block is in use."""
    if any(rules.ledger.tables.values()) or any(rules.ledger.host_tables.values()):
        return False
    rules.reset_prefixes()
    return True


class DevicePool(CacheRules, Protocol):
    """Cache rules that report exact needs, and free the blocks behind sliding windows."""

    @property
    def fast_pool(self) -> "FastPool":
        """These rules themselves, which can append and register blocks one by one (fast decode)."""

    @property
    def has_windows(self) -> bool:
        """True if `free_out_of_window` frees blocks."""

    def num_blocks_needed(self, sequence: CachedSequence, num_new_tokens: int) -> int:
        """Blocks that so many more tokens take, copies of shared blocks included."""

    def free_out_of_window(self, sequences: Sequence[CachedSequence], num_tokens: Sequence[int]) -> list[int]:
        """Free blocks of each sequence outside the sliding windows of the tokens behind so many first ones, which must be
        computed; returns how many.
        """

    def take_out_of_window(self, sequence: CachedSequence, num_tokens: int) -> list[int]:
        """Take the blocks that `free_out_of_window` frees out of its table, lowest first; the caller releases them."""

    def next_out_of_window(self, num_tokens: int) -> int:
        """The number of computed tokens from which on `free_out_of_window` frees more than at `num_tokens`."""


class FastPool(DevicePool, Protocol):
    """Cache rules that count, append and register device blocks one by one, or one for each cache group."""

    @property
    def checkpoint_tokens(self) -> int:
        """Steps keep a checkpoint of states where the computed tokens of a sequence are a multiple of it; 0 = never."""

    def has_unnamed_checkpoint(self, sequence: CachedSequence) -> bool:
        """True if a checkpoint was kept that `commit_sampled` makes available, once its last tokens are known."""

    def register(self, sequence: CachedSequence, num_tokens: int) -> int:
        """Register full blocks among the first `num_tokens` tokens. Returns the length at which the next block is
        full.
        """

    def open_end(self, sequence: CachedSequence) -> Any:
        """The end of the sequence's block table, which changes until the table is released. `table`: its blocks in order, of
        one cache group; `num_held`: its blocks of all groups and of states, without null blocks.
        """

    def append_blocks(self, ends: Sequence[Any]) -> list[list[int]]:
        """Append one block (of each cache group) to each of these tables, in order; returns the blocks of each table."""

    def register_blocks(self, ends: Sequence[Any], data: bytes) -> None:
        """Register the next block of each table, filled with `data`: little-endian int32 [ends, block_size]."""
