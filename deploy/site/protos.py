"""A page for each .proto file: its messages, enums and services with their comments, as written there."""

import re
from pathlib import Path

_DEFINES = re.compile(r"(?P<kind>message|enum|service) (?P<name>\w+) \{")
_COMMENT = "//"
_TITLES = {
    "inference": "inference.proto: the API for users",
    "admin": "admin.proto: the API for operators",
    "common": "common.proto: shared messages",
    "engine": "engine.proto: gateway and scheduler",
    "worker": "worker.proto: scheduler and worker",
    "smg_common": "smg_common.proto: what routers' contracts share",
    "vllm_engine": "vllm_engine.proto: the contract of SGLang Model Gateway",
    "openengine": "openengine.proto: the contract of OpenEngine",
}


def proto_page(path: Path) -> str:
    """The page, in the order of the file."""
    header, *definitions = _definitions(path.read_text(encoding="utf-8"))
    about = _prose(line for line in header if line.startswith(_COMMENT))
    package = next(line for line in header if line.startswith("package ")).removeprefix("package ").rstrip(";")
    parts = [f"# {_TITLES[path.stem]}\n\n{about}\n\nPackage `{package}`."]
    return "\n\n".join(parts + [_section(lines) for lines in definitions]) + "\n"


def _definitions(text: str) -> list[list[str]]:
    """The lines before the first definition, then those of each definition with the comment above it."""
    found, depth = [list[str]()], 0
    comment = list[str]()
    for line in text.splitlines():
        if depth == 0 and line.startswith(_COMMENT):
            comment.append(line)
            continue
        if depth == 0 and _DEFINES.match(line):
            found.append([*comment, line])
        else:
            found[-1] += [*comment, line]
        comment = []
        depth += line.count("{") - line.count("}")
    return found


def _section(lines: list[str]) -> str:
    start = next(i for i, line in enumerate(lines) if not line.startswith(_COMMENT))
    defines = _DEFINES.match(lines[start])
    assert defines is not None
    body = "\n".join(lines[start:]).strip()
    about = _prose(lines[:start])
    return f"## {defines['name']}\n\n{about}\n\n```proto\n{body}\n```"


def _prose(lines: object) -> str:
    """Comment lines as Markdown paragraphs."""
    assert not isinstance(lines, str)
    text = "\n".join(line.removeprefix(_COMMENT).strip() for line in lines)  # type: ignore[attr-defined]
    parts = re.split(r"(`[^`]*`)", text)
    parts[::2] = [re.sub(r"([<_*])", r"\\\1", part) for part in parts[::2]]  # code is not escaped
    return "".join(parts)
