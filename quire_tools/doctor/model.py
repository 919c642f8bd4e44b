"""Checks of a checkpoint folder by its file names and headers; nothing is loaded."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quire.sizes import size_text
from quire_tools.doctor.findings import Finding, ok, problem, warning
from worker_svc.model import stored_weights

_PICKLED = ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt")
_NAME = "model"


def folder(path: Path) -> Iterator[Finding]:
    """Check everything that a worker will read."""
    if not path.is_dir():
        yield problem(
            _NAME, f"there is no folder {path}", "name the folder of a checkpoint, or ORG/NAME of the hub in `quire up`"
        )
        return
    yield from _config(path)
    yield from _tokenizer(path)
    yield from _weights(path)


def _config(path: Path) -> Iterator[Finding]:
    config = _object(path / "config.json")
    if config is None:
        yield problem(_NAME, "config.json is missing or no JSON object", "take the one that belongs to the checkpoint")
    elif "auto_map" in config and "model_type" not in config:
        yield problem(
            _NAME, "it needs code of its own", "code of checkpoints is never run; use a model that transformers has"
        )
    elif quantized := stored_weights.problem_of(stored_weights.quantization(config, path)):
        yield problem(_NAME, quantized, stored_weights.TO_DO)
    else:
        names = ", ".join(config.get("architectures") or [str(config.get("model_type"))])
        yield ok(_NAME, f"{names}, {config.get('num_hidden_layers', '?')} layers")


def _tokenizer(path: Path) -> Iterator[Finding]:
    if _object(path / "tokenizer.json") is None:
        to_do = "make it: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        yield problem("tokenizer", "tokenizer.json is missing or no JSON object", to_do)
        return
    settings = _object(path / "tokenizer_config.json") or {}
    has_template = "chat_template" in settings or (path / "chat_template.jinja").is_file()
    if has_template:
        yield ok("tokenizer", "there, with a chat template")
    else:
        yield warning(
            "tokenizer", "there, without a chat template: completions only", "chats need chat_template.jinja beside it"
        )


def _weights(path: Path) -> Iterator[Finding]:
    files = _weight_files(path)
    if not files:
        pickled = sorted(file.name for form in _PICKLED for file in path.glob(form))
        what = f"only pickled weights ({pickled[0]})" if pickled else "no model.safetensors and no index of shards"
        yield problem("weights", what, f"quire convert {path} NEW_FOLDER" if pickled else "take the whole checkpoint")
        return
    broken = [f"{file.name} {why}" for file in files if (why := _wrong_with(file))]
    if broken:
        yield problem("weights", "; ".join(broken), "download the file again")
    elif quantized := _quantized(path, files):
        yield problem("weights", quantized, stored_weights.TO_DO)
    else:
        total = sum(file.stat().st_size for file in files)
        yield ok("weights", f"{len(files)} safetensors file{'s' if len(files) > 1 else ''}, {size_text(total)}")


def _quantized(path: Path, files: list[Path]) -> str:
    """Why weights stored like this are not served; empty if they are, or if config.json's own check reports it already."""
    said = stored_weights.quantization(_object(path / "config.json") or {}, path)
    unread = stored_weights.problem_of(said)
    return "" if unread else stored_weights.problem_of_weights(said, stored_weights.entries_of(files))


def _weight_files(path: Path) -> list[Path]:
    index = _object(path / "model.safetensors.index.json")
    if index is not None:
        return [path / name for name in sorted({Path(str(name)).name for name in index.get("weight_map", {}).values()})]
    return [file for file in (path / "model.safetensors",) if file.is_file()]


def _wrong_with(file: Path) -> str:
    """What is wrong with a file, empty if nothing; a truncated file is shorter than its header says."""
    if not file.is_file():
        return "is missing"
    try:
        entries, start = stored_weights.header_of(file)
        ends = [int(entry["data_offsets"][1]) for entry in entries.values()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return "is no safetensors file"
    missing = start + max(ends, default=0) - file.stat().st_size
    return f"is {size_text(missing)} too short" if missing > 0 else ""


def _object(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None
