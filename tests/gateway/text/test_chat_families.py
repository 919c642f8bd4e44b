"""Templates and token ids equal transformers' own for every tested family."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2
import pytest
from transformers import PreTrainedTokenizerFast

from gateway_svc.chat.resolving import resolve_chat
from gateway_svc.chat.tool_calls.format_choice import FormatChoice
from gateway_svc.checks.validation import SamplingDefaults, check_parameters
from gateway_svc.text.text_model import TextModel
from protos.common.v1 import common_pb2
from protos.inference.v1 import inference_pb2 as pb
from svc_common.errors import InvalidArgument
from tests.gateway.text.chat_families import FAMILIES, WITH_TOOLS, as_request, conversation, load_family, write_family
from tests.support.services import models
from worker_svc.model.bundle import make_bundle

SAMPLE, WHOLE = 10, 500


@pytest.mark.parametrize("family", FAMILIES)
def test_conversations_render_as_in_transformers(family: str, tmp_path: Path, record_property: Any) -> None:
    """Some conversations of each family."""
    record_property("size", f"{SAMPLE} of {WHOLE} conversations")
    compare(family, tmp_path, SAMPLE)


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_many_conversations_render_as_in_transformers(family: str, tmp_path: Path, record_property: Any) -> None:
    """Many of each."""
    record_property("size", f"{WHOLE} of {WHOLE} conversations")
    compare(family, tmp_path, WHOLE)


def compare(family: str, folder: Path, num: int) -> None:
    """Texts and token ids are equal, with the generation prompt and without; what one refuses the other refuses."""
    text, theirs = load_family(family, folder)
    num_equal = num_with_tools = 0
    for seed in range(num):
        messages, tools, variables = conversation(random.Random(f"{family}/{seed}"), family)
        equal = compare_one(text, theirs, messages, tools, variables)
        num_equal += equal
        num_with_tools += equal and bool(tools)
    assert num_equal > num / 5
    assert bool(num_with_tools) == (family in WITH_TOOLS)


def compare_one(
    text: TextModel,
    theirs: PreTrainedTokenizerFast,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]],
    variables: dict[str, Any],
) -> bool:
    """Whether both render it; they may differ in nothing."""
    request = as_request(messages, tools, variables)
    check_parameters(request, text.limits)
    given: dict[str, Any] = {"tools": tools or None, **variables}
    try:
        expected = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **given)
    except jinja2.TemplateError:
        with pytest.raises(InvalidArgument):
            resolve_chat(request, text, text.limits, SamplingDefaults(), FormatChoice())
        return False
    ids = theirs.apply_chat_template(messages, tokenize=True, return_dict=False, add_generation_prompt=True, **given)
    assert text.apply_chat_template(messages, tools=tools or None, variables=variables) == expected
    assert resolve_chat(request, text, text.limits, SamplingDefaults(), FormatChoice()).prompt_token_ids == ids
    expected = theirs.apply_chat_template(messages, tokenize=False, **given)
    assert (
        text.apply_chat_template(messages, tools=tools or None, variables=variables, add_generation_prompt=False)
        == expected
    )
    return True


def _in_one_list(folder: Path, templates: dict[str, str]) -> None:
    named = [{"name": name, "template": source} for name, source in templates.items()]
    settings = json.loads((folder / "tokenizer_config.json").read_text()) | {"chat_template": named}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").unlink()


def _in_files(folder: Path, templates: dict[str, str]) -> None:
    (folder / "additional_chat_templates").mkdir()
    for name, source in templates.items():
        path = "chat_template.jinja" if name == "default" else f"additional_chat_templates/{name}.jinja"
        (folder / path).write_text(source)


@pytest.mark.parametrize("write", [_in_one_list, _in_files])
def test_named_templates_are_chosen_as_transformers_does(tmp_path: Path, write: Callable[..., None]) -> None:
    """`tool_use` where there are tools, else `default`, other names never; what each shows is parsed."""
    write_family("gpt2", tmp_path)
    write(
        tmp_path,
        {
            "rag": "rag",
            "default": "<think>{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
            "tool_use": "[TOOL_CALLS]{{ tools | tojson }}{% for m in messages %}{{ m.content }}{% endfor %}",
        },
    )
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    limits = common_pb2.ModelLimits(model="gpt2", max_model_len=100_000, vocab_size=5_000, eos_token_ids=[1])
    text = TextModel.from_bundle(make_bundle(tmp_path, limits))
    messages, tools = [{"role": "user", "content": "hi"}], [_TOOL]
    for given in (None, tools):
        request = as_request(messages, given or [], {})
        ids = theirs.apply_chat_template(messages, tools=given, tokenize=True, return_dict=False)
        found = resolve_chat(request, text, text.limits, SamplingDefaults(), FormatChoice())
        assert found.prompt_token_ids == ids and found.parsing is not None
        formats = ("mistral", "none") if given else ("none", "think")
        assert (found.parsing.tool_format, found.parsing.reasoning_format) == formats
    request.tool_choice.mode = pb.TOOL_MODE_NONE
    found = resolve_chat(request, text, text.limits, SamplingDefaults(), FormatChoice())
    assert text.decode(found.prompt_token_ids) == "<think>user: hi\n"


_TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}


def test_content_may_be_missing(tmp_path: Path) -> None:
    """None, as transformers' users pass it, for templates that take it; the built-in model's is one."""
    theirs = PreTrainedTokenizerFast.from_pretrained(models.TINY)
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": "é"}}}
    tools = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}]
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "3"},
    ]
    for given in (None, tools):
        expected = theirs.apply_chat_template(messages, tools=given, tokenize=False, add_generation_prompt=True)
        assert models.tiny().apply_chat_template(messages, tools=given) == expected
    text, other = load_family("gpt2", tmp_path)
    expected = other.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text.apply_chat_template(messages) == expected
