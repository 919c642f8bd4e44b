"""Prints the requirements of `quire[EXTRA,...]` from pyproject.toml, one per line.

Used by the Dockerfiles so that the layer with the dependencies depends only on pyproject.toml and
constraints.txt.

    python deploy/requirements.py gateway | pip install -c constraints.txt -r /dev/stdin
"""

import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

PYPROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"


def requirements(project: Mapping, extras: list[str]) -> Iterator[str]:
    """Base requirements, then those of each extra; extras that name other extras are resolved."""
    yield from project["dependencies"]
    for extra in extras:
        yield from _of_extra(project, extra)


def _of_extra(project: Mapping, extra: str) -> Iterator[str]:
    for requirement in project["optional-dependencies"][extra]:
        if requirement.startswith(f"{project['name']}["):
            for inner in requirement.partition("[")[2].rstrip("]").split(","):
                yield from _of_extra(project, inner)
        else:
            yield requirement


def main() -> None:
    """Print the requirements of the extras given on the command line."""
    project = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]
    sys.stdout.write("\n".join(dict.fromkeys(requirements(project, sys.argv[1:]))) + "\n")


if __name__ == "__main__":
    main()
