"""Numbers as lines of text, for pipes and logs. Pure."""

from collections.abc import Iterator

from quire_tools.top.numbers import PoolNumbers, TopNumbers
from quire_tools.top.requests_table import duration
from quire_tools.top.steps import PARTS
from quire_tools.top.view import SORTS, TopView
from quire_tools.top.words import reason_text

_NUM_REQUESTS = 5
_NUM_REASONS = 5


def plain_text(numbers: TopNumbers, view: TopView, at: str) -> str:
    """One frame as text; `at` begins its first line."""
    return "\n".join([f"{at}  {_head(numbers)}", *(f"  {line}" for line in _lines(numbers, view))])


def _head(numbers: TopNumbers) -> str:
    state = "draining" if numbers.draining else "serving" if numbers.serving else "not serving"
    num_ready = sum(worker.ready for worker in numbers.workers)
    workers = f"  workers {num_ready}/{len(numbers.workers)} ready" if numbers.workers else ""
    return f"{state}  step {numbers.step}  policy {numbers.policy or '-'}{workers}"


def _lines(numbers: TopNumbers, view: TopView) -> Iterator[str]:
    steps = numbers.steps
    yield f"requests: {numbers.running} running, {numbers.waiting} waiting, {numbers.swapped} swapped"
    yield from (f"worker {w.lane} at {w.address}: {w.problem}" for w in numbers.workers if not w.ready)
    yield from (_pool(pool) for pool in numbers.pools)
    yield f"tokens/s: {steps.prompt_tokens_per_s:.1f} prompt, {numbers.output_tokens_per_s:.1f} output"
    if steps.p50_ms is not None:
        shares = ", ".join(f"{part} {steps.shares[part]:.0%}" for part in PARTS)
        yield f"steps: p50 {steps.p50_ms:.2f} ms, p99 {steps.p99_ms:.2f} ms, {steps.steps_per_s:.1f} a second; {shares}"
        counts = f"{steps.num_preempted} preemptions, {steps.blocks_moved} blocks moved, {steps.num_failed} failed"
        yield f"the last {steps.num_steps} steps: {counts}"
    if numbers.prefixes.hit_rate is not None:
        yield f"prefix cache: {numbers.prefixes.hit_rate:.1%} of the prompt tokens of {numbers.prefixes.num_requests} requests"
    for wait in numbers.waits[:_NUM_REASONS]:
        yield f"{wait.num_requests} {wait.queue}: {wait.reason}: {wait.words}"
    for tenant in numbers.tenants if any(t.name for t in numbers.tenants) else ():
        yield f"tenant {tenant.name or '(default)'}: {tenant.waiting} waiting, {tenant.running} running"
    waiting = [row for row in sorted(numbers.requests, key=SORTS[view.sort]) if row.is_waiting]
    for row in waiting[:_NUM_REQUESTS]:
        name, why = row.request_id or row.id, reason_text(row.reason, row.numbers)
        yield f"{row.queue} {name}: arrived {duration(row.age_s)} ago, {row.prompt_tokens} prompt tokens, {why}"


def _pool(pool: PoolNumbers) -> str:
    return f"{pool.tier} blocks: {pool.used} used, {pool.cached} cached, {pool.free} free of {pool.total}"
