"""The lab's page in a real browser: of a recording, and of a running stack under load. Nothing may complain."""

import asyncio
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gateway_svc.lab.source import Step
from quire.local_stack.stack import LocalStack
from quire.operators.admin import AdminClient
from quire_tools.lab import server
from quire_tools.lab.recorded import RecordedLabSource
from scheduler_svc.observe.recording.file_format import Recording
from tests.gateway.lab.chromium import Chromium, chromium
from tests.gateway.lab.load import load
from tests.support.core.granting_lives import granting_life
from tests.support.services.lab_recordings import recording

pytestmark = pytest.mark.processes

FEW_BLOCKS = (
    "--dtype",
    "float32",
    "--max-model-len",
    "512",
    "--num-gpu-blocks-override",
    "48",
    "--swap-space",
    "16MiB",
)
ARROW = "#arrows path.logical"


@pytest.fixture(scope="module")
def browser(life: object, swapping: object, granting: object, without_blocks: object) -> Iterator[Chromium]:
    """A Chromium for these tests, after their recordings: its driver keeps an event loop in this thread."""
    with chromium() as running:
        yield running


@contextmanager
def served(source: RecordedLabSource) -> Iterator[str]:
    """The URL of a recording's lab, served by a thread."""
    urls: list[str] = []
    is_ready = threading.Event()
    loop, stop = asyncio.new_event_loop(), asyncio.Event()

    def ready(url: str) -> None:
        urls.append(url)
        is_ready.set()

    thread = threading.Thread(target=loop.run_until_complete, args=(server.serve(source, 0, ready, stop),))
    thread.start()
    try:
        assert is_ready.wait(20)
        yield urls[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


def shown_step(page: Any) -> int:
    """The step that the page is at."""
    return int(page.locator("[data-figure=step] dd").inner_text().replace(",", ""))


def go_until(page: Any, key: str, condition: str, at_most: int) -> bool:
    """Presses a key until the page's own state is so; whether it was."""
    for _ in range(at_most):
        if page.evaluate(condition):
            return True
        before = page.locator("#step-text").inner_text()
        page.keyboard.press(key)
        page.wait_for_function("before => document.getElementById('step-text').textContent !== before", arg=before)
    return bool(page.evaluate(condition))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of recordings."""
    return tmp_path_factory.mktemp("lab")


@pytest.fixture(scope="module")
def life(folder: Path) -> tuple[RecordedLabSource, list[int]]:
    """A recording and the numbers of its steps."""
    source = RecordedLabSource(recording(folder, "vllm-v0"))
    overview = asyncio.run(source.about()).overview
    assert overview is not None
    return source, overview.step


@pytest.fixture(scope="module")
def swapping(folder: Path) -> tuple[RecordedLabSource, int]:
    """A recording that swaps, and the number of its first step that preempts."""
    source = RecordedLabSource(recording(folder, "vllm-2023"))
    overview = asyncio.run(source.about()).overview
    assert overview is not None
    return source, next(step for step, count in zip(overview.step, overview.num_preempted, strict=True) if count)


@pytest.fixture(scope="module")
def without_blocks(folder: Path) -> RecordedLabSource:
    """A recording of a host pool in which nothing is held."""
    return RecordedLabSource(recording(folder, seed=5))


@pytest.fixture(scope="module")
def granting(folder: Path) -> tuple[RecordedLabSource, list[Step]]:
    """A recording with grants, and its steps."""
    path = folder / "grants.rec"
    granting_life("quire", 1).write(path)
    source = RecordedLabSource(Recording(path))
    return source, asyncio.run(source.steps(0, 500))


def test_a_recording_is_stepped_through(life: tuple[RecordedLabSource, list[int]], browser: Chromium) -> None:
    """Forward and back by key and button, a request chosen and explained, its table with arrows."""
    source, numbers = life
    with served(source) as url, browser.page(url) as page:
        page.wait_for_selector(".card")
        assert "recording vllm-v0-1.rec" in page.locator("#mode").inner_text()
        assert page.locator("#tab-play").is_hidden()
        page.keyboard.press("Home")
        page.wait_for_function(
            "n => document.querySelector('[data-figure=step] dd').textContent === n", arg=str(numbers[0])
        )
        page.keyboard.press("ArrowRight")
        page.locator("#forward").click()
        page.wait_for_function(
            "n => document.querySelector('[data-figure=step] dd').textContent === n", arg=str(numbers[2])
        )
        page.keyboard.press("ArrowLeft")
        page.wait_for_function(
            "n => document.querySelector('[data-figure=step] dd').textContent === n", arg=str(numbers[1])
        )
        page.locator("section[aria-label=Running] .card").first.click()
        page.wait_for_selector(".episodes-list li")
        assert page.locator(".cell").count() == page.locator(ARROW).count() > 0
        page.keyboard.press("End")
        page.wait_for_function(
            "n => document.querySelector('[data-figure=step] dd').textContent === n", arg=str(numbers[-1])
        )
        page.keyboard.press("Escape")
        page.wait_for_selector(".hint")


def test_a_recording_opens_at_its_first_preemption(swapping: tuple[RecordedLabSource, int], browser: Chromium) -> None:
    """Where there is something to see; the step keeps its number in the lanes, and squares take the room there is."""
    source, first = swapping
    with served(source) as url, browser.page(url) as page:
        page.wait_for_selector(".card")
        assert shown_step(page) == first > 1
        assert "preempted" in page.locator("#step-text").inner_text()
        assert page.locator(".lanes .number.chosen").text_content() == str(first)
        assert page.locator("[data-tier=c] canvas").is_visible()
        square = page.evaluate("document.querySelector('[data-tier=g] canvas').clientHeight")
        assert square >= 60, "eight blocks have room to be large"


def test_grants_are_told(granting: tuple[RecordedLabSource, list[Step]], browser: Chromium) -> None:
    """A step that grants others, one that was repeated, and one whose plan followed a revocation, with the reason."""
    source, steps = granting
    first = next(step for step in steps if step.granted_steps)
    told = {
        f"grants {first.granted_steps} more": first.step,
        "repeated by grant": next(step.step for step in steps if step.is_repeat),
        "rest of a grant revoked: request waits": next(s.step for s in steps if s.revoked == "REQUEST_WAITS"),
    }
    with served(source) as url, browser.page(url) as page:
        page.wait_for_selector(".card")
        page.keyboard.press("Home")
        page.wait_for_function(
            "n => document.querySelector('[data-figure=step] dd').textContent === n", arg=str(steps[0].step)
        )
        for words, number in sorted(told.items(), key=lambda item: item[1]):
            is_told = f"document.getElementById('step-text').textContent.includes('{words}')"
            assert go_until(page, "ArrowRight", is_told, 100) and shown_step(page) == number, words


def test_a_host_pool_without_blocks_is_a_line(without_blocks: RecordedLabSource, browser: Chromium) -> None:
    """Thousands of empty squares say nothing."""
    with served(without_blocks) as url, browser.page(url) as page:
        page.wait_for_selector(".card")
        host = page.locator("[data-tier=c]")
        assert host.locator("canvas").is_hidden() and re.search(r"\b(\d+) free of \1\b", host.inner_text())


@pytest.mark.long
def test_a_stack_under_load_is_watched(browser: Chromium) -> None:
    """vllm-v0 with 48 blocks: sharing, swapping, preemption and waits as the admin API has them; the playground streams."""
    options = {"policy": "vllm-v0", "policy_set": ["preemption_mode=swap"], "worker_args": FEW_BLOCKS}
    with LocalStack(**options) as stack, load(stack.http_url, clients=8), browser.page(stack.admin_url) as page:
        page.wait_for_function("() => document.querySelector('section[aria-label=Waiting] .card')")
        page.wait_for_function("() => document.querySelector('[data-tier=g] .note').textContent.includes('shared')")
        page.wait_for_function(
            "() => / [1-9]\\d* held/.test(' ' + document.querySelector('[data-tier=c] .note').textContent)"
        )
        assert page.locator("#mode").inner_text().startswith("live")
        height = page.evaluate("document.getElementById('memory-stage').clientHeight")
        assert page.evaluate("document.getElementById('pools').offsetHeight") > 0.6 * height, "of 48 blocks"
        page.keyboard.press("Space")
        _compare_moves(page, stack)
        _explain_one(page)
        _play(page)


def _compare_moves(page: Any, stack: LocalStack) -> None:
    """Goes back to a step that swapped: its arrows and queues are the step's."""
    assert go_until(page, "ArrowLeft", "document.querySelector('#arrows path.move') !== null", 400)
    number = shown_step(page)
    with AdminClient(stack.admin_address) as admin:
        report = next(admin.steps(since=number))
    moved = {kind: len(getattr(report, kind)) for kind in ("swap_in", "swap_out", "copy")}
    for kind, count in moved.items():
        assert page.locator(f"#arrows path.move.{kind}").count() == count, (number, kind)
    figures = [int(page.locator(f"[data-figure={name}] dd").inner_text()) for name in ("waiting", "running", "swapped")]
    queues = report.queues
    assert report.step == number and figures == [queues.waiting, queues.running, queues.swapped]


def _explain_one(page: Any) -> None:
    """Back at the newest step: a request that waited says why, and the steps of its episodes can be gone to."""
    page.keyboard.press("End")
    page.locator("section[aria-label=Waiting] .card").first.click()
    page.wait_for_selector(".episodes-list li")
    texts = page.locator(".episodes-list .reason").all_inner_texts()
    assert texts and all(re.fullmatch(r"[a-z ]+", text) for text in texts)
    page.locator(".episodes-list .link").first.click()
    page.wait_for_function("() => document.getElementById('run').getAttribute('aria-label') === 'Play'")
    page.keyboard.press("End")
    page.wait_for_function("() => document.getElementById('run').getAttribute('aria-label') === 'Pause'")


def _play(page: Any) -> None:
    """Three choices stream; their request is chosen by itself."""
    page.locator("#tab-play").click()
    page.locator("select[name=model] option").first.wait_for(state="attached")
    page.locator("input[name=n]").fill("3")
    page.locator("input[name=max_tokens]").fill("40")
    page.locator(".playground button").click()
    page.wait_for_function("() => document.querySelectorAll('.output').length === 3")
    page.wait_for_function("() => document.querySelector('#play > .note').textContent.includes('tokens/s')")
    assert all(page.locator(".output").all_inner_texts())
    page.locator("#tab-why").click()
    page.wait_for_selector(".episodes-list li")
    assert page.locator(".request .id").inner_text()
