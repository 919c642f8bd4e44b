"""Client and AsyncClient against a real gateway, scheduler and simulated worker."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from quire import LLM, AsyncClient, Client, RetryPolicy, SamplingParams
from quire.client.messages import RequestOptions
from quire.local_stack.processes import ServiceProcess, child_environment, ignore_line
from quire.local_stack.stack import LocalStack
from quire.operators.admin import AdminClient
from svc_common.errors import (
    Cancelled,
    ConfigError,
    DeadlineExceeded,
    InvalidArgument,
    NotFound,
    OutOfRange,
    Unavailable,
)

MAX_MODEL_LEN = 4_096
SHORT = SamplingParams(max_tokens=8, ignore_eos=True, seed=3)
RESUMABLE = RequestOptions(resumable=True)
LONG = SamplingParams(max_tokens=MAX_MODEL_LEN - 10, ignore_eos=True)


@pytest.fixture
def stack(simulated_stack: LocalStack) -> LocalStack:
    """Three processes; the worker is simulated."""
    return simulated_stack


@pytest.fixture
def client(stack: LocalStack) -> Iterator[Client]:
    """A blocking client."""
    with Client(stack.grpc_address) as made:
        yield made


def test_unary_and_stream_give_the_same(client: Client) -> None:
    """One seed, one output: merged answer and merged deltas, offsets without gaps, one account."""
    whole = client.generate("hello", SHORT)
    stream = client.generate_stream("hello", SHORT, request_id="mine")
    deltas = list(stream)
    tokens = [token for delta in deltas for token in delta.token_ids]
    assert tokens == whole.outputs[0].token_ids == stream.result.outputs[0].token_ids
    assert "".join(delta.text for delta in deltas) == whole.text
    assert [d.token_offset for d in deltas] == [sum(len(e.token_ids) for e in deltas[:i]) for i in range(len(deltas))]
    assert stream.result.request_id == "mine"
    assert (whole.finished, whole.outputs[0].finish_reason, whole.seed, whole.model) == (True, "length", 3, "simulated")
    assert whole.num_prompt_tokens == len(client.tokenize("hello"))


def test_logprobs_are_one_per_token(client: Client) -> None:
    """Asked: {chosen id: Logprob} each, and their sum; not asked: None."""
    params = SamplingParams(max_tokens=4, ignore_eos=True, logprobs=True)
    output = client.generate("hello", params).outputs[0]
    assert [list(entry) for entry in output.logprobs] == [[token] for token in output.token_ids]
    total = sum(value.logprob for entry in output.logprobs for value in entry.values())
    assert output.cumulative_logprob == pytest.approx(total)
    assert client.generate("hello", SHORT).outputs[0].logprobs is None


def test_chat_models_and_tokens(client: Client) -> None:
    """A string is one user turn; tokens turn back into the text."""
    turns = [{"role": "user", "content": "hi"}]
    assert (
        client.chat("hi", SHORT).text == client.chat(turns, SHORT).text == client.chat_stream("hi", SHORT).read().text
    )
    assert client.detokenize(client.tokenize("naïve ☃")) == "naïve ☃"
    (card,) = client.models()
    assert (card.name, card.max_model_len, card.chat) == ("simulated", MAX_MODEL_LEN, True)


@pytest.mark.parametrize(
    ("prompt", "options", "error"),
    [
        ([], RequestOptions(), InvalidArgument),
        ("", RequestOptions(), InvalidArgument),
        ([10**6], RequestOptions(), InvalidArgument),
        ([1] * MAX_MODEL_LEN, RequestOptions(), OutOfRange),
        ("x", RequestOptions(model="other"), NotFound),
    ],
)
def test_errors_are_typed(client: Client, prompt: object, options: RequestOptions, error: type[Exception]) -> None:
    """The class says whose fault it is; the same from the stream."""
    with pytest.raises(error):
        client.generate(prompt, SHORT, options=options)  # type: ignore[arg-type]
    with pytest.raises(error):
        client.generate_stream(prompt, SHORT, options=options).read()  # type: ignore[arg-type]


def test_deadline_and_cancel(client: Client) -> None:
    """`timeout_s` is the deadline; Cancel by id ends a stream with CANCELLED; an unknown id is no error."""
    with pytest.raises(DeadlineExceeded):
        client.generate("x", LONG, timeout_s=0.2)
    stream = client.generate_stream("x", LONG, request_id="to-cancel")
    next(iter(stream))
    client.cancel("unknown")
    stream = client.generate_stream("x", LONG, request_id="to-cancel-2")
    with pytest.raises(Cancelled):
        for i, _ in enumerate(stream):
            if i == 0:
                client.cancel("to-cancel-2")


def test_without_a_listener() -> None:
    """Says what to do, soon."""
    start = time.monotonic()
    with Client("127.0.0.1:1") as nobody, pytest.raises(Unavailable, match="quire up"):
        nobody.generate("x")
    assert time.monotonic() - start < 10


def test_async_client(stack: LocalStack) -> None:
    """The same methods, awaited; many at once; leaving a stream early ends the request, cancelling it is told as such."""

    async def scenario() -> None:
        async with AsyncClient(stack.grpc_address) as client:
            outputs = await asyncio.gather(*(client.generate(f"prompt {i}", SHORT) for i in range(16)))
            assert [len(output.outputs[0].token_ids) for output in outputs] == [8] * 16
            assert (await client.chat("hi", SHORT)).text == (await client.chat_stream("hi", SHORT).read()).text
            assert await client.detokenize(await client.tokenize("abc")) == "abc"
            assert [card.name for card in await client.models()] == ["simulated"]
            async for delta in client.generate_stream("x", LONG):
                assert delta.token_ids
                break
            stream = client.generate_stream("x", LONG)
            with pytest.raises(Cancelled):
                async for _ in stream:
                    stream.cancel()
            await client.cancel("unknown")
            with pytest.raises(InvalidArgument):
                await client.generate([10**6])

    asyncio.run(scenario())


class _OtherGateway:
    """Another gateway of the same scheduler, which can be killed and started again at its address."""

    def __init__(self, stack: LocalStack) -> None:
        self._stack = stack
        self._port = "0"
        self.start()
        self.address = self.service.address
        self._port = self.address.rpartition(":")[2]

    def start(self) -> None:
        """Until it listens."""
        arguments = ("gateway", "--scheduler", self._stack.scheduler_address, "--port", self._port)
        more = ("--http-port", "0", "--admin-port", "0", "--admin-http-port", "0")
        self.service = ServiceProcess(
            "gateway", (*arguments, *more), environ=self._stack.options.environ, on_line=ignore_line
        )
        while not self.service.announced:
            time.sleep(0.02)
        self.service.check()

    def kill(self) -> None:
        """As kill -9."""
        self.service.kill()
        self.service.wait(10)


@pytest.fixture
def other(stack: LocalStack) -> Iterator[_OtherGateway]:
    """Beside the stack's own."""
    gateway = _OtherGateway(stack)
    yield gateway
    gateway.kill()


def test_a_killed_gateway_loses_no_request(stack: LocalStack, client: Client, other: _OtherGateway) -> None:
    """Calls and streams of several threads go on at the next gateway, and one of a single gateway when that is back."""
    params = SamplingParams(max_tokens=60, ignore_eos=True, seed=5)
    expected = client.generate("x", params).outputs[0].token_ids
    with Client(f"{other.address}, {stack.grpc_address}") as several, ThreadPoolExecutor(4) as threads:
        calls = [threads.submit(several.generate, "x", params) for _ in range(2)]
        streams = [several.generate_stream("x", params) for _ in range(2)]
        unread = [iter(stream) for stream in streams]
        first = [next(deltas) for deltas in unread]
        reads = [threads.submit(list, deltas) for deltas in unread]
        other.kill()
        assert [call.result(30).outputs[0].token_ids for call in calls] == [expected] * 2
        for begun, read in zip(first, reads, strict=True):
            assert [token for delta in (begun, *read.result(30)) for token in delta.token_ids] == expected
        assert several.target == stack.grpc_address
    other.start()
    patient = RetryPolicy(max_attempts=200, max_pause_s=0.4)
    with Client(other.address, retries=patient) as alone, ThreadPoolExecutor(1) as threads:
        tokens: list[int] = []
        for delta in alone.generate_stream("x", params, options=RESUMABLE):
            if not tokens:
                other.kill()
                threads.submit(other.start)
            tokens += delta.token_ids
    assert tokens == expected


def test_leaving_a_resumable_call_ends_it(stack: LocalStack) -> None:
    """Cancelled tasks, Ctrl-C, and a client that closes: nothing keeps running for a reader that could return (10 s)."""

    async def leave() -> None:
        async with AsyncClient(stack.grpc_address) as client:
            for reading in (
                client.generate("x", LONG, options=RESUMABLE),
                client.generate_stream("x", LONG, options=RESUMABLE).read(),
            ):
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(reading, 0.3)
            async for _ in client.generate_stream("x", LONG, options=RESUMABLE):
                break

    with AdminClient(stack.admin_address) as admin, Client(stack.grpc_address) as client:
        asyncio.run(leave())
        _wait_idle(admin)
        for reading in (
            ".generate('x', params, options=options)",
            ".generate_stream('x', params, options=options).read()",
        ):
            _interrupted(stack.grpc_address, reading, admin)
            _wait_idle(admin)
        with client.generate_stream("x", LONG, options=RESUMABLE) as stream:
            next(iter(stream))
        _wait_idle(admin)
        with Client(stack.grpc_address) as short:
            stream = short.generate_stream("x", LONG, options=RESUMABLE)
        _wait_idle(admin)


_READER = """
import sys
from quire import Client, RequestOptions, SamplingParams

params, options = SamplingParams(max_tokens=2000, ignore_eos=True), RequestOptions(resumable=True)
with Client(sys.argv[1]) as client:
    client{reading}
"""


def _interrupted(address: str, reading: str, admin: AdminClient) -> None:
    """A program of its own whose call is in flight gets Ctrl-C; it ends by it."""
    command = [sys.executable, "-c", _READER.format(reading=reading), address]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=child_environment(os.environ)) as program:
        deadline = time.monotonic() + 40
        while not admin.load().tenants:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        program.send_signal(signal.SIGINT)
        assert "KeyboardInterrupt" in program.communicate(timeout=40)[1]


def _wait_idle(admin: AdminClient) -> None:
    deadline = time.monotonic() + 40
    while (load := admin.load()).tenants:
        assert time.monotonic() < deadline, load
        time.sleep(0.05)


def test_llm_behind_a_gateway(stack: LocalStack) -> None:
    """`LLM(target=...)`: outputs in input order, equal to the client's with the same seed; steps and abort."""
    with LLM(target=stack.grpc_address) as llm, Client(stack.grpc_address) as client:
        prompts = ["one", "two", [5, 6, 7]]
        outputs = llm.generate(prompts, SHORT, use_tqdm=False)
        assert [output.prompt for output in outputs] == ["one", "two", None]
        assert outputs[0].prompt_token_ids == client.tokenize("one")
        expected = [client.generate(prompt, SHORT).outputs[0] for prompt in prompts]
        assert [o.outputs[0].token_ids for o in outputs] == [e.token_ids for e in expected]
        assert [o.text for o in outputs] == [e.text for e in expected]
        llm.add_request("gone", "x", LONG)
        llm.add_request("stays", "x", SHORT)
        ends = _run_and_abort(llm, "gone")
        assert ends == {"gone": "abort", "stays": "length"}
        with pytest.raises(InvalidArgument):
            llm.generate(["fine", [10**6]], SHORT, use_tqdm=False)
        assert not llm.has_unfinished_requests()


def test_target_takes_no_settings_of_an_engine() -> None:
    """They would be ignored silently."""
    with pytest.raises(ConfigError, match="max_num_seqs"):
        LLM(target="127.0.0.1:1", max_num_seqs=4)


def _run_and_abort(llm: LLM, victim: str) -> dict[str, str | None]:
    ends: dict[str, str | None] = {}
    while llm.has_unfinished_requests():
        for output in llm.step():
            if output.request_id == victim and not output.finished and output.outputs:
                llm.abort(victim)
            if output.finished:
                assert output.request_id not in ends, "told as finished once"
                ends[output.request_id] = output.outputs[0].finish_reason
    return ends
