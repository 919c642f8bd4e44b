"""LoRA adapters through the services: loaded while serving, several in one batch, each as PEFT alone computes it (design.md 6)."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from quire import SamplingParams
from quire.admin import AdminClient
from quire.client import Client
from quire.messages import RequestOptions
from quire.stack import LocalStack, default_model
from svc_common.errors import AlreadyExists, NotFound, QuireError
from tests.worker.adapter_folders import Oracle, make_adapter

PROMPT = list(range(40, 90))
PARAMS = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
NAMES = {"": 0, "one": 1, "two": 2}


def greedy(oracle: Oracle, adapter_id: int) -> list[int]:
    tokens = list(PROMPT)
    for _ in range(10):
        tokens.append(int(oracle.logits(tokens, adapter_id)[-1].argmax()))
    return tokens[len(PROMPT) :]


def test_adapters_are_loaded_named_and_unloaded_while_serving(tmp_path: Path) -> None:
    """R138: two adapters and the base in one batch give PEFT's tokens, and share no cached block."""
    folders = {
        i: make_adapter(default_model(), tmp_path / name, i, r=4, target_modules="all-linear")
        for name, i in list(NAMES.items())[1:]
    }
    oracle = Oracle(default_model(), folders)
    expected = [greedy(oracle, adapter_id) for adapter_id in NAMES.values()]
    assert len({tuple(tokens) for tokens in expected}) == 3, "the adapters change nothing: no witnesses"
    with (
        LocalStack(worker_args=("--dtype", "float32")) as stack,
        Client(stack.grpc_address) as client,
        AdminClient(stack.admin_address) as admin,
        ThreadPoolExecutor(3) as threads,
    ):
        for name in ("one", "two"):
            assert admin.load_adapter(name, str(tmp_path / name)).rank == 4
        deadline = time.monotonic() + 20
        while not {card.name for card in client.models()} >= {"one", "two"}:
            assert time.monotonic() < deadline, "the gateway was not told of the adapters"
            time.sleep(0.02)

        def ask(name: str) -> tuple[list[int], int | None]:
            output = client.generate(PROMPT, PARAMS, options=RequestOptions(model=name), timeout_s=60)
            return list(output.outputs[0].token_ids), output.num_cached_tokens

        first = list(threads.map(ask, NAMES))
        assert [tokens for tokens, _ in first] == expected
        assert [cached for _, cached in first] == [0, 0, 0], "the same prompt under another adapter is no hit"
        assert [cached for _, cached in map(ask, NAMES)] == [48, 48, 48]

        with pytest.raises(AlreadyExists):
            admin.load_adapter("one", str(tmp_path / "two"))
        with pytest.raises(QuireError, match="missing"):
            admin.load_adapter("three", str(tmp_path / "missing"))
        admin.unload_adapter("two")
        with pytest.raises(NotFound, match="two"):
            ask("two")
        assert ask("one")[0] == expected[1]
