"""Whatever the order of a scheduler's words, losses and readers: each reader has everything exactly once and no INTERNAL (R60)."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from gateway_svc.checks.validation import SamplingDefaults
from gateway_svc.engine.outbox import Outbox
from gateway_svc.engine.request_table import RequestTable
from gateway_svc.generating.cell_model import CellModel, ServedModel
from gateway_svc.generating.generation import Generation
from gateway_svc.requests.engine_request import EngineRequest
from gateway_svc.text.text_stream import TextStream
from protos.common.v1 import common_pb2
from protos.engine.v1 import engine_pb2
from protos.inference.v1 import inference_pb2 as pb
from svc_common import wire_arrays
from svc_common.clock import monotonic_ns
from svc_common.errors import ResourceExhausted
from tests.support.services import models
from tests.support.services.chat_outputs import parsing
from tests.support.services.reading import Read
from tests.support.services.scripted_engine import PATIENCE_S, asynchronous, finished, tokens

SAMPLE, WHOLE = 60, 3_000
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
TEXTS = (f"<think>hm</think>so {CALL}", "just END talk", "", "<think>ENDless</think>x", f"{CALL}{CALL}", "a😀 EN", "b")
FIELDS = {
    pb.Started: "started",
    pb.Delta: "delta",
    pb.ReasoningDelta: "reasoning_delta",
    pb.ToolCallDelta: "tool_call_delta",
    pb.Finished: "finished",
    pb.Usage: "usage",
}


@dataclass
class Scheduler:
    """The far end of the stream: the same outputs in each of its lives. Says something new of some choices at a time."""

    outputs: list[list[int]]
    rng: random.Random
    handle: int = 0
    cursors: list[int] = field(default_factory=list)
    told_ends: set[int] = field(default_factory=set)
    stopped: dict[int, int] = field(default_factory=dict)

    def serve(self, handle: int, cursors: list[int]) -> None:
        """From here on to that handle, from those tokens on."""
        self.handle, self.told_ends = handle, set()
        self.cursors = cursors + [0] * (len(self.outputs) - len(cursors))

    def say(self, *, everything: bool = False) -> list[engine_pb2.EngineMessage]:
        """In one message of the stream each: what it would write next."""
        said = []
        for choice, output in enumerate(self.outputs):
            if not everything and self.rng.random() < 0.4:
                continue
            begin = self.cursors[choice]
            end = len(output) if everything else min(len(output), begin + self.rng.randint(0, 6))
            self.cursors[choice] = max(begin, end)
            if begin < end:
                said.append(
                    tokens(self.handle, begin, output[begin:end], [float(-i) for i in range(begin, end)], choice=choice)
                )
            over = self.cursors[choice] == len(output)
            if over and choice not in self.told_ends:
                said.append(self._end(choice))
        return said

    def _end(self, choice: int) -> engine_pb2.EngineMessage:
        self.told_ends.add(choice)
        output, is_stop = self.outputs[choice], choice in self.stopped or choice % 2 == 0
        message = finished(
            self.handle,
            self.stopped.get(choice, len(output)),
            common_pb2.FINISH_REASON_STOP if is_stop else common_pb2.FINISH_REASON_LENGTH,
            choice=choice,
            last=len(self.told_ends) == len(self.outputs),
        )
        if choice not in self.stopped and is_stop:
            message.finished[0].stop_token_id = output[-1]
        return message


class Life:
    """One gateway's table, a scheduler, and one reader at a time of one request."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        words = self.rng.choices(TEXTS, k=self.rng.randint(1, 4))
        # Choices of even numbers end by a token, the others by their length.
        outputs = [
            [*models.tiny().encode(text), 0] if i % 2 == 0 else models.tiny().encode(text + ".")
            for i, text in enumerate(words)
        ]
        self.scheduler = Scheduler(outputs, self.rng)
        self.outbox = Outbox()
        self.table = RequestTable(self.outbox, 10**6)
        self.resumable = self.rng.random() < 0.7
        self.submit = engine_pb2.Submit(
            request_id="r",
            token_ids=wire_arrays.pack([5, 6, 7]),
            num_choices=len(outputs),
            sampling=common_pb2.ResolvedSampling(logprobs=True),
            resumable=self.resumable,
        )
        self.request: EngineRequest | None = None

    def begin(self) -> EngineRequest:
        """Submits it, or attaches to it."""
        if self.request is None:
            submit, is_attaching = self.submit, False
        else:
            submit, is_attaching = engine_pb2.Submit(request_id="r", resumable=True), True
        self.request = self.table.add(submit, monotonic_ns() + 10**11, is_attaching=is_attaching)
        self.outbox.submit(self.request)
        self.hear()
        return self.request

    def hear(self) -> None:
        """The scheduler takes what the gateway says."""
        said = self.outbox.take()
        for submit in said.submits:
            if self.resumable and not submit.resubmitted:
                self._confirm(submit.handle, is_known=False)
            ended = [wire_arrays.unpack(c.token_ids, "").tolist() for c in submit.committed]
            assert all(self.scheduler.outputs[i][: len(ids)] == ids for i, ids in enumerate(ended))
            self.scheduler.serve(submit.handle, [len(ids) for ids in ended])
        for attach in said.attaches:
            self._confirm(attach.handle, is_known=True)
            self.scheduler.serve(attach.handle, [])
        for stop in said.stops:
            if stop.token_offset < len(self.scheduler.outputs[stop.choice]):
                self.scheduler.stopped[stop.choice] = stop.token_offset

    def _confirm(self, handle: int, *, is_known: bool) -> None:
        held = engine_pb2.HeldRequest(
            handle=handle, request_id="r", token_offsets=wire_arrays.pack(self.scheduler.cursors, wire_arrays.U32)
        )
        if is_known:
            held.submit.CopyFrom(self.submit)
        self.table.receive(engine_pb2.EngineMessage(attached=[held]))

    def disturb(self) -> None:
        """One thing that may happen."""
        what = self.rng.random()
        said = self.scheduler.say()
        if what < 0.15:  # the stream is lost, and what was on it; the next scheduler may be another one
            self.outbox.forget_stream()
            self.table.resume({self.scheduler.handle} if self.rng.random() < 0.5 else set(), set())
            self.hear()
            return
        with_tokens = [message for message in said if message.HasField("tokens")]
        if what < 0.3 and with_tokens and not self.scheduler.stopped:  # tokens are missing
            said.remove(self.rng.choice(with_tokens))
        for message in said if what < 0.9 else [*said, *said]:
            self.table.receive(message)
        if what < 0.7:
            self.hear()

    def recover(self) -> None:
        """A new stream, and everything on it."""
        self.outbox.forget_stream()
        self.table.resume(set(), set())
        self.hear()
        for message in self.scheduler.say(everything=True):
            self.table.receive(message)

    def generation(self, request: EngineRequest, read: Read) -> Generation:
        how = parsing("hermes", reasoning="think")
        delivered = [len(read.ids.get(i, ())) for i in range(request.num_choices)]
        texts = [TextStream(models.tiny(), ["END"], parser=how.parser(i)) for i in range(request.num_choices)]
        served = ServedModel(
            common_pb2.ModelLimits(model="tiny"), models.tiny(), SamplingDefaults(), cast(CellModel, None)
        )
        return Generation(request, self.table, texts, served, num_delivered=delivered)


async def pump(generation: Generation, read: Read) -> None:
    """Reads to the end."""
    number = 0
    async for events in generation:
        for event in events:
            read.take(pb.GenerateEvent(sequence=number, **{FIELDS[type(event)]: event}))
            number += 1


@contextlib.asynccontextmanager
async def reading(life: Life, read: Read) -> AsyncIterator["asyncio.Task[None]"]:
    """A reader, and its release."""
    request = life.begin()
    task = asyncio.create_task(pump(life.generation(request, read), read))
    try:
        yield task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        life.table.release(request)
        life.hear()


async def undisturbed(seed: int) -> Read:
    life, read = Life(seed), Read()
    async with reading(life, read) as task:
        life.recover()
        await asyncio.wait_for(task, PATIENCE_S)
    return read


async def disturbed(seed: int) -> Read:
    life, read = Life(seed), Read()
    for _ in range(life.rng.randint(0, 3) if life.resumable else 0):
        async with reading(life, read) as task:
            for _ in range(life.rng.randint(0, 8)):
                life.disturb()
                await some_time(life.rng)
            if task.done():
                task.result()
                return read
    async with reading(life, read) as task:
        for _ in range(life.rng.randint(0, 12)):
            life.disturb()
            await some_time(life.rng)
        for _ in range(3):
            if not task.done():
                life.recover()
                await asyncio.sleep(0.001)
        await asyncio.wait_for(task, PATIENCE_S)
    return read


async def some_time(rng: random.Random) -> None:
    for _ in range(rng.randint(0, 3)):
        await asyncio.sleep(0)


def compare(num: int) -> None:
    async def all_of_them() -> None:
        for seed in range(num):
            expected, found = await undisturbed(seed), await disturbed(seed)
            assert found.whole() == expected.whole(), seed

    asyncio.run(all_of_them())


def test_streams_are_whole_in_any_order_of_events(record_property: Any) -> None:
    """Messages lost and repeated, streams lost at any moment, ends before tokens, stop strings, readers one after another."""
    record_property("size", f"{SAMPLE} of {WHOLE} lives")
    compare(SAMPLE)


@pytest.mark.long
def test_streams_are_whole_in_many_orders_of_events(record_property: Any) -> None:
    """Many."""
    record_property("size", f"{WHOLE} of {WHOLE} lives")
    compare(WHOLE)


@asynchronous
async def test_an_unread_end_is_no_failure_of_ours() -> None:
    """A request that was over when its reader was cut off as the slowest: SLOW_READER, not INTERNAL."""
    life = Life(1)
    life.table = RequestTable(life.outbox, 3)
    request = life.begin()
    generation = life.generation(request, Read())
    for message in life.scheduler.say(everything=True):
        life.table.receive(message)
    assert request.is_over
    for _ in range(70):
        life.table.receive(engine_pb2.EngineMessage())
    with pytest.raises(ResourceExhausted, match="too slowly"):
        async for _ in generation:
            pass


@asynchronous
async def test_what_was_there_before_a_reader_came_is_not_held_against_it() -> None:
    """A long output with likeliest tokens is read on, though all of it comes at once; what a slow reader leaves lie is counted."""
    num = 3_000
    life = Life(1)
    life.scheduler.outputs, life.scheduler.cursors = [list(range(5, 5 + num))], [num]
    life.submit.num_choices, life.submit.resumable, life.resumable = 1, True, True
    life.request = EngineRequest(life.submit, 0)
    request = life.begin()
    tops = [[(5, -1.0), (6, -2.0)]] * num
    ids, logprobs = life.scheduler.outputs[0], [-1.0] * num
    life.table.receive(tokens(request.handle, 0, ids, logprobs, tops=tops))
    update = await request.next()
    assert update is not None and update.choices[0].num_tokens == num
    life.table.receive(tokens(request.handle, num, ids, logprobs, tops=tops))
    with pytest.raises(ResourceExhausted, match="too slowly"):
        await request.next()
