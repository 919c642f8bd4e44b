"""Attention backends by name: limits, entry points of other packages, and the libraries' parameters, from their sources."""

import ast
import importlib.metadata
import importlib.util
import inspect
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.attention import varlen

from paged_kernels.backend import AttentionRule, CacheShape
from paged_kernels.gpu import flash_attention_3, flashinfer_attention, torch_attention
from paged_kernels.registry import ATTENTION_BACKENDS, attention_backends, make_attention_backend
from svc_common.errors import ConfigError
from tests.support.attention_packages import FOLDER, in_torch

WRITTEN_FROM = "0.7.2.post1"
"""The release of flashinfer-python whose parameters the stand-in has."""
WRAPPER = "BatchPrefillWithPagedKVCacheWrapper"


def install(folder: Path, package: str, name: str = "theirs") -> None:
    """A package as pip leaves it, with an attention backend."""
    module = package.replace("-", "_")
    made = "from paged_kernels.reference import ReferenceBackend\n\ndef make(environ, say):\n    say(environ['X'])\n"
    (folder / f"{module}.py").write_text(made + "    return ReferenceBackend()\n")
    info = folder / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[quire.attention_backends]\n{name} = {module}:make\n")


def test_another_package_adds_one(tmp_path, monkeypatch):
    """Found by its entry point; what it makes is used as it is."""
    monkeypatch.syspath_prepend(tmp_path)
    install(tmp_path, "fast-attention")
    assert attention_backends() == sorted([*ATTENTION_BACKENDS, "theirs"])
    said: list[str] = []
    assert make_attention_backend("theirs", {"X": "compiling"}, said.append).name == "reference"
    assert said == ["compiling"]


def test_names_that_two_packages_have_or_none(tmp_path, monkeypatch):
    """Nothing is chosen by chance; a name of this repository stays what it is."""
    monkeypatch.syspath_prepend(tmp_path)
    install(tmp_path, "one")
    install(tmp_path, "other")
    with pytest.raises(ConfigError, match="theirs is in several packages: one, other; uninstall all but one"):
        make_attention_backend("theirs", {}, print)
    with pytest.raises(
        ConfigError, match="fastest is not known; there are: auto, flash-attn-3, flashinfer, theirs, torch"
    ):
        make_attention_backend("fastest", {}, print)
    install(tmp_path, "impostor", "flashinfer")
    try:
        made = make_attention_backend("flashinfer", {"X": ""}, print).name
    except ConfigError as error:  # it, a GPU, or Triton as these tests have it is missing
        made = error.reason
    assert made != "reference"


def test_limits_of_devices():
    """FlashAttention-3 is for Hopper, FlashInfer for Ampere and later, neither for AMD."""
    hopper, ampere = flash_attention_3.LIMITS, flashinfer_attention.LIMITS
    assert [hopper.device_problem((9, 0)), ampere.device_problem((8, 0)), ampere.device_problem((12, 0))] == [
        "",
        "",
        "",
    ]
    assert hopper.device_problem((10, 0)) == "needs a GPU of compute capability 9.0 to 9.9, and this one has 10.0"
    assert ampere.device_problem((7, 5)) == "needs a GPU of compute capability 8.0 or more, and this one has 7.5"
    assert "AMD" in hopper.device_problem((9, 4), is_nvidia=False)


@pytest.mark.parametrize("library", [flash_attention_3, flashinfer_attention, torch_attention])
def test_limits_of_chunks_and_sinks(library):
    """No library here takes them: a model that has them is refused by name."""
    shape, dtype = CacheShape(16, 1, 64), torch.bfloat16
    found = library.LIMITS.problem(shape, dtype, dtype, [AttentionRule(1.0), AttentionRule(1.0, chunk=24)])
    assert found == "takes no chunked attention, and the model's chunks have 24 tokens"
    found = library.LIMITS.problem(shape, dtype, dtype, [AttentionRule(1.0, sinks=torch.zeros(1))])
    assert found == "takes no attention sinks, which the model has"


def test_limits_of_windows():
    """Stated, though all that are here take windows."""
    shape, dtype = CacheShape(16, 1, 64), torch.bfloat16
    limits = replace(flashinfer_attention.LIMITS, window=False)
    assert limits.problem(shape, dtype, dtype, [AttentionRule(1.0)]) == ""
    found = limits.problem(shape, dtype, dtype, [AttentionRule(1.0), AttentionRule(1.0, 24)])
    assert found == "takes no sliding window, and the model's is 24"


# --- the stand-ins have the parameters of the real libraries ----------------------------------------------------------


def parameters(source: Path, *names: str) -> list[tuple[str, str]]:
    """Parameters of a function or of a method (class, name), with their defaults; the last definition, overloads come first."""
    body = ast.parse(source.read_text()).body
    for name in names:
        node = [node for node in body if getattr(node, "name", "") == name][-1]
        body = getattr(node, "body", [])
    given = node.args
    plain = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(plain) - len(given.defaults)) + given.defaults + given.kw_defaults
    return [
        (arg.arg, ast.unparse(default) if default is not None else "")
        for arg, default in zip([*plain, *given.kwonlyargs], defaults, strict=True)
    ]


def test_torch_has_these_parameters():
    """Of the torch that is installed: by name, kind and default."""
    real, ours = (inspect.signature(function).parameters for function in (varlen.varlen_attn, in_torch.varlen_attn))
    assert [(p.name, p.kind, p.default) for p in real.values()] == [(p.name, p.kind, p.default) for p in ours.values()]


def compare(real: Path, ours: Path, *names: str) -> None:
    found, written = parameters(real, *names), parameters(ours, *names)
    assert len(written) > 5
    assert found == written, names


@pytest.mark.long
def test_flashinfer_has_these_parameters(tmp_path):
    """Of the installed release, else of that which the stand-in was written from, downloaded."""
    try:
        source = Path(str(importlib.metadata.distribution("flashinfer-python").locate_file("flashinfer/prefill.py")))
    except importlib.metadata.PackageNotFoundError:
        source = downloaded(tmp_path)
    for method in ("__init__", "plan", "run"):
        compare(source, FOLDER / "flashinfer" / "__init__.py", WRAPPER, method)


def downloaded(folder: Path) -> Path:
    """prefill.py of the wheel."""
    wanted = ["--no-deps", "--no-cache-dir", "-q", "-d", str(folder), f"flashinfer-python=={WRITTEN_FROM}"]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "download", *wanted], check=False, capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"flashinfer-python {WRITTEN_FROM} cannot be downloaded: {done.stderr[-200:]}")
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        return Path(wheel.extract("flashinfer/prefill.py", folder))


@pytest.mark.long
def test_flash_attention_3_has_these_parameters():
    """Of the installed one: no registry has it."""
    found = importlib.util.find_spec("flash_attn_interface")
    if found is None or found.origin is None:
        pytest.skip("flash_attn_interface is not installed")
    compare(Path(found.origin), FOLDER / "flash_attn_interface.py", "flash_attn_with_kvcache")
