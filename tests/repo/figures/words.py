"""Words that technical prose does without, and pointers that lead nowhere."""

import re
from collections.abc import Iterator
from pathlib import PurePosixPath

from tests.repo.figures.sources import PRODUCT, Sources

_PRONOUN = re.compile(r"\b(who|whoever|whom|whose|nobody|somebody|everybody|anybody)\b", re.I)
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s#]+)[^)\s]*\)")
_DOCUMENT = re.compile(r"(?<![\w{}*<>/:.-])((?:\.{0,2}/)?[\w./-]*[\w-]\.md)\b")
# Documents that are not in this repository, and numbers of issues, which its readers cannot see.
_ELSEWHERE = re.compile(r"\b(seeds-spec(?!\.md)|house\.md|prose\.md|[Ii]ssues? \d{1,2}(?!\d))")
_REQUIREMENT = re.compile(r"\bR\d{1,2}\b")
_OWN_WORDS = ("tests/repo/figures/", "tests/repo/test_figures.py")
# They name pages that the site's build makes, which checks its links itself.
_OF_THE_SITE = ("deploy/site/", "mkdocs.yml", "tests/repo/test_site.py")


def _places(sources: Sources, names: list[str], pattern: re.Pattern[str]) -> Iterator[str]:
    for name in names:
        if pattern.search(text := sources.text(name)):
            for number, line in enumerate(text.splitlines(), 1):
                yield from (f"{name}:{number}: {found}" for found in pattern.findall(line))


def pronouns(sources: Sources) -> list[str]:
    """Words for people, in product code and documents: "path:line: word"."""
    return list(_places(sources, sources.prose(), _PRONOUN))


def requirement_numbers(sources: Sources) -> list[str]:
    """`R57` and the like in product code; tests and docs/requirements.md may have them."""
    product = [name for name in sources.python() if name.startswith(PRODUCT)]
    return list(_places(sources, product, _REQUIREMENT))


def dead_pointers(sources: Sources) -> list[str]:
    """Names of documents that are not in the repository, numbers of issues, and links that do not resolve: "path:line: pointer"."""
    names = [name for name in sources.texts() if not name.startswith(_OWN_WORDS)]
    documents = {f"/{name}" for name in sources.names if name.endswith(".md")}
    naming = [name for name in names if ".md" in sources.text(name) and not name.startswith(_OF_THE_SITE)]
    named = (place for place in _places(sources, naming, _DOCUMENT) if not _is_there(place, documents))
    links = (place for place in _places(sources, _markdown(names), _LINK) if not _resolves(sources, place))
    return sorted({*named, *links, *_places(sources, names, _ELSEWHERE)})


def _markdown(names: list[str]) -> list[str]:
    return [name for name in names if name.endswith(".md")]


def _is_there(place: str, documents: set[str]) -> bool:
    pointer = place.rpartition(" ")[2].lstrip("./")
    return any(document.endswith(f"/{pointer}") for document in documents)


def _resolves(sources: Sources, place: str) -> bool:
    link = place.rpartition(" ")[2]
    if re.match(r"[a-z]+:", link):
        return True
    return (sources.root / PurePosixPath(place.partition(":")[0]).parent / link).exists()
