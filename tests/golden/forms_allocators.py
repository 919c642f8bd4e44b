"""Forms of the families evictor, table and cached_alloc: inputs of their files and operations."""

from typing import Any, Literal

from pydantic import ConfigDict

from tests.golden.forms import Count, File, Form, Positive, Tokens


class OpsFile(File):
    """Operations in place of requests and trace; each is checked by its own form."""

    ops: list[dict[str, Any]]


class EvictorFile(OpsFile):
    """`key`: what entries are addressed by."""

    key: Literal["block_id", "hash"]


class TableFile(OpsFile):
    """Block tables."""

    num_blocks: Positive
    block_size: Positive
    prefix_caching: bool


class CachedAllocFile(OpsFile):
    """The allocator of 2023."""

    num_blocks: Positive


class Op(Form):
    """`now`: the clock of the operation."""

    op: str
    now: float | None = None


class AnyOp(Op):
    """An operation of whatever kind."""

    model_config = ConfigDict(extra="ignore")


class Entry(Op):
    """Of the evictor: the entry of a block."""

    id: int


class AddEntry(Entry):
    """A block's entry is new."""

    hash: int
    num_hashed_tokens: Count
    last_accessed: float


class UpdateEntry(Entry):
    """An entry was accessed."""

    last_accessed: float


class FreeTable(Op):
    """A table is given back."""

    table: str
    now: float


class ExtendTable(Op):
    """A table is made, or grows, by tokens."""

    table: str
    tokens: Tokens


class ForkTable(Op):
    """A second table over the same blocks."""

    table: str
    child: str


class Allocate(Op):
    """A block for a content; `hash` null: for one that is not shared."""

    hash: int | None
    num_hashed_tokens: Count
    now: float


class FreeHandle(Op):
    """One hold on a block is given up."""

    handle: Count
    now: float


class Promote(FreeHandle):
    """The block became full, and its content has this hash."""

    hash: int


EVICTOR_OPS: dict[str, type[Op]] = {"add": AddEntry, "update": UpdateEntry, "remove": Entry, "evict": Op, "count": Op}
TABLE_OPS: dict[str, type[Op]] = {"new": ExtendTable, "append": ExtendTable, "fork": ForkTable, "free": FreeTable}
CACHED_ALLOC_OPS: dict[str, type[Op]] = {"allocate": Allocate, "free": FreeHandle, "promote": Promote}
