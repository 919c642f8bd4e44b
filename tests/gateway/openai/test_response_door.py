"""The Responses API at the HTTP door of a real stack: the official client, storage, other tenants, other gateways, failures."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from protos.inference.v1 import inference_pb2 as pb
from tests.support.services.access_keys import KEYS, tenants_file
from tests.support.services.harness import run_async, scheduler, worker
from tests.support.services.scripted_engine import Gateway, asynchronous, gateway, pair, tokens
from tests.support.services.served_stack import ServedStack

pytestmark = pytest.mark.processes

WISH: dict[str, Any] = {"model": "simulated", "input": "hello", "max_output_tokens": 12, "extra_body": {"seed": 5}}
ENDLESS: dict[str, Any] = {**WISH, "max_output_tokens": 3_000, "extra_body": {"seed": 5, "ignore_eos": True}}


@pytest.fixture
def client(stack: ServedStack) -> Iterator[openai.OpenAI]:
    """The official client, unchanged."""
    with openai.OpenAI(base_url=f"{stack.http_url}/v1", api_key="anything", timeout=20, max_retries=0) as made:
        yield made


def test_whole_streamed_and_retrieved(client: openai.OpenAI) -> None:
    """The same response, but for its ids; it is stored before its client knows of its end."""
    whole = client.responses.create(**WISH)
    assert (whole.status, len(whole.output_text)) == ("incomplete", 12)
    assert whole.incomplete_details is not None and whole.incomplete_details.reason == "max_output_tokens"
    assert client.responses.retrieve(whole.id) == whole
    *_, last = client.responses.create(**WISH, stream=True)
    assert (last.type, last.response.output_text) == ("response.incomplete", whole.output_text)
    assert last.response.usage == whole.usage
    assert client.responses.retrieve(last.response.id) == last.response


def test_events_are_named(stack: ServedStack) -> None:
    """Each has its type as the name of its line, and there is no [DONE]."""
    body = {"model": "simulated", "input": "hello", "max_output_tokens": 3, "stream": True}
    text = httpx.post(f"{stack.http_url}/v1/responses", json=body, timeout=20).text
    events = [event.split("\n") for event in text.strip().split("\n\n")]
    assert all(f'"type":"{name.removeprefix("event: ")}"' in data for name, data in events)
    assert events[-1][0] == "event: response.incomplete"


def test_a_conversation_goes_on(client: openai.OpenAI) -> None:
    """previous_response_id is the same as its items, and so are references to items; instructions are not carried over."""
    first = client.responses.create(**WISH, instructions="be kind")
    after = client.responses.create(**WISH, previous_response_id=first.id)
    asked = {"role": "user", "content": "hello"}
    items = [asked, *(item.to_dict() for item in first.output), asked]
    references = [asked, {"type": "item_reference", "id": first.output[0].id}, asked]
    for given in (items, references):
        assert client.responses.create(**{**WISH, "input": given}).output_text == after.output_text
    listed = client.responses.input_items.list(after.id, order="asc", limit=2)
    assert [item.role for item in listed.data] == ["user", "assistant"]
    assert listed.has_more
    assert [item.role for item in listed] == ["user", "assistant", "user"]
    assert [item.id for item in client.responses.input_items.list(after.id)] == [item.id for item in listed][::-1]


def test_without_a_store(client: openai.OpenAI) -> None:
    """Not to be found later; reasoning that the client carries needs none."""
    made = client.responses.create(**WISH, store=False, include=["reasoning.encrypted_content"])
    for use in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError) as caught:
            use(made.id)
        assert caught.value.code == "response_not_found"
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(**WISH, previous_response_id=made.id)
    assert (refused.value.code, refused.value.param) == ("previous_response_not_found", "previous_response_id")
    with pytest.raises(openai.NotFoundError):
        client.responses.create(**{**WISH, "input": [{"type": "item_reference", "id": made.output[0].id}]})


def test_delete(client: openai.OpenAI, stack: ServedStack) -> None:
    """It is gone, and what continued it stays."""
    first = client.responses.create(**WISH)
    after = client.responses.create(**WISH, previous_response_id=first.id)
    deleted = httpx.delete(f"{stack.http_url}/v1/responses/{first.id}").json()
    assert deleted == {"id": first.id, "object": "response", "deleted": True}
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    assert len(list(client.responses.input_items.list(after.id))) == 3


@pytest.mark.parametrize("query", ["limit=0", "limit=101", "limit=x", "order=up", "after=msg_none"])
def test_bad_pages(stack: ServedStack, client: openai.OpenAI, query: str) -> None:
    """Named."""
    made = client.responses.create(**WISH)
    answer = httpx.get(f"{stack.http_url}/v1/responses/{made.id}/input_items?{query}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, query.partition("=")[0])


def test_errors_before_the_first_output(client: openai.OpenAI) -> None:
    """Have their own status and this API's names, in a stream too."""
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(**{**WISH, "max_output_tokens": 0}, stream=stream)
        assert caught.value.param == "max_output_tokens"
        assert "max_output_tokens: is 0" in caught.value.message
        with pytest.raises(openai.NotFoundError):
            client.responses.create(**{**WISH, "model": "other"}, stream=stream)


@asynchronous
async def test_an_error_in_a_stream() -> None:
    """response.failed is the last event; the output so far is in it."""
    async with (
        pair() as (_, attachment, running),
        openai.AsyncOpenAI(base_url=f"http://{running.http}/v1", api_key="x", max_retries=0) as client,
    ):
        asked = asyncio.ensure_future(client.responses.create(model="tiny", input="x", stream=True))
        submit = await attachment.next_submit()
        attachment.send(tokens(submit.handle, 0, [70, 71]))
        events = [event async for event in _until_failure(await asked, submit.request_id, running)]
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    last = events[-1]
    assert last.type == "response.failed"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert last.response.output_text == "".join(e.delta for e in events if e.type == "response.output_text.delta") != ""


async def _until_failure(stream: Any, request_id: str, running: Gateway) -> AsyncIterator[Any]:
    """Events of a stream that is cancelled by its id at the first text."""
    async for event in stream:
        yield event
        if event.type == "response.output_text.delta":
            await running.stub.Cancel(pb.CancelRequest(request_id=request_id))


# --- in the background -----------------------------------------------------------------------------------------------


def ended(client: openai.OpenAI, name: str) -> Any:
    """The response, once it has ended."""
    while (found := client.responses.retrieve(name)).status == "in_progress":
        time.sleep(0.01)
    return found


def test_background(client: openai.OpenAI) -> None:
    """In progress at once, complete later, the same as in the foreground; it can be continued then."""
    begun = client.responses.create(**WISH, background=True)
    assert (begun.status, begun.background, begun.output) == ("in_progress", True, [])
    found = ended(client, begun.id)
    whole = client.responses.create(**WISH)
    assert (found.status, found.output_text) == (whole.status, whole.output_text)
    assert found.usage is not None and whole.usage is not None
    assert found.usage.output_tokens == whole.usage.output_tokens
    assert client.responses.cancel(begun.id) == found
    client.responses.create(**WISH, previous_response_id=begun.id)


def test_cancel(client: openai.OpenAI) -> None:
    """It ends as cancelled, and stays so; one in the foreground cannot be cancelled; one that is deleted is over."""
    begun = client.responses.create(**ENDLESS, background=True)
    with pytest.raises(openai.BadRequestError, match="in progress"):
        client.responses.create(**WISH, previous_response_id=begun.id)
    assert client.responses.cancel(begun.id).status == "cancelled"
    assert client.responses.retrieve(begun.id).status == "cancelled"
    with pytest.raises(openai.BadRequestError):
        client.responses.cancel(client.responses.create(**WISH).id)
    deleted = client.responses.create(**ENDLESS, background=True)
    client.responses.delete(deleted.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(deleted.id)


def test_cancel_without_a_body(stack: ServedStack, client: openai.OpenAI) -> None:
    """OpenAI's package for Node sends no content type with it."""
    begun = client.responses.create(**ENDLESS, background=True)
    answer = httpx.post(f"{stack.http_url}/v1/responses/{begun.id}/cancel")
    assert (answer.status_code, answer.json()["status"]) == (200, "cancelled")


@asynccontextmanager
async def two_gateways(**changes: Any) -> AsyncIterator[tuple[openai.AsyncOpenAI, openai.AsyncOpenAI, Gateway]]:
    """Clients of two gateways of one scheduler, and the first of the gateways."""
    async with (
        worker(time_scale=0.5) as (worker_address,),
        scheduler(worker_address) as (address, _),
        gateway(address, **changes) as first,
        gateway(address, **changes) as second,
        openai.AsyncOpenAI(base_url=f"http://{first.http}/v1", api_key=KEYS["operator"], max_retries=9) as a,
        openai.AsyncOpenAI(base_url=f"http://{second.http}/v1", api_key=KEYS["proxy"], max_retries=9) as b,
    ):
        yield a, b, first


@run_async
async def test_any_gateway_answers() -> None:
    """Stored by one, found by another; one in the background is taken over, also after its gateway stopped, and is the same."""
    async with two_gateways() as (a, b, first):
        whole = await a.responses.create(**WISH)
        assert await b.responses.retrieve(whole.id) == whole
        wish = {**ENDLESS, "max_output_tokens": 300}
        expected = await b.responses.create(**wish)
        begun = await a.responses.create(**wish, background=True)
        for client in (b, a, b):
            assert (await client.responses.retrieve(begun.id)).status in ("in_progress", "incomplete")
        stopped = await a.responses.create(**wish, background=True)
        assert (
            await b.responses.cancel((await a.responses.create(**ENDLESS, background=True)).id)
        ).status == "cancelled"
        first.stop.set()
        await first.task
        for name in (begun.id, stopped.id):
            while (found := await b.responses.retrieve(name)).status == "in_progress":
                await asyncio.sleep(0.01)
            assert (found.status, found.output_text) == ("incomplete", expected.output_text)


@run_async
async def test_responses_are_the_tenants(tmp_path: Path) -> None:
    """Another tenant's is not found, under the same answer as one that never was."""
    async with two_gateways(tenants=tenants_file(tmp_path)) as (mine, proxy, _):
        made = await mine.responses.create(**WISH)
        assert (await proxy.responses.retrieve(made.id)).id == made.id
        other = proxy.with_options(default_headers={"x-tenant-id": "acme"})
        for use in (other.responses.retrieve, other.responses.delete, other.responses.cancel):
            with pytest.raises(openai.NotFoundError):
                await use(made.id)
        assert (await mine.responses.retrieve(made.id)).id == made.id
