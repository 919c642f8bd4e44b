"""Policy files: `{base: vllm-v0, name: mine, set: {delay_factor: 0.5}}` in YAML or JSON, read with the line of every field.

`policy.keys` knows what keys mean; `policy.assembly` combines them.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from scheduler_svc.core.spec.policy_spec import as_written
from scheduler_svc.policy.keys import Assignment, bad, close_to, references

SUFFIXES = (".yaml", ".yml", ".json")
MAX_BYTES = 2**20
_FIELDS = ("base", "name", "set")
_MAX_DEPTH = 4


@dataclass(frozen=True, slots=True)
class PolicyFile:
    """Contents of a policy file. `base_origin`: where it names its base."""

    base: str
    base_origin: str
    name: str
    assignments: list[Assignment]


def names_a_file(policy: str) -> bool:
    """True if `policy` is a path rather than a preset's name."""
    return policy.endswith(SUFFIXES) or "/" in policy or "\\" in policy


def read(path: str) -> PolicyFile:
    """Read a policy file. Raises ConfigError naming file, line and field if it is malformed."""
    top = _fields(_parse(path), path, "")
    unknown = [key for key in top if key not in _FIELDS]
    if unknown:
        where = top[unknown[0]].start_mark.line + 1
        why = f"unknown field{close_to(unknown[0], _FIELDS)}; a policy file has base, name and set"
        raise bad(f"{path}:{where}: {unknown[0]}", why)
    if "base" not in top:
        raise bad(f"{path}: base", "is missing; name the preset to start from, for example `base: vllm-v0`")
    name = _word(top["name"], path, "name") if "name" in top else Path(path).stem
    assignments = list(_assignments(top["set"], path, "", 0)) if "set" in top else []
    return PolicyFile(_word(top["base"], path, "base"), _where(top["base"], path, "base"), name, assignments)


def _parse(path: str) -> yaml.Node:
    text = _text(path)
    if path.endswith(".json"):
        text = _checked_json(text, path)
    try:
        for what, line in references(text):
            raise bad(f"{path}:{line}", f"{what}; write the value itself")
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        at = f":{mark.line + 1}" if mark is not None else ""
        raise bad(f"{path}{at}", f"cannot be read: {error.problem}") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise bad(path, f"cannot be read: {error}") from None
    if node is None:
        raise bad(path, "is empty; write for example `base: vllm-v0`")
    return node


def _checked_json(text: str, path: str) -> str:
    """Check JSON and return it for the YAML reader, which keeps lines. JSON is YAML except for tabs between tokens."""
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        raise bad(f"{path}:{error.lineno}", f"cannot be read: {error.msg}") from None
    except RecursionError:
        raise bad(path, "is nested too deeply") from None
    except ValueError:
        raise bad(path, "cannot be read: a number has too many digits") from None
    return text.replace("\t", " ")


def _text(path: str) -> str:
    if not path.endswith(SUFFIXES):
        raise bad(path, f"is no preset, and a policy file's name ends in {', '.join(SUFFIXES)}")
    try:
        with Path(path).open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        text = content.decode("utf-8")
    except OSError as error:
        raise bad(path, f"cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise bad(path, f"cannot be read: no UTF-8 at byte {error.start}") from None
    if len(content) > MAX_BYTES:
        raise bad(path, f"has more than {MAX_BYTES} bytes; that is no policy")
    return text


def _fields(node: yaml.Node, path: str, field: str) -> dict[str, yaml.Node]:
    """Values of the mapping `field` (empty: the whole file) by key; duplicate keys are an error."""
    if not isinstance(node, yaml.MappingNode):
        raise bad(_where(node, path, field) if field else path, "must be a mapping, KEY: VALUE on each line")
    found: dict[str, yaml.Node] = {}
    for key, value in node.value:
        if not isinstance(key, yaml.ScalarNode):
            raise bad(_where(key, path, field), f"a key must be a word, not {_form(key)}")
        name = str(key.value)
        if name in found:
            raise bad(_where(key, path, f"{field}.{name}".lstrip(".")), "is given twice")
        found[name] = value
    return found


def _assignments(node: yaml.Node, path: str, prefix: str, depth: int) -> Iterator[Assignment]:
    """Keys under `set`; nested mappings make dotted keys."""
    if depth == _MAX_DEPTH:
        raise bad(_where(node, path, f"set.{prefix}"), "is nested too deeply")
    for name, value in _fields(node, path, f"set.{prefix}".rstrip(".")).items():
        key = prefix + name
        if isinstance(value, yaml.MappingNode):
            yield from _assignments(value, path, f"{key}.", depth + 1)
        else:
            yield Assignment(key, _value(value, path, f"set.{key}"), _where(value, path, f"set.{key}"))


def _value(node: yaml.Node, path: str, field: str) -> Any:
    if not isinstance(node, yaml.ScalarNode):
        raise bad(_where(node, path, field), f"must be a number, a word, true, false or null, not {_form(node)}")
    try:
        return yaml.SafeLoader("").construct_object(node, deep=True)
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise bad(_where(node, path, field), f"cannot be read: {error}") from None


def _word(node: yaml.Node, path: str, field: str) -> str:
    """The text of `base` or `name`."""
    if not isinstance(node, yaml.ScalarNode):
        raise bad(_where(node, path, field), f"must be a word, not {_form(node)}")
    value = _value(node, path, field)
    if not isinstance(value, str) or not value:
        raise bad(_where(node, path, field), f"must be a word, not {as_written(value)}")
    return value


def _form(node: yaml.Node) -> str:
    return "a list" if isinstance(node, yaml.SequenceNode) else "a mapping"


def _where(node: yaml.Node, path: str, field: str) -> str:
    return f"{path}:{node.start_mark.line + 1}: {field}"
