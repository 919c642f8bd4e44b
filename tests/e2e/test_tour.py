"""`quire tour` on real stacks: one stop of a running stack, arrivals at one instant, and the whole tour."""

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from quire.client.sampling_params import SamplingParams
from quire.local_stack.stack import LocalStack
from quire.operators.admin import AdminClient, step_json
from quire_tools.tour import route
from quire_tools.tour.console import screen_console
from quire_tools.tour.guide import Guide
from quire_tools.tour.screen import HEIGHT, WIDTH
from quire_tools.tour.stage import GATE, RunningStack, Stage, TourRequest
from tests.e2e.tour_numbers import RECOMPUTED
from tests.support.tree import ROOT

_VERDICT = re.compile(r"^tour (?P<name>\S+): (?P<verdict>PASS|FAIL .+)$")
_LIMIT_S = 2_400


def steps_of(folder: Path, name: str) -> list[list[dict[str, object]]]:
    """The steps of each stack of a stop, in order."""
    files = [folder / f"{name}.json", *(folder / f"{name}-{number}.json" for number in range(2, 20))]
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in files if file.exists()]


def numbers_of(screen: str) -> dict[str, str]:
    """Numbers as they are printed, by what they are: two a line."""
    found = {}
    for line in screen.splitlines():
        columns = [column for column in re.split(r"\s{2,}", line.strip()) if column]
        found |= dict(zip(columns[::2], columns[1::2], strict=False))
    return found


def check_numbers(name: str, screen: str, folder: Path) -> int:
    """Recomputes what can be of a screen; how many numbers that were."""
    printed = numbers_of(screen)
    recomputed = RECOMPUTED[name](steps_of(folder, name), printed)
    assert {what: printed.get(what) for what in recomputed} == dict(recomputed), name
    return len(recomputed)


def check_page(screen: str) -> None:
    """A page of a terminal; the verdict's words in its last line alone."""
    *lines, last = screen.splitlines()
    assert _VERDICT.match(last)
    assert len(lines) <= HEIGHT and max(map(len, lines)) <= WIDTH, f"{len(lines)} lines, {max(map(len, lines))} columns"
    assert not re.search(r"\b(PASS|FAIL)", "\n".join(lines))


def test_a_stop_of_a_running_stack(stack: LocalStack, tmp_path: Path) -> None:
    """`sharing` wants nothing special, so it uses what runs: its own steps alone, and the closed form of R209 holds there too."""
    running = RunningStack(stack.grpc_address, stack.admin_address)
    console = screen_console(record=True)
    [visit] = Guide(console, running=running, steps_folder=tmp_path).lead(route.chosen(["sharing"]))
    screen = console.export_text()
    assert visit.passed, visit.trouble
    check_page(screen)
    assert check_numbers("sharing", screen, tmp_path) == 8
    [steps] = steps_of(tmp_path, "sharing")
    with AdminClient(stack.admin_address) as admin:
        since = int(str(steps[0]["step"]))
        assert steps == [step_json(report, tables=True) for report in admin.steps(since=since, tables=True)]


def test_requests_that_come_at_once(stack: LocalStack) -> None:
    """`at_once`: all start in the first step that one of them starts in, in their order; the policy is afterwards what it was."""
    names = ["x", "y", "z", "w"]
    params = SamplingParams(max_tokens=3, ignore_eos=True, temperature=0.0)
    with Stage("at-once", running=RunningStack(stack.grpc_address, stack.admin_address)).stack() as own:
        outputs = own.at_once([TourRequest(name, [50 + ord(name), 7, 9], params) for name in names])
        steps = own.steps()
        assert [output.request_id for output in outputs] == names
        prompts = [[g["id"] for g in s["scheduled"] if g["prefill"] and g["id"] != GATE] for s in steps]
        assert [ids for ids in prompts if ids] == [names]
        assert own.why("x")["episodes"][0]["queue"] == "waiting"
        assert own.admin.set_policy(["max_num_seqs=256"]).changes == []


@pytest.mark.long
@pytest.mark.timeout(_LIMIT_S + 60)
def test_the_whole_tour(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    """M: every stop holds, each screen is a page, its numbers come out of its steps again, and the page has all of it.

    v0: R47, R50, R53, R57, R60, R73, R76, R77, R82, R85. Overlap: R147, R159. Chitu: R168-R170, R173-R175, R179, R183, R184,
    R188-R190, R194. Every stop: R200.
    """
    page, began = tmp_path / "tour.html", time.monotonic()
    command = [sys.executable, "-m", "quire", "tour", "--all", "--html", str(page), "--steps", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    screens = _screens(done.stdout)
    failed = [screen for screen in screens.values() if not screen.endswith(": PASS")]
    assert (done.returncode, len(failed)) == (0, 0), "\n".join([*failed, done.stderr[-2_000:]])
    assert list(screens) == list(route.STOPS)
    for screen in screens.values():
        check_page(screen)
    counts = {name: check_numbers(name, screens[name], tmp_path) for name in RECOMPUTED}
    assert all(f'<section id="{name}">' in page.read_text(encoding="utf-8") for name in screens)
    record_property("size", f"{len(screens)} stops in {time.monotonic() - began:.0f} s, {sum(counts.values())} numbers")


@pytest.mark.long
def test_ctrl_c_leaves_nothing_behind() -> None:
    """Status 130 while a stack starts, no verdict and no traceback; its services have ended with it."""
    command = [sys.executable, "-m", "quire", "tour", "batching"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert "starting a stack" in process.stderr.readline()
    tour = psutil.Process(process.pid)
    while not (services := tour.children(recursive=True)):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    printed, said = process.communicate(timeout=60)
    assert (process.returncode, printed, said) == (130, "", "")
    assert not psutil.wait_procs(services, timeout=5)[1]


def _screens(printed: str) -> dict[str, str]:
    """What each stop printed, by its name; a verdict ends it."""
    found, lines = {}, list[str]()
    for line in printed.splitlines():
        lines.append(line)
        if verdict := _VERDICT.match(line):
            found[verdict["name"]] = "\n".join(lines)
            lines = []
    return found
