"""Convert messages of the admin API to the page's values. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from gateway_svc.lab.source import (
    LabEpisode,
    LabPool,
    LabShare,
    LabSnapshot,
    LabStepTimes,
    Listed,
    Numbers,
    Pairs,
    ReasonCount,
    Step,
    TableChange,
    Why,
)
from protos.inference.v1 import admin_pb2 as pb

_NS_PER_MS = 1e6
DEVICE, HOST = "g", "c"
RUNNING = "running"


def tables(message: pb.StepReport | pb.GetBlocksResponse) -> dict[str, list[str]]:
    """Block tables by sequence."""
    return {table.sequence: list(table.blocks) for table in message.tables}


def step(report: pb.StepReport, change: TableChange, snapshot: LabSnapshot | None) -> Step:
    """Convert one step. `change`: from the previous step's tables to its own; `snapshot`: state right after its plan."""
    queues, free = report.queues, report.free
    return Step(
        step=report.step,
        lane=report.lane,
        policy=report.policy,
        shares=[
            LabShare(group.id, list(group.seqs), group.tokens, group.computed_before, group.prefill)
            for group in report.scheduled
        ],
        swap_in=_pairs(report.swap_in),
        swap_out=_pairs(report.swap_out),
        copy=_pairs(report.copy),
        preempted=[(item.id, item.mode) for item in report.preempted],
        queues=(queues.waiting, queues.running, queues.swapped),
        free=(free.gpu, free.cpu),
        sampled={item.sequence: len(item.tokens) for item in report.sampled},
        computed_tokens=report.computed_tokens,
        granted_steps=report.granted_steps,
        is_repeat=report.is_repeat,
        revoked=report.revoked,
        error=report.error,
        times=_times(report),
        tables=change,
        snapshot=snapshot,
    )


def _times(report: pb.StepReport) -> LabStepTimes:
    t = report.times
    return LabStepTimes(
        planned_ms=t.planned_ns / _NS_PER_MS,
        finished_ms=t.finished_ns / _NS_PER_MS,
        started_ms=t.started_ns / _NS_PER_MS,
        duration_ms=report.duration_ns / _NS_PER_MS,
        schedule_ms=t.schedule_ns / _NS_PER_MS,
        queued_ms=t.queued_ns / _NS_PER_MS,
        cache_ms=t.cache_ns / _NS_PER_MS,
        prepare_ms=t.prepare_ns / _NS_PER_MS,
        model_ms=t.model_ns / _NS_PER_MS,
        sample_ms=t.sample_ns / _NS_PER_MS,
    )


def _pairs(pairs: Iterable[pb.BlockPair]) -> Pairs:
    return [(pair.src, pair.dst) for pair in pairs]


# --- requests and blocks -------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class PoolSizes:
    """Sizes that steps do not report: tokens per block, and the pools at the last poll."""

    block_size: int
    pools: list[LabPool]


def snapshot(blocks: pb.GetBlocksResponse, workers: pb.ListWorkersResponse) -> LabSnapshot:
    """State at one instant."""
    pools = PoolSizes(blocks.block_size, _pools(blocks, workers.workers))
    return _snapshot(blocks.step, pools, blocks.requests, blocks.cached_blocks, tables(blocks))


def state(report: pb.StepReport, pools: PoolSizes) -> LabSnapshot:
    """State right after a step's plan; its tables are in the step."""
    return _snapshot(report.step, pools, report.state.requests, report.state.cached_blocks, None)


def _snapshot(
    number: int,
    pools: PoolSizes,
    requests: pb.ListRequestsResponse,
    cached: Iterable[str],
    whole_tables: dict[str, list[str]] | None,
) -> LabSnapshot:
    return LabSnapshot(
        step=number,
        block_size=pools.block_size,
        pools=pools.pools,
        cached=list(cached),
        requests=[listed(request) for request in requests.requests],
        reasons=[ReasonCount(count.queue, count.reason, count.num_requests) for count in requests.reasons],
        num_left_out=requests.num_left_out,
        tables=whole_tables,
    )


def _pools(blocks: pb.GetBlocksResponse, workers: Sequence[pb.Worker]) -> list[LabPool]:
    """Those of the worker, or of each. With rules that reserve the first block, names begin at 1."""
    if len(workers) <= 1:
        first = int(bool(workers) and workers[0].num_gpu_blocks == blocks.gpu.total + 1)
        devices, hosts = [LabPool(DEVICE, "", first, blocks.gpu.total)], [LabPool(HOST, "", 0, blocks.cpu.total)]
    else:
        sized = [worker for worker in workers if worker.num_gpu_blocks]
        first = int(sum(worker.num_gpu_blocks for worker in sized) == blocks.gpu.total + len(sized))
        devices = [LabPool(DEVICE, f"@{w.lane}", first, w.num_gpu_blocks - first) for w in sized]
        hosts = [LabPool(HOST, f"@{w.lane}", 0, w.num_cpu_blocks) for w in sized]
    return [*devices, *(pool for pool in hosts if pool.total)]


def listed(request: pb.LiveRequest) -> Listed:
    """Convert an unfinished request."""
    return Listed(
        id=request.id,
        request_id=request.request_id,
        tenant=request.tenant,
        queue=request.queue,
        reason=request.reason,
        numbers=_numbers(request.numbers),
        priority=request.priority,
        num_choices=request.num_choices,
        prompt_tokens=request.prompt_tokens,
        output_tokens=request.output_tokens,
        cached_prompt_tokens=request.cached_prompt_tokens,
        arrived_ms=request.arrived_ns / _NS_PER_MS,
        started_ms=request.started_ns / _NS_PER_MS if request.HasField("started_ns") else None,
        num_preemptions=request.num_preemptions,
    )


# --- timeline of a request -----------------------------------------------------------------------------------------------


def why(response: pb.ExplainRequestResponse) -> Why:
    """Convert a request's timeline."""
    return Why(response.id, [_episode(episode) for episode in response.episodes], response.num_waits_not_searched)


def _episode(episode: pb.Episode) -> LabEpisode:
    return LabEpisode(
        from_step=episode.from_step,
        to_step=episode.to_step if episode.HasField("to_step") else None,
        from_ms=episode.from_ns / _NS_PER_MS,
        to_ms=episode.to_ns / _NS_PER_MS if episode.HasField("to_ns") else None,
        queue=episode.queue,
        reason=episode.reason,
        numbers=_numbers(episode.numbers),
        sample=episode.sample,
        needs=_numbers(episode.needs),
    )


def _numbers(numbers: Iterable[Any]) -> Numbers:
    return {number.name: getattr(number, number.WhichOneof("value")) for number in numbers}
