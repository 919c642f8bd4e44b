"""Prompts from a JSONL file as requests of a run. Not here: prompts generated from a seed (quire_tools.bench.workloads)."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire_tools.bench.workloads import LoadShape, PlannedRequest, arrivals, shape_rng
from svc_common.errors import ConfigError

_FORMS = 'a JSON string, or {"prompt": "...", "max_tokens": 64} (max_tokens may be left out)'


@dataclass(slots=True, frozen=True)
class FilePrompt:
    """One prompt of the file. `max_tokens` None = drawn from the shape's output length."""

    text: str
    max_tokens: int | None = None


def read_prompts(path: Path) -> list[FilePrompt]:
    """Prompts of a file, one per line, without empty lines. Raises ConfigError naming an invalid line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--dataset: {path} cannot be read: {error}", reason="BAD_FILE") from None
    prompts = [_prompt(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise ConfigError(f"--dataset: {path} has no prompt; each line is {_FORMS}", reason="BAD_FILE")
    return prompts


def plan_of(prompts: list[FilePrompt], shape: LoadShape) -> list[PlannedRequest]:
    """The prompts in order, starting at index `seed` (0 = the first), repeated as often as needed."""
    rng = shape_rng(shape)
    planned = []
    for index, at_s in enumerate(arrivals(shape, rng)):
        prompt = prompts[(shape.seed + index) % len(prompts)]
        max_tokens = prompt.max_tokens or shape.output.draw(rng)
        planned.append(PlannedRequest(index, at_s, prompt.text, (), max_tokens))
    return planned


def _prompt(path: Path, number: int, line: str) -> FilePrompt:
    try:
        value = json.loads(line)
    except ValueError:
        value = None
    if isinstance(value, str) and value:
        return FilePrompt(value)
    if _is_prompt(value):
        return FilePrompt(value["prompt"], value.get("max_tokens"))
    raise ConfigError(f"--dataset: line {number} of {path} is not {_FORMS}", reason="BAD_FILE")


def _is_prompt(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("prompt"), str) or not value["prompt"]:
        return False
    limit = value.get("max_tokens")
    return limit is None or (isinstance(limit, int) and not isinstance(limit, bool) and limit >= 1)
