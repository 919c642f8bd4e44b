"""Statistics from time stamps.

TTFT and latency count from the planned arrival, so that a late client does not improve the results:

* TTFT: planned arrival to the first token. Latency: planned arrival to the end.
* TPOT: (last token - first token) / (output tokens - 1), one value per request with two tokens or more.
* ITL: gaps between consecutive messages with tokens; servers may put several tokens in one message.
* Throughput: output tokens (and requests) of successful requests / (last end - first send).
"""

from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from svc_common.percentiles import percentiles


@dataclass(slots=True)
class Record:
    """Measurements of one request. Times in seconds since the start of the run; owned by the task that sends it."""

    index: int
    planned_s: float
    sent_s: float = 0.0
    token_times_s: list[float] = field(default_factory=list)
    ended_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    error: str = ""

    @property
    def ttft_s(self) -> float:
        """Planned arrival to first token."""
        return self.token_times_s[0] - self.planned_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per token after the first; None below two tokens."""
        if self.output_tokens < 2:
            return None
        return (self.token_times_s[-1] - self.token_times_s[0]) / (self.output_tokens - 1)

    @property
    def itl_s(self) -> list[float]:
        """Gaps between messages with tokens."""
        return [b - a for a, b in zip(self.token_times_s, self.token_times_s[1:], strict=False)]


def finish(record: Record, *, max_tokens: int) -> None:
    """Mark a request as failed if its stream ended normally but with no tokens or too many."""
    if not record.error and not record.token_times_s:
        record.error = "no token"
    if not record.error and record.output_tokens > max_tokens:
        record.error = f"{record.output_tokens} tokens, {max_tokens} asked"


def spread_ms(values_s: list[float]) -> dict[str, float]:
    """Mean, p50, p90, p99 and max in milliseconds; empty without values."""
    if not values_s:
        return {}
    found = {"mean": fmean(values_s), **percentiles(values_s, (50, 90, 99)), "max": max(values_s)}
    return {name: round(1e3 * value, 3) for name, value in found.items()}


def summarise(records: list[Record]) -> dict[str, Any]:
    """All statistics of one run."""
    good = [record for record in records if not record.error]
    duration_s = max((r.ended_s for r in records), default=0.0) - min((r.sent_s for r in records), default=0.0)
    output_tokens = sum(r.output_tokens for r in good)
    prompt_tokens = sum(r.prompt_tokens for r in good)
    return {
        "requests": len(records),
        "failed": len(records) - len(good),
        "errors": _errors(records),
        "duration_s": round(duration_s, 4),
        "prompt_tokens": prompt_tokens,
        "cached_prompt_tokens": sum(r.cached_tokens for r in good),
        "output_tokens": output_tokens,
        "output_tokens_per_s": _rate(output_tokens, duration_s),
        "total_tokens_per_s": _rate(output_tokens + prompt_tokens, duration_s),
        "requests_per_s": _rate(len(good), duration_s),
        "ttft_ms": spread_ms([r.ttft_s for r in good]),
        "tpot_ms": spread_ms([tpot for r in good if (tpot := r.tpot_s) is not None]),
        "itl_ms": spread_ms([gap for r in good for gap in r.itl_s]),
        "latency_ms": spread_ms([r.ended_s - r.planned_s for r in good]),
        "client_lag_ms": spread_ms([r.sent_s - r.planned_s for r in records]),
    }


def _rate(count: int, duration_s: float) -> float:
    return round(count / duration_s, 3) if duration_s > 0 else 0.0


def _errors(records: list[Record]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for record in records:
        if record.error:
            counts[record.error] = counts.get(record.error, 0) + 1
    return counts
