"""`python -m tests.repo.figures [--json] [--list] [--at COMMIT]...`: figures of this checkout, beside those of other commits.

With `--at 1e8428b` the first column is that commit. `--list` names what is counted, of this checkout.
"""

import argparse
import json
import sys

from tests.repo.checkout import checkout
from tests.repo.figures.arrows import upward_imports
from tests.repo.figures.code import (
    full_folders,
    function_lengths,
    lines_and_files,
    longest_files,
    repeated_classes,
    short_files,
)
from tests.repo.figures.sources import Sources
from tests.repo.figures.words import dead_pointers, pronouns, requirement_numbers

Found = dict[str, list[str]]


def measure(commit: str | None = None) -> tuple[dict[str, int], Found]:
    """The figures of a commit, of this checkout for None, and what was counted for them."""
    with checkout(commit) as root:
        sources = Sources.of(root)
        lengths, longest_functions = function_lengths(sources)
        classes, folders = repeated_classes(sources), full_folders(sources)
        counted = {
            "folders_over_20_files": [f"{count} {folder}" for folder, count in folders.items()],
            "files_under_60_lines": short_files(sources),
            "repeated_class_names": [f"{name}: {', '.join(modules)}" for name, modules in classes.items()],
            "pronouns": pronouns(sources),
            "dead_pointers": dead_pointers(sources),
            "requirement_numbers_in_product": requirement_numbers(sources),
            "upward_imports": upward_imports(sources),
        }
        figures = {
            **lines_and_files(sources),
            **{name: len(found) for name, found in counted.items()},
            **lengths,
        }
        found = {
            **counted,
            "longest_files": longest_files(sources),
            "longest_functions": longest_functions,
        }
    return figures, found


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.repo.figures", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one object: commit -> figures")
    parser.add_argument("--list", action="store_true", help="name what is counted, of this checkout")
    parser.add_argument("--at", metavar="COMMIT", action="append", default=[], help="measure this commit too")
    options = parser.parse_args()
    columns = {commit or "now": measure(commit) for commit in [*options.at, None]}
    figures = {name: column[0] for name, column in columns.items()}
    if options.json:
        print(json.dumps(figures, indent=2))
        return 0
    print(f"{'':32}" + "".join(f"{name[:9]:>10}" for name in figures))
    for row in figures["now"]:
        print(f"{row:32}" + "".join(f"{column[row]:10}" for column in figures.values()))
    found = columns["now"][1]
    for name in found if options.list else ("folders_over_20_files", "longest_files", "longest_functions"):
        print(f"\n{name}:", *found[name], sep="\n  ")
    return 0


if __name__ == "__main__":
    sys.exit(main())
