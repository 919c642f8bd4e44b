"""Block tables of a step: ownership, sharing, and their state before the step's copies."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, pairwise
from typing import Any

Step = Mapping[str, Any]
"""A step in the format of `quire steps --json --tables`."""
Tables = Mapping[str, Sequence[str]]
"""Names of blocks ("g3" = device block 3) in logical order, by sequence ("A/0" = the first choice of request A)."""


def tables_of(step: Step, request_id: str) -> dict[str, list[str]]:
    """The tables of one request's sequences right after the step's schedule()."""
    return {name: blocks for name, blocks in step["tables"].items() if name.rpartition("/")[0] == request_id}


def references(tables: Tables) -> Counter[str]:
    """Number of tables that each block is in."""
    return Counter(chain.from_iterable(set(blocks) for blocks in tables.values()))


def before_copies(step: Step, request_id: str) -> dict[str, list[str]]:
    """A request's tables before the step's copies: each destination replaced by its source."""
    sources = {f"g{dst}": f"g{src}" for src, dst in step["copy"]}
    return {
        name: [sources.get(block, block) for block in blocks] for name, blocks in tables_of(step, request_id).items()
    }


def num_logical(tables: Tables) -> int:
    """Number of entries in all tables."""
    return sum(len(blocks) for blocks in tables.values())


def num_physical(tables: Tables) -> int:
    """Number of distinct blocks in all tables."""
    return len(set(chain.from_iterable(tables.values())))


def is_scattered(blocks: Iterable[str]) -> bool:
    """True if the blocks are not contiguous."""
    return any(int(after[1:]) != int(before[1:]) + 1 for before, after in pairwise(blocks))
