"""Goals D1 to D7 (and C7, C8) for the CPU, read from a result: the measured and wanted values, and whether they are met.

A goal is left out if the result lacks its engine or workload.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.compare import figures
from benchmarks.compare.figures import THROUGHPUT, Row, Spread

_US, _OFFLINE, _VLLM = "quire", "quire-offline", "vllm"
_OFFLINE_PEERS = ("vllm-offline", "openvino", "transformers")


@dataclass(frozen=True, slots=True)
class Verdict:
    """One goal. `most`: the figure must be at most `wanted`, else at least."""

    goal: str
    what: str
    measured: Spread
    wanted: float
    most: bool = False

    @property
    def is_met(self) -> bool:
        """True if the median meets the goal."""
        return self.measured.median <= self.wanted if self.most else self.measured.median >= self.wanted


def verdicts(result: Mapping[str, Any]) -> list[Verdict]:
    """Verdicts on the goals that the result covers."""
    rows = result["runs"]
    found = [*_against_vllm(rows), *_against_offline(rows), *_single(result), *_own(result), *_start(result)]
    return sorted(found, key=lambda verdict: verdict.goal)


def _ratio(rows: Sequence[Row], goal: str, workload: str, other: str, wanted: float, **how: Any) -> Iterator[Verdict]:
    figure, ours = how.get("figure", THROUGHPUT), how.get("ours", _US)
    found = figures.ratio(rows, workload, figure, ours, other)
    if found is not None:
        yield Verdict(goal, f"{workload} {figure} / {other}", found, wanted, how.get("most", False))


def _against_vllm(rows: Sequence[Row]) -> Iterator[Verdict]:
    yield from _ratio(rows, "D1", "W1", _VLLM, 1.4)
    yield from _ratio(rows, "D1", "W2", _VLLM, 1.4)
    yield from _ratio(rows, "D3", "W3", _VLLM, 1.4)
    for figure in ("ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "tpot_p99_ms"):
        yield from _ratio(rows, "D6", "W5", _VLLM, 0.7, figure=figure, most=True)


def _against_offline(rows: Sequence[Row]) -> Iterator[Verdict]:
    """Compare with the peer that is best at this workload, in any form."""
    for workload in ("W1", "W2"):
        known = {name: figures.spread(rows, workload, name, THROUGHPUT) for name in (_VLLM, *_OFFLINE_PEERS)}
        medians = {name: one.median for name, one in known.items() if one is not None}
        if medians:
            yield from _ratio(rows, "D2", workload, max(medians, key=medians.__getitem__), 1.15)


def _single(result: Mapping[str, Any]) -> Iterator[Verdict]:
    rows, time_per_token = result["runs"], {"figure": "tpot_p50_ms", "most": True}
    yield from _ratio(rows, "D4", "W4", "llamacpp", 0.85, **time_per_token)
    yield from _share(result, "D4", "W4", 0.8)
    yield from _ratio(rows, "D4", "W4", _OFFLINE, 0.98)
    for form, peer, faster in (("int8", "llamacpp-q8_0", 1.8), ("int4", "llamacpp-q4_k_m", 2.6)):
        ours = f"{_US}-{form}"
        yield from _ratio(rows, "D5", "W4", peer, 0.95, ours=ours, **time_per_token)
        yield from _ratio(rows, "D5", "W4", _US, faster, ours=ours)
        yield from _ratio(rows, "D5", "W1", _US, 1.0, ours=ours)


def _own(result: Mapping[str, Any]) -> Iterator[Verdict]:
    for workload in ("W1", "W2"):
        yield from _share(result, "D1", workload, 0.8)
    for workload in ("W1", "W2", "W3"):
        yield from _ratio(result["runs"], "C7", workload, _OFFLINE, 0.95)
    yield from _share(result, "C8", "P", 0.8)


def _share(result: Mapping[str, Any], goal: str, workload: str, wanted: float) -> Iterator[Verdict]:
    limit = result["limits"]["tokens_per_s"].get(workload)
    reached = list(figures.values(result["runs"], workload, _US, THROUGHPUT).values())
    found = Spread.of([one / limit for one in reached]) if limit else None
    if found is not None:
        yield Verdict(goal, f"{workload} share of the limit", found, wanted)


def _start(result: Mapping[str, Any]) -> Iterator[Verdict]:
    facts = result["engines"].get(_US)
    if facts and (starts := Spread.of(facts["starts_s"])):
        yield Verdict("D7", "start to the first token, s", starts, 4.0, most=True)
    if facts and facts.get("peak_mb"):
        gib = facts["peak_mb"] * 1e6 / 2**30
        yield Verdict("D7", "peak memory, GiB", Spread(gib, gib, gib), 1.0, most=True)
