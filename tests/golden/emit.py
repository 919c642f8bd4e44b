"""Where `--emit` writes: one file per scenario, inside one folder, never over a scenario."""

import os
from collections import Counter
from pathlib import Path

from tests.golden.forms import ScenarioError


def emit_paths(paths: list[Path], out: Path) -> dict[Path, Path]:
    """Where each scenario's trace goes: a file of the same name, below as many of its folders' names as make it unique.

    Nothing is written. ScenarioError where `out` is no folder, or a target is a scenario, lies outside `out` or is a folder.
    """
    for place in (out, *out.parents):
        if place.exists() and not place.is_dir():
            raise ScenarioError(f"--emit {out}: {place} is a file, not a folder")
    targets = {path: out.joinpath(*name) for path, name in _unique_names(paths).items()}
    inputs = {path.resolve() for path in paths}
    folders = {folder for target in targets.values() for folder in target.parents}
    for path, target in targets.items():
        if reason := _refusal(target, out, inputs, folders):
            raise ScenarioError(f"--emit {out}: the trace of {path} would go to {target}, which {reason}")
    return targets


def _refusal(target: Path, out: Path, inputs: set[Path], folders: set[Path]) -> str | None:
    resolved = target.resolve()
    if resolved in inputs:
        return "is a scenario of this run"
    if not resolved.is_relative_to(out.resolve()):
        return "lies outside of that folder"
    if target in folders or target.is_dir():
        return "is a folder"
    if any(folder.exists() and not folder.is_dir() for folder in target.parents):
        return "is below a file"
    return None


def _unique_names(paths: list[Path]) -> dict[Path, tuple[str, ...]]:
    """The shortest ends of the absolute paths of which no two are equal, at least the file's name."""
    parts = {path: Path(os.path.abspath(path)).parts[1:] for path in paths}
    lengths = dict.fromkeys(paths, 1)
    while True:
        names = {path: parts[path][-lengths[path] :] for path in paths}
        times = Counter(names.values())
        clashing = [path for path, name in names.items() if times[name] > 1]
        if not clashing:
            return names
        for path in clashing:
            lengths[path] += 1
