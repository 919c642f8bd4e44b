"""What the policy `quire` promises against the other policies, checked on the figures of a comparison."""

from collections.abc import Iterable, Mapping

from quire_tools.simulation.history import Figures

OURS = "quire"
TEACHERS = ("vllm-v0", "vllm-v1", "chitu")
MAX_LOST = 0.01


def teachers_of(names: Iterable[str]) -> list[str]:
    """Those of `names` that `quire` is compared with."""
    return [name for name in names if name in TEACHERS and name != OURS]


def broken(of: Mapping[str, Figures]) -> list[str]:
    """Promises that do not hold on one workload, in words.

    `of`: figures by policy, with `quire` and at least one teacher.

    No teacher may be better in TTFT p99, TPOT p99 and throughput at once; none may lose fewer tokens, beyond
    1 % of those computed; none may complete more requests, without which the rest would mean nothing.
    """
    ours, teachers = of[OURS], {name: of[name] for name in teachers_of(of)}
    found = [_beaten(name, theirs, ours) for name, theirs in teachers.items() if is_better(theirs, ours)]
    least, best = min((theirs.num_lost_tokens, name) for name, theirs in teachers.items())
    most = max(least, MAX_LOST * ours.num_computed_tokens)
    if ours.num_lost_tokens > most:
        found.append(
            f"{ours.num_lost_tokens:,} tokens lost, more than {most:,.0f}: what {best} loses, or {MAX_LOST:.0%} of those computed"
        )
    for name, theirs in teachers.items():
        if theirs.num_done > ours.num_done:
            found.append(f"{ours.num_done:,} requests done, {theirs.num_done:,} under {name}")
    return found


def is_better(a: Figures, b: Figures) -> bool:
    """True if `a` is better in all three at once."""
    return a.ttft_p99_s < b.ttft_p99_s and a.tpot_p99_s < b.tpot_p99_s and a.throughput > b.throughput


def _beaten(name: str, theirs: Figures, ours: Figures) -> str:
    return (
        f"{name} is better in all three: TTFT p99 {theirs.ttft_p99_s:.3f} < {ours.ttft_p99_s:.3f} s, TPOT p99 "
        f"{theirs.tpot_p99_s * 1e3:.1f} < {ours.tpot_p99_s * 1e3:.1f} ms, {theirs.throughput:.1f} > {ours.throughput:.1f} tokens/s"
    )
