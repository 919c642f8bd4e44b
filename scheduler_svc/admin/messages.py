"""Conversion of the scheduler's state to messages of the admin API: blocks, memory, timelines."""

from block_manager.memory_report import MemoryReport
from block_manager.pool import PoolCounts
from protos.inference.v1 import admin_pb2
from scheduler_svc.core.reasons import Numbers
from scheduler_svc.observe.counterfactual.search import Counterfactual
from scheduler_svc.observe.recording.recorder import AnyCore
from scheduler_svc.observe.timelines import WaitEpisode
from svc_common.clock import NS_PER_S, unix_ns


def blocks_message(core: AnyCore) -> admin_pb2.GetBlocksResponse:
    """The block ledger at this instant."""
    pools = core.pool_report()
    return admin_pb2.GetBlocksResponse(
        block_size=pools.block_size,
        gpu=pool_message(pools.gpu),
        cpu=pool_message(pools.cpu),
        tables=[admin_pb2.BlockTable(sequence=s, blocks=b) for s, b in core.block_tables().items()],
        refs=pools.refs,
        step=core.step,
        num_state_blocks=pools.num_state_blocks,
    )


def pool_message(counts: PoolCounts) -> admin_pb2.BlockPool:
    """Counts of one block pool."""
    return admin_pb2.BlockPool(total=counts.total, free=counts.free, cached=counts.cached)


def memory_message(report: MemoryReport) -> admin_pb2.MemoryReport:
    """Memory use of paged allocation, and of contiguous allocation for comparison."""
    paged, contiguous = report.paged, report.contiguous
    return admin_pb2.MemoryReport(
        paged=admin_pb2.PagedMemory(
            num_sequences=paged.num_sequences,
            num_tokens=paged.num_tokens,
            logical_blocks=paged.logical_blocks,
            physical_blocks=paged.physical_blocks,
            waste_tokens=paged.waste_tokens,
            max_waste_tokens=paged.max_waste_tokens,
        ),
        contiguous=admin_pb2.ContiguousMemory(
            used=contiguous.used,
            reserved=contiguous.reserved,
            internal=contiguous.internal,
            external=contiguous.external,
            num_regions=contiguous.num_regions,
            num_left_out=contiguous.num_left_out,
        ),
    )


def episode_message(episode: WaitEpisode, needs: Counterfactual) -> admin_pb2.Episode:
    """One episode of a timeline, with its counterfactual: what would have ended it."""
    return admin_pb2.Episode(
        from_step=episode.from_step,
        to_step=episode.to_step,
        from_ns=_unix_ns_of(episode.from_time),
        to_ns=None if episode.to_time is None else _unix_ns_of(episode.to_time),
        queue=episode.queue,
        reason=episode.reason.value,
        numbers=numbers_message(episode.numbers),
        sample=episode.sample,
        needs=numbers_message(needs),
    )


def numbers_message(numbers: Numbers) -> list[admin_pb2.Number]:
    """Named values, in order."""
    return [_number(name, value) for name, value in numbers.items()]


def _number(name: str, value: int | float | str) -> admin_pb2.Number:
    if isinstance(value, str):
        return admin_pb2.Number(name=name, text=value)
    return (
        admin_pb2.Number(name=name, integer=value)
        if isinstance(value, int)
        else admin_pb2.Number(name=name, real=value)
    )


def _unix_ns_of(monotonic_s: float) -> int:
    return unix_ns(int(monotonic_s * NS_PER_S))
