"""Headers of endpoint pickers: tenant, priority and deadline, and only where they are trusted."""

import asyncio

import httpx
import pytest

from gateway_svc.calls import Caller, DefaultTenantOnly, ServiceGoals
from gateway_svc.cell.router_headers import FairnessCallers, read_goals
from gateway_svc.settings import GatewaySettings
from svc_common.clock import NS_PER_S
from svc_common.errors import InvalidArgument
from tests.support.services.scripted_engine import asynchronous, finished, limits, pair, tokens

PRIORITIES = GatewaySettings(router_headers=True, objectives="interactive=10,batch=-5").priorities


@pytest.mark.parametrize("prefix", ["x-llm-d", "x-gateway"])
def test_an_objective_is_a_priority(prefix: str) -> None:
    """By the operator's list; one that is not in it has 0, and a call without one keeps the request's own."""
    header = f"{prefix}-inference-objective"
    found = [read_goals({header: name}, PRIORITIES).priority for name in ("interactive", "batch", "other")]
    assert found == [10, -5, 0]
    assert read_goals({}, PRIORITIES).priority is None


def test_goals_are_a_deadline() -> None:
    """First token and all further ones; no deadline where the time of one of them is not given."""
    goals = read_goals({"x-llm-d-slo-ttft-ms": "500", "x-slo-tpot-ms": "20.5"}, {})
    due_ns = goals.deadline_ns(11)
    assert due_ns is not None
    assert due_ns - goals.since_ns == pytest.approx((0.5 + 10 * 0.0205) * NS_PER_S, abs=10)
    assert ServiceGoals(ttft_s=0.5).deadline_ns(2) is None and ServiceGoals(tpot_s=0.5).deadline_ns(1) is None
    assert ServiceGoals(ttft_s=0.5).deadline_ns(1) == 0.5 * NS_PER_S


@pytest.mark.parametrize("value", ["0", "-1", "x", "1e9", "9" * 30])
def test_times_that_are_none_are_refused(value: str) -> None:
    """By name."""
    with pytest.raises(InvalidArgument, match="x-llm-d-slo-tpot-ms"):
        read_goals({"x-slo-tpot-ms": value}, {})


def test_a_fairness_id_is_a_tenant() -> None:
    """Without a tenants file every name is one, with the terms of the default tenant; with one, it is x-tenant-id."""
    callers = FairnessCallers(DefaultTenantOnly(), has_file=False)
    assert callers.of({"x-llm-d-inference-fairness-id": "acme"}).tenant == "acme"
    assert callers.of({"x-gateway-inference-fairness-id": "acme"}).tenant == "acme"
    assert callers.of({}).tenant == ""
    with pytest.raises(InvalidArgument, match="fairness"):
        callers.of({"x-llm-d-inference-fairness-id": "a b"})
    seen: list[str | None] = []

    class Recorded(DefaultTenantOnly):
        def of(self, metadata: object) -> Caller:
            assert isinstance(metadata, dict)
            seen.append(metadata.get("x-tenant-id"))
            return Caller()

    named = FairnessCallers(Recorded(), has_file=True)
    named.of({"x-llm-d-inference-fairness-id": "acme"})
    named.of({"x-llm-d-inference-fairness-id": "acme", "x-tenant-id": "other"})
    assert seen == ["acme", "other"]


def test_objectives_need_the_headers() -> None:
    """A list that nothing would read is refused, and so is one that is malformed."""
    for settings in ({"objectives": "a=1"}, {"router_headers": True, "objectives": "a"}):
        with pytest.raises(ValueError, match="objective"):
            GatewaySettings.model_validate(settings)


@pytest.mark.processes
@pytest.mark.parametrize("is_trusted", [True, False])
@asynchronous
async def test_the_scheduler_gets_them_only_where_they_are_trusted(is_trusted: bool) -> None:
    """Tenant, priority (negated on the wire) and time to the deadline of a request."""
    headers = {
        "x-llm-d-inference-fairness-id": "acme",
        "x-llm-d-inference-objective": "interactive",
        "x-llm-d-slo-ttft-ms": "20000",
        "x-llm-d-slo-tpot-ms": "1000",
    }
    settings = {"router_headers": True, "objectives": "interactive=10"} if is_trusted else {}
    async with (
        pair(**settings) as (_, attachment, gateway),
        httpx.AsyncClient(base_url=f"http://{gateway.http}", timeout=20) as http,
    ):
        body = {"model": limits().model, "prompt": "abc", "max_tokens": 3}
        asked = asyncio.create_task(http.post("/v1/completions", json=body, headers=headers))
        submit = await attachment.next_submit()
        attachment.send(tokens(submit.handle, 0, [65, 66, 67]), finished(submit.handle, 3))
        assert (await asked).status_code == 200
    assert (submit.tenant, submit.priority) == (("acme", -10) if is_trusted else ("", 0))
    assert (submit.remaining_ns <= 22 * NS_PER_S) == is_trusted
