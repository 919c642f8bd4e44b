"""SubscribeKvEvents through a real gateway, scheduler and simulated worker."""

import grpc
import pytest

from protos.routers.v1 import smg_common_pb2
from protos.routers.v1 import vllm_engine_pb2 as pb
from protos.routers.v1.vllm_engine_pb2_grpc import VllmEngineStub
from tests.support.services.harness import run_async, scheduler, worker
from tests.support.services.scripted_engine import gateway

pytestmark = pytest.mark.processes

BLOCK = 16


class Router:
    """What a router makes of one stream: token ids of the known blocks by hash, and their parents."""

    def __init__(self, stub: VllmEngineStub, start: int = 0) -> None:
        asked = smg_common_pb2.SubscribeKvEventsRequest(start_sequence_number=start)
        self.stream = stub.SubscribeKvEvents(asked, timeout=60)
        self.blocks: dict[int, tuple[int, ...]] = {}
        self.parents: dict[int, int | None] = {}
        self.numbers: list[int] = []

    async def read(self) -> None:
        """One batch."""
        batch = await self.stream.read()
        self.numbers.append(batch.sequence_number)
        assert batch.HasField("snapshot") == (len(self.numbers) == 1)
        for event in batch.events:
            if event.HasField("cleared"):
                self.blocks.clear()
            for block_hash in event.removed.block_hashes:
                del self.blocks[block_hash]
            stored = event.stored
            parent = stored.parent_block_hash if stored.HasField("parent_block_hash") else None
            for block in stored.blocks:
                assert block.block_size == len(block.token_ids) == BLOCK
                self.blocks[block.block_hash], self.parents[block.block_hash] = tuple(block.token_ids), parent
                parent = block.block_hash

    async def until_knows(self, text: list[int]) -> None:
        """Read until all full blocks of that text are known, one after the other."""
        while self.longest(text) < len(text) // BLOCK:
            await self.read()

    def longest(self, text: list[int]) -> int:
        """How many leading blocks of a text are known."""
        parent, found = None, 0
        for start in range(0, len(text) // BLOCK * BLOCK, BLOCK):
            tokens = tuple(text[start : start + BLOCK])
            hits = [h for h, known in self.blocks.items() if known == tokens and self.parents[h] == parent]
            if not hits:
                break
            [parent] = hits
            found += 1
        return found


async def generate(stub: VllmEngineStub, prompt: bytes) -> list[int]:
    """All tokens of a request but the last, whose KV is not computed."""
    sampling = pb.SamplingParams(top_p=1.0, max_tokens=20, ignore_eos=True)
    tokenized = pb.TokenizedInput(original_text=prompt.decode(), input_ids=prompt)
    [answer] = [one async for one in stub.Generate(pb.GenerateRequest(tokenized=tokenized, sampling_params=sampling))]
    return [*prompt, *answer.complete.output_ids][:-1]


@run_async
async def test_a_router_knows_what_is_cached() -> None:
    """At once and late, before and after blocks are evicted; one that does not read holds up nothing."""
    async with (
        worker(num_gpu_blocks=24, block_size=BLOCK) as (worker_address,),
        scheduler(worker_address, kv_events=True) as (address, _),
        gateway(address) as running,
    ):
        stub = VllmEngineStub(running.channel)
        early, slow = Router(stub), Router(stub)
        await early.read()
        first = await generate(stub, b"a" * 40 + b"b" * 10)
        await early.until_knows(first)
        assert early.longest(first) == len(first) // BLOCK == 4
        for number in range(20):
            last = await generate(stub, b"%02d" % number * 30)
        await early.until_knows(last)
        assert early.longest(first) == 0 and len(early.blocks) <= 23
        await slow.until_knows(last)
        late = Router(stub, start=7)
        await late.read()
        assert late.blocks == early.blocks == slow.blocks
        assert late.numbers == [7] and early.numbers == list(range(1, len(early.numbers) + 1))


@run_async
async def test_refused_unless_the_scheduler_keeps_track() -> None:
    """With the option that is missing."""
    async with (
        worker() as (worker_address,),
        scheduler(worker_address) as (address, _),
        gateway(address) as running,
    ):
        with pytest.raises(grpc.aio.AioRpcError, match="--kv-events") as caught:
            await Router(VllmEngineStub(running.channel)).read()
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
