"""Distributions that a folder's sources import, found in their syntax trees without importing them."""

import sys
from functools import cache
from importlib.metadata import files, packages_distributions
from pathlib import Path

from packaging.utils import canonicalize_name

from tests.support.outline import outline
from tests.support.tree import ROOT, name_of, python_files

OURS = {
    "quire",
    "quire_tools",
    "gateway_svc",
    "scheduler_svc",
    "worker_svc",
    "block_manager",
    "paged_kernels",
    "svc_common",
    "protos",
}
_REPOSITORY = {"tests", "benchmarks", "deploy", "models", "examples"}
_KNOWN = sys.stdlib_module_names | OURS | _REPOSITORY


@cache
def imported(folder: str, *, but: tuple[str, ...] = ()) -> dict[str, set[str]]:
    """Canonical distribution names imported below `folder`, each with the files that do; `but`: prefixes of paths left out."""
    found: dict[str, set[str]] = {}
    for name, path in _sources().items():
        if not name.startswith(f"{folder}/") or name.startswith(but):
            continue
        beside = _beside(path.parent)  # scripts import those by their plain names
        for module in outline(path).modules:
            top = module.partition(".")[0]
            if top not in _KNOWN and top not in beside:
                found.setdefault(_distribution(module), set()).add(name)
    return found


@cache
def _sources() -> dict[str, Path]:
    return {name_of(path): path for path in python_files()}


@cache
def _beside(folder: Path) -> set[str]:
    return {file.stem for file in folder.glob("*.py")}


@cache
def _distribution(module: str) -> str:
    """The distribution that has `module`; several share the namespaces google and opentelemetry."""
    owners = sorted(set(_owners().get(module.partition(".")[0], ())))
    if len(owners) > 1:
        owners = [owner for owner in owners if _has(owner, module)] or owners
    return canonicalize_name(owners[0] if owners else module.partition(".")[0])


@cache
def _owners() -> dict[str, list[str]]:
    return dict(packages_distributions())


@cache
def _folders(distribution: str) -> frozenset[str]:
    """Folders and modules of a distribution's wheel, without suffix."""
    paths = [file for file in files(distribution) or () if file.suffix in {".py", ".so"}]
    return frozenset(str(path) for file in paths for path in (file.parent, file.with_suffix("")))


def _has(distribution: str, module: str) -> bool:
    """Whether `module`, or the package that has it as an attribute, lies in the distribution."""
    parts = module.split(".")
    return any("/".join(parts[:end]) in _folders(distribution) for end in range(len(parts), max(1, len(parts) - 2), -1))


PYPROJECT = ROOT / "pyproject.toml"
