"""The main loop of `quire top`: a live screen on a terminal, lines of text (`plain_text`) or JSON elsewhere."""

import json
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.live import Live

from quire_tools.top.drawing import Surroundings, frame
from quire_tools.top.keys import Keys
from quire_tools.top.live import SourceReader
from quire_tools.top.numbers import PoolNumbers, TopNumbers, numbers_json
from quire_tools.top.requests_table import duration
from quire_tools.top.states import Source, TopState
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


_TICK_S = 0.25

Write = Callable[[str], None]


def show(source: Source, console: Console, *, interval_s: float) -> None:
    """Show a live screen until a key ends it. Raises the error that ended the source."""
    keys, view = Keys(), TopView()
    with (
        SourceReader(source, interval_s) as reader,
        keys.ready(),
        Live(console=console, screen=True, auto_refresh=False) as live,
    ):
        around = Surroundings(source.title, interval_s, has_keys=keys.are_there)
        while not view.is_over and reader.error is None:
            live.update(frame(reader.state, view, around, *console.size), refresh=True)
            view = _turn(reader, keys, view, console)
    if reader.error is not None:
        raise reader.error


def _turn(reader: SourceReader, keys: Keys, view: TopView, console: Console) -> TopView:
    """Handle keys until the screen must be redrawn: a key, new numbers, a resized terminal, or one second."""
    size, deadline_s = console.size, time.monotonic() + 1.0
    while time.monotonic() < deadline_s:
        pressed = keys.pressed(_TICK_S)
        for key in pressed:
            view = view.after(key)
        reader.is_paused = view.is_paused
        if pressed or reader.has_news() or console.size != size:
            break
    return view


def once(source: Source, write: Write, *, as_json: bool) -> None:
    """Write one frame. Raises QuireError if there are no numbers."""
    state = source.last()
    write(_json_line(state) if as_json else _text(state, source))


def lines(source: Source, write: Write, *, interval_s: float, as_json: bool) -> None:
    """Write one frame per interval, for pipes, until the source ends."""
    while True:
        began_s = time.monotonic()
        state = source.read()
        write(_json_line(state) if as_json else _text(state, source))
        if state.is_over:
            return
        time.sleep(max(0.0, began_s + interval_s - time.monotonic()) if source.is_live else 0.0)


def _json_line(state: TopState) -> str:
    """One JSON line; without numbers, `numbers` is null and `problem` says why."""
    if state.problem or state.numbers is None:
        return json.dumps({"problem": state.problem, "numbers": None})
    return json.dumps(numbers_json(state.numbers))


def _text(state: TopState, source: Source) -> str:
    if state.problem or state.numbers is None:
        what = " is unreachable, retrying" if source.is_live else ""
        return f"{source.title}{what}: {state.problem or 'no step'}"
    return plain_text(state.numbers, TopView(), state.when)
