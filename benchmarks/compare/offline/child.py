"""The child's side of an offline run: one JSON object per line, commands in, answers out.

Standard library only.

    {"what": "load", "model": FOLDER, "settings": {...}}
    -> {"what": "loaded", "versions": {...}}
    {"what": "run", "requests": [[AT_S, [ID, ...], MAX_TOKENS], ...]}
    -> {"what": "ran", "events": [[[S, N], ...], ...], "tokens": [[ID, ...], ...]}

`events`: per request, times (seconds since the run began) at which N tokens arrived. Standard output is
reserved for answers; output of the library goes to standard error. The child ends when its standard input
does.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any, Protocol


@dataclass(slots=True)
class Asked:
    """One request and its results."""

    index: int
    at_s: float
    prompt: list[int]
    max_tokens: int
    events: list[tuple[float, int]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    def take(self, at_s: float, new_tokens: Sequence[int]) -> None:
        """Add tokens that have arrived."""
        if new_tokens:
            self.events.append((at_s, len(new_tokens)))
            self.tokens.extend(new_tokens)


class Library(Protocol):
    """A peer's library with a model."""

    def run(self, requests: Sequence[Asked], began: float) -> None:
        """Compute all requests. `began`: time.perf_counter() that `at_s` and events count from."""


Loader = Callable[[str, Mapping[str, Any]], Library]
"""Makes a Library from a checkpoint's folder and settings."""


class Stepped(Protocol):
    """A library that computes step by step, driven by `run_stepped`."""

    def add(self, request: Asked) -> None:
        """Add a request."""

    def step(self, began: float) -> None:
        """Compute one step and assign its tokens to their requests, with seconds since `began`."""

    def has_unfinished(self) -> bool:
        """True if there is something to compute."""


def run_stepped(library: Stepped, requests: Sequence[Asked], began: float) -> None:
    """Add each request when it is due, between two steps."""
    waiting = sorted(requests, key=lambda request: request.at_s)
    while waiting or library.has_unfinished():
        now = time.perf_counter() - began
        while waiting and waiting[0].at_s <= now:
            library.add(waiting.pop(0))
        if library.has_unfinished():
            library.step(began)
        else:
            time.sleep(max(0.0, waiting[0].at_s - now))


def serve(load: Loader, packages: Sequence[str]) -> None:
    """Answer commands until standard input ends. `packages`: those with versions to report."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    library: Library | None = None
    for line in sys.stdin:
        command = json.loads(line)
        if command["what"] == "load":
            library = load(command["model"], command["settings"])
            answer: dict[str, Any] = {"what": "loaded", "versions": _versions(packages)}
        else:
            assert library is not None, "a model is loaded before anything runs"
            answer = _run(library, command["requests"])
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _run(library: Library, wanted: Sequence[Sequence[Any]]) -> dict[str, Any]:
    requests = [Asked(i, at_s, prompt, max_tokens) for i, (at_s, prompt, max_tokens) in enumerate(wanted)]
    library.run(requests, time.perf_counter())
    return {
        "what": "ran",
        "events": [request.events for request in requests],
        "tokens": [request.tokens for request in requests],
    }


def _versions(packages: Sequence[str]) -> dict[str, str]:
    known = {}
    for name in packages:
        try:
            known[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return known
