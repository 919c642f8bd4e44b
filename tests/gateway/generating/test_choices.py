"""Several choices of a request, and what comes beside tokens: scores, likeliest tokens, the prompt's log probabilities.

R25 (n of best_of), R94 (beams): what the gateway tells the scheduler and makes of its answers. Real gateway, scripted scheduler.
"""

import asyncio
from typing import Any

import openai
import pytest

from protos.common.v1 import common_pb2
from protos.engine.v1 import engine_pb2
from protos.inference.v1 import inference_pb2 as pb
from svc_common import wire_arrays
from svc_common.errors import Internal
from tests.gateway.engine.test_scheduler_link import error_of, read_events
from tests.support.services.models import tiny
from tests.support.services.scripted_engine import Attachment, Gateway, asynchronous, finished, pair, tokens

pytestmark = pytest.mark.processes

ONE = tiny().encode("one two three four")
TWO = tiny().encode("five six seven")
THREE = tiny().encode("eight")
PROMPT = [5, 6, 7]


def request(n: int = 1, **parts: Any) -> pb.GenerateRequest:
    parts.setdefault("sampling", pb.SamplingParams(n=n))
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=PROMPT), **parts)


def texts(events: list[pb.GenerateEvent], n: int) -> list[str]:
    """Text of each choice; checks that its offsets are dense and it ends once, after its text."""
    found, offsets, ended = [""] * n, [0] * n, set()
    for event in events:
        if event.HasField("delta"):
            choice = event.delta.choice
            assert choice not in ended
            assert event.delta.token_offset == offsets[choice]
            offsets[choice] += len(event.delta.token_ids)
            found[choice] += event.delta.text
        elif event.HasField("finished"):
            assert event.finished.choice not in ended
            ended.add(event.finished.choice)
    assert ended == set(range(n))
    return found


@asynchronous
async def test_choices_grow_side_by_side_and_end_one_by_one() -> None:
    """R25: n choices, each with offsets, text and an end of its own; one Usage over all of them, last."""
    async with pair() as (_, attachment, running):
        call = running.stub.GenerateStream(request(n=3), timeout=20)
        submit = await attachment.next_submit()
        assert (submit.num_choices, submit.best_of, submit.HasField("beam")) == (3, 3, False)
        handle = submit.handle
        attachment.send(tokens(handle, 0, ONE[:2], choice=0), tokens(handle, 0, TWO[:1], choice=1))
        attachment.send(tokens(handle, 0, THREE, choice=2), finished(handle, len(THREE), choice=2, last=False))
        attachment.send(tokens(handle, 1, TWO[1:], choice=1), tokens(handle, 2, ONE[2:], choice=0))
        attachment.send(finished(handle, len(ONE), choice=0, last=False))
        stop = common_pb2.FINISH_REASON_STOP
        attachment.send(finished(handle, len(TWO), stop, choice=1, last=True))
        events = await read_events(call)
    assert texts(events, 3) == ["one two three four", "five six seven", "eight"]
    assert events[-1].usage.completion_tokens == len(ONE) + len(TWO) + len(THREE)
    ends = {e.finished.choice: e.finished.reason for e in events if e.HasField("finished")}
    assert ends[1] == stop != ends[0] == ends[2]


@asynchronous
async def test_a_stop_string_ends_its_choice_alone() -> None:
    """The scheduler is told which one; the others go on, even when it says that all of it is over later."""
    async with pair() as (_, attachment, running):
        call = running.stub.Generate(request(n=2, stop=pb.StopConditions(stop_strings=[" three"])), timeout=20)
        handle = (await attachment.next_submit()).handle
        attachment.send(tokens(handle, 0, ONE, choice=0), tokens(handle, 0, TWO[:1], choice=1))
        (stopped,) = (await attachment.next()).stops
        kept = tiny().encode("one two")
        assert (stopped.handle, stopped.choice, stopped.token_offset) == (handle, 0, len(kept))
        attachment.send(finished(handle, len(kept), choice=0, last=False), tokens(handle, 1, TWO[1:], choice=1))
        attachment.send(finished(handle, len(TWO), choice=1))
        answer = await call
    assert [(choice.index, choice.text) for choice in answer.choices] == [(0, "one two"), (1, "five six seven")]
    assert answer.choices[0].finished.stop_string == " three"
    assert answer.usage.completion_tokens == len(kept) + len(TWO)


@asynchronous
async def test_after_a_loss_each_choice_goes_on_from_its_own_tokens() -> None:
    """Committed tokens per choice; choices that ended here are told as stopped; overlap is dropped, nothing is lost."""
    async with pair() as (scheduler, first, running):
        call = running.stub.GenerateStream(request(n=3), timeout=20)
        handle = (await first.next_submit()).handle
        first.send(tokens(handle, 0, ONE[:2], choice=0), tokens(handle, 0, THREE, choice=2))
        first.send(finished(handle, len(THREE), choice=2, last=False))
        stream = aiter(call)
        events = []
        while not (events and events[-1].HasField("finished")):
            events.append(await anext(stream))
        first.break_off()
        second = await scheduler.attached()
        message = await second.next()
        (again,) = message.submits
        committed = {c.choice: wire_arrays.unpack(c.token_ids, "x").tolist() for c in again.committed}
        assert committed == {0: ONE[:2], 1: [], 2: THREE}
        assert [(stop.choice, stop.token_offset) for stop in message.stops] == [(2, len(THREE))]
        second.send(tokens(handle, 1, ONE[1:], choice=0), tokens(handle, 0, TWO, choice=1))
        second.send(finished(handle, len(ONE), choice=0, last=False), finished(handle, len(TWO), choice=1))
        events += await read_events(stream)
    assert texts(events, 3) == ["one two three four", "five six seven", "eight"]


@asynchronous
async def test_ranked_choices_start_anew_after_a_loss() -> None:
    """Beams and best_of above n have no tokens to go on from."""
    async with pair() as (scheduler, first, running):
        call = running.stub.Generate(request(sampling=pb.SamplingParams(n=1, best_of=3)), timeout=20)
        assert (await first.next_submit()).best_of == 3
        first.break_off()
        second = await scheduler.attached()
        again = await second.next_submit()
        assert (again.resubmitted, list(again.committed)) == (True, [])
        second.send(tokens(again.handle, 0, ONE), finished(again.handle, len(ONE), score=-1.5))
        choice = (await call).choices[0]
    assert (choice.text, choice.finished.score) == ("one two three four", -1.5)


@asynchronous
async def test_beams_are_asked_for_and_come_with_scores() -> None:
    """R94: width, rules, no reshaping of the distribution whatever the model's defaults; hypotheses best first."""
    beam = pb.BeamSearch(length_penalty=0.5, early_stopping=common_pb2.BEAM_STOP_NEVER)
    async with pair() as (_, attachment, running):
        call = running.stub.Generate(request(sampling=pb.SamplingParams(n=2, best_of=4, beam=beam)), timeout=20)
        submit = await attachment.next_submit()
        assert (submit.num_choices, submit.best_of) == (2, 4)
        assert submit.beam == common_pb2.BeamRules(length_penalty=0.5, stop=common_pb2.BEAM_STOP_NEVER)
        assert (submit.sampling.temperature, submit.sampling.top_p, submit.sampling.top_k) == (0, 1, 0)
        handle = submit.handle
        attachment.send(tokens(handle, 0, ONE, choice=0), finished(handle, len(ONE), choice=0, last=False, score=-0.5))
        attachment.send(tokens(handle, 0, TWO, choice=1), finished(handle, len(TWO), choice=1, score=-0.75))
        answer = await call
        default = running.stub.Generate(request(sampling=pb.SamplingParams(beam=pb.BeamSearch())), timeout=20)
        rules = (await attachment.next_submit()).beam
        default.cancel()
    assert [choice.finished.score for choice in answer.choices] == [-0.5, -0.75]
    assert rules == common_pb2.BeamRules(length_penalty=1.0, stop=common_pb2.BEAM_STOP_WHEN_UNBEATABLE)


@asynchronous
async def test_likeliest_tokens_stay_with_their_tokens() -> None:
    """Aligned through coalescing, held-back text and stop strings; asking for them asks for the chosen ones' too."""
    tops = [[(i, -0.25), (i + 1, -2.0)] for i in ONE]
    logprobs = [-0.5 * i for i in range(len(ONE))]
    wish = request(stop=pb.StopConditions(stop_strings=[" four"]), response=pb.ResponseOptions(num_top_logprobs=2))
    async with pair() as (_, attachment, running):
        call = running.stub.GenerateStream(wish, timeout=20)
        submit = await attachment.next_submit()
        assert (submit.sampling.logprobs, submit.sampling.num_top_logprobs) == (True, 2)
        for i in range(len(ONE)):
            attachment.send(tokens(submit.handle, i, ONE[i : i + 1], logprobs[i : i + 1], tops=tops[i : i + 1]))
        attachment.send(finished(submit.handle, len(ONE)))
        deltas = [event.delta for event in await read_events(call) if event.HasField("delta")]
    kept = tiny().encode("one two three")
    assert [i for delta in deltas for i in delta.token_ids] == kept
    assert [p for delta in deltas for p in delta.logprobs] == logprobs[: len(kept)]
    found = [list(zip(top.token_ids, top.logprobs, strict=True)) for delta in deltas for top in delta.top_logprobs]
    assert found == tops[: len(kept)]


def prompt_logprobs(handle: int, num_top: int) -> engine_pb2.EngineMessage:
    """Of a prompt of three tokens."""
    places = len(PROMPT) - 1
    entry = engine_pb2.PromptLogprobs(
        handle=handle,
        logprobs=wire_arrays.pack([-1.0, -2.0], wire_arrays.F32),
        num_top=num_top,
        top_token_ids=wire_arrays.pack([9, 7] * places if num_top else []),
        top_logprobs=wire_arrays.pack([-0.5, -2.0] * places if num_top else [], wire_arrays.F32),
    )
    return engine_pb2.EngineMessage(prompt_logprobs=[entry])


@asynchronous
async def test_prompt_logprobs_come_as_an_event_and_in_the_answer() -> None:
    """From the second token on, with its index; 0 asks for no neighbours and is not absence."""
    async with pair() as (_, attachment, running):
        for num_top in (0, 2):
            wish = request(response=pb.ResponseOptions(num_prompt_logprobs=num_top))
            stream, unary = running.stub.GenerateStream(wish, timeout=20), running.stub.Generate(wish, timeout=20)
            for submit in await attachment.next_submits(2):
                assert submit.sampling.HasField("num_prompt_logprobs")
                assert submit.sampling.num_prompt_logprobs == num_top
                attachment.send(prompt_logprobs(submit.handle, num_top), tokens(submit.handle, 0, ONE))
                attachment.send(finished(submit.handle, len(ONE)))
            (event,) = [e.prompt_logprobs for e in await read_events(stream) if e.HasField("prompt_logprobs")]
            assert event == (await unary).prompt_logprobs
            assert (event.start_index, list(event.token_ids), list(event.logprobs)) == (1, [6, 7], [-1.0, -2.0])
            assert [list(top.token_ids) for top in event.top_logprobs] == ([[9, 7]] * 2 if num_top else [])


@asynchronous
async def test_what_a_scheduler_must_not_say() -> None:
    """A choice that the request does not have ends the stream and is asked for again; an early end is INTERNAL, never OK."""
    async with pair() as (scheduler, attachment, running):
        call = running.stub.Generate(request(n=2), timeout=20)
        handle = (await attachment.next_submit()).handle
        attachment.send(tokens(handle, 0, ONE, choice=2))
        second = await scheduler.attached()
        assert (await second.next_submit()).handle == handle
        second.send(tokens(handle, 0, ONE), finished(handle, len(ONE), choice=0, last=True))
        assert isinstance(await error_of(call), Internal)


# --- in OpenAI's shapes ------------------------------------------------------------------------------------------------


def openai_client(running: Gateway) -> openai.AsyncOpenAI:
    """The official client, unchanged."""
    return openai.AsyncOpenAI(base_url=f"http://{running.http}/v1", api_key="x", timeout=20, max_retries=0)


async def answer_two(attachment: Attachment, num_requests: int, *, with_tops: bool = False) -> list[engine_pb2.Submit]:
    """Answers each of the next requests with two choices, interleaved."""
    submits = await attachment.next_submits(num_requests)
    for submit in submits:
        handle = submit.handle
        for choice, ids in ((1, TWO), (0, ONE)):
            tops = [[(i, -0.25), (5, -2.0)] for i in ids] if with_tops else None
            attachment.send(tokens(handle, 0, ids, [-0.25] * len(ids), choice=choice, tops=tops))
            attachment.send(finished(handle, len(ids), choice=choice, last=choice == 0))
    return submits


@asynchronous
async def test_openai_choices_are_numbered_over_prompts() -> None:
    """Choice c of prompt p is number p * n + c, whole and streamed; usage counts each prompt once."""
    async with pair() as (_, attachment, running), openai_client(running) as client:
        wish: dict[str, Any] = {"model": "tiny", "prompt": [PROMPT, PROMPT], "n": 2, "max_tokens": 9}
        asking = client.completions.create(**wish)
        whole = await _both(asking, answer_two(attachment, 2))
        stream = await _both(client.completions.create(**wish, stream=True), answer_two(attachment, 2))
        streamed = [""] * 4
        async for chunk in stream:
            streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert [choice.text for choice in whole.choices] == ["one two three four", "five six seven"] * 2 == streamed
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert whole.usage.completion_tokens == 2 * (len(ONE) + len(TWO))


@asynchronous
async def test_openai_chat_choices_and_logprobs() -> None:
    """n and top_logprobs in chat's shape; each choice of a stream has its own role chunk and end."""
    async with pair() as (_, attachment, running), openai_client(running) as client:
        wish: dict[str, Any] = {
            "model": "tiny",
            "messages": [{"role": "user", "content": "hi"}],
            "n": 2,
            "logprobs": True,
            "top_logprobs": 2,
        }
        whole = await _both(client.chat.completions.create(**wish), answer_two(attachment, 1, with_tops=True))
        stream = await _both(
            client.chat.completions.create(**wish, stream=True), answer_two(attachment, 1, with_tops=True)
        )
        chunks = [chunk async for chunk in stream]
    assert [choice.message.content for choice in whole.choices] == ["one two three four", "five six seven"]
    for choice in whole.choices:
        assert "".join(entry.token for entry in choice.logprobs.content) == choice.message.content
        assert all([top.logprob for top in entry.top_logprobs] == [-0.25, -2.0] for entry in choice.logprobs.content)
        assert all(entry.top_logprobs[0].token == entry.token for entry in choice.logprobs.content)
    for index in (0, 1):
        mine = [c.choices[0] for c in chunks if c.choices[0].index == index]
        assert (mine[0].delta.role, mine[-1].finish_reason) == ("assistant", "length")
        assert "".join(c.delta.content or "" for c in mine) == whole.choices[index].message.content


@asynchronous
async def test_openai_completion_logprobs() -> None:
    """Completions have a dictionary of the likeliest, the chosen one among them, at each place."""
    async with pair() as (_, attachment, running), openai_client(running) as client:
        wish: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "n": 2, "logprobs": 2}
        whole = await _both(client.completions.create(**wish), answer_two(attachment, 1, with_tops=True))
        logprobs = whole.choices[1].logprobs
    assert "".join(logprobs.tokens) == "five six seven"
    assert [sorted(top.values()) for top in logprobs.top_logprobs] == [[-2.0, -0.25]] * len(TWO)
    assert all(token in top for token, top in zip(logprobs.tokens, logprobs.top_logprobs, strict=True))


@asynchronous
async def test_openai_prompt_logprobs() -> None:
    """vLLM's shape: null first, then by token id with rank and text; refused in a stream."""
    async with pair() as (_, attachment, running), openai_client(running) as client:

        async def answer() -> None:
            handle = (await attachment.next_submit()).handle
            attachment.send(prompt_logprobs(handle, 2), tokens(handle, 0, ONE), finished(handle, len(ONE)))

        wish: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "extra_body": {"prompt_logprobs": 2}}
        whole = await _both(client.completions.create(**wish), answer())
        try:
            await client.completions.create(**wish, stream=True)
        except openai.BadRequestError as error:
            refused = error.param
    first, second, third = whole.choices[0].prompt_logprobs
    assert first is None
    assert second["6"] == {"logprob": -1.0, "rank": None, "decoded_token": tiny().token_bytes(6).decode()}
    assert (third["7"]["rank"], third["7"]["logprob"], third["9"]["rank"]) == (2, -2.0, 1)
    assert refused == "prompt_logprobs"


async def _both(asking: Any, answering: Any) -> Any:
    """What is asked, while the scheduler answers."""
    task = asyncio.ensure_future(asking)
    await answering
    return await task
