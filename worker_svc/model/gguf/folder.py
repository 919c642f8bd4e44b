"""A GGUF file as the folder of a checkpoint: everything but the weights, written once per process.

The tokenizer is built by transformers.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from worker_svc.model.gguf.config import config_of, end_tokens
from worker_svc.model.gguf.header import GgufHeader, problem

_LLAMA3 = frozenset({"llama-bpe", "llama3", "llama-v3", "falcon3"})
_WHOLE_WORDS_FIRST = _LLAMA3 | {"tekken"}
"""How llama.cpp names the splitting of texts whose words are looked up before they are merged."""
_GPT2 = frozenset({"gpt-2", "default", "smollm"})
_SPLITS = _WHOLE_WORDS_FIRST | _GPT2 | {"qwen2", "deepseek-r1-qwen"}
_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


_FOLDERS: dict[Path, tempfile.TemporaryDirectory[str]] = {}


def folder_of(header: GgufHeader) -> Path:
    """A folder with config.json, generation_config.json and the tokenizer's files, removed when the process ends.

    Raises ConfigError for a configuration or tokenizer that is not supported.
    """
    config = config_of(header)
    path = header.path.resolve()
    if path not in _FOLDERS:
        _FOLDERS[path] = tempfile.TemporaryDirectory(prefix="quire-gguf-")
    folder = Path(_FOLDERS[path].name)
    _write_tokenizer(header, folder)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": end_tokens(header)}), encoding="utf-8")
    return folder


def _write_tokenizer(header: GgufHeader, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json. Raises ConfigError for a kind of tokenizer that is not known."""
    given = header.metadata
    kind, split = given.get("tokenizer.ggml.model"), given.get("tokenizer.ggml.pre", "default")
    if kind not in {"gpt2", "llama"} or (kind == "gpt2" and split not in _SPLITS):
        what = f"has a tokenizer of the kind {kind!r} that splits texts as {split!r}, which is not known"
        raise problem("MODEL_UNSUPPORTED", header.path, what)
    try:
        made = PreTrainedTokenizerFast.from_pretrained(header.path.parent, gguf_file=header.path.name)
    except (ValueError, KeyError, OSError, ImportError) as error:
        raise problem("MODEL_UNREADABLE", header.path, f"has a tokenizer that cannot be read: {error}") from error
    backend: Tokenizer = made.backend_tokenizer
    if kind == "gpt2":
        _split(backend, str(split))
    first = _first_token(given, default=kind == "llama" or split in _LLAMA3)
    if first is not None:
        backend.post_processor = _begins_with(*first, backend.post_processor)
    backend.save(str(folder / "tokenizer.json"))
    tokens = given["tokenizer.ggml.tokens"]
    ids = {name: given.get(f"tokenizer.ggml.{key}_token_id") for name, key in _SPECIAL.items()}
    config: dict[str, Any] = {name: tokens[number] for name, number in ids.items() if number is not None}
    if template := given.get("tokenizer.chat_template"):
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def _split(backend: Tokenizer, split: str) -> None:
    if split == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    backend.model.ignore_merges = split in _WHOLE_WORDS_FIRST


def _first_token(given: dict[str, Any], *, default: bool) -> tuple[str, int] | None:
    """The token that begins every text, if any."""
    number = given.get("tokenizer.ggml.bos_token_id")
    if number is None or not given.get("tokenizer.ggml.add_bos_token", default):
        return None
    return given["tokenizer.ggml.tokens"][number], int(number)


def _begins_with(token: str, number: int, present: Any) -> processors.PostProcessor:
    begins = processors.TemplateProcessing(
        single=f"{token} $A", pair=f"{token} $A {token} $B", special_tokens=[(token, number)]
    )
    return (
        processors.Sequence([processors.ByteLevel(trim_offsets=False), begins])
        if isinstance(present, processors.ByteLevel)
        else begins
    )
