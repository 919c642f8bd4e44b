"""The memory report of a running scheduler, as JSON values and as tables. Used by `quire blocks --memory`."""

from typing import Any

from rich.console import Group
from rich.table import Table

from block_manager.contiguous import ContiguousMemory
from block_manager.memory_report import MemoryReport, PagedMemory
from protos.inference.v1 import admin_pb2

_MEANINGS = {
    "used": "a token is in it",
    "reserved": "a token may come: room up to prompt + max_tokens",
    "internal": "no token can come: rounding to a power of two",
    "external": "free, but too small for any request that waits",
}


def memory_of(response: admin_pb2.GetBlocksResponse) -> MemoryReport:
    """The scheduler's counts as a MemoryReport."""
    paged, contiguous = response.memory.paged, response.memory.contiguous
    return MemoryReport(
        PagedMemory(
            response.block_size,
            paged.num_sequences,
            paged.num_tokens,
            paged.logical_blocks,
            paged.physical_blocks,
            paged.waste_tokens,
            paged.max_waste_tokens,
        ),
        ContiguousMemory(
            contiguous.used,
            contiguous.reserved,
            contiguous.internal,
            contiguous.external,
            contiguous.num_regions,
            contiguous.num_left_out,
        ),
    )


def memory_json(response: admin_pb2.GetBlocksResponse) -> dict[str, Any]:
    """Counts, and shares as fractions."""
    report = memory_of(response)
    paged, contiguous = report.paged, report.contiguous
    return {
        "block_size": paged.block_size,
        "num_blocks": response.gpu.total,
        "num_sequences": paged.num_sequences,
        "num_tokens": paged.num_tokens,
        "logical_blocks": paged.logical_blocks,
        "physical_blocks": paged.physical_blocks,
        "saved": paged.saved,
        "waste_tokens": paged.waste_tokens,
        "max_waste_tokens": paged.max_waste_tokens,
        "waste": paged.waste,
        "contiguous": {
            **contiguous.shares(),
            "num_slots": contiguous.num_slots,
            "num_regions": contiguous.num_regions,
            "num_left_out": contiguous.num_left_out,
        },
    }


def memory_tables(response: admin_pb2.GetBlocksResponse) -> Group:
    """Two tables: the paged memory, and the same requests without paging."""
    report = memory_of(response)
    return Group(_paged_table(report.paged, response.gpu.total), "", _contiguous_table(report.contiguous))


def _paged_table(paged: PagedMemory, num_blocks: int) -> Table:
    table = Table("paged", "", "", title_justify="left")
    table.columns[1].justify = "right"
    table.add_row("sequences", f"{paged.num_sequences:,}", f"holding {paged.num_tokens:,} tokens")
    table.add_row("logical blocks", f"{paged.logical_blocks:,}", f"of {paged.block_size} tokens, in all block tables")
    table.add_row("physical blocks", f"{paged.physical_blocks:,}", f"of {num_blocks:,}")
    table.add_row("saved by sharing", f"{paged.saved:.1%}", "1 - physical / logical")
    worst = f"{paged.waste_tokens:,} slots of last blocks; worst sequence {paged.max_waste_tokens}"
    table.add_row("internal waste", f"{paged.waste:.1%}", worst)
    return table


def _contiguous_table(contiguous: ContiguousMemory) -> Table:
    table = Table("contiguous", "share", "slots", "", title_justify="left")
    for column in table.columns[1:3]:
        column.justify = "right"
    counts = (contiguous.used, contiguous.reserved, contiguous.internal, contiguous.external)
    for (name, share), count in zip(contiguous.shares().items(), counts, strict=True):
        table.add_row(name, f"{share:.1%}", f"{count:,}", _MEANINGS[name])
    if contiguous.num_left_out:
        table.add_row("left out", "", "", f"{contiguous.num_left_out} running sequence(s) would find no place")
    return table
