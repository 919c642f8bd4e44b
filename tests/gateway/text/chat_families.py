"""The tested families with chat templates in the style of each one's own, their kind of tokenizer, and random conversations.

The templates are in `templates/`; those of gpt2, gpt_neox and opt, which have none of their own, use what else templates use.
"""

import json
import random
import string
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import normalizers
from transformers import PreTrainedTokenizerFast

from gateway_svc.text.text_model import TextModel
from protos.common.v1 import common_pb2
from protos.inference.v1 import inference_pb2 as pb
from tests.support import checkpoints
from tests.support.services import models
from worker_svc.model.bundle import make_bundle

TEMPLATES = Path(__file__).parent / "templates"
# Of newer families there are no templates here: theirs belong to models that cannot be fetched.
FAMILIES = tuple(family for family in checkpoints.FAMILIES if (TEMPLATES / f"{family}.jinja").exists())
WITH_TOOLS = frozenset({"llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "phi3", "opt"})
# Families whose tokenizers are SentencePiece's: words begin with a metaspace, unknown characters are bytes.
METASPACE = frozenset({"mistral", "mixtral", "gemma2", "gemma3_text", "phi3"})
SPECIAL = {
    "llama": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>"),
    "mistral": (
        "[INST]",
        "[/INST]",
        "[AVAILABLE_TOOLS]",
        "[/AVAILABLE_TOOLS]",
        "[TOOL_CALLS]",
        "[TOOL_RESULTS]",
        "[/TOOL_RESULTS]",
    ),
    "mixtral": (),
    "gemma2": ("<start_of_turn>", "<end_of_turn>"),
    "gemma3_text": ("<start_of_turn>", "<end_of_turn>"),
    "phi3": ("<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<|tool|>", "<|/tool|>", "<|tool_response|>"),
}
CHATML = ("<|im_start|>", "<|im_end|>")
WORDS = (
    "hello",
    "naïve",
    "日本語",
    "😀",
    "<b>",
    "&amp;",
    "'q'",
    '"d"',
    "a\nb",
    " x ",
    "{{ 1 }}",
    "\\n",
    "</think>",
    "<|im_end|>",
    "0.5",
    "\t",
)
assert set(FAMILIES) == {path.stem for path in TEMPLATES.glob("*.jinja")}


def write_family(family: str, folder: Path) -> None:
    """Tokenizer and template as a checkpoint has them; as files of their own, or inside of the configuration."""
    base = models.fallback_tokenizer() if family in METASPACE else models.tiny_tokenizer()
    tokenizer = tokenizers.Tokenizer.from_str(base.to_str())
    if family in METASPACE:
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
    special = ["<s>", "</s>", *SPECIAL.get(family, CHATML)]
    tokenizer.add_special_tokens([tokenizers.AddedToken(text, special=True, normalized=False) for text in special])
    tokenizer.add_tokens(
        [tokenizers.AddedToken(text, normalized=False) for text in ("<tool_call>", "</tool_call>", "<think>")]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    source = (TEMPLATES / f"{family}.jinja").read_text()
    if family in METASPACE:
        config["chat_template"] = source
    else:
        (folder / "chat_template.jinja").write_text(source)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def load_family(family: str, folder: Path) -> tuple[TextModel, PreTrainedTokenizerFast]:
    """What a gateway makes of the folder's bundle, and what transformers makes of the folder."""
    write_family(family, folder)
    limits = common_pb2.ModelLimits(model=family, max_model_len=100_000, vocab_size=5_000, eos_token_ids=[1])
    text = TextModel.from_bundle(make_bundle(folder, limits))
    return text, PreTrainedTokenizerFast.from_pretrained(folder)


# --- conversations -----------------------------------------------------------------------------------------------------


def conversation(rng: random.Random, family: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, Any]]:
    """Messages and tools in the form that transformers documents, and variables; now and then one that a template refuses."""
    has_tools = family in WITH_TOOLS and rng.random() < 0.6
    messages = [_turn("system", rng)] if rng.random() < 0.5 else []
    for _ in range(rng.randint(1, 3)):
        messages.append(_turn("user", rng))
        if rng.random() < 0.85:
            messages += _answer(rng, has_tools)
    variables = {
        name: value
        for name, value in (("enable_thinking", rng.random() < 0.5), ("style", _text(rng)))
        if rng.random() < 0.4
    }
    if rng.random() < 0.3:
        variables["date_string"] = "26 Jul 2024"
    return messages, [_tool(rng, i) for i in range(rng.randint(1, 3))] if has_tools else [], variables


def as_request(
    messages: list[dict[str, Any]], tools: list[dict[str, Any]], variables: dict[str, Any]
) -> pb.ChatRequest:
    """The same as a client of ours sends it."""
    request = pb.ChatRequest(template_arguments_json=json.dumps(variables) if variables else "")
    for message in messages:
        calls = [_sent_call(call) for call in message.get("tool_calls", ())]
        request.messages.add(
            role=message["role"],
            content=message["content"],
            name=message.get("name", ""),
            reasoning=message.get("reasoning_content", ""),
            tool_call_id=message.get("tool_call_id", ""),
            tool_calls=calls,
        )
    for tool in tools:
        function = tool["function"]
        schema = json.dumps(function["parameters"])
        request.tools.add(name=function["name"], description=function["description"], parameters_json=schema)
    return request


def _sent_call(call: dict[str, Any]) -> pb.ToolCall:
    function = call["function"]
    return pb.ToolCall(id=call["id"], name=function["name"], arguments=json.dumps(function["arguments"]))


def _text(rng: random.Random) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(1, 6)))


def _turn(role: str, rng: random.Random) -> dict[str, Any]:
    named = {"name": "ann"} if rng.random() < 0.2 else {}
    return {"role": role, "content": _text(rng), **named}


def _answer(rng: random.Random, has_tools: bool) -> list[dict[str, Any]]:
    thought = {"reasoning_content": _text(rng)} if rng.random() < 0.3 else {}
    answer = {**_turn("assistant", rng), **thought}
    if not has_tools or rng.random() < 0.4:
        return [answer]
    calls = [_call(rng) for _ in range(1 if rng.random() < 0.8 else 2)]
    told = [
        {"role": "tool", "content": _text(rng), "tool_call_id": call["id"], "name": call["function"]["name"]}
        for call in calls
    ]
    with_calls = {
        "role": "assistant",
        "content": "" if rng.random() < 0.6 else _text(rng),
        **thought,
        "tool_calls": calls,
    }
    return [with_calls, *told] + ([answer] if rng.random() < 0.5 else [])


def _call(rng: random.Random) -> dict[str, Any]:
    arguments = {
        rng.choice(string.ascii_lowercase): rng.choice([1, 2.5, None, True, _text(rng), [1, {"k": "é"}]])
        for _ in range(2)
    }
    size = 9 if rng.random() < 0.95 else 5
    identity = "".join(rng.choices(string.ascii_letters + string.digits, k=size))
    return {
        "id": identity,
        "type": "function",
        "function": {"name": f"tool_{rng.randint(0, 2)}", "arguments": arguments},
    }


def _tool(rng: random.Random, number: int) -> dict[str, Any]:
    properties = {
        name: rng.choice([{"type": "string", "description": _text(rng)}, {"enum": [1, "ü"]}, {"type": "integer"}])
        for name in ("b", "a")
    }
    parameters = {"type": "object", "properties": properties, "required": ["a"]}
    return {
        "type": "function",
        "function": {"name": f"tool_{number}", "description": _text(rng), "parameters": parameters},
    }
