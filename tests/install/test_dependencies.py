"""Declared dependencies are the imported ones, extra by extra."""

import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.install.imports import PYPROJECT, imported
from tests.support.tree import ROOT

PROJECT = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
SERVED = ("gateway", "scheduler", "worker", "cuda", "bench", "tls")

USABLE = {
    "protos": (),
    "svc_common": (),
    "block_manager": (),
    "scheduler_svc": ("scheduler",),
    "gateway_svc": ("gateway",),
    "worker_svc": ("worker",),
    "kernels/paged_kernels": ("worker", "cuda"),
    "quire": SERVED,
    "quire_tools": SERVED,
}
"""Extras whose packages a folder may import, beside those that are always installed."""

SHARED = {"llguidance": "svc_common/grammars.py"}
"""Imported below both services that need it, so it is in the extra of each."""

INDIRECT = {"accelerate": ("worker_svc/model/weight_choices.py", 'find_spec("accelerate")')}
"""Imported by transformers, where it loads weights onto a device."""

ELSEWHERE = (
    "tests/clients/",
    "tests/compose/stand_ins/",
    "tests/support/routers/picker.py",
    "benchmarks/compare/offline/",
    "benchmarks/perplexity/with_compressed_tensors.py",
    "deploy/site/markup.py",
)
"""Programs that run in environments of their own, and what the site's builder loads (the extra `docs`)."""

PRIVATE_PARTS = {
    "tokenizers": ("gateway_svc/text/text_model.py", "._resize_cache("),
    "torch": ("worker_svc/invariance.py", "._parameters"),
    "transformers": ("worker_svc/model/decoder/text_half.py", "._model_mapping.get("),
    "typer": ("quire/cli/groups.py", "from typer.core import"),
    "uvicorn": ("gateway_svc/http/server.py", "class HttpServer(uvicorn.Server)"),
}
"""What is not public, or is inherited from, and where."""


def requirements(*extras: str) -> dict[str, Requirement]:
    """By canonical name: what is always installed, and what these extras add."""
    texts = [*PROJECT["dependencies"], *(text for extra in extras for text in EXTRAS[extra])]
    found = [Requirement(text) for text in texts]
    return {canonicalize_name(requirement.name): requirement for requirement in found}


@pytest.mark.parametrize("folder", USABLE)
def test_what_a_folder_imports_is_declared(folder: str) -> None:
    """Nothing is imported that only another package happens to install."""
    declared = set(requirements(*USABLE[folder]))
    undeclared = {
        name: sorted(where)
        for name, where in imported(folder).items()
        if name not in declared and where != {SHARED.get(name)}
    }
    assert undeclared == {}


@pytest.mark.parametrize("extra", ["", *SERVED])
def test_what_is_declared_is_imported(extra: str) -> None:
    """No dependency is declared that is not used."""
    folders = [folder for folder, extras in USABLE.items() if not extra or extra in extras]
    used = {name for folder in folders for name in imported(folder)} | set(SHARED)
    added = set(requirements(extra)) - set(requirements()) if extra else set(requirements())
    assert added - used - set(INDIRECT) == set()
    assert all(text in (ROOT / file).read_text(encoding="utf-8") for file, text in INDIRECT.values())


def test_shared_packages_are_in_the_extras_that_share_them() -> None:
    """The gateway compiles grammars to check them, the worker to mask tokens."""
    for name in SHARED:
        assert name in requirements("gateway") and name in requirements("worker")


@pytest.mark.parametrize("folder", ["tests", "benchmarks", "deploy", "models", "examples"])
def test_what_development_imports_is_declared(folder: str) -> None:
    """`pip install '.[all,dev]'` is enough for every test, benchmark and script."""
    declared = set(requirements(*SERVED, "dev"))
    found = imported(folder, but=ELSEWHERE)
    assert {name: sorted(where) for name, where in found.items() if name not in declared} == {}


@pytest.mark.parametrize("name", PRIVATE_PARTS)
def test_private_parts_have_an_upper_bound(name: str) -> None:
    """A release that changes them is not installed before it was tried."""
    file, text = PRIVATE_PARTS[name]
    assert text in (ROOT / file).read_text(encoding="utf-8")
    bounds = {specifier.operator for specifier in requirements(*SERVED)[name].specifier}
    assert "<" in bounds


def test_every_pin_is_in_range() -> None:
    """constraints.txt is one point in the ranges, and pins whatever is declared."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = {
        canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines) if version
    }
    wanted = requirements(*SERVED, "dev")
    assert set(wanted) - set(pins) == set()
    wrong = {name: pins[name] for name, asked in wanted.items() if not asked.specifier.contains(pins[name])}
    assert wrong == {}
