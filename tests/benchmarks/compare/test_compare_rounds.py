"""The order of work of the comparison with peers: turns, frozen peers, failures, tokens compared."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.compare.engines.base import Form, Memory, Run
from benchmarks.compare.rounds import Rounds, references
from benchmarks.compare.workloads import Lengths, Workload, fixed
from quire_tools.bench.measure import Record
from tests.benchmarks.compare.compare_cases import workload


class Recorded:
    """An engine whose runs are known. `tokens`: of every request."""

    form, starts_slowly = Form.SERVER, False

    def __init__(self, name: str, calls: list[str], tokens: Sequence[int] = (7, 8), breaks_in: str = "") -> None:
        self.name, self._calls, self._tokens, self._breaks_in = name, calls, list(tokens), breaks_in

    def missing(self) -> str:
        return ""

    def can(self, workload: str) -> bool:
        return True

    def settings(self) -> Mapping[str, Any]:
        return {}

    def versions(self) -> Mapping[str, str]:
        return {}

    def start(self) -> float:
        self._calls.append(f"{self.name} starts")
        return 1.0

    def run(self, workload: Workload) -> Run:
        self._calls.append(f"{self.name} {workload.name}")
        if workload.name == self._breaks_in:
            raise RuntimeError("out of memory")
        count = len(self._tokens)
        records = [
            Record(r.index, 0.0, token_times_s=[0.1], output_tokens=count, ended_s=1.0) for r in workload.requests
        ]
        return Run(records, [self._tokens for _ in workload.requests])

    def pause(self) -> None:
        self._calls.append(f"{self.name} pauses")

    def resume(self) -> None:
        self._calls.append(f"{self.name} resumes")

    def memory(self) -> Memory:
        return Memory(2.0, 1.0)

    def cpu_s(self) -> float:
        return 0.0

    def stop(self) -> None:
        self._calls.append(f"{self.name} stops")


def test_rounds_turn_the_order_and_freeze_peers() -> None:
    """Each workload goes to all in turn; a peer is frozen when it is not its turn, Quire is not; all are stopped at the end."""
    calls: list[str] = []
    with Rounds([Recorded("quire", calls), Recorded("peer", calls)], lambda line: None, fresh=False) as rounds:
        rounds.run(["A", "B"], lambda name, round_: workload(name, Lengths(1, fixed(4), fixed(2)), round_), 2, {})
    runs = [call for call in calls if call.split()[1] in {"A", "B"}]
    assert runs == ["quire A", "peer A", "quire B", "peer B", "peer A", "quire A", "peer B", "quire B"]
    assert calls[:4] == ["quire starts", "quire A", "peer starts", "peer A"] and calls.count("peer starts") == 2
    assert calls.count("peer pauses") == 4 and calls[-2:] == ["quire stops", "peer stops"]
    assert "quire pauses" not in calls and rounds.standings[1].facts()["starts_s"] == [1.0, 1.0]


def test_an_engine_that_fails_runs_no_more() -> None:
    """The others go on, and the result says why."""
    calls: list[str] = []
    with Rounds(
        [Recorded("quire", calls), Recorded("peer", calls, breaks_in="A")], lambda line: None, fresh=False
    ) as rounds:
        rounds.run(["A", "B"], lambda name, round_: workload(name, Lengths(1, fixed(4), fixed(2)), round_), 1, {})
    assert [one["engine"] for one in rounds.rows] == ["quire", "quire"]
    assert rounds.standings[1].facts()["failure"] == "RuntimeError: out of memory" and "peer B" not in calls


def test_tokens_are_compared_with_those_computed_alone() -> None:
    """Of the requests that were sampled, in every round; the first place that differs is told."""
    draw = lambda name, round_: workload(name, Lengths(4, fixed(4), fixed(2)), round_)  # noqa: E731
    alone = references(Recorded("reference", [], tokens=[7, 9]).run, ["A"], draw, 2, 2)
    assert sorted(alone) == [("A", 0, 0), ("A", 0, 2), ("A", 1, 0), ("A", 1, 2)]
    with Rounds([Recorded("quire", []), Recorded("peer", [])], lambda line: None, fresh=False) as rounds:
        rounds.run(["A"], draw, 2, alone)
    assert rounds.num_checked == 4
    assert rounds.differences[0] == "quire A round 1 request 0 from token 1 on"
