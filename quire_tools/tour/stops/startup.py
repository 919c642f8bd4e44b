"""The stop `startup`: phases of a startup, and memory for weights, the largest step and the KV cache."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table
from rich.text import Text

from protos.inference.v1 import admin_pb2
from protos.worker.v1 import worker_pb2, worker_pb2_grpc
from quire.built_in_model import default_model
from quire.client.connections import Credentials, blocking_channel
from quire.client.sampling_params import SamplingParams
from quire.sizes import size_text
from quire_tools.tour import pictures
from quire_tools.tour.pictures import BarPart
from quire_tools.tour.screen import Check, Number, Screen, Stop
from quire_tools.tour.stage import Milestone, Stage, TourRequest, TourStack
from quire_tools.tour.tables import Step

_MIB = 2**20
_CACHE_MIB, _SWAP_MIB = 24, 8
_WORKER_ARGS = ("--kv-cache-memory", f"{_CACHE_MIB}MiB", "--swap-space", f"{_SWAP_MIB}MiB")
_BAR_WIDTH = 56
_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Start:
    """What was read of a stack right after its start, and of its first request."""

    milestones: Sequence[Milestone]
    account: worker_pb2.ProfileCacheResponse
    worker: admin_pb2.Worker
    pools: Mapping[str, Mapping[str, int]]
    steps: Sequence[Step]

    @property
    def block_bytes(self) -> int:
        """Bytes of a block from config.json: dtype x layers x 2 x block size x KV heads x head size."""
        config: dict[str, Any] = json.loads((default_model() / "config.json").read_text(encoding="utf-8"))
        dtype_bytes = {"bfloat16": 2, "float16": 2, "float32": 4}[config["dtype"]]
        per_token = config["num_hidden_layers"] * 2 * config["num_key_value_heads"] * config["head_dim"]
        return int(dtype_bytes * per_token * self.account.block_size)

    @property
    def pool_blocks(self) -> int:
        """Blocks of the device pool at the first step: those free plus those that the step took."""
        first = self.steps[0]
        taken = {block for blocks in first["tables"].values() for block in blocks}
        return int(first["free"][0]) + len(taken)


def show(stage: Stage) -> Screen:
    """A stack with a KV cache of 24 MiB and a swap space of 8 MiB."""
    with stage.stack(tables=True, worker_args=_WORKER_ARGS) as stack:
        start = _start(stack)
    account = start.account
    return Screen(
        "From a checkpoint to the first token",
        STOP.requirements,
        [
            "The worker loads the weights, runs the largest step once to see what it needs, and allocates all KV blocks before the "
            "first request; the scheduler then gives out their numbers. On a GPU the blocks are what the rest of its memory holds.",
            _timeline(start.milestones),
            _bar(account),
            _account(account),
        ],
        _checks(start),
        _numbers(start),
    )


def _start(stack: TourStack) -> Start:
    pools = {name: dict(pool) for name, pool in stack.blocks().items() if name in ("gpu", "cpu")}
    [worker] = stack.admin.workers()
    stack.together([TourRequest("first", list(range(40, 80)), SamplingParams(max_tokens=2, temperature=0.0))])
    return Start(stack.milestones, _profile(stack.local.worker_address), worker, pools, stack.steps(tables=True))


def _profile(address: str) -> worker_pb2.ProfileCacheResponse:
    """The worker's memory profile of the largest step, which it repeats for every smaller one."""
    with blocking_channel(Credentials())(address) as channel:
        stub: Any = worker_pb2_grpc.WorkerServiceStub(channel)  # type: ignore[no-untyped-call]
        request = worker_pb2.ProfileCacheRequest(max_num_batched_tokens=1, max_num_seqs=1)
        account: worker_pb2.ProfileCacheResponse = stub.ProfileCache(request, timeout=_TIMEOUT_S)
        return account


# --- drawing -------------------------------------------------------------------------------------------------------


def _timeline(milestones: Sequence[Milestone]) -> Table:
    """One line per milestone: when it was reached."""
    end_s = milestones[-1].at_s
    table = Table.grid(padding=(0, 2))
    for milestone in milestones:
        place = round(_BAR_WIDTH * milestone.at_s / end_s)
        line = Text("─" * max(0, place - 1), style="bright_black").append("●", style="cyan")
        table.add_row(milestone.what, f"{milestone.at_s:5.2f} s", line)
    return table


def _parts(account: worker_pb2.ProfileCacheResponse) -> list[tuple[BarPart, str]]:
    """Bytes by purpose, and how each is known."""
    gpu = account.num_gpu_blocks * account.block_bytes
    cpu = account.num_cpu_blocks * account.block_bytes
    return [
        (BarPart("weights", account.weight_bytes, "W", "blue"), "read from the checkpoint"),
        (BarPart("largest step", account.peak_activation_bytes, "s", "magenta"), "measured: the profile run"),
        (
            BarPart("KV cache", gpu, "#", "green"),
            f"{account.num_gpu_blocks} blocks of {size_text(account.block_bytes)}",
        ),
        (BarPart("swap space", cpu, "w", "cyan"), f"{account.num_cpu_blocks} blocks on the host"),
    ]


def _bar(account: worker_pb2.ProfileCacheResponse) -> Text:
    return Text("\n[").append(pictures.bar([part for part, _ in _parts(account)], width=90)).append("]")


def _account(account: worker_pb2.ProfileCacheResponse) -> Table:
    table = Table.grid(padding=(0, 2))
    for part, how in _parts(account):
        table.add_row(pictures.legend((part.sign, part.style, part.name)), size_text(int(part.amount)), how)
    return table


def _numbers(start: Start) -> list[Number]:
    account = start.account
    return [
        Number("weights, bytes", account.weight_bytes, "R9"),
        Number("largest step, bytes", account.peak_activation_bytes, "R9"),
        Number("block, bytes", account.block_bytes, "R9"),
        Number("device blocks", account.num_gpu_blocks, "R9"),
        Number("host blocks", account.num_cpu_blocks, "R9"),
        Number("blocks in the pool at step 1", start.pool_blocks, "R8"),
    ]


# --- checks --------------------------------------------------------------------------------------------------------


def _checks(start: Start) -> list[Check]:
    account, worker = start.account, start.worker
    gpu, cpu = account.total_bytes // account.block_bytes, account.swap_space_bytes // account.block_bytes
    order = [milestone.what for milestone in start.milestones]
    stages = ["worker: weights", "worker: measuring memory", "the gateway serves"]
    at = [order.index(stage) if stage in order else -1 for stage in stages]
    free = (start.pools["gpu"]["free"], start.pools["gpu"]["total"])
    return [
        Check("load, then profile, then serve", -1 not in at and at == sorted(at), ", ".join(stages)),
        Check(
            "a block's bytes are R9's product",
            account.block_bytes == start.block_bytes,
            f"{account.block_bytes}, from config.json {start.block_bytes}",
        ),
        Check(
            "blocks = floor(bytes / block bytes)",
            (account.num_gpu_blocks, account.num_cpu_blocks)
            == (gpu, cpu)
            == (_blocks(_CACHE_MIB, start), _blocks(_SWAP_MIB, start)),
            f"{account.num_gpu_blocks} on the device, {account.num_cpu_blocks} on the host",
        ),
        Check(
            "the scheduler has what the worker allocated",
            (worker.num_gpu_blocks, worker.num_cpu_blocks) == (account.num_gpu_blocks, account.num_cpu_blocks),
            f"{worker.num_gpu_blocks} and {worker.num_cpu_blocks}",
        ),
        Check(
            "all but the null block are free at first",
            free[0] == free[1] == account.num_gpu_blocks - 1 == start.pool_blocks,
            f"{free[0]} of {free[1]}; the first step found {start.pool_blocks}",
        ),
    ]


def _blocks(mib: int, start: Start) -> int:
    return mib * _MIB // start.block_bytes


STOP = Stop(
    "startup", "From a checkpoint to the first token: the order, and who gets which memory.", ("R8", "R9"), show
)
