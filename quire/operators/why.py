"""A request's timeline as JSON values and as text: where its time went, and why. Used by `quire why`."""

import contextlib
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any

from rich.table import Table

from protos.inference.v1 import admin_pb2
from quire.operators.reason_texts import PAST, Numbers, behind

_NS_PER_MS = 1e6
_MOST_KINDS = 3
_FEWEST_OF_A_KIND = 2
_FEWEST_IN_A_RUN = 4


def why_json(response: admin_pb2.ExplainRequestResponse) -> dict[str, Any]:
    """`{id, episodes: [{from_step, to_step, from_ns, to_ns, queue, reason, numbers}]}`; to_* is null while an episode lasts.

    `numbers.key` and `numbers.value`: the setting, and its smallest value with which the request would have
    started at `from_step`; `numbers.needs`: several settings and values, if no single one suffices.
    `numbers.sample`: number of the sample, if not the first.
    """
    return {"id": response.id, "episodes": [_episode(episode) for episode in response.episodes]}


def why_table(response: admin_pb2.ExplainRequestResponse) -> Table:
    """One row per episode, oldest first; alternating episodes are folded into one row."""
    several = len({episode.sample for episode in response.episodes}) > 1
    table = Table(title=f"request {response.id}", title_justify="left")
    for name in (*(("sample",) if several else ()), "steps", "ms", "queue", "reason", "because"):
        table.add_column(name, justify="right" if name in ("steps", "ms") else "left", overflow="fold")
    for episodes in _folded(response.episodes):
        first = episodes[0]
        sample = (str(first.sample),) if several else ()
        reason = " / ".join(dict.fromkeys(episode.reason for episode in episodes))
        table.add_row(*sample, _steps(episodes), _ms(episodes), first.queue, reason, _because_of_all(episodes))
    return table


def _key(episode: admin_pb2.Episode) -> tuple[object, ...]:
    """Folding key: episodes with equal keys may be shown as one. An episode that still lasts is never folded."""
    return episode.sample, _label(episode), None if episode.HasField("to_ns") else episode.from_ns


def _label(episode: admin_pb2.Episode) -> tuple[str, ...]:
    """Queue, reason and the head's reason: episodes behind different heads that lack the same resource count as equal."""
    return episode.queue, episode.reason, str(_numbers(episode.numbers).get("head_reason", ""))


def summary(response: admin_pb2.ExplainRequestResponse) -> str:
    """One line: total waiting time, and the reason of most of it."""
    waits: dict[str, float] = {}
    for episode in response.episodes:
        if episode.queue in ("waiting", "swapped") and episode.HasField("to_ns"):
            waits[episode.reason] = waits.get(episode.reason, 0.0) + (episode.to_ns - episode.from_ns) / _NS_PER_MS
    if not waits:
        return "it has not waited yet" if not response.episodes else "its waits are not over"
    most = max(waits, key=lambda reason: waits[reason])
    return f"waited {sum(waits.values()):.1f} ms in all, {waits[most]:.1f} ms of it {most}"


def _episode(episode: admin_pb2.Episode) -> dict[str, Any]:
    values: dict[str, Any] = {
        "from_step": episode.from_step,
        "to_step": episode.to_step if episode.HasField("to_step") else None,
        "from_ns": episode.from_ns,
        "to_ns": episode.to_ns if episode.HasField("to_ns") else None,
        "queue": episode.queue,
        "reason": episode.reason,
        "numbers": _numbers(episode.numbers),
    }
    if episode.sample:
        values["numbers"]["sample"] = episode.sample
    needs = _numbers(episode.needs)
    if len(needs) == 1:
        [(key, value)] = needs.items()
        values["numbers"] |= {"key": key, "value": value}
    elif needs:
        values["numbers"]["needs"] = needs
    return values


def _numbers(numbers: Any) -> dict[str, Any]:
    return {number.name: getattr(number, number.WhichOneof("value")) for number in numbers}


def _steps(episodes: Sequence[admin_pb2.Episode]) -> str:
    first, last = episodes[0], episodes[-1]
    return f"{first.from_step}..{last.to_step}" if last.HasField("to_step") else f"{first.from_step}.."


def _ms(episodes: Sequence[admin_pb2.Episode]) -> str:
    first, last = episodes[0], episodes[-1]
    return f"{(last.to_ns - first.from_ns) / _NS_PER_MS:.1f}" if last.HasField("to_ns") else "..."


def _because_of_all(episodes: Sequence[admin_pb2.Episode]) -> str:
    """Why, for folded episodes: their number, and the longest one of each reason."""
    if len(episodes) == 1:
        return _because(episodes[0])
    longest: dict[tuple[str, ...], admin_pb2.Episode] = {}
    for episode in sorted(episodes, key=lambda episode: episode.from_ns - episode.to_ns):
        longest.setdefault(_label(episode), episode)
    how = f"alternating {len(episodes)} times" if len(longest) > 1 else f"{len(episodes)} times in a row"
    return f"{how}; at the longest: {'; '.join(map(_because, longest.values()))}"


def _because(episode: admin_pb2.Episode) -> str:
    text = _text(episode.reason, _numbers(episode.numbers))
    needs = ", ".join(f"{name}={value}" for name, value in _numbers(episode.needs).items())
    return f"{text}; {needs} would have let it in" if needs else text


def _text(reason: str, numbers: Numbers) -> str:
    """Text of a reason; the bare numbers if it has none. BEHIND is explained by the reason of the head."""
    if (found := behind(reason, numbers)) is not None:
        head, head_reason, rest = found
        return f"behind {head}: {_text(head_reason, rest)}"
    for key in (f"{reason} {numbers.get('mode')}", reason):
        with contextlib.suppress(KeyError):
            return PAST[key].format(**numbers)
    return ", ".join(f"{name} {value}" for name, value in numbers.items()) or reason


# --- folding ---------------------------------------------------------------------------------------------------------


def _folded(episodes: Sequence[admin_pb2.Episode]) -> list[Sequence[admin_pb2.Episode]]:
    """The episodes in order, in runs of alternating ones (A, B, A, B, ...).

    A run of more than one has at least four episodes of at most three keys, each at least twice.
    """
    keys = [_key(episode) for episode in episodes]
    runs: list[Sequence[admin_pb2.Episode]] = []
    start = 0
    while start < len(episodes):
        length = _run_length(keys[start:])
        runs.append(episodes[start : start + length])
        start += length
    return runs


def _run_length(keys: Sequence[Hashable]) -> int:
    """Length of the longest run that starts at the first key."""
    counts: Counter[Hashable] = Counter()
    longest = 1
    for number, key in enumerate(keys, 1):
        counts[key] += 1
        if len(counts) > _MOST_KINDS:
            break
        if number >= _FEWEST_IN_A_RUN and min(counts.values()) >= _FEWEST_OF_A_KIND:
            longest = number
    return longest
