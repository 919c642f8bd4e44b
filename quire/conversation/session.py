"""The state behind `quire chat` (turns and sampling settings), without a terminal, and its file format."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.client.chat_messages import Message, assistant_turn
from quire.client.outputs import RequestOutput
from quire.client.sampling_params import SamplingParams
from svc_common.errors import ConfigError

_FORMAT = "quire-chat-1"
_SETTABLE = {
    "max_tokens": None, "min_tokens": 0, "temperature": None, "top_p": None, "top_k": None, "min_p": None, "seed": None, "stop": (),
    "repetition_penalty": None, "presence_penalty": 0.0, "frequency_penalty": 0.0, "ignore_eos": False,
}  # fmt: skip
"""Settable sampling parameters, with the value that stands for the model's default."""


@dataclass(slots=True)
class Spent:
    """Tokens of all answers so far."""

    num_answers: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_reasoning_tokens: int = 0


@dataclass(slots=True)
class Session:
    """Owns the turns (without the system message, which is `system`) and the settings. `last`: the last answer."""

    system: str = ""
    model: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    turns: list[Message] = field(default_factory=list)
    spent: Spent = field(default_factory=Spent)
    last: RequestOutput | None = None

    def __post_init__(self) -> None:
        self.settings = {**_SETTABLE, **self.settings}

    @property
    def params(self) -> SamplingParams:
        """Parameters of the next answer. Raises InvalidArgument for invalid values."""
        return SamplingParams(**self.settings)

    def asked(self, turn: Message) -> list[Message]:
        """Messages to send: the conversation plus `turn`."""
        system: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *self.turns, turn]

    def answered(self, turn: Message, output: RequestOutput) -> None:
        """Append `turn` and its answer to the conversation, and count its tokens."""
        answer = output.outputs[0]
        self.turns += [turn, assistant_turn(answer.text, answer.tool_calls, answer.reasoning)]
        self.last = output
        spent = self.spent
        spent.num_answers += 1
        spent.num_prompt_tokens += output.num_prompt_tokens
        spent.num_cached_tokens += output.num_cached_tokens or 0
        spent.num_output_tokens += len(answer.token_ids)
        spent.num_reasoning_tokens += output.num_reasoning_tokens

    def undo(self) -> Message | None:
        """Remove the last turn and its answer; returns that turn, or None if there is none."""
        if len(self.turns) < 2:
            return None
        turn = self.turns[-2]
        del self.turns[-2:]
        return turn

    def next_call_id(self) -> str:
        """Id of the first tool call without result; empty = none."""
        done = {turn.get("tool_call_id") for turn in self.turns if turn["role"] == "tool"}
        calls = [call["id"] for turn in self.turns for call in turn.get("tool_calls") or ()]
        return next((str(call) for call in calls if call not in done), "")

    def set(self, assignment: str) -> None:
        """Set a sampling parameter from KEY=VALUE; KEY= restores the default.

        Raises ConfigError or InvalidArgument, without changes, if it is invalid.
        """
        key, separator, text = assignment.partition("=")
        key = key.strip()
        if not separator or key not in _SETTABLE:
            raise ConfigError(f"/set KEY=VALUE; KEY is one of {', '.join(_SETTABLE)}", reason="INVALID_SETTING")
        value = _value(key, text.strip())
        SamplingParams(**{**self.settings, key: value})
        self.settings[key] = value

    def save(self, path: Path) -> None:
        """Write the conversation as JSON. Raises ConfigError if that fails."""
        content = {
            "format": _FORMAT,
            "system": self.system,
            "model": self.model,
            "settings": self.settings,
            "turns": [dict(turn) for turn in self.turns],
        }
        try:
            path.write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}", reason="BAD_FILE") from None

    def load(self, path: Path) -> None:
        """Replace this conversation by a saved one. Raises ConfigError, without changes, for any other file."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            found = _session_of(content)
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}", reason="BAD_FILE") from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{path} is no saved conversation: {error}", reason="BAD_FILE") from None
        self.system, self.model, self.settings, self.turns = found.system, found.model, found.settings, found.turns
        self.last = None


def _value(key: str, text: str) -> Any:
    if not text or text.lower() in ("none", "default"):
        return _SETTABLE[key]
    if key == "stop":
        return (text.encode().decode("unicode_escape"),) if text.isascii() else (text,)
    try:
        return json.loads(text)
    except ValueError:
        raise ConfigError(f"/set {key}: {text!r} is no value", reason="INVALID_SETTING") from None


def _session_of(content: Mapping[str, Any]) -> Session:
    if content["format"] != _FORMAT:
        raise ValueError(f"its format is {content['format']!r}, not {_FORMAT}")
    settings = {key: content["settings"][key] for key in content["settings"] if key in _SETTABLE}
    turns = [dict(turn) for turn in content["turns"]]
    if not all(isinstance(turn["role"], str) and isinstance(turn["content"], str) for turn in turns):
        raise ValueError("a turn has no role or no content")
    found = Session(str(content["system"]), str(content["model"]), settings, list(turns))
    SamplingParams(**found.settings)
    return found
