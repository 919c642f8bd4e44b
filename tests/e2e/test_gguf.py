"""A GGUF file from door to worker: its weights, its tokenizer and its chat template."""

import json
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
from gguf import GGMLQuantizationType as Kind

from quire import LLM, RequestOutput, SamplingParams
from quire.built_in_model import default_model
from quire.client.sync_client import Client
from quire.local_stack.stack import LocalStack
from tests.support.gguf_files import to_gguf
from tests.support.stack.sizes import SMALL_STEP

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = ["def f(", "import os\n\nclass A:\n    def __init__(self, 12345):", "# h\u00e9llo w\u00f6rld\n\treturn x+1"]
TEMPLATE = "{% for turn in messages %}{{ turn['role'] }}: {{ turn['content'] }}\n{% endfor %}"


class Made(NamedTuple):
    """A GGUF file of unrounded weights, and what the folder gives from which it was made."""

    path: Path
    completions: list[tuple[str, list[int]]]
    chat: str


def of(outputs: list[RequestOutput]) -> list[tuple[str, list[int]]]:
    return [(output.outputs[0].text, output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    tmp_path = tmp_path_factory.mktemp("gguf")
    folder = Path(shutil.copytree(default_model(), tmp_path / "folder"))
    (folder / "chat_template.jinja").unlink()
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": TEMPLATE}), encoding="utf-8")
    path = to_gguf(folder, tmp_path / "small.gguf", lambda _name: Kind.F32)
    with LLM(folder, dtype="float32", kv_cache_memory="64MiB", max_num_batched_tokens=SMALL_STEP) as llm:
        [chat] = llm.chat("hi", GREEDY)
        return Made(path, of(llm.generate(PROMPTS, GREEDY, use_tqdm=False)), chat.outputs[0].text)


def test_in_process(made: Made) -> None:
    """The same prompts as tokens, and the same tokens; a chat is written by the file's template."""
    with LLM(made.path, dtype="float32", kv_cache_memory="64MiB", max_num_batched_tokens=SMALL_STEP) as llm:
        assert of(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == made.completions
        [chat] = llm.chat("hi", GREEDY)
        assert chat.outputs[0].text == made.chat


@pytest.mark.long
def test_over_the_services(made: Made) -> None:
    """The same; the model's name is the file's."""
    up = LocalStack(model=str(made.path), worker_args=("--dtype", "float32"), max_num_batched_tokens=SMALL_STEP)
    with up as stack, Client(stack.grpc_address) as client:
        [card] = client.models()
        assert card.name == "small" and card.chat
        assert of([client.generate(prompt, GREEDY) for prompt in PROMPTS]) == made.completions
        assert client.chat("hi", GREEDY).text == made.chat
