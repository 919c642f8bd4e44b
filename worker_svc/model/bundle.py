"""The model bundle: all that a gateway needs to serve a model without its checkpoint. Contains no weights."""

import hashlib
from pathlib import Path
from typing import Any

from protos.common.v1 import common_pb2
from protos.worker.v1 import worker_pb2
from worker_svc.model.checkpoint import read_json

_SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")


def make_bundle(folder: Path, limits: common_pb2.ModelLimits) -> bytes:
    """Serialise the `ModelBundle` of a checkpoint folder. Deterministic for a folder and limits.

    `limits.bundle_digest` must be empty: it is the SHA-256 of these bytes (`digest_of`).
    """
    assert not limits.bundle_digest, "a bundle cannot contain its own digest"
    tokenizer_config = _optional_json(folder / "tokenizer_config.json")
    templates = _chat_templates(folder, tokenizer_config)
    generation = folder / "generation_config.json"
    bundle = worker_pb2.ModelBundle(
        tokenizer_json=(folder / "tokenizer.json").read_bytes(),
        chat_template=templates.get("default", ""),
        tool_use_template=templates.get("tool_use", ""),
        special_tokens=_special_tokens(folder, tokenizer_config),
        generation_config_json=generation.read_text(encoding="utf-8") if generation.is_file() else "",
        limits=limits,
    )
    return bundle.SerializeToString(deterministic=True)


def digest_of(bundle: bytes) -> str:
    """SHA-256 (hex): the key under which the bundle is fetched and cached."""
    return hashlib.sha256(bundle).hexdigest()


def eos_token_ids(folder: Path, config: Any) -> list[int]:
    """Ids that end a sequence, ascending: from generation_config.json, else from the configuration."""
    value = _optional_json(folder / "generation_config.json").get("eos_token_id")
    if value is None:
        value = getattr(config, "eos_token_id", None)
    if value is None:
        return []
    return sorted({value} if isinstance(value, int) else set(value))


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _chat_templates(folder: Path, tokenizer_config: dict[str, Any]) -> dict[str, str]:
    """Chat templates by name, searched as transformers does: template files first, then the configuration.

    A single template is named `default`.
    """
    paths = {path.name.removesuffix(".jinja"): path for path in (folder / "additional_chat_templates").glob("*.jinja")}
    paths = {"default": folder / "chat_template.jinja"} | paths
    files = {name: path.read_text(encoding="utf-8") for name, path in paths.items() if path.is_file()}
    if files:
        return files
    given = tokenizer_config.get("chat_template") or _optional_json(folder / "chat_template.json").get("chat_template")
    if isinstance(given, list):
        return {entry["name"]: entry["template"] for entry in given}
    return {"default": given} if given else {}


def _special_tokens(folder: Path, tokenizer_config: dict[str, Any]) -> dict[str, str]:
    declared = _optional_json(folder / "special_tokens_map.json") | tokenizer_config
    named = {name: declared.get(name) for name in _SPECIAL_TOKENS}
    # A token is a string, or an object with its text and stripping rules.
    texts = {name: token.get("content") if isinstance(token, dict) else token for name, token in named.items()}
    return {name: text for name, text in texts.items() if text}
