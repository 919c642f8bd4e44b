"""Normalize prompts of any accepted form to text or token ids. Pure."""

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

from quire.client.messages import Prompt
from quire.client.value_checks import is_listing, valid_ids, valid_text
from svc_common.errors import InvalidArgument

AnyPrompt = str | Sequence[int] | Mapping[str, Any]
_PROMPT_KEYS = ("prompt_token_ids", "prompt")


def prompt_list(prompts: AnyPrompt | Sequence[AnyPrompt]) -> list[Prompt]:
    """One prompt or many, each in any accepted form."""
    if not is_listing(prompts):
        return [plain_prompt(prompts)]  # type: ignore[arg-type]
    items = list(prompts)
    if items and isinstance(items[0], Integral):
        return [plain_prompt(items)]  # type: ignore[arg-type]
    return [plain_prompt(prompt) for prompt in items]  # type: ignore[arg-type]


def plain_prompt(prompt: AnyPrompt) -> Prompt:
    """Text or token ids, at least one token.

    Raises InvalidArgument naming `prompt` otherwise, in process as behind a gateway.
    """
    if isinstance(prompt, Mapping):
        prompt = _of_mapping(prompt)
    if not isinstance(prompt, str) and not is_listing(prompt):
        raise _wrong_prompt(f"is of type {type(prompt).__name__}")
    plain: Prompt = valid_text("prompt", prompt) if isinstance(prompt, str) else valid_ids("prompt", prompt)  # type: ignore[arg-type]
    if not plain:
        raise InvalidArgument.field("prompt", "is empty; send at least one token")
    return plain


def _of_mapping(prompt: Mapping[str, Any]) -> Any:
    given = [prompt[key] for key in _PROMPT_KEYS if prompt.get(key) is not None]
    if not given:
        raise _wrong_prompt("is a dict with neither of the two keys")
    return given[0]


def _wrong_prompt(what: str) -> InvalidArgument:
    forms = ", ".join(f'{{"{key}": ...}}' for key in _PROMPT_KEYS)
    return InvalidArgument.field("prompt", f"{what}; give a text, a list of token ids, or one of {forms}")
