"""The step log by request and by sequence: what the numbers on spans are held against."""

from collections import Counter, defaultdict
from collections.abc import Iterable

from protos.inference.v1 import admin_pb2


class StepIndex:
    """Owner of what the tests ask of step reports. Requests by their ids in the core."""

    def __init__(self, reports: Iterable[admin_pb2.StepReport]) -> None:
        self.by_step: dict[int, admin_pb2.StepReport] = {}
        self.shares: dict[tuple[int, str], admin_pb2.ScheduledGroup] = {}
        self.planned_steps: defaultdict[str, set[int]] = defaultdict(set)
        self.prefill_steps: defaultdict[str, set[int]] = defaultdict(set)
        self.steps_of: defaultdict[str, set[int]] = defaultdict(set)
        self.sampled_steps: defaultdict[str, set[int]] = defaultdict(set)
        self.num_sampled: Counter[tuple[int, str]] = Counter()
        self.preempted: defaultdict[str, list[tuple[int, str]]] = defaultdict(list)
        self.longest: defaultdict[str, dict[int, int]] = defaultdict(dict)
        for report in reports:
            self.add(report)

    def add(self, report: admin_pb2.StepReport) -> None:
        """One more step."""
        self.by_step[report.step] = report
        for group in report.scheduled:
            for name in group.seqs:
                self.shares[report.step, name] = group
                self.steps_of[name].add(report.step)
            self.planned_steps[group.id].add(report.step)
            if group.prefill:
                self.prefill_steps[group.id].add(report.step)
        for sampled in report.sampled:
            if sampled.tokens:
                self.sampled_steps[request_of(sampled.sequence)].add(report.step)
                self.num_sampled[report.step, sampled.sequence] = len(sampled.tokens)
        for preempted in report.preempted:
            self.preempted[preempted.id].append((report.step, preempted.mode))
        for table in report.tables:
            longest = self.longest[request_of(table.sequence)]
            longest[report.step] = max(longest.get(report.step, 0), len(table.blocks))

    def num_planned(self, after_ns: int, until_ns: int) -> int:
        """Steps planned in that time, by the scheduler's clock."""
        return sum(after_ns < report.times.planned_ns <= until_ns for report in self.by_step.values())


def request_of(sequence: str) -> str:
    """The request that a sequence is of."""
    return sequence.rpartition("/")[0]
