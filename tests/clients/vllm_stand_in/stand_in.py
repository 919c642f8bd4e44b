"""A pytest plugin in the place of vLLM: its tests are imported unchanged, and what of vLLM they use is here or skips the test.

Modules that vLLM's tests import and that are not there become stand-ins. Using one of their names skips the test, which then is
one of vLLM's classes and not of its HTTP API; a few names have a real counterpart.
"""

import importlib.abc
import importlib.machinery
import json
import os
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from skipped import SKIPPED

_STOOD_IN = ("vllm", "torch", "tests")
_MODEL = Path(os.environ["QUIRE_MODEL"])


class _Absent:
    """A name of vLLM's own Python code."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *_: Any, **__: Any) -> Any:
        pytest.skip(f"a test of vLLM's own classes: it uses {self._name}", allow_module_level=True)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self()

    def __or__(self, other: object) -> Any:
        return object

    def __add__(self, other: object) -> Any:
        return self()

    __ror__ = __or__
    __getitem__ = __or__

    def __iter__(self) -> Any:
        return self()


class _Platform:
    """Of which none is."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: False


class _ModelConfig:
    """What tests ask of the model."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._config = json.loads((_MODEL / "config.json").read_text())
        self.max_model_len = self._config["max_position_embeddings"]

    def get_vocab_size(self) -> int:
        return int(self._config["vocab_size"])


def _get_tokenizer(*_: Any, **__: Any) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(_MODEL)


class _Hub:
    """A hub with one repository: an adapter of the model."""

    def snapshot_download(self, *_: Any, **__: Any) -> str:
        return os.environ["QUIRE_ADAPTER"]


_REAL: dict[str, dict[str, Any]] = {
    "vllm.transformers_utils.repo_utils": {"hf_api": _Hub},
    "vllm.tokenizers": {"get_tokenizer": _get_tokenizer},
    "vllm.config": {"ModelConfig": _ModelConfig},
    "vllm.platforms": {"current_platform": _Platform()},
    "vllm.version": {"__version__": os.environ["QUIRE_VERSION"]},
    "torch": {"manual_seed": lambda seed: None},
}


class _Module(types.ModuleType):
    """Any name of it: real, an exception where it is called so, or absent."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        real = _REAL.get(self.__name__, {})
        if name not in real and name.endswith(("Error", "Exception")):
            return type(name, (Exception,), {})
        return real.get(name, _Absent(f"{self.__name__}.{name}"))


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> Any:
        if name.partition(".")[0] in _STOOD_IN:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        made = _Module(spec.name)
        for name, value in _REAL.get(spec.name, {}).items():
            setattr(made, name, value)
        return made

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run."""


# Behind the others: what is there is taken.
sys.meta_path.append(_Finder())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what needs a feature or a model that Quire does not have, by the written list."""
    for item in items:
        file, _, test = item.nodeid.removeprefix("tests/entrypoints/").partition("::")
        for name, reason in SKIPPED.get(file, {}).items():
            if name in ("*", test, test.partition("[")[0]):
                item.add_marker(pytest.mark.skip(reason=reason))
