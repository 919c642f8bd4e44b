"""The stop `preempt`: blocks run out, and requests are preempted by recompute or by swap."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import RenderableType

from quire_tools.tour import arrivals, pictures, step_facts
from quire_tools.tour.scenario import Observation, observed, request, tiny_worker
from quire_tools.tour.screen import Check, Number, all_free, declared
from quire_tools.tour.stage import Stage, TourRequest, TourStack

_NUM_BLOCKS, _BLOCK_SIZE = 16, 16
RECOMPUTE, SWAP, BY_NUMBER = "recompute", "swap", "by number"
_MODES = {RECOMPUTE: "r", SWAP: "s", BY_NUMBER: "n"}
"""Modes, and the first letter of their requests' names."""
_LETTERS = "ABCD"
_TWO_SAMPLES = "C"
"""The request with two samples where the mode depends on the number of samples."""
_PROMPT_TOKENS, _OUTPUT_TOKENS = 48, 36
_OPTIONS: dict[str, Any] = {
    "policy": "vllm-v0",
    # Below 100 blocks the default watermark is 0, and a preempted request would resume in the next step, to
    # be preempted again.
    "policy_set": ("preemption_mode=recompute", "prefix_caching=false", "watermark_blocks=1"),
    "worker_args": tiny_worker(256, _NUM_BLOCKS, "--swap-space", "8MiB", "--block-size", str(_BLOCK_SIZE)),
}


@dataclass(frozen=True, slots=True)
class PreemptedRequest:
    """One preemption.

    `amount`: tokens lost, or blocks copied out, as reported by `quire why`; `by`: the request that got the
    blocks. `back`: step number and the request's entry when it ran again, if it did.
    """

    setting: str
    name: str
    step: int
    mode: str
    amount: int
    by: str
    back: tuple[int, Mapping[str, Any]] | None

    @property
    def row(self) -> tuple[str, ...]:
        """Its line in the table."""
        cost = f"{self.amount} blocks copied out" if self.mode == SWAP else f"{self.amount} tokens lost"
        number, then = ("never", "") if self.back is None else (str(self.back[0]), self._resumed(self.back[1]))
        return (self.setting, str(self.step), self.name, self.by, self.mode, cost, number, then)

    def _resumed(self, group: Mapping[str, Any]) -> str:
        if self.mode == SWAP:
            return f"copied in, {group['tokens']} more"
        return f"computes {group['tokens']} from {group['computed_before']}"


@dataclass(frozen=True, slots=True)
class ModeRun:
    """The four requests under one preemption mode, beside their tokens in an undisturbed run."""

    name: str
    seen: Observation
    undisturbed: Sequence[Sequence[Sequence[int]]]

    @property
    def preempted(self) -> list[PreemptedRequest]:
        """All preemptions, in order."""
        found = [
            PreemptedRequest(
                self.name,
                name,
                episode["from_step"],
                (numbers := episode["numbers"])["mode"],
                numbers["blocks" if numbers["mode"] == SWAP else "lost_tokens"],
                numbers["by"],
                step_facts.next_share(self.seen.steps, name, episode["from_step"]),
            )
            for name, episodes in self.seen.episodes.items()
            for episode in episodes
            if episode["reason"] == "PREEMPTED"
        ]
        return sorted(found, key=lambda one: one.step)

    def total(self, what: str) -> int:
        """Sum of the steps' lists of this name."""
        return sum(len(step[what]) for step in self.seen.steps)


@dataclass(frozen=True, slots=True)
class PreemptRuns:
    """One run for each mode, and the pool in the end."""

    runs: Sequence[ModeRun]
    pool: Mapping[str, int]


def _observe(stage: Stage) -> PreemptRuns:
    """Four requests that need more blocks together than there are, under each mode."""
    with stage.stack(**_OPTIONS) as stack:
        alone = observed(stack, arrivals.in_turn(stack, _requests("alone-", 1))).tokens
        two = observed(stack, stack.together([_request("alone-two", _TWO_SAMPLES, 2)])).tokens
        place = _LETTERS.index(_TWO_SAMPLES)
        by_number = [*alone[:place], *two, *alone[place + 1 :]]
        runs = [_run(stack, mode, by_number if mode == BY_NUMBER else alone) for mode in _MODES]
        return PreemptRuns(runs, stack.blocks()["gpu"])


def _run(stack: TourStack, mode: str, undisturbed: Sequence[Sequence[Sequence[int]]]) -> ModeRun:
    stack.admin.set_policy([f"preemption_mode={'null' if mode == BY_NUMBER else mode}"])
    requests = _requests(_MODES[mode], 2 if mode == BY_NUMBER else 1)
    return ModeRun(mode, observed(stack, arrivals.one_by_one(stack, requests), why=True), undisturbed)


def _requests(prefix: str, num_samples: int) -> list[TourRequest]:
    return [_request(f"{prefix}{letter}", letter, num_samples if letter == _TWO_SAMPLES else 1) for letter in _LETTERS]


def _request(name: str, letter: str, num_samples: int) -> TourRequest:
    seed = _LETTERS.index(letter)
    return request(name, _PROMPT_TOKENS, _OUTPUT_TOKENS, like=letter, n=num_samples, seed=seed, temperature=0.8)


def _picture(found: PreemptRuns) -> Iterator[RenderableType]:
    for run in found.runs[:2]:
        yield f"preemption_mode={run.name}"
        steps = step_facts.fitting(run.seen.steps, 94)
        yield pictures.timetable(steps, run.seen.names, step_facts.mark_preemptions)
    yield pictures.legend(*pictures.TIMETABLE_LEGEND, step_facts.PREEMPTED_LEGEND)
    yield pictures.table(
        ("mode", "step", "preempted", "for", "by", "which costs", "back", "and then"),
        [one.row for run in found.runs for one in run.preempted],
    )


def _numbers(found: PreemptRuns) -> list[Number]:
    recompute, swap, by_number = found.runs
    lost, modes = recompute.preempted, [one.mode for one in by_number.preempted]
    again = sum(int(one.back[1]["tokens"]) for one in lost if one.back is not None)
    return [
        Number("recompute: preemptions", len(lost)),
        Number("recompute: tokens lost", sum(one.amount for one in lost)),
        Number("recompute: tokens computed again", again),
        Number("by number: one sample, recomputed", modes.count(RECOMPUTE)),
        Number("swap: preemptions", len(swap.preempted)),
        Number("swap: blocks copied out", sum(one.amount for one in swap.preempted)),
        Number("swap: blocks copied in", swap.total("swap_in")),
        Number("by number: two samples, swapped", modes.count(SWAP)),
    ]


def _checks(found: PreemptRuns) -> list[Check]:
    recompute, swap, by_number = found.runs
    equal = {run.name: run.seen.tokens == run.undisturbed for run in found.runs}
    return [
        Check("the last running request is preempted", *_last_preempted(found.runs)),
        Check("a recomputed request starts over", *_starts_over(recompute)),
        Check("a swapped request resumes with all its blocks", *_resumes(swap)),
        Check("no step copies both ways", *_one_way(found.runs)),
        Check("one sample is recomputed, two are swapped", *_by_number(by_number)),
        Check(
            "tokens are those of an undisturbed run",
            all(equal.values()),
            ", ".join(f"{name}: {'equal' if same else 'different'}" for name, same in equal.items()),
        ),
        all_free(found.pool),
    ]


def _last_preempted(runs: Sequence[ModeRun]) -> tuple[bool, str]:
    """Check that the victim is the tail of the running queue, which has the order of the steps' requests."""
    wrong, count = [], 0
    for run in runs:
        running: list[str] = []
        for step in run.seen.steps:
            for name in step_facts.preempted(step):
                count += 1
                ended = {one for one in running if not step_facts.next_share(run.seen.steps, one, step["step"] - 1)}
                running = [one for one in running if one not in ended]
                if not running or running.pop() != name:
                    wrong.append(f"{name} in step {step['step']}")
            here = step_facts.ids(step)
            running = [*running, *here] if step_facts.is_prefill(step) else here
    return count > 0 and not wrong, ", ".join(wrong) or f"{count} of {count}"


def _starts_over(run: ModeRun) -> tuple[bool, str]:
    """Check that a recompute starts at token 0 with prompt and generated tokens, and loses what had been computed."""
    for one in run.preempted:
        made = step_facts.num_sampled(run.seen.steps, one.name, before=one.step)
        computed = step_facts.num_computed(run.seen.steps, one.name, one.step)
        back = one.back[1] if one.back is not None else {"computed_before": -1, "tokens": -1}
        if (back["computed_before"], back["tokens"], one.amount) != (0, _PROMPT_TOKENS + made, computed):
            return False, f"{one.name} in step {one.step}: {back}, {computed} had been computed, {one.amount} lost"
    return {one.mode for one in run.preempted} == {RECOMPUTE}, "from token 0, with its output"


def _resumes(run: ModeRun) -> tuple[bool, str]:
    """Check that a swap brings back as many blocks as were copied out, and that decoding then continues."""
    out, back = run.total("swap_out"), run.total("swap_in")
    told = sum(one.amount for one in run.preempted)
    continues = all(one.back is not None and one.back[1]["tokens"] == 1 for one in run.preempted)
    only = {one.mode for one in run.preempted} == {SWAP}
    return only and out == back == told and continues, f"{out} blocks out, {back} in, nothing recomputed"


def _one_way(runs: Sequence[ModeRun]) -> tuple[bool, str]:
    """Check that no step swaps both in and out."""
    ways = [(bool(step["swap_out"]), bool(step["swap_in"])) for run in runs for step in run.seen.steps]
    copies, both = sum(map(any, ways)), sum(map(all, ways))
    return copies > 0 and not both, f"{copies} steps copy, {both} of them both ways"


def _by_number(run: ModeRun) -> tuple[bool, str]:
    """Check that the default mode depends on the number of unfinished sequences: one is recomputed, several are swapped."""
    two = f"{_MODES[BY_NUMBER]}{_TWO_SAMPLES}"
    wrong = [one for one in run.preempted if (one.mode == SWAP) is not (one.name == two)]
    both = {one.mode for one in run.preempted} == {RECOMPUTE, SWAP}
    return both and not wrong, ", ".join(f"{one.name} by {one.mode}" for one in run.preempted)


STOP = declared(
    "preempt",
    "Which request is preempted when blocks run out, how, and what it costs.",
    "docs/policies.md#keys",
    title="Preemption: recomputed, or copied to the host and back",
    text=f"Four prompts of {_PROMPT_TOKENS} tokens with {_OUTPUT_TOKENS} output tokens each, {_NUM_BLOCKS} blocks of "
    f"{_BLOCK_SIZE}: at the end they would need 24. Policy vllm-v0.",
    observe=_observe,
    picture=_picture,
    checks=_checks,
    numbers=_numbers,
)
