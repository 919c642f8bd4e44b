"""Block tables of a step: whose blocks they are, who shares them, how they were before the step's copies."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, pairwise
from typing import Any

Step = Mapping[str, Any]
"""A step as `quire steps --json --tables` has it."""
Tables = Mapping[str, Sequence[str]]
"""Names of blocks ("g3" = device block 3) in logical order, by sequence ("A/0" = the first choice of request A)."""


def tables_of(step: Step, request_id: str) -> dict[str, list[str]]:
    """The tables of one request's sequences right after the step's schedule()."""
    return {name: blocks for name, blocks in step["tables"].items() if name.rpartition("/")[0] == request_id}


def references(tables: Tables) -> Counter[str]:
    """In how many tables each block is."""
    return Counter(chain.from_iterable(set(blocks) for blocks in tables.values()))


def before_copies(step: Step, request_id: str) -> dict[str, list[str]]:
    """Its tables before the step's copies: the source where the destination stands now."""
    sources = {f"g{dst}": f"g{src}" for src, dst in step["copy"]}
    return {
        name: [sources.get(block, block) for block in blocks] for name, blocks in tables_of(step, request_id).items()
    }


def num_logical(tables: Tables) -> int:
    """Entries of all tables."""
    return sum(len(blocks) for blocks in tables.values())


def num_physical(tables: Tables) -> int:
    """Different blocks among them."""
    return len(set(chain.from_iterable(tables.values())))


def is_scattered(blocks: Iterable[str]) -> bool:
    """Whether the blocks do not lie one behind the other."""
    return any(int(after[1:]) != int(before[1:]) + 1 for before, after in pairwise(blocks))
