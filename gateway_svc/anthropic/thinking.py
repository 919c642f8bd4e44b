"""Thinking blocks: signatures, and template variables of a request's `thinking`. Pure.

A signature verifies nothing here, since a client may write any history. Under `display: "omitted"` it carries the
text that the client is not shown, so that a later request returns it to the template.
"""

import base64
import binascii
import hashlib
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

_CARRIES = "text."
_NAMES = "sha256."


class ThinkingConfig(BaseModel):
    """The field `thinking`. `budget_tokens` is a target, as in Anthropic's API: templates with such a variable show it."""

    model_config = ConfigDict(strict=True)

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[int, Field(ge=1)] | None = None
    display: Literal["summarized", "omitted"] | None = None

    def template_variables(self) -> dict[str, Any]:
        """Variables that templates of hybrid models read: Qwen's and GLM's name, DeepSeek's and Granite's, Seed-OSS's."""
        thinks = self.type != "disabled"
        budget = {"thinking_budget": self.budget_tokens} if self.type == "enabled" and self.budget_tokens else {}
        return {"enable_thinking": thinks, "thinking": thinks, **budget}


def signature_of(text: str, *, carries: bool) -> str:
    """Signature of a thinking block. `carries`: the block is sent without its text."""
    if carries:
        return _CARRIES + base64.b64encode(text.encode()).decode()
    return _NAMES + hashlib.sha256(text.encode()).hexdigest()


def thinking_text(thinking: str, signature: str) -> str:
    """Text of a block of an earlier turn; empty if it is in another server's signature."""
    if thinking or not signature.startswith(_CARRIES):
        return thinking
    try:
        return base64.b64decode(signature.removeprefix(_CARRIES), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return ""
