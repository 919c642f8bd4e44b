"""The order of work: rounds in which every workload goes to every engine in turn, and the token checks.

One engine works at a time. Peers that are up meanwhile are frozen; Quire's stacks must be idle by themselves,
and the processor time they use is reported. The order of engines rotates from round to round.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from benchmarks.compare import figures
from benchmarks.compare.engines.base import Engine, Run
from benchmarks.compare.engines.registry import is_quire
from benchmarks.compare.workloads import Workload, sampled

Say = Callable[[str], None]
Draw = Callable[[str, int], Workload]
"""The workload of a name and a round."""

References = Mapping[tuple[str, int, int], list[int]]
"""Tokens of requests that were computed alone, by workload, round and index."""


@dataclass(slots=True)
class Standing:
    """State of an engine apart from its runs. `failure`: why it is no longer run."""

    engine: Engine
    is_up: bool = False
    starts_s: list[float] = field(default_factory=list)
    peak_mb: float = 0.0
    now_mb: float = 0.0
    idle_cpu_s: float = 0.0
    idle_s: float = 0.0
    failure: str = ""
    _left_at: float = 0.0
    _cpu_then: float = 0.0

    def leave(self) -> None:
        """End its turn."""
        self._left_at, self._cpu_then = time.perf_counter(), self.engine.cpu_s()
        if not is_quire(self.engine.name):
            self.engine.pause()

    def come_back(self) -> None:
        """Start its turn again; a no-op for idle figures if it was just started."""
        if self._left_at:
            self.idle_s += time.perf_counter() - self._left_at
            self.idle_cpu_s += self.engine.cpu_s() - self._cpu_then
        if not is_quire(self.engine.name):
            self.engine.resume()

    def weigh(self) -> None:
        """Read its memory."""
        memory = self.engine.memory()
        self.peak_mb, self.now_mb = max(self.peak_mb, memory.peak_mb), max(self.now_mb, memory.now_mb)

    def down(self) -> None:
        """Stop it."""
        self.engine.stop()
        self.is_up, self._left_at = False, 0.0

    def facts(self) -> dict[str, Any]:
        """Its facts for the result file."""
        return {
            "form": self.engine.form.value,
            "versions": dict(self.engine.versions()) if self.starts_s else {},
            "settings": dict(self.engine.settings()),
            "starts_s": [round(value, 3) for value in self.starts_s],
            "peak_mb": round(self.peak_mb, 1),
            "now_mb": round(self.now_mb, 1),
            "idle_cpu_share": round(self.idle_cpu_s / self.idle_s, 4) if self.idle_s else 0.0,
            **({"failure": self.failure} if self.failure else {}),
        }


class Rounds:
    """Owner of the engines while they run, of the rows and of the checks. Exiting ends every engine."""

    def __init__(self, engines: Sequence[Engine], say: Say, *, fresh: bool) -> None:
        self.standings = [Standing(engine) for engine in engines]
        self.rows: list[dict[str, Any]] = []
        self.num_checked = 0
        self.differences: list[str] = []
        self._say, self._fresh = say, fresh

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for standing in self.standings:
            standing.down()

    def run(self, names: Sequence[str], draw: Draw, num_rounds: int, references: References) -> None:
        """Run all rounds."""
        for round_ in range(num_rounds):
            self._renew()
            for name in names:
                self._one_workload(round_, num_rounds, draw(name, round_), references)

    def capacity(self, name: str, workload: Workload) -> float:
        """Requests per second that this engine completes of the workload; not among the rows. 0 if it fails."""
        [standing] = [one for one in self.standings if one.engine.name == name]
        run = self._turn(standing, workload)
        found = 0.0 if run is None else figures.of_run(run)["requests_per_s"]
        self._say(f"{name} completes {found:.2f} requests/s")
        return float(found)

    def _renew(self) -> None:
        """Stop engines that start quickly, so that each round measures a start."""
        for standing in self.standings:
            if standing.is_up and (self._fresh or not standing.engine.starts_slowly):
                standing.down()

    def _one_workload(self, round_: int, num_rounds: int, workload: Workload, references: References) -> None:
        first = round_ % len(self.standings)
        for standing in [*self.standings[first:], *self.standings[:first]]:
            if standing.failure or not standing.engine.can(workload.name):
                continue
            run = self._turn(standing, workload)
            if run is not None:
                self._take(round_, workload, standing.engine.name, run, references)
                self._say(f"round {round_ + 1}/{num_rounds} {workload.name} {_line(self.rows[-1])}")

    def _turn(self, standing: Standing, workload: Workload) -> Run | None:
        """Run a workload on an engine; None if the engine failed, which is recorded."""
        try:
            if standing.is_up:
                standing.come_back()
            else:
                self._say(f"{standing.engine.name} starts")
                standing.starts_s.append(standing.engine.start())
                standing.is_up = True
            run = standing.engine.run(workload)
            standing.weigh()
            standing.leave()
            return run
        except Exception as error:  # one engine fails; the others continue
            standing.failure = f"{type(error).__name__}: {error}"[:2_000]
            self._say(f"{standing.engine.name} failed and is skipped from now on: {standing.failure}")
            standing.down()
            return None

    def _take(self, round_: int, workload: Workload, name: str, run: Run, references: References) -> None:
        self.rows.append({"round": round_, "workload": workload.name, "engine": name, **figures.of_run(run)})
        if not is_quire(name):
            return
        for index, tokens in enumerate(run.tokens):
            wanted = references.get((workload.name, round_, index))
            if wanted is None or not tokens:
                continue
            self.num_checked += 1
            if tokens != wanted:
                same = next((i for i, pair in enumerate(zip(tokens, wanted, strict=False)) if pair[0] != pair[1]), 0)
                self.differences.append(
                    f"{name} {workload.name} round {round_ + 1} request {index} from token {same} on"
                )


def _line(row: Mapping[str, Any]) -> str:
    latencies = (
        f"TTFT {row['ttft_p50_ms']:,.0f} / {row['ttft_p99_ms']:,.0f} ms" if "ttft_p50_ms" in row else "no tokens"
    )
    failed = f", {row['failed']} FAILED: {row['errors']}" if row["failed"] else ""
    return f"{row['engine']}: {row[figures.THROUGHPUT]:,.1f} tokens/s, {latencies}{failed}"


def references(
    alone: Callable[[Workload], Run], names: Sequence[str], draw: Draw, num_rounds: int, count: int
) -> dict[tuple[str, int, int], list[int]]:
    """Tokens of `count` requests of each workload and round, each computed alone. Raises RuntimeError if one fails."""
    found = {}
    for round_ in range(num_rounds):
        for name in names:
            for request in sampled(draw(name, round_), count):
                run = alone(Workload(name, (request,)))
                if run.records[0].error:
                    raise RuntimeError(f"the reference of {name} failed: {run.records[0].error}")
                found[name, round_, request.index] = run.tokens[0]
    return found
