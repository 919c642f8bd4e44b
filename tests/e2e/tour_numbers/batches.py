"""Numbers of the stops about batches: `batching`, `phases`, `offline`."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

Steps = Sequence[Mapping[str, Any]]

_PLACES = 4


def shares(step: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """What each request has of a step, the one that holds the door left out."""
    return {group["id"]: group for group in step["scheduled"] if group["id"] != "gate"}


def _batching(files: Sequence[Steps], printed: Mapping[str, str]) -> dict[str, str]:
    found = {}
    for policy, steps in zip(("static", "quire"), files, strict=True):
        ours = [step for step in steps if shares(step)]
        last = {name: place for place, step in enumerate(ours, 1) for name in shares(step)}
        found |= {
            f"{policy}: steps in all": str(len(ours)),
            f"{policy}: places used": str(sum(len(shares(step)) for step in ours)),
            f"{policy}: places wasted": str(sum(_PLACES - len(step["scheduled"]) for step in ours)),
            f"{policy}: mean last step": f"{fmean(last.values()):.4g}",
        }
    return found


def _phases(files: Sequence[Steps], printed: Mapping[str, str]) -> dict[str, str]:
    found = {}
    for name, steps in zip(("v0", "v1"), files, strict=True):
        places = [place for place, step in enumerate(steps) if shares(step)]
        shown = steps[max(0, places[0] - 2) : places[-1] + 1]
        longest = [place for place, step in enumerate(steps) if shares(step).get("C", {}).get("prefill")]
        mixed = [step for step in shown if {group["prefill"] for group in step["scheduled"]} == {True, False}]
        paused = [step for step in shown if "gate" not in {group["id"] for group in step["scheduled"]}]
        found |= {
            f"{name}: steps that mix both": str(len(mixed)),
            f"{name}: steps in which gate paused": str(len(paused)),
            f"{name}: most tokens of a step": str(max(step["computed_tokens"] for step in shown)),
            f"{name}: steps until C has its prompt": str(max(longest) - places[0] + 1),
        }
    return found


def _offline(files: Sequence[Steps], printed: Mapping[str, str]) -> dict[str, str]:
    found = {}
    for name, steps in zip(("served", "offline"), files, strict=True):
        found |= {
            f"{name}: steps": str(len(steps)),
            f"{name}: tokens sampled": str(sum(len(ids) for step in steps for ids in step["sampled"].values())),
            f"{name}: tokens computed": str(sum(group["tokens"] for step in steps for group in step["scheduled"])),
        }
    return found


RECOMPUTED = {"batching": _batching, "phases": _phases, "offline": _offline}
