"""vLLM's fields at the HTTP door of a real stack: what they change, and what is null where it was not asked for."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from tokenizers.processors import TemplateProcessing

from gateway_svc.chat.resolving import resolve_chat
from gateway_svc.chat.tool_calls.format_choice import FormatChoice
from gateway_svc.checks.validation import SamplingDefaults
from gateway_svc.text.chat_template import ChatTemplate
from gateway_svc.text.text_model import TextModel
from gateway_svc.text.text_stream import TextStream
from protos.inference.v1 import inference_pb2 as pb
from protos.worker.v1 import worker_pb2
from quire.local_stack.stack import LocalStack
from svc_common.errors import InvalidArgument
from tests.support.services import models

pytestmark = pytest.mark.processes

PREFIX = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Sure, "}]


@pytest.fixture(scope="module")
def tiny(stack: LocalStack) -> Iterator[httpx.Client]:
    """The built-in model, which has a chat template and special tokens."""
    with httpx.Client(base_url=stack.http_url, timeout=60) as client:
        yield client


def ask(client: httpx.Client, path: str = "/v1/completions", **fields: Any) -> dict[str, Any]:
    answer = client.post(path, json={"prompt": "def f", "max_tokens": 12, "temperature": 0, **fields})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def chat(client: httpx.Client, **fields: Any) -> dict[str, Any]:
    return ask(client, "/v1/chat/completions", prompt=None, **fields)


def refusal(client: httpx.Client, **fields: Any) -> dict[str, Any]:
    answer = client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1, **fields})
    assert answer.status_code == 400
    return dict(answer.json()["error"])


def test_logprobs_of_zero_have_the_chosen_token(tiny: httpx.Client) -> None:
    """One entry at each place; in a chat, `top_logprobs` 0 has none."""
    found = ask(tiny, logprobs=0)["choices"][0]["logprobs"]
    assert [list(top.values()) for top in found["top_logprobs"]] == [[value] for value in found["token_logprobs"]]
    entries = chat(tiny, messages=PREFIX[:1], logprobs=True, top_logprobs=0)["choices"][0]["logprobs"]["content"]
    assert entries and all(entry["top_logprobs"] == [] for entry in entries)


def test_what_was_not_asked_for_is_null(tiny: httpx.Client) -> None:
    """Clients of vLLM look the fields up."""
    choice = ask(tiny)["choices"][0]
    assert [choice[name] for name in ("prompt_logprobs", "prompt_token_ids", "token_ids")] == [None] * 3
    answer = chat(tiny, messages=PREFIX[:1])
    assert (answer["prompt_logprobs"], answer["prompt_token_ids"]) == (None, None)
    assert answer["choices"][0]["token_ids"] is None


def test_refusals_name_what_is_wrong(tiny: httpx.Client) -> None:
    """`stream_options` without a stream, and the key of `logit_bias` that is no token or none of the model's."""
    assert refusal(tiny, stream_options={"include_usage": True})["param"] == "stream_options"
    assert "'abc'" in refusal(tiny, logit_bias={"abc": 1})["message"]
    assert "999999" in refusal(tiny, logit_bias={"999999": 1})["message"]
    assert "whole vocabulary" in refusal(tiny, logprobs=-1)["message"]


def test_stop_strings_in_the_output(tiny: httpx.Client) -> None:
    """Whole and streamed, the text ends with the one that ended it; by default before it."""
    whole = ask(tiny)["choices"][0]["text"]
    stop, end = whole[4:6], whole.index(whole[4:6])
    assert ask(tiny, stop=stop)["choices"][0]["text"] == whole[:end]
    assert ask(tiny, stop=stop, include_stop_str_in_output=True)["choices"][0]["text"] == whole[: end + len(stop)]


def test_a_stop_string_is_released_with_what_it_ends() -> None:
    """Cut into tokens in any way; what comes behind it stays out."""
    model = models.tiny()
    stream = TextStream(model, ["END"], include_stop=True)
    pieces = [stream.push([token]) for token in model.encode("abENDcd", add_special_tokens=False)]
    assert "".join(piece.text for piece in pieces) == "abEND"
    assert stream.stopped_by == "END"


def test_special_tokens_in_the_output(tiny: httpx.Client) -> None:
    """They have text where they are asked for; a stop token has, where the text has its end."""
    model = models.tiny()
    (special,) = model.special_ids(["</s>"]) or model.special_ids(["<|end|>"])
    fields = {"allowed_token_ids": [special], "ignore_eos": True, "max_tokens": 2}
    name = model.token_bytes(special).decode()
    assert ask(tiny, **fields)["choices"][0]["text"] == ""
    assert ask(tiny, **fields, skip_special_tokens=False)["choices"][0]["text"] == 2 * name
    stopped = {"allowed_token_ids": [special], "stop_token_ids": [special], "skip_special_tokens": False}
    assert ask(tiny, **stopped)["choices"][0]["text"] == ""
    assert ask(tiny, **stopped, include_stop_str_in_output=True)["choices"][0]["text"] == name


def test_a_prompt_is_truncated_from_its_beginning(tiny: httpx.Client) -> None:
    """To so many tokens, or with -1 to what fits; text and token ids; more than the context is refused."""
    model = models.tiny()
    ids = model.encode("abcdefgh" * 4)
    last = ask(tiny, prompt=ids[-5:])
    for prompt in (ids, "abcdefgh" * 4):
        found = ask(tiny, prompt=prompt, truncate_prompt_tokens=5)
        assert found["usage"]["prompt_tokens"] == 5
        assert found["choices"][0]["text"] == last["choices"][0]["text"]
    long = "x" * 3 * model.limits.max_model_len
    assert ask(tiny, prompt=long, truncate_prompt_tokens=-1)["usage"]["prompt_tokens"] == model.limits.max_model_len - 1
    assert refusal(tiny, truncate_prompt_tokens=10**6)["param"] == "truncate_prompt_tokens"


def test_a_chat_goes_on_with_its_last_message(tiny: httpx.Client) -> None:
    """The prompt ends with its text; without `add_generation_prompt` no answer is begun; both together are refused."""
    model = models.tiny()

    def prompt(**fields: Any) -> str:
        answer = tiny.post("/tokenize", json={"messages": PREFIX, **fields})
        assert answer.status_code == 200, answer.text
        return b"".join(model.token_bytes(token) for token in answer.json()["tokens"]).decode()

    assert prompt(continue_final_message=True).endswith("Sure, ")
    assert prompt().startswith(prompt(add_generation_prompt=False)) and prompt() != prompt(add_generation_prompt=False)
    both = {"messages": PREFIX, "continue_final_message": True, "add_generation_prompt": True}
    assert tiny.post("/v1/chat/completions", json=both).status_code == 400
    assert chat(tiny, messages=PREFIX, continue_final_message=True)["choices"][0]["message"]["content"]


def test_a_chat_may_have_the_special_tokens_of_its_tokenizer() -> None:
    """`add_special_tokens`: those before what the template made; else the template's own alone."""
    tokenizer = models.tiny_tokenizer()
    tokenizer.post_processor = TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)])
    bundle = worker_pb2.ModelBundle.FromString(models.tiny_bundle())
    bundle.tokenizer_json = tokenizer.to_str().encode()
    text = TextModel.from_bundle(bundle.SerializeToString())

    def token_ids(**fields: bool) -> list[int]:
        request = pb.ChatRequest(messages=[pb.Message(role="user", content="Hi")], **fields)
        return resolve_chat(request, text, text.limits, SamplingDefaults(), FormatChoice()).prompt_token_ids

    assert token_ids(add_special_tokens=True) == [0, *token_ids()]


@pytest.mark.parametrize("last", ["  spaced out  ", "Sure, ", "x"])
def test_templates_that_trim_are_cut_where_the_text_ends(last: str) -> None:
    """As transformers does it."""
    trimming = ChatTemplate("{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}<end>{% endfor %}", {})
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": last}]
    assert trimming.render(messages, continue_final_message=True) == f"[user]q<end>[assistant]{last.strip()}"
    plain = ChatTemplate("{% for m in messages %}[{{ m.role }}]{{ m.content }}<end>{% endfor %}", {})
    assert plain.render(messages, continue_final_message=True) == f"[user]q<end>[assistant]{last}"
    with pytest.raises(InvalidArgument, match="continue_final_message"):
        plain.render([{"role": "user", "content": " "}], continue_final_message=True)
