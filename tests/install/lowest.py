"""The lowest versions that pyproject.toml declares, as pins."""

from collections.abc import Iterator

from packaging.requirements import Requirement

from tests.support.tree import ROOT

HELD = ("torch",)
"""Pinned as in constraints.txt: of older releases not every index has a build without CUDA."""


def lowest_pins(requirements: list[str]) -> Iterator[str]:
    """NAME==LOWEST for each requirement that has a lower bound; the last of the kind wins where two extras name one package."""
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    for text in requirements:
        requirement = Requirement(text)
        bounds = [specifier.version for specifier in requirement.specifier if specifier.operator == ">="]
        version = pinned[requirement.name] if requirement.name in HELD else (bounds or [""])[0]
        if version:
            yield f"{requirement.name}=={version}"
