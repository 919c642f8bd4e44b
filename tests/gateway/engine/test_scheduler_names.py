"""A gateway follows the DNS name of its scheduler, also away from one that still answers."""

import asyncio

import pytest

from protos.inference.v1 import inference_pb2 as pb
from tests.support.dns.names import resolving
from tests.support.services.harness import fresh_port
from tests.support.services.models import tiny
from tests.support.services.scripted_engine import asynchronous, engine, finished, gateway, tokens

pytestmark = pytest.mark.processes

NAME = "localhost"
IDS = tiny().encode("one two three four")


@pytest.mark.parametrize("old_answers", [True, False])
def test_requests_continue_at_the_new_address(old_answers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name has another address in the middle of an answer; a lookup that fails and a second address change nothing."""
    names = resolving(NAME, monkeypatch)

    @asynchronous
    async def test() -> None:
        port = fresh_port()
        names.addresses = ["127.0.0.2"]
        async with (
            engine(port, "127.0.0.2") as old,
            engine(port, "127.0.0.3") as new,
            gateway(f"dns:///{NAME}:{port}", scheduler_lookup_s=0.05) as running,
        ):
            at_old = await old.attached()
            call = running.stub.GenerateStream(pb.GenerateRequest(text="hello"))
            reading = asyncio.create_task(_ids(call))
            submit = await at_old.next_submit()
            at_old.send(tokens(submit.handle, 0, IDS[:2]))
            names.addresses = None
            await asyncio.sleep(0.2)
            names.addresses = ["127.0.0.2", "127.0.0.3"]
            await asyncio.sleep(0.2)
            assert new.attachments.empty()
            assert old.attachments.empty()
            names.addresses = ["127.0.0.3"]
            if not old_answers:
                at_old.break_off()
            at_new = await new.attached()
            again = await at_new.next_submit()
            num_held = len(again.committed[0].token_ids) // 4
            at_new.send(tokens(again.handle, num_held, IDS[num_held:]), finished(again.handle, len(IDS)))
            assert await reading == IDS
            if old_answers:  # else it may have been tried once more before the next lookup
                assert old.attachments.empty()

    test()


async def _ids(call: object) -> list[int]:
    return [token for event in [e async for e in call] if event.HasField("delta") for token in event.delta.token_ids]
