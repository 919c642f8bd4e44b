"""docs/requirements.md says what the tests name, and the list behind it is whole."""

import tomllib
from pathlib import Path

import pytest

from tests import requirements
from tests.requirements import Mention, Requirement, Section

EXAMPLE = '''"""Of the module: R1."""

from hypothesis.stateful import RuleBasedStateMachine, rule

# R2 in a comment


def helper() -> None:
    """R3: tests nothing."""


def test_plain() -> None:
    """R4, and R5 of two."""
    text = "R6 in a text"


async def test_range() -> None:
    """R7-R9: together."""


class Machine(RuleBasedStateMachine):
    """R10 at every step."""

    @rule()
    def move(self) -> None:
        """R11: one of its rules."""


class TestMany(Machine.TestCase):
    """R12: the heavy version."""


class Builder:
    """R13: no test."""
'''


@pytest.fixture
def example(tmp_path: Path) -> dict[int, list[Mention]]:
    """What is collected from one file that holds every kind of mention."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_example.py").write_text(EXAMPLE, encoding="utf-8")
    (tmp_path / "tests" / "builders.py").write_text('def test_in_no_test_file():\n    """R14."""\n', encoding="utf-8")
    return requirements.collect(tmp_path)


def wanted(number: int, *, rules: tuple[int, ...] = (), not_built: str = "", required: bool = True) -> Requirement:
    """A requirement of the example."""
    return Requirement(number, "a title", required, rules, not_built, "")


def test_the_page_is_fresh() -> None:
    """`make requirements` would change nothing."""
    made = requirements.page(requirements.read_list(), requirements.collect())
    assert requirements.PAGE.read_text(encoding="utf-8") == made, "run `make requirements`"


def test_the_list_is_whole() -> None:
    """Every number once and in order, with a short title; nothing points to a number that is not there."""
    sections = requirements.read_list()
    items = [item for section in sections for item in section.requirements]
    assert [item.number for item in items] == list(range(1, 210))
    assert [section.number for section in sections] == [*range(1, 15), 16]
    assert [section.number for section in sections if section.required] == [2, 3, 4, 5, 6, 8, 9, 14, 16]
    assert all(0 < len(item.title.split()) <= 10 for item in items)
    followers = {item.number for item in items if item.rules}
    assert not followers & {rule for item in items for rule in item.rules}


def test_the_list_has_no_remark_on_an_unknown_number() -> None:
    """Names in the tables beside the titles are those of requirements; a remark with a typing error would be lost."""
    table = tomllib.loads(requirements.LIST.read_text(encoding="utf-8"))
    known = {name for section in table["sections"].values() for name in section["titles"]}
    named = {*table["later"], *table["rules"], *table["not_built"], *table["notes"]}
    named.update(rule for rules in table["rules"].values() for rule in rules)
    assert named <= known


def test_tests_name_only_numbers_that_exist() -> None:
    """A typing error in a docstring is no requirement."""
    known = {item.number for section in requirements.read_list() for item in section.requirements}
    unknown = {number: found for number, found in requirements.collect().items() if number not in known}
    assert not unknown, unknown


def test_what_counts_as_a_mention(example: dict[int, list[Mention]]) -> None:
    """Docstrings of tests, machines and their rules count; modules, comments, texts and helpers do not."""
    names = {number: [mention.name for mention in found] for number, found in example.items()}
    ranged = {number: ["test_range"] for number in (7, 8, 9)}
    machine = {10: ["Machine"], 11: ["Machine::move"], 12: ["TestMany"]}
    assert names == {4: ["test_plain"], 5: ["test_plain"], **ranged, **machine}


def test_a_range_alone_satisfies_nothing(example: dict[int, list[Mention]]) -> None:
    """It is shown with a footnote, and the number stays missing."""
    section = Section(1, "Example", True, (wanted(4), wanted(8)))
    text = requirements.page([section], example)
    assert requirements.missing([section], example, required=True) == [8]
    assert "| R4 | a title | [test_example.py::test_plain](../tests/test_example.py) |" in text
    assert "| R8 | a title | **missing**<br>[test_example.py::test_range](../tests/test_example.py)[^range] |" in text
    assert "\n[^range]: " in text


def test_numbers_between_both_ends_are_meant() -> None:
    """Written out, without the second letter or with a dash; what is also named by itself is not a range."""
    assert list(requirements.numbers_in("R1-R3")) == [(1, True), (2, True), (3, True)]
    assert list(requirements.numbers_in("R1-3, R2: x")) == [(2, False), (1, True), (3, True)]
    assert list(requirements.numbers_in("R8–R9 and XR4, R5x")) == [(8, True), (9, True)]


def test_which_requirements_need_a_test(example: dict[int, list[Mention]]) -> None:
    """A correction needs all its rules to have one, what is not built needs none, later numbers are listed apart."""
    items = (
        wanted(20, rules=(4, 5)),
        wanted(21, rules=(4, 6)),
        wanted(22, not_built="old"),
        wanted(23, required=False),
    )
    section = Section(1, "Example", True, items)
    assert requirements.missing([section], example, required=True) == [21]
    assert requirements.missing([section], example, required=False) == [23]
    assert "| 1 Example | 4 | 1 | 1 | 1 | 1 |" in requirements.page([section], example)
