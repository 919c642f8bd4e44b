"""Engines of the comparison with peers: what they are started with, what is left out, how peers are installed."""

import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
import typer

from benchmarks.compare import __main__ as command_line
from benchmarks.compare import install
from benchmarks.compare.engines import registry
from benchmarks.compare.engines.base import Form, Host
from tests.benchmarks.compare.compare_cases import BIG


def host(tmp_path: Path) -> Host:
    """For command lines; nothing is there."""
    return Host(tmp_path / "model", 2, 64, 2_048, 2, tmp_path / "peers", tmp_path / "logs")


def test_command_lines_of_all_engines(tmp_path: Path) -> None:
    """With the settings at which each is best on these cores, and the same memory for all."""
    every = registry.engines(host(tmp_path), BIG, {"loose": "--no-invariant"}, "--num-threads 2")
    rounded = {"llamacpp-q8_0", "llamacpp-q4_0", "llamacpp-q4_k_m"}
    assert set(command_line.ENGINES) | rounded | {"quire-loose"} == set(every)
    settings = {name: engine.settings() for name, engine in every.items()}
    assert settings["quire-loose"]["command"][-3:] == ["--num-threads", "2", "--no-invariant"]
    assert settings["quire"]["command"][:5] == ["quire", "up", "--model", "MODEL", "--kv-cache-memory"]
    assert settings["vllm"]["environment"]["VLLM_CPU_OMP_THREADS_BIND"] == "0-1"
    assert {"bfloat16", "64", "--enable-prefix-caching"} <= set(settings["vllm"]["command"])
    assert settings["llamacpp"]["command"][3:5] == ["--ctx-size", str((2 << 30) // BIG.kv_token_bytes)]
    assert settings["llamacpp-q4_k_m"]["command"][2] == "model-q4_k_m.gguf"
    assert settings["openvino"]["properties"]["INFERENCE_NUM_THREADS"] == "2"
    assert not every["transformers"].can("W5") and every["transformers"].can("W4") and every["vllm"].can("W5")
    assert every["quire"].form is Form.SERVER and every["quire-offline"].form is Form.OFFLINE


def test_a_peer_that_is_not_installed_is_said(tmp_path: Path) -> None:
    """And left out; a name that there is not is a mistake."""
    said: list[str] = []
    every = registry.engines(host(tmp_path), BIG, {})
    found = registry.chosen(every, ["vllm", "transformers", "quire"], said.append)
    assert [engine.name for engine in found] == ["quire", "transformers"]
    assert said == ["vllm is skipped: not installed: make peers PEERS=vllm"]
    with pytest.raises(KeyError):
        registry.chosen(every, ["vlm"], said.append)


def test_installing_says_what_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The others go on; what is installed with these pins is not installed again."""
    asked: list[str] = []

    def fails(name: str, peers: Path, pip_flags: Sequence[str]) -> None:
        asked.append(name)
        raise subprocess.CalledProcessError(1, ["pip"])

    monkeypatch.setattr(install, "install", fails)
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / ".installed").write_text(install.digest("vllm"))
    install.main(["vllm", "openvino", "llamacpp"], "", tmp_path)
    said = capsys.readouterr()
    assert asked == ["openvino", "llamacpp"] and "vllm is already installed" in said.out
    assert said.err.count("cannot be installed and is skipped") == 2
    (tmp_path / "vllm" / ".installed").write_text("other pins")
    assert not install.is_current(tmp_path / "vllm", "vllm")
    with pytest.raises(typer.BadParameter):
        install.main(["torch"], "", tmp_path)
