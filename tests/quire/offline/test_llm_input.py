"""What `LLM` is given that is wrong: typed errors, the same in this process and behind a gateway, and by Python's names."""

from collections.abc import Iterator

import pytest

from quire import LLM, SamplingParams
from quire.client.chat_messages import turns
from quire.local_stack.stack import LocalStack
from quire.offline.llm_settings import named_as_in_python
from svc_common.errors import ConfigError, InvalidArgument

SHORT = SamplingParams(max_tokens=2, ignore_eos=True)
NO_PROMPTS = [
    None,
    5,
    b"ab",
    "",
    [""],
    [],
    {},
    {"text": "x"},
    {"prompt": None},
    {"prompt": ""},
    [1.5],
    [[1], "x", [None]],
]


@pytest.fixture(scope="module", params=["in process", "target"])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    """Both kinds."""
    if request.param == "in process":
        with LLM(max_model_len=64, num_gpu_blocks_override=8, max_num_batched_tokens=64, swap_space="1MiB") as made:
            yield made
    else:
        stack: LocalStack = request.getfixturevalue("simulated_stack")
        with LLM(target=stack.grpc_address) as made:
            yield made


@pytest.mark.parametrize("prompt", NO_PROMPTS, ids=repr)
def test_no_prompt(llm: LLM, prompt: object) -> None:
    """InvalidArgument naming `prompt`, from both ways in; nothing is left running."""
    with pytest.raises(InvalidArgument) as caught:
        llm.add_request("a", prompt, SHORT)  # type: ignore[arg-type]
    assert [v.field for v in caught.value.violations] == ["prompt"]
    if prompt != []:
        with pytest.raises(InvalidArgument) as caught:
            llm.generate(prompt, SHORT)  # type: ignore[arg-type]
        assert [v.field for v in caught.value.violations] == ["prompt"]
    assert not llm.has_unfinished_requests()


@pytest.mark.parametrize("params", [{}, 5, "x", [{}], [None, None], [5]], ids=repr)
def test_no_sampling_params(llm: LLM, params: object) -> None:
    """InvalidArgument naming `sampling_params`."""
    with pytest.raises(InvalidArgument) as caught:
        llm.generate("x", params)  # type: ignore[arg-type]
    assert [v.field for v in caught.value.violations] == ["sampling_params"]
    with pytest.raises(InvalidArgument):
        llm.add_request("a", "x", params)  # type: ignore[arg-type]


@pytest.mark.parametrize("request_id", ["", 5, None, "line\nbreak", "caf\u00e9"], ids=repr)
def test_no_request_id(llm: LLM, request_id: object) -> None:
    """Refused at once; `step` used to wait for ever for a request that the gateway had named itself."""
    with pytest.raises(InvalidArgument) as caught:
        llm.add_request(request_id, "x", SHORT)  # type: ignore[arg-type]
    assert [v.field for v in caught.value.violations] == ["request_id"]
    assert not llm.has_unfinished_requests()
    assert llm.step() == []


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"foo": 1}, "^unknown option foo; there are: .*max_num_seqs"),
        ({"foo": 1, "bar": 1, "target": "127.0.0.1:1"}, "^unknown options bar, foo;"),
        ({"host": "0.0.0.0"}, "^unknown option host"),
        ({"max_num_seqs": 0}, "^max_num_seqs: .*1"),
        ({"max_num_seqs": "many"}, "^max_num_seqs: "),
        ({"max_num_batched_tokens": 0}, "^max_num_batched_tokens: "),
        ({"max_num_seqs": 5, "max_num_batched_tokens": 4}, r"^max_num_batched_tokens \(4\) .* max_num_seqs \(5\)"),
        ({"policy": "best"}, "^policy: .*'best'.*vllm-v1"),
        ({"dtype": "float8"}, "^dtype: "),
        ({"kv_cache_memory": 0}, "^kv_cache_memory: "),
        ({"gpu_memory_utilization": 2}, "^gpu_memory_utilization: "),
        ({"model": "no/such--model"}, "^model: no/such--model does not exist"),
        (
            {"num_gpu_blocks_override": 4, "max_num_batched_tokens": 256},
            "max_model_len=64 .*raise num_gpu_blocks_override",
        ),
    ],
)
def test_wrong_options_have_their_python_names(settings: dict[str, object], text: str) -> None:
    """ConfigError; numbers, names and limits are checked before a model is loaded."""
    with pytest.raises(ConfigError, match=text) as caught:
        LLM(**settings)  # type: ignore[arg-type]
    assert " --" not in caught.value.message


def test_paths_are_no_options() -> None:
    """Only what looks like an option is spelled anew."""
    with pytest.raises(ConfigError) as caught, named_as_in_python():
        raise ConfigError("--model /a/models--Qwen--7b/--x: use --device cpu or --max-model-len 64", reason="R")
    assert caught.value.message == "model /a/models--Qwen--7b/--x: use device=cpu or max_model_len=64"
    assert caught.value.reason == "R"


def test_a_turn_without_its_role() -> None:
    """A misspelt key is told as what it is: missing."""
    with pytest.raises(InvalidArgument, match=r"^messages\[0\]\.role: is missing"):
        turns([{"rol": "user", "content": "x"}])
