"""What `quire top` makes of a scheduler's answers: pure functions of messages."""

import json

import pytest

from protos.inference.v1 import admin_pb2 as pb
from quire.operators.reason_texts import NOW
from quire_tools.reasons_now import BEFORE
from quire_tools.top.numbers import PrefixTally, numbers_json
from quire_tools.top.steps import PARTS, StepWindow
from quire_tools.top.words import reason_text, sentence, short_id
from scheduler_svc.core.reasons import Reason
from svc_common.percentiles import percentiles
from tests.quire_tools.top.answers import MS, NOW_NS, busy, request, step


def _window(*reports: pb.StepReport, since: int = 1) -> StepWindow:
    window = StepWindow()
    window.take(reports, since=since)
    return window


# --- steps ------------------------------------------------------------------------------------------------------------


def test_percentiles_are_values_that_were_there() -> None:
    """The nearest rank: half of the steps are at most p50."""
    assert percentiles([], observed=True) == {}
    assert percentiles([3.0, 1.0, 2.0], observed=True)["p50"] == 2.0
    assert percentiles(list(range(1, 101)), observed=True)["p99"] == 99
    assert percentiles([7.0], observed=True)["p99"] == 7.0


def test_where_a_steps_time_goes() -> None:
    """Parts add up to planning, waiting at the worker and the worker's own time."""
    figures = _window(step(1, ms=10.0)).figures(NOW_NS)
    assert tuple(figures.shares) == PARTS
    assert sum(figures.shares.values()) == pytest.approx(1.0)
    whole_ms = 1 + 2 + 10
    assert figures.shares["schedule"] == pytest.approx(1 / whole_ms)
    assert figures.shares["queued"] == pytest.approx(2 / whole_ms)
    assert figures.shares["model"] == pytest.approx(5 / whole_ms)
    assert figures.shares["other"] == pytest.approx(2 / whole_ms)


def test_rates_count_the_last_ten_seconds() -> None:
    """Steps before them do not count, and no steps are none a second."""
    old = [step(i, ended_ms=30_000 - i) for i in range(1, 50)]
    new = [step(50 + i, ended_ms=9_000 - 100 * i, prompt=30) for i in range(20)]
    figures = _window(*old, *new).figures(NOW_NS)
    assert figures.steps_per_s == pytest.approx(2.0)
    assert figures.prompt_tokens_per_s == pytest.approx(60.0)
    assert figures.output_tokens_per_s == pytest.approx(8.0)
    assert _window(*old).figures(NOW_NS).steps_per_s == 0.0


def test_steps_that_were_not_read_count_like_those_that_were() -> None:
    """Of large steps only some are read."""
    window = _window(step(1, ended_ms=60_000))
    window.take([step(i, ended_ms=9_000 - 100 * i) for i in range(11, 21)], since=11)
    figures = window.figures(NOW_NS)
    assert figures.is_sampled and figures.num_steps == 11
    assert figures.steps_per_s == pytest.approx(1.9), "steps 2 to 20 in ten seconds"


def test_what_is_read_next() -> None:
    """No step twice; of a long pause the newest; less where steps are large; all over again after another scheduler came."""
    window = StepWindow(max_steps=600)
    assert window.since(0) == 1 and window.since(10_000) == 10_000 - 125 + 1
    window.take([step(10)], since=10)
    assert window.since(12) == 11
    assert window.since(10) == 11, "nothing new: nothing is sent"
    assert window.since(100_000) == 100_000 - 500 + 1
    window.take([step(11, decode=200)], since=11)
    assert window.since(100_000) == 100_000 - 10 + 1
    window.take([step(12, decode=2_000)], since=12)
    assert window.since(100_000) == 100_000 - 8 + 1
    assert window.since(3) == 1
    window.take([step(1), step(2)], since=1)
    assert [window.figures(NOW_NS).last_step, window.figures(NOW_NS).num_steps] == [2, 2]


def test_failed_steps_are_counted_and_not_timed() -> None:
    """A step whose worker was lost took no time at the worker."""
    figures = _window(step(1, ms=4), step(2, ms=0, error="the worker was lost")).figures(NOW_NS)
    assert (figures.num_failed, figures.p50_ms, figures.num_steps) == (1, 4.0, 2)


def test_steps_repeated_by_grants_are_counted() -> None:
    """Of those that were read."""
    figures = _window(step(1, granted_steps=2), step(2, is_repeat=True), step(3, is_repeat=True), step(4)).figures(
        NOW_NS
    )
    assert (figures.num_repeated, figures.num_steps) == (2, 4)


# --- words ------------------------------------------------------------------------------------------------------------


def test_every_reason_has_words() -> None:
    """None is told by its code alone."""
    assert set(NOW) == set(Reason)
    assert len(set(NOW.values())) == len(NOW)
    for reason in Reason:
        assert sentence(reason.value, {}).startswith(NOW[reason])


def test_words_have_the_numbers_and_the_keys() -> None:
    """The deciding numbers, and the key that influences them; behind another request: that one's."""
    numbers = {"need": 14, "free": 3}
    text = sentence("NEED_BLOCKS", numbers)
    assert (
        text
        == "too few free KV-cache blocks (need 14, free 3). Depends on num_gpu_blocks, num_cpu_blocks, watermark_blocks"
    )
    behind = {"head": "7c9e", "head_reason": "NEED_BLOCKS", **numbers}
    assert sentence("BEHIND", behind) == f"behind 7c9e: {text}"
    assert reason_text("BEHIND", behind) == "behind 7c9e: NEED_BLOCKS need 14, free 3"
    assert reason_text("DELAY", {"waited_s": 0.12345}) == "DELAY waited_s 0.123"
    assert sentence("A_NEW_ONE", {"x": "y"}) == "A_NEW_ONE (x y)", "of a newer scheduler"
    assert "recording" in sentence(BEFORE, {})


def test_long_ids_are_told_by_their_ends() -> None:
    """Ids that are made one after another begin alike."""
    assert short_id("7c9e6679") == "7c9e6679"
    assert short_id("01a201fb-a15a-7abd-8892-5595597779a5") == "…5595597779a5"


# --- all of it --------------------------------------------------------------------------------------------------------


def test_numbers_of_a_busy_scheduler() -> None:
    """Queues, reasons by frequency with words, pools without overlap, workers with their problem."""
    numbers = busy()
    assert (numbers.running, numbers.waiting, numbers.swapped, numbers.step) == (20, 85, 2, 400)
    assert [(wait.reason, wait.queue, wait.num_requests) for wait in numbers.waits] == [
        ("BEHIND", "waiting", 84),
        ("NEED_BLOCKS", "swapped", 2),
        ("NEED_BLOCKS", "waiting", 1),
    ]
    assert "too few free" in numbers.waits[0].words
    device, host = numbers.pools
    assert (device.used, device.cached, device.free, device.total) == (288, 9, 3, 300)
    assert (host.used, host.free) == (24, 1000)
    assert [worker.problem for worker in numbers.workers] == ["", "it cannot be reached"]
    assert numbers.num_left_out == 25 and numbers.steps.num_preempted == 1


def test_ages_and_waits() -> None:
    """Of one that started the wait is over; clocks of two machines that disagree make no negative ages."""
    rows = {row.id: row for row in busy().requests}
    assert (rows["run-0"].age_s, rows["run-0"].waited_s) == (9.0, 0.5)
    assert rows["wait-0"].age_s == rows["wait-0"].waited_s == 6.0
    assert all(row.age_s >= 0 for row in rows.values())


def test_json_has_the_same_numbers() -> None:
    """One object; names are those of the fields."""
    values = json.loads(json.dumps(numbers_json(busy())))
    assert values["waits"][0]["reason"] == "BEHIND" and values["pools"][0]["used"] == 288
    assert values["prefixes"]["hit_rate"] == pytest.approx(500 / 2_100)
    assert values["steps"]["shares"].keys() == set(PARTS) and len(values["steps"]["durations_ms"]) == 100
    assert values["requests"][20]["numbers"] == {"need": 14, "free": 3, "watermark": 3}


def test_prefix_hits_are_counted_once_for_each_request() -> None:
    """And only of those that started; one that is seen again is not another."""
    tally = PrefixTally()
    started = request("a", "running", "RUNNING", started=True, prompt_tokens=100, cached_prompt_tokens=64)
    tally.take([started, request("b", "waiting", "ARRIVED", prompt_tokens=50)])
    tally.take([started])
    found = tally.prefixes()
    assert (found.num_requests, found.prompt_tokens, found.cached_tokens, found.hit_rate) == (1, 100, 64, 0.64)
    tally.forget()
    assert tally.prefixes().hit_rate is None


def test_the_helper_makes_steps_as_the_scheduler_tells_them() -> None:
    """Times of a step lie in each other."""
    times = step(1, ms=5).times
    assert times.cache_ns + times.prepare_ns + times.model_ns + times.sample_ns <= 5 * MS
