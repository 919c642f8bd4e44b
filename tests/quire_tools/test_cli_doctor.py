"""`quire doctor`: each finding says how it is and what to do; problems end with status 1."""

import importlib.metadata
import json
import resource
import shutil
import socket
from pathlib import Path

import pytest

from paged_kernels import cpu_library
from quire import extras
from quire.built_in_model import default_model
from quire.cli import main
from quire.client.connections import Credentials
from quire_tools.doctor import findings, installation, machine, model, service
from quire_tools.doctor.findings import Finding, Severity
from svc_common.errors import PermissionDenied, QuireError, Unauthenticated, Unavailable
from svc_common.version import Revisions


def states(found: list[Finding]) -> dict[str, Severity]:
    """By name."""
    return {finding.name: finding.state for finding in found}


def test_a_sound_folder_and_a_broken_one(tmp_path: Path) -> None:
    """Nothing of a model is loaded: names, JSON, and the lengths that headers promise."""
    assert set(states(list(model.folder(default_model()))).values()) == {Severity.OK}
    broken = tmp_path / "broken"
    shutil.copytree(default_model(), broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    (broken / "tokenizer.json").write_text("[")
    found = list(model.folder(broken))
    assert states(found) == {"model": Severity.OK, "tokenizer": Severity.PROBLEM, "weights": Severity.PROBLEM}
    assert any("1000 B too short" in finding.what for finding in found)
    weights.rename(broken / "pytorch_model.bin")
    [finding] = [finding for finding in model.folder(broken) if finding.name == "weights"]
    assert "quire convert" in finding.to_do
    assert states(list(model.folder(tmp_path / "none"))) == {"model": Severity.PROBLEM}


def test_packages_out_of_range_and_in_conflict(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranges are those of pyproject.toml; xds-protos beside the exporter is a problem."""
    real = importlib.metadata.version

    def version(name: str) -> str:
        return {"grpcio": "1.50.0", "xds-protos": "1.0"}.get(name) or real(name)

    assert Severity.PROBLEM not in states(list(installation.packages())).values()
    assert states(list(installation.conflicts())) == {"conflicting packages": Severity.OK}
    monkeypatch.setattr(importlib.metadata, "version", version)
    assert states(list(installation.packages()))["packages"] is Severity.PROBLEM
    [finding] = installation.conflicts()
    assert finding.state is Severity.PROBLEM and finding.to_do == "pip uninstall xds-protos"


def test_which_cpu_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prebuilt, compiled here, or none, which is slower and says what to do."""
    for name in ("QUIRE_KERNEL_LIBRARY", "QUIRE_CPU_KERNELS", "CXX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(cpu_library, "PREBUILT", tmp_path)
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "cache"))
    [finding] = installation.kernels()
    assert finding.state is Severity.OK and "g++, when a worker first starts" in finding.what
    monkeypatch.setenv("PATH", str(tmp_path))
    [finding] = installation.kernels()
    assert finding.state is Severity.WARNING and "several times slower" in finding.what
    assert "install Quire's wheel for this platform" in finding.to_do
    build = cpu_library.runs_here()[0]
    (tmp_path / build.file_name).touch()
    assert list(installation.kernels()) == [Finding(Severity.OK, "CPU kernels", f"prebuilt for {build.name}")]


def test_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files, ports, clock: told from what they are."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        [finding] = machine.ports({"--http-port": taken.getsockname()[1]})
    assert finding.state is Severity.WARNING and "--http-port 0" in finding.to_do
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (256, 1 << 20))
    [finding] = machine.open_files()
    assert finding.state is Severity.PROBLEM and finding.to_do == "ulimit -n 65536"
    assert states(list(machine.clock())) == {"clock": Severity.OK}
    monkeypatch.setattr("time.time", lambda: 1.0)
    assert states(list(machine.clock())) == {"clock": Severity.PROBLEM}


def test_without_a_listener() -> None:
    """A service that is not there is a problem, with the address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    [finding] = service.health("gateway", address, Credentials())
    assert finding.state is Severity.PROBLEM and address in finding.what
    [finding] = service.scheduler(address, Credentials())
    assert finding.state is Severity.PROBLEM


@pytest.mark.parametrize("refusal", [Unauthenticated, PermissionDenied])
def test_a_refused_caller_is_told_of_keys(refusal: type[QuireError]) -> None:
    """The address was right then."""
    assert "QUIRE_API_KEY" in service._to_do(refusal("no"), "give another address")
    assert service._to_do(Unavailable("no"), "give another address") == "give another address"


def test_another_release_is_told() -> None:
    """Another protocol revision cannot work, another release should not be."""
    ours = [finding.state for finding in service._build("worker", extras.version("quire") or "", Revisions(1, 2))]
    assert ours == [Severity.PROBLEM]
    assert [f.state for f in service._build("worker", "0.0.1", service.SPOKEN)] == [Severity.WARNING]


def test_a_check_that_fails_is_a_finding() -> None:
    """Whatever is broken, the others are still checked."""

    def fails() -> list[Finding]:
        raise RuntimeError("odd")

    found = list(findings.findings([("odd thing", fails), ("Python", installation.python)]))
    assert states(found) == {"odd thing": Severity.WARNING, "Python": Severity.OK}


def test_status_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command: 0 here, 1 with a model that is none, and the same as JSON."""
    with pytest.raises(SystemExit) as caught:
        main(["doctor", "--json", "--model", str(tmp_path)])
    values = json.loads(capsys.readouterr().out)
    assert caught.value.code == 1 and values["problems"] == 3
    wrong = [finding for finding in values["findings"] if finding["state"] == "problem"]
    assert {finding["name"] for finding in wrong} == {"model", "tokenizer", "weights"} and all(
        f["to_do"] for f in wrong
    )
