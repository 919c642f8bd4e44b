"""Check the ledger's invariants from scratch.

Tests run it after every operation on small pools. In production it runs on a sample of steps; a violation is
reported and never fatal.
"""

from collections import Counter
from collections.abc import Iterable
from itertools import compress, count

from block_manager.ledger import Ledger
from block_manager.pool import BlockPool


def check(ledger: Ledger) -> list[str]:
    """Violations as sentences; empty if there are none."""
    found = []
    for rank, part in enumerate(parts := ledger.parts()):
        of_rank = f" of rank {rank}" if len(parts) > 1 else ""
        found += _check_pool(f"device{of_rank}", part.gpu, [*part.tables.values(), *part.reading.values()])
        found += _check_pool(f"host{of_rank}", part.cpu, part.host_tables.values())
    return found


def _check_pool(device: str, pool: BlockPool, tables: Iterable[list[int]]) -> list[str]:
    held = Counter(block for table in tables for block in set(table) - pool.reserved)
    referenced = {block: pool.refs[block] for block in compress(count(), pool.refs)}
    free = list(pool.free_blocks)
    distinct = set(free)
    found = []
    if len(free) + len(held) != pool.num_usable:
        found.append(f"{device}: {len(free)} free + {len(held)} referenced != {pool.num_usable} blocks")
    if len(distinct) != len(free) or len(free) != pool.num_free:
        found.append(
            f"{device}: the free queue holds {len(free)} entries, {len(distinct)} distinct; the pool counts {pool.num_free}"
        )
    found += [f"{device}: free block {b} is in a table" for b in sorted(distinct & held.keys())]
    found += [
        f"{device}: block {b} has {referenced.get(b, 0)} references, {held[b]} tables contain it"
        for b in (sorted(referenced.keys() | held.keys()) if referenced != held else ())
        if referenced.get(b, 0) != held[b]
    ]
    found += [f"{device}: reserved block {b} is free" for b in sorted(distinct & pool.reserved)]
    cached = len(free) - list(map(pool.hash_of.__getitem__, free)).count(None)
    if cached != pool.counts().cached:
        found.append(f"{device}: {cached} free blocks hold a prefix, the pool counts {pool.counts().cached}")
    return found
