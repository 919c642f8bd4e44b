"""`--model ORG/NAME`: a download from the hub, against a stand-in on 127.0.0.1."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.built_in_model import default_model
from quire.client.sync_client import Client
from quire.hub import checkpoint_folder, is_hub_name
from svc_common.errors import ConfigError
from tests.quire.hub_server import Hub
from tests.support.stack.up_process import ROOT, UpProcess, run_quire

# Asks for each model in turn, in one interpreter: [name, revision] -> the folder's files, or the error.
ASK = """
import json, sys
from quire.hub import checkpoint_folder
from svc_common.errors import QuireError
for name, revision in json.loads(sys.argv[1]):
    try:
        found = checkpoint_folder(name, revision)
        print(json.dumps({"path": str(found.path), "name": found.name, "files": sorted(p.name for p in found.path.iterdir())}))
    except QuireError as error:
        print(json.dumps({"reason": error.reason, "message": error.message, "kind": type(error).__name__}))
"""


def environment(hub: Hub, home: Path, **more: str) -> dict[str, str]:
    """What a person would set to use the stand-in."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    return {**kept, "HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1", **more}


def ask(env: dict[str, str], *wanted: tuple[str, str]) -> list[dict[str, object]]:
    """The answers of ASK."""
    done = subprocess.run(
        [sys.executable, "-c", ASK, json.dumps(wanted)],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    """With org/tiny, the built-in model and much beside it that must not be downloaded; org/old has pickled weights only."""
    tiny, old = tmp_path / "hub-tiny", tmp_path / "hub-old"
    shutil.copytree(default_model(), tiny)
    for name in ("pytorch_model.bin", "modeling_tiny.py", "consolidated.safetensors", "training.pkl"):
        (tiny / name).write_bytes(b"not wanted")
    (tiny / "onnx").mkdir()
    (tiny / "onnx" / "model.safetensors").write_bytes(b"not wanted")
    old.mkdir()
    shutil.copy(tiny / "config.json", old)
    (old / "pytorch_model.bin").write_bytes(b"pickled")
    with Hub({"org/tiny": tiny, "org/old": old, "org/secret": tiny}, gated={"org/secret"}).serving() as serving:
        yield serving


def test_what_is_a_name_and_what_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ORG/NAME is a model of the hub unless there is such a folder; paths are never."""
    monkeypatch.chdir(tmp_path)
    assert is_hub_name("org/tiny") and is_hub_name("Qwen/Qwen3-0.6B")
    (tmp_path / "org" / "tiny").mkdir(parents=True)
    assert not any(map(is_hub_name, ("org/tiny", "/a/b", "./a/b", "~/a", "a", "a/b/c", "../a", "a/", "")))
    assert checkpoint_folder("org/tiny").name == ""
    with pytest.raises(ConfigError, match="--revision goes with"):
        checkpoint_folder("org/tiny", "v1")


def test_a_model_is_downloaded_once_and_used_offline(hub: Hub, tmp_path: Path) -> None:
    """Only safetensors, configuration and tokenizer come; then the cache serves without the hub."""
    env = environment(hub, tmp_path / "home")
    [found, again, tagged] = ask(env, ("org/tiny", ""), ("org/tiny", ""), ("org/tiny", "v1"))
    own = {path.name for path in default_model().iterdir() if path.suffix in (".json", ".safetensors", ".jinja")}
    assert set(found["files"]) == own
    assert found["name"] == "org/tiny" and found == again == tagged
    assert (Path(str(found["path"])) / "model.safetensors").read_bytes() == (
        default_model() / "model.safetensors"
    ).read_bytes()
    touched = [path for _, path, _ in hub.asked if "/resolve/" in path]
    assert not any(
        path.endswith((".bin", ".py", ".pkl")) or "onnx" in path or "consolidated" in path for path in touched
    )
    assert ask({**env, "HF_HUB_OFFLINE": "1"}, ("org/tiny", ""), ("org/tiny", "v1")) == [found, found]


def test_a_broken_download_goes_on_where_it_ended(hub: Hub, tmp_path: Path) -> None:
    """The second request for the weights asks for the rest (the library writes pieces of 10 MiB)."""
    content = bytes(range(256)) * (24 * 4096)
    big = tmp_path / "hub-big"
    big.mkdir()
    shutil.copy(default_model() / "config.json", big)
    (big / "model.safetensors").write_bytes(content)
    hub.models["org/big"] = big
    hub.broken.add("model.safetensors")
    [found] = ask(environment(hub, tmp_path / "home"), ("org/big", ""))
    assert (Path(str(found["path"])) / "model.safetensors").read_bytes() == content
    spans = [span for method, path, span in hub.asked if method == "GET" and path.endswith("/model.safetensors")]
    assert spans[0] == "" and spans[1].startswith("bytes=10485760-") and len(spans) == 2


def test_refusals_say_what_to_do(hub: Hub, tmp_path: Path) -> None:
    """Unknown, gated, no such revision, pickled only: each a wrong option, before anything large comes."""
    wanted = (("org/none", ""), ("org/secret", ""), ("org/tiny", "v9"), ("org/old", ""))
    answers = ask(environment(hub, tmp_path / "home"), *wanted)
    assert [a["reason"] for a in answers] == ["MODEL_NOT_FOUND", "MODEL_GATED", "REVISION_NOT_FOUND", "PICKLED_WEIGHTS"]
    assert all(answer["kind"] == "ConfigError" for answer in answers)
    for answer, words in zip(
        answers,
        (("no folder here", hub.url), ("accept", "HF_TOKEN"), ("v9", "--revision"), ("quire convert",)),
        strict=True,
    ):
        assert all(word in str(answer["message"]) for word in words), answer
    assert not any("/resolve/" in path for _, path, _ in hub.asked)


def test_without_a_network(hub: Hub, tmp_path: Path) -> None:
    """No answer, or HF_HUB_OFFLINE: the option is not wrong; the error names both variables' part."""
    env = environment(hub, tmp_path / "home")
    [offline] = ask({**env, "HF_HUB_OFFLINE": "1"}, ("org/tiny", ""))
    [silent] = ask({**env, "HF_ENDPOINT": "http://127.0.0.1:9"}, ("org/tiny", ""))
    assert [offline["kind"], silent["kind"]] == ["Unavailable", "Unavailable"]
    assert "HF_HUB_OFFLINE is set" in str(offline["message"])
    assert "http://127.0.0.1:9 does not answer" in str(silent["message"]) and "HF_ENDPOINT" in str(silent["message"])


@pytest.mark.long
def test_up_serves_a_model_of_the_hub(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`quire up --model ORG/NAME` downloads and serves under that name; a worker alone refuses the same; plan needs no weights."""
    for key, value in environment(hub, tmp_path / "home").items():
        monkeypatch.setenv(key, value)
    planned = run_quire("plan", "--model", "org/tiny", "--json")
    assert planned.returncode == 0, planned.stderr
    assert json.loads(planned.stdout)["model"]["name"] == "org/tiny"
    assert not any(path.endswith(".safetensors") for _, path, _ in hub.asked)
    with UpProcess("--model", "org/tiny") as up:
        address, _, _ = up.wait_ready()
        with Client(address) as client:
            assert [card.name for card in client.models()] == ["org/tiny"]
        assert up.stop() == 0
    refused = run_quire("serve", "worker", "--model", "org/none", "--port", "0")
    assert refused.returncode == 2 and "org/none" in refused.stderr


@pytest.mark.long
def test_run_plans_before_it_downloads_weights(hub: Hub, tmp_path: Path) -> None:
    """A model that does not fit is refused before its weights are asked for; one that fits is served under its name."""
    env = environment(hub, tmp_path / "home")
    refused = run_quire("run", "org/tiny", "hi", "--kv-cache-memory", "1KiB", env=env)
    assert refused.returncode == 2 and "does not hold a single block" in refused.stderr, refused.stderr
    assert not any(path.endswith(".safetensors") and "/resolve/" in path for _, path, _ in hub.asked)
    done = run_quire("run", "org/tiny", "hi", "--max-tokens", "4", "--temperature", "0", env=env)
    assert done.returncode == 0 and done.stdout.strip(), done.stderr
    assert "org/tiny fits: weights " in done.stderr and "context 2048 tokens" in done.stderr
    assert "MiB from http://127.0.0.1" in done.stderr
