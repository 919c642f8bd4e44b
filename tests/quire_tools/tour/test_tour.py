"""`quire tour` without a stack: verdicts, pages, steps files, pictures, and the command's own errors."""

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from quire_tools.commands import tour as command
from quire_tools.tour import pictures, route
from quire_tools.tour.console import screen_console
from quire_tools.tour.guide import CompletedStop, Guide
from quire_tools.tour.page import page
from quire_tools.tour.screen import HEIGHT, Check, Number, Screen, Stop
from quire_tools.tour.stage import Stage
from svc_common.errors import ConfigError, Unavailable
from tests.repo.test_docs import anchors
from tests.support.tree import ROOT

ORDER = [
    *("batching", "memory", "sharing", "cow", "prefix", "phases", "preempt", "policy-v0", "chitu", "chitu-threshold"),
    *("skew", "dp", "overlap", "startup", "offline", "explain", "crash"),
]
VERDICT = re.compile(r"^tour (\S+): (PASS|FAIL .+)$")


def screen(*checks: Check) -> Screen:
    return Screen("A <picture>", "docs/tour.md", ["Two sentences. Here.", "[bold]"], checks, [Number("seven", 7)])


def stop(name: str, show: Any) -> Stop:
    return Stop(name, f"What {name} is.", "docs/tour.md", show)


def good(stage: Stage) -> Screen:
    return screen(Check("it holds", True, "7 of 7"))


def bad(stage: Stage) -> Screen:
    return screen(Check("it holds", True, "7"), Check("that holds", False, "6 of 7"), Check("nor this", False, "5"))


def unchecked(stage: Stage) -> Screen:
    return screen()


def broken(stage: Stage) -> Screen:
    raise Unavailable("the worker\nis gone")


STOPS = [stop("good", good), stop("broken", broken), stop("bad", bad), stop("unchecked", unchecked), stop("last", good)]


def led(stops: list[Stop]) -> tuple[list[CompletedStop], list[str]]:
    printed = io.StringIO()
    visits = Guide(screen_console(printed)).lead(stops)
    return visits, printed.getvalue().splitlines()


def test_every_stop_ends_with_its_verdict() -> None:
    """One line each with PASS or FAIL and why, in one line; one that raises is one that fails, and the others go on."""
    visits, lines = led(STOPS)
    verdicts = [line for line in lines if VERDICT.match(line)]
    assert verdicts == [
        "tour good: PASS",
        "tour broken: FAIL Unavailable: the worker is gone",
        "tour bad: FAIL that holds: 6 of 7; nor this: 5",
        "tour unchecked: FAIL nothing was checked",
        "tour last: PASS",
    ]
    assert [visit.passed for visit in visits] == [True, False, False, False, True]
    others = [line for line in lines if not VERDICT.match(line)]
    assert not [line for line in others if "PASS" in line or "FAIL" in line]
    assert lines[-1] == "tour last: PASS"


def test_a_screen_has_title_document_numbers_and_checks() -> None:
    """What is text stays text, brackets too; checks stand beside what was seen."""
    _, lines = led([STOPS[2]])
    assert lines[0].startswith("A <picture>  (docs/tour.md)")
    assert "[bold]" in lines
    assert any(re.match(r"seven\s+7\s*$", line) for line in lines)
    assert any(re.match(r"✗\s+that holds\s+6 of 7", line) for line in lines)
    assert any(re.match(r"✓\s+it holds\s+7", line) for line in lines)


def test_ctrl_c_ends_the_tour() -> None:
    """It is no stop's verdict: the guide lets it through, so that stacks are stopped on the way."""

    def interrupted(stage: Stage) -> Screen:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        led([stop("first", interrupted), STOPS[0]])


def test_the_page_needs_nothing_else() -> None:
    """A table of contents that leads to every screen; no script, no style sheet, no address but its own."""
    visits, _ = led(STOPS)
    text = page(visits)
    assert re.findall(r'<a href="#(\S+)">', text) == re.findall(r'<section id="(\S+)">', text)
    assert len(re.findall(r"<section", text)) == len(STOPS)
    assert "A &lt;picture&gt;" in text and "tour broken: FAIL Unavailable" in text
    assert not re.search(r"<script|<link|https?://|src=", text)


def test_steps_are_kept_a_file_for_each_stack(tmp_path: Path) -> None:
    """NAME.json, then NAME-2.json: a JSON object a line, as they were read."""
    stage = Stage("good", steps_folder=tmp_path)
    stage.keep_steps(lambda *, tables: [{"step": 1}, {"step": 2}])
    stage.keep_steps(lambda *, tables: [{"step": 3, "tables": tables}], tables=True)
    assert [json.loads(line) for line in (tmp_path / "good.json").read_text().splitlines()] == [
        {"step": 1},
        {"step": 2},
    ]
    assert json.loads((tmp_path / "good-2.json").read_text()) == {"step": 3, "tables": True}
    Stage("nowhere").keep_steps(lambda *, tables: [{"step": 1}])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["good-2.json", "good.json"]


# --- pictures ------------------------------------------------------------------------------------------------------


def step(number: int, **tokens: tuple[int, bool]) -> dict[str, Any]:
    shares = [{"id": name, "tokens": count, "prefill": prefill} for name, (count, prefill) in tokens.items()]
    return {"step": number, "scheduled": shares}


def test_a_timetable_has_a_row_for_each_request() -> None:
    """Prompt, decode, nothing; and tokens where there is room for them."""
    steps = [step(98, A=(5, True)), step(99, A=(1, False), B=(12, True)), step(100, B=(1, False))]
    assert pictures.timetable(steps, ["A", "B"]).plain.splitlines()[1:] == ["A ▒█·", "B ·▒█"]
    wide = pictures.timetable(steps, ["A", "B"], pictures.token_cell(3), width=3).plain.splitlines()
    assert wide[1:] == ["A   5  1  ·", "B   · 12  1"]
    assert "98" in wide[0]


@pytest.mark.parametrize("amounts", [(1, 1, 1), (0, 3, 0.2), (0, 0, 0), (1e-6, 1, 1e6), (33, 33, 34)])
def test_a_bar_is_never_longer_than_what_it_stands_for(amounts: tuple[float, ...]) -> None:
    """Rounding does not add up: the whole is the whole width, a part of it at most that."""
    parts = [pictures.BarPart(sign, amount, sign, "") for sign, amount in zip("abc", amounts, strict=True)]
    assert len(pictures.bar(parts, width=50)) == (50 if sum(amounts) else 0)
    assert len(pictures.bar(parts, total=2 * sum(amounts), width=50)) == (25 if sum(amounts) else 0)


# --- the command ---------------------------------------------------------------------------------------------------


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(command.app, list(arguments))


def test_the_stops_are_all_there_in_order() -> None:
    """`--list`, and no argument at all, name them with what they show."""
    assert list(route.STOPS) == ORDER
    for arguments in (["--list"], []):
        result = invoke(*arguments)
        assert result.exit_code == 0
        assert [line.split()[0] for line in result.stdout.splitlines()] == ORDER
    assert all(stop.summary.endswith(".") for stop in route.STOPS.values())


@pytest.mark.parametrize("stop", route.STOPS.values(), ids=list(route.STOPS))
def test_a_stop_names_a_document_that_exists(stop: Stop) -> None:
    """A page of docs/, and a section of it where one is named."""
    document, _, section = stop.page.partition("#")
    text = (ROOT / document).read_text(encoding="utf-8")
    assert not section or section in anchors(text)


def test_a_name_that_no_stop_has() -> None:
    """ConfigError, status 2, with the name that was meant."""
    with pytest.raises(ConfigError, match="did you mean phases"):
        route.chosen(["batching", "phase"])


def test_a_stop_that_cannot_reach_its_stack_is_status_1(tmp_path: Path) -> None:
    """The reason stands in the verdict and on the page."""
    file = tmp_path / "tour.html"
    nobody = "127.0.0.1:9"
    result = invoke("sharing", "--address", nobody, "--admin", nobody, "--html", str(file))
    assert result.exit_code == 1
    assert re.match(r"tour sharing: FAIL Unavailable: .*127\.0\.0\.1:9", result.stdout.splitlines()[-1])
    assert "tour sharing: FAIL" in file.read_text(encoding="utf-8")


def test_an_address_that_is_none_is_refused_before_anything_starts() -> None:
    """Status 2 by ConfigError."""
    result = invoke("sharing", "--address", "nowhere")
    assert isinstance(result.exception, ConfigError)


def test_files_that_cannot_be_written_are_refused_before_anything_starts(tmp_path: Path) -> None:
    """ConfigError that names the option, not a traceback when the tour is over."""
    for option, path in (("--html", tmp_path / "nowhere" / "tour.html"), ("--steps", Path("/dev/null/steps"))):
        result = invoke("batching", option, str(path))
        assert isinstance(result.exception, ConfigError)
        assert option in str(result.exception)


@pytest.mark.parametrize("num_lines", [5, 33, 34, 35, 36])
def test_blank_lines_only_where_there_is_room(num_lines: int) -> None:
    """Sections stand apart, but a page that is nearly full stays a page, its verdict on it."""

    def tall(stage: Stage) -> Screen:
        picture = "\n".join(f"line {number}" for number in range(num_lines - 1))
        return Screen(
            "Tall", "docs/tour.md", ["One paragraph.", picture], [Check("it holds", True, "")], [Number("n", 1)]
        )

    _, lines = led([stop("tall", tall)])
    assert len(lines) == min(HEIGHT, num_lines + 7)
    assert lines.count("") == len(lines) - num_lines - 4
