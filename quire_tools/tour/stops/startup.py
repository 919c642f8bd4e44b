"""The stop `startup`: phases of a startup, and memory for weights, the largest step and the KV cache."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from protos.inference.v1 import admin_pb2
from protos.worker.v1 import worker_pb2, worker_pb2_grpc
from quire.built_in_model import default_model
from quire.client.connections import Credentials, blocking_channel
from quire.sizes import size_text
from quire_tools.tour import pictures
from quire_tools.tour.pictures import BarPart
from quire_tools.tour.scenario import request
from quire_tools.tour.screen import Check, Number, declared
from quire_tools.tour.stage import Milestone, Stage
from quire_tools.tour.tables import Step

_CACHE_MIB, _SWAP_MIB = 24, 8
_WORKER_ARGS = ("--kv-cache-memory", f"{_CACHE_MIB}MiB", "--swap-space", f"{_SWAP_MIB}MiB")
_STAGES = ["worker: weights", "worker: measuring memory", "the gateway serves"]
_BAR_WIDTH = 56
_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class StartedStack:
    """What was read of a stack right after its start, and of its first request."""

    milestones: Sequence[Milestone]
    account: worker_pb2.ProfileCacheResponse
    worker: admin_pb2.Worker
    pool: Mapping[str, int]
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

    @property
    def parts(self) -> list[tuple[BarPart, str]]:
        """Bytes by purpose, and how each is known."""
        of = self.account
        gpu, cpu = of.num_gpu_blocks * of.block_bytes, of.num_cpu_blocks * of.block_bytes
        return [
            (BarPart("weights", of.weight_bytes, "W", "blue"), "read from the checkpoint"),
            (BarPart("largest step", of.peak_activation_bytes, "s", "magenta"), "measured: the profile run"),
            (BarPart("KV cache", gpu, "#", "green"), f"{of.num_gpu_blocks} blocks of {size_text(of.block_bytes)}"),
            (BarPart("swap space", cpu, "w", "cyan"), f"{of.num_cpu_blocks} blocks on the host"),
        ]


def _observe(stage: Stage) -> StartedStack:
    with stage.stack(tables=True, worker_args=_WORKER_ARGS) as stack:
        pool, [worker] = stack.blocks()["gpu"], stack.admin.workers()
        stack.together([request("first", 40, 2, ignore_eos=False)])
        account = _profile(stack.local.worker_address)
        return StartedStack(stack.milestones, account, worker, pool, stack.steps(tables=True))


def _profile(address: str) -> worker_pb2.ProfileCacheResponse:
    """The worker's memory profile of the largest step, which it repeats for every smaller one."""
    with blocking_channel(Credentials())(address) as channel:
        stub: Any = worker_pb2_grpc.WorkerServiceStub(channel)  # type: ignore[no-untyped-call]
        profile = worker_pb2.ProfileCacheRequest(max_num_batched_tokens=1, max_num_seqs=1)
        account: worker_pb2.ProfileCacheResponse = stub.ProfileCache(profile, timeout=_TIMEOUT_S)
        return account


def _picture(start: StartedStack) -> Iterator[RenderableType]:
    """When each milestone was reached, and the memory as a bar and as a list."""
    end_s = start.milestones[-1].at_s
    yield pictures.grid((one.what, f"{one.at_s:5.2f} s", _point(one.at_s / end_s)) for one in start.milestones)
    yield Text("\n[").append(pictures.bar([part for part, _ in start.parts], width=90)).append("]")
    yield pictures.grid(
        (pictures.legend((part.sign, part.style, part.name)), size_text(int(part.amount)), how)
        for part, how in start.parts
    )


def _point(share: float) -> Text:
    """A point on a line, after this share of its width."""
    line = "─" * max(0, round(_BAR_WIDTH * share) - 1)
    return Text(line, style="bright_black").append("●", style="cyan")


def _numbers(start: StartedStack) -> list[Number]:
    account = start.account
    return [
        Number("weights, bytes", account.weight_bytes),
        Number("largest step, bytes", account.peak_activation_bytes),
        Number("block, bytes", account.block_bytes),
        Number("device blocks", account.num_gpu_blocks),
        Number("host blocks", account.num_cpu_blocks),
        Number("blocks in the pool at step 1", start.pool_blocks),
    ]


def _checks(start: StartedStack) -> list[Check]:
    account, worker, pool = start.account, start.worker, start.pool
    blocks = (account.num_gpu_blocks, account.num_cpu_blocks)
    sizes = (account.total_bytes, account.swap_space_bytes)
    order = [milestone.what for milestone in start.milestones]
    # The worker is asked for its stage from time to time, so a short one may have gone unseen.
    seen = [what for what in order if what in _STAGES]
    return [
        Check(
            "load, then profile, then serve",
            len(seen) > 1 and seen == [s for s in _STAGES if s in seen] and order[-1] in seen,
            ", ".join(seen),
        ),
        Check(
            "a block's bytes follow from config.json",
            account.block_bytes == start.block_bytes,
            f"{account.block_bytes}, from config.json {start.block_bytes}",
        ),
        Check(
            "blocks = floor(bytes / block bytes)",
            blocks
            == tuple(size // account.block_bytes for size in sizes)
            == tuple(mib * 2**20 // start.block_bytes for mib in (_CACHE_MIB, _SWAP_MIB)),
            f"{blocks[0]} on the device, {blocks[1]} on the host",
        ),
        Check(
            "the scheduler has what the worker allocated",
            (worker.num_gpu_blocks, worker.num_cpu_blocks) == blocks,
            f"{worker.num_gpu_blocks} and {worker.num_cpu_blocks}",
        ),
        Check(
            "all but the null block are free at first",
            pool["free"] == pool["total"] == blocks[0] - 1 == start.pool_blocks,
            f"{pool['free']} of {pool['total']}; the first step found {start.pool_blocks}",
        ),
    ]


STOP = declared(
    "startup",
    "From a checkpoint to the first token: the order, and what uses how much memory.",
    "docs/architecture.md#7-the-step-on-the-wire",
    title="From a checkpoint to the first token",
    text="The worker loads the weights, runs the largest step once to measure its memory, and allocates all KV blocks before the "
    "first request; the scheduler then hands out block ids. On a GPU the blocks take what the rest leaves of its memory.",
    observe=_observe,
    picture=_picture,
    checks=_checks,
    numbers=_numbers,
)
