"""Quotas of tenants: what is taken at admission is settled exactly once, however a request ends."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway_svc.access.quota import TenantQuota, estimated_tokens, used_tokens
from gateway_svc.access.tenants_file import TenantLimits
from gateway_svc.access.terms import TenantTerms
from gateway_svc.requests.engine_request import EngineRequest
from gateway_svc.requests.token_runs import ChoiceTokens
from protos.common.v1 import common_pb2
from protos.engine.v1 import engine_pb2
from svc_common import wire_arrays
from svc_common.clock import monotonic_ns
from svc_common.errors import Cancelled, PermissionDenied, ResourceExhausted
from svc_common.token_bucket import TokenBucket

PER_MINUTE = 6_000


@dataclass
class Clock:
    """Seconds that stand still until told."""

    at_s: float = field(default=100.0)

    def __call__(self) -> float:
        return self.at_s


def terms(clock: Clock, **limits: object) -> tuple[TenantTerms, TenantQuota]:
    """Of one tenant."""
    made = TenantLimits.model_validate(limits)
    quota = TenantQuota("acme", made, clock)
    return TenantTerms("acme", made, quota), quota


def submit(
    prompt: int = 3, most: int = 10, choices: int = 1, best_of: int = 0, *, resumable: bool = False
) -> engine_pb2.Submit:
    """A request; what the scheduler is told."""
    return engine_pb2.Submit(
        token_ids=wire_arrays.pack(list(range(prompt))),
        stop=common_pb2.StopRules(max_tokens=most),
        num_choices=choices,
        best_of=best_of,
        resumable=resumable,
    )


def running(message: engine_pb2.Submit, *num_tokens: int) -> EngineRequest:
    """A request that started; so many tokens of each choice have come."""
    request = EngineRequest(message, monotonic_ns() + 10**12)
    request.start(engine_pb2.Started())
    for choice, num in enumerate(num_tokens):
        request.add_tokens(choice, ChoiceTokens(0, list(range(num))))
    return request


def test_a_bucket_says_when() -> None:
    """Full at first, filling evenly, never above what it holds."""
    clock = Clock()
    bucket = TokenBucket(2.0, 4.0, clock)
    bucket.take(4)
    assert bucket.wait_s(1) == pytest.approx(0.5)
    clock.at_s += 0.5
    assert bucket.wait_s(1) == 0
    clock.at_s += 1_000
    assert bucket.level == 4


def test_what_never_fits_is_taken_on_credit() -> None:
    """A request above the whole quota runs when the bucket is full; the debt is paid before the next."""
    clock = Clock()
    bucket = TokenBucket(1.0, 10.0, clock)
    assert bucket.wait_s(1_000) == 0
    bucket.take(30)
    assert bucket.wait_s(1) == pytest.approx(21)


def test_calls_per_second() -> None:
    """RetryInfo is the bucket's; QuotaFailure names tenant and limit."""
    clock = Clock()
    made, _ = terms(clock, requests_per_s=4, burst=2)
    made.count_call()
    made.count_call()
    with pytest.raises(ResourceExhausted) as refused:
        made.count_call()
    error = refused.value
    assert (error.reason, error.retry_after_s) == ("TENANT_QUOTA", pytest.approx(0.25))
    assert error.quota is not None
    assert (error.quota.subject, error.quota.description) == ("tenant:acme", "requests_per_s = 4")
    clock.at_s += error.retry_after_s
    made.count_call()


def test_requests_at_a_time() -> None:
    """A place is free again when its request ends, also by an error."""
    made, quota = terms(Clock(), concurrent_requests=1)
    with pytest.raises(Cancelled), made.permit(0):
        with pytest.raises(ResourceExhausted) as refused, made.permit(0):
            pass
        assert refused.value.retry_after_s is not None
        raise Cancelled("gone")
    assert quota.num_running == 0
    with made.permit(0):
        assert quota.num_running == 1


def test_priority_is_capped() -> None:
    """Higher = sooner; without an entry in the file no tenant is above the rest."""
    made, quota = terms(Clock())
    with made.permit(-5), pytest.raises(PermissionDenied) as refused, made.permit(1):
        pass
    assert refused.value.reason == "PRIORITY_NOT_ALLOWED"
    assert quota.num_running == 0


def test_the_estimate_is_the_most_that_a_request_can_cost() -> None:
    """Prompt, and output of every sequence, returned or not."""
    assert estimated_tokens(submit(3, 10)) == 13
    assert estimated_tokens(submit(3, 10, choices=4)) == 43
    assert estimated_tokens(submit(3, 10, choices=2, best_of=5)) == 53


def test_what_a_request_cost() -> None:
    """Output to the stop string, hidden sequences too; nothing before it starts; everything where it goes on unread."""
    request = running(submit(3, 10, choices=2), 4, 6)
    assert used_tokens(request) == 13
    request.stop(1, 5)
    assert used_tokens(request) == 12
    assert used_tokens(running(submit(3, 10, choices=1, best_of=3), 4)) == 15
    assert used_tokens(EngineRequest(submit(), monotonic_ns() + 10**12)) == 0
    left = running(submit(3, 10, resumable=True), 4)
    assert used_tokens(left) == 13
    left.fail(Cancelled("ended"))
    assert used_tokens(left) == 7


def test_another_calls_request_costs_its_reader_nothing() -> None:
    """An idempotent call that attaches, and Resume: the submitter was charged."""
    request = running(submit(3, 10), 4)
    request.was_attached = True
    assert used_tokens(request) == 0


ENDS = (
    "done",
    "cancelled before it was sent",
    "refused by the scheduler",
    "failed",
    "left",
    "charged and never submitted",
)


@given(
    plan=st.lists(
        st.tuples(st.integers(1, 40), st.integers(0, 60), st.integers(1, 3), st.sampled_from(ENDS), st.data()),
        max_size=30,
    )
)
@settings(max_examples=60, deadline=None)
def test_each_request_is_settled_exactly_once(plan: list) -> None:
    """Under any ends in any order the bucket is short by exactly what was used: time stands still, so nothing hides it."""
    clock = Clock()
    made, quota = terms(clock, tokens_per_min=PER_MINUTE, concurrent_requests=1_000)
    used = 0
    open_permits = []
    for prompt, most, choices, end, data in plan:
        message = submit(prompt, most, choices)
        context = made.permit(0)
        permit = context.__enter__()
        left = quota.num_tokens_left
        assert left is not None
        if left < estimated_tokens(message):
            with pytest.raises(ResourceExhausted):
                permit.charge(message)
            assert quota.num_tokens_left == pytest.approx(left)
        else:
            permit.charge(message)
            used += _end(permit, message, end, data)
        if data.draw(st.booleans()):
            open_permits.append(context)
        else:
            context.__exit__(None, None, None)
    for context in open_permits:
        context.__exit__(None, None, None)
    assert quota.num_running == 0
    assert quota.num_tokens_left == pytest.approx(PER_MINUTE - used)


def _end(permit, message: engine_pb2.Submit, end: str, data) -> int:
    """Lets a request end so; what it cost by our own count."""
    if end == "charged and never submitted":
        return 0
    if end in {"cancelled before it was sent", "refused by the scheduler"}:
        request = EngineRequest(message, monotonic_ns() + 10**12)
        if end.startswith("refused"):
            request.fail(ResourceExhausted("full"))
        permit.settle(request)
        return 0
    counts = [data.draw(st.integers(0, message.stop.max_tokens)) for _ in range(message.num_choices)]
    request = running(message, *counts)
    if end == "failed":
        request.fail(Cancelled("failed"))
    elif end == "done":
        for choice, num in enumerate(counts):
            last = choice == len(counts) - 1
            request.finish(engine_pb2.Finished(choice=choice, num_output_tokens=num, last=last))
    permit.settle(request)
    return len(message.token_ids) // 4 + sum(counts)


def test_salts_keep_tenants_apart() -> None:
    """Equal only for one tenant and one wish, or where both share; short enough for the scheduler."""
    clock = Clock()
    acme, shared, also_shared = terms(clock)[0], terms(clock, shared_cache=True)[0], terms(clock, shared_cache=True)[0]
    other = TenantTerms("acm", TenantLimits(), TenantQuota("acm", TenantLimits(), clock))
    long = "s" * 512
    wishes = ("", "a", "e", long, acme.cache_salt(""))
    salts = [made.cache_salt(wish) for made in (acme, other, shared) for wish in wishes]
    assert len(set(salts)) == len(salts)
    assert max(map(len, salts)) <= 65
    assert [shared.cache_salt(wish) for wish in wishes] == [also_shared.cache_salt(wish) for wish in wishes]
    assert shared.cache_salt("") == ""
