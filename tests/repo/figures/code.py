"""Sizes and names: lines, files, folders, functions, classes."""

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import PurePosixPath

from tests.repo.figures.sources import Sources

FULL_FOLDER = 20
SHORT_FILE = 60
_LONGEST = 5


def lines_and_files(sources: Sources) -> dict[str, int]:
    """Python of the product and of its serving part: physical lines, and files."""
    lines = {name: len(sources.text(name).splitlines()) for name in sources.python()}
    serving = sources.serving()
    return {
        "product_lines": sum(lines.values()),
        "product_files": len(lines),
        "serving_lines": sum(lines[name] for name in serving),
        "serving_files": len(serving),
    }


def full_folders(sources: Sources) -> dict[str, int]:
    """Folders with more than 20 source files of their own, outside tests."""
    counts = Counter(str(PurePosixPath(name).parent) for name in sources.code())
    return {folder: count for folder, count in counts.most_common() if count > FULL_FOLDER}


def short_files(sources: Sources) -> list[str]:
    """Python files of the product under 60 lines, without `__init__.py` and `__main__.py`."""
    names = (name for name in sources.python() if not name.endswith("__.py"))
    return [name for name in names if len(sources.text(name).splitlines()) < SHORT_FILE]


def longest_files(sources: Sources) -> list[str]:
    """The five longest, as "lines path"."""
    sized = sorted(((len(sources.text(name).splitlines()), name) for name in sources.python()), reverse=True)
    return [f"{lines} {name}" for lines, name in sized[:_LONGEST]]


def repeated_classes(sources: Sources) -> dict[str, list[str]]:
    """Public names that several modules of the product define as a class, with those modules."""
    found = defaultdict(list)
    for name in sources.python():
        for cls in sources.outline(name).classes:
            if not cls.startswith("_"):
                found[cls].append(name)
    return {cls: names for cls, names in sorted(found.items()) if len(names) > 1}


def _functions(sources: Sources) -> Iterator[tuple[int, str]]:
    for name in sources.python():
        for num_lines, function in sources.outline(name).functions:
            yield num_lines, f"{name}:{function}"


def function_lengths(sources: Sources) -> tuple[dict[str, int], list[str]]:
    """Lines of a function from `def` to its end: median and 90th percentile, and the five longest as "lines path:name"."""
    sized = sorted(_functions(sources), reverse=True)
    deciles = statistics.quantiles([lines for lines, _ in sized], n=10)
    figures = {"function_lines_median": round(deciles[4]), "function_lines_p90": round(deciles[8])}
    return figures, [f"{lines} {name}" for lines, name in sized[:_LONGEST]]
