"""Settings from user input, with errors that name options as the user wrote them: `--max-num-seqs` or `max_num_seqs`.

Not here: the settings themselves (each service's `settings`).
"""

from collections.abc import Callable
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from svc_common.errors import ConfigError

Settings = TypeVar("Settings", bound=BaseModel)
Spelling = Callable[[str], str]


def option_name(field: str) -> str:
    """The command line's spelling of a setting."""
    return "--set" if field == "policy_set" else "--" + field.replace("_", "-")


def settings_of(cls: type[Settings], spelled: Spelling, **values: Any) -> Settings:
    """Settings from `values` (None = not given). Raises ConfigError naming each wrong one as `spelled(field)`."""
    try:
        return cls(**{name: value for name, value in values.items() if value is not None})
    except ValidationError as error:
        wrong = []
        for item in error.errors():
            field = str(item["loc"][0]) if item["loc"] else ""
            wrong.append(f"{spelled(field)}: {item['msg'].removeprefix('Value error, ')} (given: {item['input']!r})")
        raise ConfigError("; ".join(wrong), reason="INVALID_SETTING") from None
