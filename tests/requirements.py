"""`python -m tests.requirements [--write]`: docs/requirements.md, made from the R-numbers that tests name.

Numbers count in docstrings of test functions, test classes and Hypothesis machines (their rules included), not in comments
and not in docstrings of modules. A range such as R4-R8 is shown, but satisfies none of its numbers.
"""

import argparse
import ast
import functools
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "requirements.md"
LIST = ROOT / "tests" / "requirements.toml"

_RANGE = re.compile(r"\bR(\d+)\s*[-–]\s*R?(\d+)\b")
_NUMBER = re.compile(r"\bR(\d+)\b")
_INTRODUCTION = """\
# Requirements and their tests

This page lists every requirement of Quire with the tests that check it. It is made by `make requirements` from the numbers that
docstrings of tests name and from [a list of all](../tests/requirements.toml).
A requirement has a test when at least one names it; one that only corrects an article or draws a conclusion has those of its rule.
"""
_FOOTNOTE = "[^range]: Names a range of numbers; that alone does not count as a test of each.\n"


@dataclass(frozen=True, slots=True)
class Requirement:
    """One number. `rules`: it only corrects an article, their tests are its tests; `not_built`: why it needs no test."""

    number: int
    title: str
    required: bool
    rules: tuple[int, ...]
    not_built: str
    note: str


@dataclass(frozen=True, slots=True)
class Section:
    """A section of the specification. `required`: its numbers must have tests now, but for those marked as later."""

    number: int
    title: str
    required: bool
    requirements: tuple[Requirement, ...]


@dataclass(frozen=True, slots=True, order=True)
class Mention:
    """A test that names a number. `path`: below the root; `name`: function, `Class::function` or class."""

    path: str
    name: str
    in_range: bool


Mentions = Mapping[int, list[Mention]]


def _number(name: str) -> int:
    """57 for "R57"."""
    return int(name.removeprefix("R"))


def read_list(path: Path = LIST) -> list[Section]:
    """The sections in order of their numbers."""
    table = tomllib.loads(path.read_text(encoding="utf-8"))

    def requirement(name: str, title: str, required: bool) -> Requirement:
        return Requirement(
            _number(name),
            title,
            required and name not in table["later"],
            tuple(map(_number, table["rules"].get(name, ()))),
            table["not_built"].get(name, ""),
            table["notes"].get(name, ""),
        )

    return [
        Section(
            int(number),
            section["title"],
            section["required"],
            tuple(requirement(name, title, section["required"]) for name, title in section["titles"].items()),
        )
        for number, section in table["sections"].items()
    ]


# --- what tests name --------------------------------------------------------------------------------------------------


def numbers_in(docstring: str) -> Iterator[tuple[int, bool]]:
    """(number, named by a range only) for every number in a docstring."""
    direct = {int(number) for number in _NUMBER.findall(_RANGE.sub("", docstring))}
    yield from ((number, False) for number in sorted(direct))
    ranges = {n for first, last in _RANGE.findall(docstring) for n in range(int(first), int(last) + 1)}
    yield from ((number, True) for number in sorted(ranges - direct))


def _is_tested_class(node: ast.ClassDef, machines: set[str]) -> bool:
    bases = {ast.unparse(base).removesuffix(".TestCase") for base in node.bases}
    is_machine = any(base.endswith("StateMachine") for base in bases) or bool(bases & machines)
    if is_machine:
        machines.add(node.name)
    return is_machine or node.name.startswith("Test")


def _documented(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """(name, docstring) of what tests; in a machine or test class every method belongs to the test."""
    machines: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test"):
            yield node.name, ast.get_docstring(node) or ""
        elif isinstance(node, ast.ClassDef) and _is_tested_class(node, machines):
            yield node.name, ast.get_docstring(node) or ""
            for child in node.body:
                if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                    yield f"{node.name}::{child.name}", ast.get_docstring(child) or ""


@functools.cache
def collect(root: Path = ROOT) -> dict[int, list[Mention]]:
    """Which tests name which number, in the files tests/**/test_*.py below `root`."""
    found: dict[int, list[Mention]] = {}
    for path in sorted((root / "tests").rglob("test_*.py")):
        name_of = path.relative_to(root).as_posix()
        if not _NUMBER.search(text := path.read_text(encoding="utf-8")):
            continue  # most files need no syntax tree
        for name, docstring in _documented(ast.parse(text)):
            for number, in_range in numbers_in(docstring):
                found.setdefault(number, []).append(Mention(name_of, name, in_range))
    return {number: sorted(mentions) for number, mentions in sorted(found.items())}


# --- the page ---------------------------------------------------------------------------------------------------------


def is_named(number: int, mentions: Mentions) -> bool:
    """Whether a test names the number itself, not just a range around it."""
    return any(not mention.in_range for mention in mentions.get(number, ()))


def is_missing(requirement: Requirement, mentions: Mentions) -> bool:
    """Whether it needs a test, now or later, and has none of its own and not one of each of its rules."""
    if requirement.not_built or is_named(requirement.number, mentions):
        return False
    return not requirement.rules or not all(is_named(rule, mentions) for rule in requirement.rules)


def missing(sections: list[Section], mentions: Mentions, *, required: bool) -> list[int]:
    """Numbers without a test among those that are required now, or among those of later parts."""
    wanted = (item for section in sections for item in section.requirements if item.required == required)
    return [item.number for item in wanted if is_missing(item, mentions)]


def _names(numbers: list[int] | tuple[int, ...]) -> str:
    return ", ".join(f"R{number}" for number in numbers) or "none"


def _cell(requirement: Requirement, mentions: Mentions) -> str:
    """What the table says about the tests of one requirement."""
    parts = ["**missing**"] if is_missing(requirement, mentions) else []
    if requirement.not_built:
        parts.append(f"not built: {requirement.not_built}")
    if requirement.rules:
        parts.append(f"tests of {_names(requirement.rules)}")
    for mention in sorted(mentions.get(requirement.number, ()), key=lambda mention: (mention.in_range, mention)):
        link = f"[{mention.path.removeprefix('tests/')}::{mention.name}](../{mention.path})"
        parts.append(f"{link}[^range]" if mention.in_range else link)
    if requirement.note:
        parts.append(f"({requirement.note})")
    return "<br>".join(parts)


def _counts(sections: list[Section], mentions: Mentions) -> Iterator[str]:
    """The table of sections: numbers, with a test, not built, missing now, missing later."""
    yield "| section | numbers | with a test | not built | missing, required now | missing, later |"
    yield "|---|---:|---:|---:|---:|---:|"
    for section in sections:
        items = section.requirements
        not_built = sum(bool(item.not_built) for item in items)
        now, later = (len(missing([section], mentions, required=required)) for required in (True, False))
        tested = len(items) - not_built - now - later
        yield f"| {section.number} {section.title} | {len(items)} | {tested} | {not_built} | {now} | {later} |"


def _rows(section: Section, mentions: Mentions) -> Iterator[str]:
    yield f"## {section.number}. {section.title}\n"
    yield "| number | title | tests |"
    yield "|---|---|---|"
    for item in section.requirements:
        yield f"| R{item.number} | {item.title} | {_cell(item, mentions)} |"
    yield ""


def page(sections: list[Section], mentions: Mentions) -> str:
    """The whole of docs/requirements.md."""
    lines = [_INTRODUCTION, *_counts(sections, mentions), ""]
    for required, title in ((True, "Missing, required now"), (False, "Missing, follows with later parts")):
        of = [section for section in sections if any(item.required == required for item in section.requirements)]
        heading = ", ".join(str(section.number) for section in of)
        lines.append(f"**{title}** (sections {heading}): {_names(missing(of, mentions, required=required))}\n")
    for section in sections:
        lines.extend(_rows(section, mentions))
    text = "\n".join(lines)
    return f"{text}\n{_FOOTNOTE}" if "[^range]" in text else text


def main(argv: list[str]) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.requirements", description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write docs/requirements.md instead of printing it")
    args = parser.parse_args(argv)
    sections, mentions = read_list(), collect()
    text = page(sections, mentions)
    if not args.write:
        print(text, end="")
        return 0
    PAGE.write_text(text, encoding="utf-8")
    print(f"missing, required now: {_names(missing(sections, mentions, required=True))}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
