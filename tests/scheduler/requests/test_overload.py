"""A scheduler with more than it can serve: the bounded queue, shares of tenants, limits of requests."""

from typing import Any

import numpy as np
import pytest

from protos.common.v1 import common_pb2
from protos.engine.v1 import engine_pb2
from scheduler_svc.requests import sampling_limits
from scheduler_svc.requests.submission import MAX_AGE_NS, parse
from scheduler_svc.requests.waiting_room import WaitingRoom
from scheduler_svc.settings import SchedulerSettings
from svc_common import wire_arrays
from svc_common.errors import InvalidArgument, ResourceExhausted
from tests.support.services.harness import Gateway, eventually, run_async, stack

MS = 1_000_000
PROMPT = list(range(32, 72))
SLOW = {"time_scale": 1.0, "step_base_s": 0.01, "num_gpu_blocks": 512}


class _Clock:
    """Monotonic ns, set by hand."""

    now_ns = 0

    def __call__(self) -> int:
        return self.now_ns


def _room(clock: _Clock | None = None, **limits: Any) -> WaitingRoom:
    return WaitingRoom(SchedulerSettings(**limits), clock or _Clock())


def _enter(room: WaitingRoom, tenant: str, num_tokens: int = 1) -> bool:
    try:
        room.check(tenant, num_tokens, 0)
    except ResourceExhausted as error:
        assert error.reason == "QUEUE_FULL" and error.retry_after_s is not None
        return False
    room.enter(tenant, num_tokens)
    return True


# --- the queue ------------------------------------------------------------------------------------------------------


def test_it_is_bounded_by_requests_and_by_tokens() -> None:
    """One tenant has the whole queue, and not more; an empty queue takes a prompt of any size."""
    room = _room(max_waiting_requests=8, max_waiting_tokens=100)
    assert [_enter(room, "a") for _ in range(9)] == [True] * 8 + [False]
    room = _room(max_waiting_requests=8, max_waiting_tokens=100)
    assert _enter(room, "a", 500) and not _enter(room, "a", 1)
    room.leave("a", 500)
    assert [_enter(room, "a", 50) for _ in range(3)] == [True, True, False]


def test_a_flood_leaves_room_for_others() -> None:
    """A tenant that has less than its share of a full queue gets in, up to that share; each has one request at least."""
    room = _room(max_waiting_requests=40, max_waiting_tokens=10_000)
    assert sum(_enter(room, "flood") for _ in range(100)) == 40
    assert sum(_enter(room, "a") for _ in range(100)) == 20, "half of it is its share"
    assert sum(_enter(room, "b") for _ in range(100)) == 13, "a third"
    room = _room(max_waiting_requests=1, max_waiting_tokens=10_000)
    assert [_enter(room, tenant) for tenant in ("flood", "flood", "a", "a", "b")] == [True, False, True, False, True]


def test_the_same_by_tokens() -> None:
    """Many small prompts do not get past a share that few large ones would fill; the first of a tenant is taken at any size."""
    room = _room(max_waiting_requests=1_000, max_waiting_tokens=1_000)
    assert sum(_enter(room, "flood", 100) for _ in range(20)) == 10
    assert sum(_enter(room, "a", 50) for _ in range(20)) == 10
    assert room.num_tokens == 1_500
    assert _enter(room, "b", 5_000) and not _enter(room, "b", 1)


def test_a_tenant_that_was_refused_may_try_again_below_its_share() -> None:
    """While the queue stays full of another's requests: told when one of its own no longer waits."""
    room, told = _room(max_waiting_requests=8), []
    for _ in range(8):
        _enter(room, "flood")
    for _ in range(5):
        _enter(room, "a")
    assert room.closed_for == ["a"] and room.num_requests == 12
    room.listen(lambda: told.append(room.closed_for))
    room.leave("flood", 1)
    assert told == [], "still four of its own, which is its share"
    room.leave("a", 1)
    assert told == [[]] and _enter(room, "a")


def test_it_names_the_tenants_for_which_it_is_closed() -> None:
    """Told when a tenant is refused, and again when it would not be: not at each request that starts."""
    room, told = _room(max_waiting_requests=256, max_waiting_tokens=10_000), []
    room.listen(lambda: told.append(room.closed_for))
    for _ in range(300):
        _enter(room, "flood")
    assert told == [["flood"]]
    for _ in range(4):
        room.leave("flood", 1)
    assert told == [["flood"]], "a little room is kept before it opens again"
    room.leave("flood", 1)
    assert told == [["flood"], []]


def test_when_to_come_again_follows_the_drain_rate() -> None:
    """A tenth of the queue, at the rate of the last starts while a request waited, between 0.1 and 60 s."""
    clock = _Clock()
    room = _room(clock, max_waiting_requests=100)
    for _ in range(100):
        _enter(room, "a")
    assert room.retry_after_s(0) == 1.0, "nothing has started yet"
    for i in range(64):
        clock.now_ns = i * 500 * MS
        room.started(clock.now_ns)
    clock.now_ns = 32_000 * MS
    assert room.retry_after_s(clock.now_ns) == pytest.approx(10 / 2.0, rel=0.05)
    clock.now_ns = 3_600_000 * MS
    assert room.retry_after_s(clock.now_ns) == 60.0


def test_it_may_be_bounded_by_time() -> None:
    """As many as start within `max_waiting_s`; what an idle queue starts at once tells of no limit."""
    clock = _Clock()
    room = _room(clock, max_waiting_requests=1_000, max_waiting_s=2.0)
    for _ in range(40):  # one every second, each of which waits for a millisecond
        assert _enter(room, "a")
        clock.now_ns += MS
        room.leave("a", 1)
        room.started(clock.now_ns)
        clock.now_ns += 999 * MS
    assert sum(_enter(room, "a") for _ in range(1_000)) == 1_000, "a burst after an idle time"
    for _ in range(200):  # ten a second, now that they wait
        clock.now_ns += 100 * MS
        room.leave("a", 1)
        room.started(clock.now_ns)
    for _ in range(780):
        room.leave("a", 1)
    assert room.num_requests == 20 and not _enter(room, "a") and _enter(room, "b")


@run_async
async def test_gateways_are_told_that_the_queue_is_full() -> None:
    """Once when a tenant is refused, once when there is room again; a gateway that attaches meanwhile hears it in its Welcome."""
    async with stack(SLOW, max_num_seqs=1, max_num_batched_tokens=64, max_waiting_requests=2) as s:
        first = await s.gateway.submit(PROMPT, max_tokens=1_000, tenant="a")
        await s.gateway.tokens_of(first, 1)
        handles = [await s.gateway.submit(PROMPT, max_tokens=2, tenant="a") for _ in range(3)]
        refused = await s.gateway.end_of(handles[-1])
        assert refused.failed is not None and refused.failed.error.reason == "QUEUE_FULL"
        other = await s.gateway.submit(PROMPT, max_tokens=2, tenant="b")
        await eventually(lambda: s.gateway.queues, "the gateway is told")
        assert list(s.gateway.queues[0].closed_for) == ["a"] and s.gateway.queues[0].retry_after_ns >= 100 * MS
        async with Gateway(s.address, "second") as second:
            assert list(second.welcome.queue.closed_for) == ["a"]
        await s.gateway.leave(first)
        for handle in [*handles[:-1], other]:
            assert (await s.gateway.end_of(handle)).finished is not None
        assert [list(queue.closed_for) for queue in s.gateway.queues] == [["a"], []]


@run_async
async def test_live_requests_are_bounded() -> None:
    """Whatever the queue has room for."""
    async with stack(SLOW, max_num_seqs=2, max_live_requests=3) as s:
        handles = await s.gateway.submit_all([PROMPT] * 4, max_tokens=30)
        refused = (await s.gateway.end_of(handles[-1])).failed
        assert refused is not None and refused.error.reason == "QUEUE_FULL" and refused.error.retry_after_ns > 0
        for handle in handles[:-1]:
            assert (await s.gateway.end_of(handle)).finished is not None


@run_async
async def test_a_flooding_tenant_does_not_keep_another_waiting() -> None:
    """Through the service: twenty of one wait when the other's comes, which is next."""
    async with stack(SLOW, max_num_seqs=1, max_num_batched_tokens=64) as s:
        flood = [await s.gateway.submit(PROMPT, max_tokens=6, tenant="flood") for _ in range(20)]
        await s.gateway.tokens_of(flood[0], 1)
        quiet = await s.gateway.submit(PROMPT, max_tokens=2, tenant="quiet")
        assert (await s.gateway.end_of(quiet)).finished is not None
        assert sum(s.gateway.outputs[handle].is_over for handle in flood) <= 4


# --- what one request may ask for -----------------------------------------------------------------------------------


def _submit(**fields: Any) -> engine_pb2.Submit:
    sampling = common_pb2.ResolvedSampling(**{"top_p": 1.0, **fields.pop("sampling", {})})
    rest: dict[str, Any] = {"handle": 1, "request_id": "r", "token_ids": wire_arrays.pack([1, 2, 3]), **fields}
    return engine_pb2.Submit(sampling=sampling, stop=common_pb2.StopRules(max_tokens=4), **rest)


_WORD = common_pb2.TokenSequence(token_ids=wire_arrays.pack([1]))
_NEGATIVE, _ODD = wire_arrays.pack([-1]), b"\x00\x00\x00"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"num_choices": 129}, "num_choices"),
        ({"num_choices": 4, "best_of": 129}, "best_of"),
        ({"num_choices": 4, "best_of": 3}, "best_of"),
        ({"remaining_ns": MAX_AGE_NS + 1}, "remaining_ns"),
        ({"arrival_age_ns": MAX_AGE_NS + 1}, "arrival_age_ns"),
        ({"adapter": "a" * 600}, "adapter"),
        ({"tenant": "a" * 600}, "tenant"),
        ({"cache_salt": "a" * 600}, "cache_salt"),
        ({"sampling": {"num_top_logprobs": 21}}, "sampling.num_top_logprobs"),
        ({"sampling": {"num_prompt_logprobs": 21}}, "sampling.num_prompt_logprobs"),
        (
            {"sampling": {"num_prompt_logprobs": 20}, "token_ids": wire_arrays.pack(np.ones(10_000, wire_arrays.I32))},
            "sampling.num_prompt_logprobs",
        ),
        ({"sampling": {"min_p": float("nan")}}, "sampling.min_p"),
        ({"sampling": {"repetition_penalty": float("inf")}}, "sampling.repetition_penalty"),
        ({"sampling": {"presence_penalty": float("-inf")}}, "sampling.presence_penalty"),
        ({"sampling": {"frequency_penalty": float("nan")}}, "sampling.frequency_penalty"),
        (
            {
                "sampling": {
                    "logit_bias_ids": wire_arrays.pack(range(1_025)),
                    "logit_biases": wire_arrays.pack([0.0] * 1_025, wire_arrays.F32),
                }
            },
            "sampling.logit_bias_ids",
        ),
        ({"sampling": {"logit_bias_ids": wire_arrays.pack([1])}}, "sampling.logit_biases"),
        (
            {
                "sampling": {
                    "logit_bias_ids": wire_arrays.pack([1]),
                    "logit_biases": wire_arrays.pack([101.0], wire_arrays.F32),
                }
            },
            "sampling.logit_biases",
        ),
        (
            {"sampling": {"logit_bias_ids": _NEGATIVE, "logit_biases": wire_arrays.pack([1.0], wire_arrays.F32)}},
            "sampling.logit_bias_ids",
        ),
        ({"sampling": {"logit_bias_ids": _ODD, "logit_biases": _ODD}}, "sampling.logit_biases"),
        ({"sampling": {"allowed_token_ids": _NEGATIVE}}, "sampling.allowed_token_ids"),
        ({"sampling": {"allowed_token_ids": _ODD}}, "sampling.allowed_token_ids"),
        ({"sampling": {"bad_words": [_WORD] * 2_049}}, "sampling.bad_words"),
        ({"sampling": {"bad_words": [common_pb2.TokenSequence()]}}, "sampling.bad_words"),
        (
            {"sampling": {"bad_words": [common_pb2.TokenSequence(token_ids=wire_arrays.pack(range(1_025)))]}},
            "sampling.bad_words",
        ),
        (
            {"sampling": {"grammar": common_pb2.Grammar(text="x" * (sampling_limits.MAX_GRAMMAR_BYTES + 1))}},
            "sampling.grammar",
        ),
    ],
)
def test_what_a_request_asks_is_bounded_here_too(fields: dict[str, Any], field: str) -> None:
    """A gateway is not to be trusted: INVALID_ARGUMENT names the field."""
    with pytest.raises(InvalidArgument) as error:
        parse(_submit(**fields), 0)
    assert field in [violation.field for violation in error.value.violations]


def test_a_request_within_all_limits_is_taken() -> None:
    """At each limit."""
    sampling = {
        "num_top_logprobs": 20,
        "num_prompt_logprobs": 20,
        "logit_bias_ids": wire_arrays.pack(range(1_024)),
        "logit_biases": wire_arrays.pack([-100.0] * 1_024, wire_arrays.F32),
        "allowed_token_ids": wire_arrays.pack(range(5_000)),
        "bad_words": [_WORD] * 2_048,
        "grammar": common_pb2.Grammar(kind=common_pb2.GRAMMAR_KIND_REGEX, text="x" * 1_000),
    }
    taken = parse(_submit(sampling=sampling, num_choices=4, best_of=128, remaining_ns=MAX_AGE_NS), 0)
    assert taken.best_of == 128
