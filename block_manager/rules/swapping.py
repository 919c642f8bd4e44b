"""Moving blocks between device and host so that what was shared stays shared."""

from collections.abc import Iterable, Sequence

from block_manager.pool import BlockPool


def distinct(tables: Iterable[Sequence[int]], null: int) -> set[int]:
    """The blocks in these tables, without the one that stands for none."""
    return {block for table in tables for block in table} - {null}


def place(source: int, placed: dict[int, int], pool: BlockPool) -> int:
    """The block that takes the contents of `source`: a new one, or one more reference to the one placed before."""
    if source in placed:
        pool.share([placed[source]])
    else:
        [placed[source]] = pool.allocate(1)
    return placed[source]
