"""What schedulers ask of the ledger: the seam `CacheRules` behind which every way of using blocks stands (design.md 4, 5).

Rules are asked about the *live* sequences of one group, which act together (R28): a list, the oldest first. `can_x` asks and
changes nothing, `x` does it. Nothing here knows a scheduler's types.
"""

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from block_manager.ledger import Ledger

Pair = tuple[int, int]


class CachedSequence(Protocol):
    """What the rules need to know of a sequence; they never change it."""

    @property
    def name(self) -> str:
        """Key of its block table."""

    @property
    def token_ids(self) -> Sequence[int]:
        """Known tokens: prompt and output."""

    @property
    def num_prompt_tokens(self) -> int:
        """How many of them are the prompt."""

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose KV is in its blocks, or promised to be by a step under way."""

    @property
    def num_scheduled_tokens(self) -> int:
        """Its tokens in the step last planned; asked at `commit`."""

    @property
    def num_placeholders(self) -> int:
        """Tokens that steps under way will make (asynchronous scheduling)."""

    @property
    def cache_salt(self) -> str:
        """Tenant salt: only equal salts share blocks."""

    @property
    def lora_id(self) -> int:
        """Adapter, 0 = none: its KV differs, so only equal adapters share blocks."""

    @property
    def lane(self) -> int | None:
        """Which of several caches is its own; None where it has no blocks yet, or there is one cache."""

    @property
    def no_cache_reuse(self) -> bool:
        """Never takes cached blocks."""

    @property
    def sibling_names(self) -> Sequence[str]:
        """Names of older samples of its request that are not in its group; they have the same prompt (R19)."""


class AllocStatus(enum.Enum):
    """Whether blocks can be had: now, later, or not even from an empty pool (R51)."""

    OK = "ok"
    LATER = "later"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """Blocks of the longest known prefix, in logical order, and how many tokens they hold."""

    block_ids: tuple[int, ...] = ()
    num_tokens: int = 0


@dataclass(slots=True)
class Growth:
    """What an append did to a table.

    `added`: blocks put at its end. `copies`: (source, destination) pairs of copy-on-write, to be executed before the step (R20).
    `rewritten`: an entry that was there before changed, so whoever holds a copy of the table needs all of it.
    """

    added: list[int] = field(default_factory=list)
    copies: list[Pair] = field(default_factory=list)
    rewritten: bool = False


class CacheRules(Protocol):
    """How blocks are taken and given back, over one ledger.

    `num_lookahead`: slots to keep free behind the new tokens (multi-step, R68).
    """

    ledger: Ledger
    watermark_blocks: int
    """Device blocks that stay free when a group starts or comes back (R52); 0 = none are kept."""

    @property
    def num_free_gpu(self) -> int:
        """Free device blocks."""

    @property
    def num_free_cpu(self) -> int:
        """Free host blocks."""

    @property
    def capacity_tokens(self) -> int:
        """Tokens that one sequence could hold with everything to itself."""

    @property
    def hits(self) -> tuple[int, int]:
        """(lookups, hits) in blocks since the start (R119)."""

    def resize(self, num_gpu_blocks: int, num_cpu_blocks: int) -> None:
        """Pools of other sizes from now on; the watermark stays. ValueError where blocks in use would have to go."""

    # --- a group starts ---------------------------------------------------------------------------------------------

    def lookup(self, sequence: CachedSequence) -> PrefixHit:
        """Its longest cached prefix, where hits relieve the budget (V1); else empty."""

    def can_admit(
        self, sequences: Sequence[CachedSequence], hit: PrefixHit, num_new_tokens: int, num_lookahead: int = 0
    ) -> AllocStatus:
        """Whether there are blocks to start them with `num_new_tokens` of the first behind its hit."""

    def num_blocks_to_admit(
        self, sequences: Sequence[CachedSequence], hit: PrefixHit, num_new_tokens: int, num_lookahead: int = 0
    ) -> int:
        """Free blocks that `can_admit` finds to be needed, above the watermark: the number to tell."""

    def admit(
        self, sequences: Sequence[CachedSequence], hit: PrefixHit, num_new_tokens: int, num_lookahead: int = 0
    ) -> None:
        """Makes their tables. The first gets blocks for its tokens; others share the full blocks of the prompt with it and
        get their own for the rest (R100, design.md 4 "Groups")."""

    # --- a group goes on --------------------------------------------------------------------------------------------

    def can_extend(self, sequences: Sequence[CachedSequence], num_new_tokens: int, num_lookahead: int = 0) -> bool:
        """Whether there are blocks for `num_new_tokens` more of each."""

    def fits_exactly(self, sequences: Sequence[CachedSequence], num_new_tokens: int, num_lookahead: int = 0) -> bool:
        """The same by what `extend` really takes, where `can_extend` counts a worst case (R65, R66)."""

    def extend(self, sequence: CachedSequence, num_new_tokens: int, num_lookahead: int = 0) -> Growth:
        """Room for `num_new_tokens` more."""

    def fork(self, parent: CachedSequence, child: CachedSequence) -> None:
        """The child shares all blocks of its parent; no table: no-op (R102)."""

    def commit(self, sequences: Iterable[CachedSequence], now: float) -> None:
        """The step that holds them is planned: writes access times, and what it computes counts as computed (R93)."""

    def num_computed_blocks(self, sequences: Sequence[CachedSequence]) -> int:
        """Leading blocks common to all of them that need no computing, never the last of a table (R115, R121)."""

    def num_common_prefix_blocks(self, sequences: Sequence[CachedSequence]) -> int:
        """Leading blocks of the first that every table holds; 0 when caching is off (R143)."""

    def settle(self, sequence: CachedSequence) -> None:
        """Its tokens changed by a result: what became full and sure may be found by others (R151)."""

    def retract(self, sequence: CachedSequence, num_computed_tokens: int) -> None:
        """Its tokens from that offset on were promised by a step and never computed: nobody may reuse them."""

    # --- a group moves between device and host ----------------------------------------------------------------------

    def can_swap_out(self, sequences: Sequence[CachedSequence]) -> bool:
        """Whether the host has room for all of their blocks (R72)."""

    def swap_out(self, sequences: Sequence[CachedSequence]) -> list[Pair]:
        """Moves all of them to the host; (device, host) pairs in order (R73, R74)."""

    def can_swap_in(self, sequences: Sequence[CachedSequence], num_lookahead: int = 0) -> AllocStatus:
        """Whether the device has room for their blocks and for what they append next (R69, R72)."""

    def num_blocks_to_swap_in(self, sequences: Sequence[CachedSequence], num_lookahead: int = 0) -> int:
        """Device blocks that `can_swap_in` finds to be needed, above the watermark: the number to tell (R69, R72)."""

    def swap_in(self, sequences: Sequence[CachedSequence]) -> list[Pair]:
        """Moves all of them back; (host, device) pairs in order."""

    # --- a sequence ends --------------------------------------------------------------------------------------------

    def release(self, sequence: CachedSequence) -> None:
        """Gives its blocks back, on whichever device; no blocks: no-op (R97, R103)."""

    def forget(self, sequence: CachedSequence) -> None:
        """The sequence is over: drops what was remembered for it besides blocks."""

    def reset_prefixes(self) -> None:
        """No block may be found by its contents any more: the memory is gone, or somebody asked (R142)."""

    def try_reset_prefixes(self) -> bool:
        """`reset_prefixes` on request: False, and nothing done, while any block is in use (R142)."""
