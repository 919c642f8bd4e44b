"""Configuration as OpenTelemetry's programs write it: one YAML file, `--config=FILE`, `${env:NAME:-default}` in it.

The stand-ins take addresses from the real files and refuse what the real ones would: a pipeline with a part that is not defined.
"""

import argparse
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml


def read() -> dict[str, Any]:
    """The file that the command line names; ends the program where its pipelines do not hold together."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", required=True, type=Path)
    text = parser.parse_args().config.read_text(encoding="utf-8")
    settings: dict[str, Any] = yaml.safe_load(re.sub(r"\$\{env:(\w+)(?::-([^}]*))?\}", _value, text))
    if wrong := sorted(set(_undefined(settings))):
        sys.exit(f"not defined: {', '.join(wrong)}")
    return settings


def _value(found: re.Match[str]) -> str:
    return os.environ.get(found[1]) or found[2] or ""


def _undefined(settings: dict[str, Any]) -> Iterator[str]:
    service = settings["service"]
    yield from (f"extension {name}" for name in service.get("extensions", []) if name not in settings["extensions"])
    for pipeline in service["pipelines"].values():
        for kind, names in pipeline.items():
            yield from (f"{kind} {name}" for name in names if name not in settings[kind])


def address(settings: dict[str, Any], *path: str) -> str:
    """HOST:PORT at that place."""
    found: Any = settings
    for name in path:
        found = found[name]
    return str(found)
