"""`quire top` over the three real services: its numbers are those of the admin API."""

from quire.client.sampling_params import SamplingParams
from quire.client.sync_client import Client
from quire.local_stack.stack import LocalStack
from quire.operators.admin import AdminClient
from quire_tools.top.live import LiveTopSource
from quire_tools.top.steps import PARTS

_LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)


def test_top_sees_what_runs(stack: LocalStack, client: Client) -> None:
    """A request that runs is listed under its public id, with its tokens; steps have times; parts of the pool add up."""
    with AdminClient(stack.admin_address) as admin:
        source = LiveTopSource(admin)
        with client.generate_stream("import os", _LONG, request_id="seen-by-top") as stream:
            deltas = iter(stream)
            next(deltas), next(deltas)
            numbers = source.numbers()
        [row] = [row for row in numbers.requests if row.request_id == "seen-by-top"]
        assert (row.queue, row.is_waiting, row.num_choices) == ("running", False, 1)
        assert row.output_tokens >= 1 and row.prompt_tokens > 0 and row.age_s >= row.waited_s >= 0
        assert numbers.running >= 1 and numbers.serving and [worker.ready for worker in numbers.workers] == [True]
        after = source.numbers()
        reports = {report.step: report for report in admin.steps()}
    steps = after.steps
    assert steps.last_step >= numbers.steps.last_step > 0 and steps.last_step in reports
    shown = [reports[step].duration_ns / 1e6 for step in sorted(reports)][-len(steps.durations_ms) :]
    assert min(shown) / 1.001 <= steps.p50_ms <= steps.p99_ms <= max(shown) * 1.001
    assert steps.output_tokens_per_s > 0 and steps.prompt_tokens_per_s > 0
    assert set(steps.shares) == set(PARTS) and abs(sum(steps.shares.values()) - 1) < 1e-9 and steps.shares["model"] > 0
    for pool in after.pools:
        assert pool.used + pool.cached + pool.free == pool.total
