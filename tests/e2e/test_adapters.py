"""LoRA adapters through the services: loaded while serving, several in one batch, each as PEFT alone computes it."""

import json
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from quire import SamplingParams
from quire.built_in_model import default_model
from quire.cli import CONFIG_ERROR_STATUS
from quire.client.messages import RequestOptions
from quire.client.sync_client import Client
from quire.operators.admin import AdminClient
from svc_common.errors import AlreadyExists, FailedPrecondition, InvalidArgument, NotFound, QuireError
from tests.support.stack.commands import quire_here
from tests.support.stack.supervised import Supervised
from tests.support.worker.adapter_folders import Oracle

PROMPT = list(range(40, 90))
PARAMS = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
NAMES = {"": 0, "one": 1, "two": 2, "kept": 3}


@dataclass(frozen=True, slots=True)
class Served:
    """A running stack that started with the adapter `kept`; folders of the others beside it."""

    running: Supervised
    folders: dict[str, Path]
    client: Client
    admin: AdminClient

    def ask(self, name: str, params: SamplingParams = PARAMS) -> tuple[list[int], int | None]:
        """Tokens, and how many of the prompt's were found in the cache."""
        output = self.client.generate(PROMPT, params, options=RequestOptions(model=name), timeout_s=240)
        return list(output.outputs[0].token_ids), output.num_cached_tokens

    def stream(self, name: str) -> Iterator[object]:
        """A long answer."""
        return iter(self.client.generate_stream(PROMPT, LONG, options=RequestOptions(model=name), timeout_s=240))

    def problems(self) -> dict[str, str]:
        """Why an adapter cannot be used, by name, as `quire adapters list` says it."""
        listed = quire_here("adapters", "list", "--json", "--admin", self.running.stack.admin_address).stdout
        return {adapter["name"]: adapter["unavailable"] for adapter in json.loads(listed)["adapters"]}


@pytest.fixture(scope="module")
def served(killable: Supervised, adapters: dict[str, Path]) -> Iterator[Served]:
    """The stack with its clients."""
    with Client(killable.stack.grpc_address) as client, AdminClient(killable.stack.admin_address) as admin:
        yield Served(killable, adapters, client, admin)


def eventually(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def greedy(oracle: Oracle, adapter_id: int) -> list[int]:
    tokens = list(PROMPT)
    for _ in range(10):
        tokens.append(int(oracle.logits(tokens, adapter_id)[-1].argmax()))
    return tokens[len(PROMPT) :]


def test_adapters_are_loaded_named_and_unloaded_while_serving(served: Served) -> None:
    """R138: adapters and the base in one batch give PEFT's tokens, and share no cached block; one was loaded at the start."""
    oracle = Oracle(default_model(), {NAMES[name]: folder for name, folder in served.folders.items()})
    expected = [greedy(oracle, adapter_id) for adapter_id in NAMES.values()]
    assert len({tuple(tokens) for tokens in expected}) == 4, "the adapters change nothing: no witnesses"
    assert served.ask("kept")[0] == expected[3], "named at the start, known from the start"
    for name in ("one", "two"):
        assert served.admin.load_adapter(name, str(served.folders[name])).rank == 4
    eventually(
        lambda: {card.name for card in served.client.models()} >= set(NAMES) - {""}, "the gateway is not told of them"
    )
    with ThreadPoolExecutor(3) as threads:
        first = list(threads.map(served.ask, list(NAMES)[:3]))
    assert [tokens for tokens, _ in first] == expected[:3]
    assert [cached for _, cached in first] == [0, 0, 0], "the same prompt under another adapter is no hit"
    assert [cached for _, cached in map(served.ask, NAMES)] == [48, 48, 48, 48]

    with pytest.raises(AlreadyExists):
        served.admin.load_adapter("one", str(served.folders["two"]))
    with pytest.raises(QuireError, match="missing"):
        served.admin.load_adapter("three", "/missing")
    for name in ("two", "one"):
        served.admin.unload_adapter(name)
        with pytest.raises(NotFound, match=name):
            served.ask(name)
    assert served.ask("kept")[0] == expected[3]


@pytest.mark.long
def test_a_worker_that_comes_back_without_an_adapter_serves_the_others(served: Served, tmp_path: Path) -> None:
    """The files of one are gone when a killed worker restarts: requests for it fail with the reason, all others go on with their
    tokens; the list says so; with the files back, loading it again is enough."""
    folder = Path(shutil.copytree(served.folders["one"], tmp_path / "fading"))
    served.admin.load_adapter("fading", str(folder))
    eventually(lambda: "fading" in {card.name for card in served.client.models()}, "the gateway is not told of it")
    expected = {name: served.ask(name, LONG)[0] for name in ("", "kept")}
    short = served.ask("fading")[0]
    fading = served.stream("fading")
    next(fading)
    shutil.rmtree(folder)
    with ThreadPoolExecutor(2) as threads:
        others = {name: threads.submit(served.ask, name, LONG) for name in ("", "kept")}
        served.running.kill("worker")
        with pytest.raises(
            FailedPrecondition, match=r"fading is not available: the worker at .*could not load it: .*fading"
        ):
            list(fading)
        assert {name: other.result()[0] for name, other in others.items()} == expected
    with pytest.raises(FailedPrecondition, match="not available") as told:
        served.ask("fading")
    assert told.value.reason == "ADAPTER_UNAVAILABLE"
    assert {name: bool(problem) for name, problem in served.problems().items()} == {"fading": True, "kept": False}
    with pytest.raises(InvalidArgument):
        served.admin.load_adapter("fading", str(folder))
    shutil.copytree(served.folders["one"], folder)
    served.admin.load_adapter("fading", str(folder))
    assert served.problems() == {"fading": "", "kept": ""} and served.ask("fading")[0] == short
    served.admin.unload_adapter("fading")


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("sql", "--adapter 'sql': write NAME=PATH"),
        pytest.param(
            "sql=/no/such/folder", "--adapter sql=/no/such/folder: the worker at 127.0.0.1:", marks=pytest.mark.long
        ),
    ],
)
def test_an_adapter_that_is_missing_at_the_start_ends_up(option: str, said: str) -> None:
    """`quire up --adapter`: status 2 and one line with the reason."""
    ports = ("--grpc-port", "0", "--http-port", "0", "--admin-port", "0", "--admin-http-port", "0")
    done = quire_here("up", *ports, "--adapter", option)
    assert done.returncode == CONFIG_ERROR_STATUS and "ready" not in done.stdout
    assert said in done.stderr, done.stderr
