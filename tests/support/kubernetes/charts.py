"""Renders the templates of deploy/kubernetes/chart: the few forms that `deploy.chart` writes, and an error for any other."""

import json
import re
from collections.abc import Mapping
from typing import Any

import yaml

_IF = re.compile(r"\{\{- if (.*) \}\}")
_ONE_OF = re.compile(r"has \.Values\.([\w.]+) \(list ((?:\"[\w-]+\" ?)+)\)")
_VALUE = re.compile(r"\{\{ \.Values\.([\w.]+)( \| quote)? \}\}")


def _value(values: Mapping[str, Any], path: str) -> Any:
    found: Any = values
    for name in path.split("."):
        found = found[name]
    return found


def _holds(condition: str, values: Mapping[str, Any]) -> bool:
    if among := _ONE_OF.fullmatch(condition):
        return _value(values, among[1]) in re.findall(r"[\w-]+", among[2])
    plain = re.fullmatch(r"(not )?\.Values\.([\w.]+)", condition)
    assert plain, f"a condition that the chart's generator does not write: {condition}"
    return bool(_value(values, plain[2])) is not bool(plain[1])


def _written(found: re.Match[str], values: Mapping[str, Any]) -> str:
    value = _value(values, found[1])
    return json.dumps(str(value)) if found[2] else str(value)


def render(template: str, values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Manifests of one template with these values."""
    lines, open_ones = [], [True]
    for line in template.splitlines():
        if opened := _IF.fullmatch(line):
            open_ones.append(open_ones[-1] and _holds(opened[1], values))
        elif line == "{{- end }}":
            open_ones.pop()
        elif open_ones[-1]:
            lines.append(_VALUE.sub(lambda found: _written(found, values), line))
    assert open_ones == [True], "a condition is never closed"
    text = "\n".join(lines)
    assert "{{" not in text, "an expression that the chart's generator does not write"
    return [manifest for manifest in yaml.safe_load_all(text) if manifest]
