"""Cache groups: which blocks the tokens of a sliding window need.

A token attends to itself and the `window` - 1 tokens before it. Blocks behind the windows of all tokens to come are
freed; the null block stands for them in the block table.
"""

from collections.abc import Iterable, Sequence

NULL = 0
"""The null block, never allocated; it stands in tables for blocks behind a sliding window."""


def num_leading(block: int, table: list[int]) -> int:
    """Number of leading entries of a table that are that block."""
    return next((i for i, found in enumerate(table) if found != block), len(table))


def num_behind(num_tokens: int, window: int, block_size: int) -> int:
    """Leading blocks that no token behind the first `num_tokens` attends to."""
    return max(0, num_tokens - window + 1) // block_size


def next_behind(num_tokens: int, window: int, block_size: int) -> int:
    """The number of tokens from which on more blocks are behind the window than at `num_tokens`."""
    return (num_behind(num_tokens, window, block_size) + 1) * block_size + window - 1


def take_behind(table: list[int], num_blocks: int) -> list[int]:
    """Replace what is left of the leading blocks of a table by null blocks; returns them."""
    first = end = min(len(table), num_blocks)
    while first and table[first - 1] != NULL:
        first -= 1
    blocks = table[first:end]
    table[first:end] = [NULL] * len(blocks)
    return blocks


def most_held(window: int, num_ahead_tokens: int, block_size: int) -> int:
    """The most blocks that a sequence holds of a window: those from the window of some token on, the last one that blocks
    were freed for, up to the end of the table at most `num_ahead_tokens` behind that.
    """
    return -(-(window + num_ahead_tokens - 2) // block_size) + 1


def longest_hit(blocks: Sequence[int | None], window: int, block_size: int) -> int:
    """The most leading blocks that can be shared, if for each the cached block is given, or None.

    Behind n blocks the next token attends to the last ones of them only; n are shared where those are cached.
    """
    num_needed, run = -(-(window - 1) // block_size), 0
    for at in range(len(blocks), 0, -1):
        if run == num_needed:
            return at + run
        run = 0 if blocks[at - 1] is None else run + 1
    return run


def flat(of_groups: Iterable[Sequence[int]]) -> list[int]:
    """Equally long lists of blocks as one: the first block of each group, then the second of each."""
    return [block for blocks in zip(*of_groups, strict=True) for block in blocks]
