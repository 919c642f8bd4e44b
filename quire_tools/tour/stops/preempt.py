"""The stop `preempt`: blocks run out, and requests are preempted by recompute or by swap."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from quire.client.outputs import RequestOutput
from quire.client.sampling_params import SamplingParams
from quire_tools.tour import arrivals, pictures, step_facts
from quire_tools.tour.pictures import Step
from quire_tools.tour.screen import Check, Number, Screen, Stop
from quire_tools.tour.stage import Stage, TourRequest, TourStack

NUM_BLOCKS, BLOCK_SIZE = 16, 16
RECOMPUTE, SWAP, BY_NUMBER = "recompute", "swap", "by number"
ACTS: Mapping[str, str] = {RECOMPUTE: "r", SWAP: "s", BY_NUMBER: "n"}
"""Acts, and the first letter of their requests' names."""
_LETTERS = "ABCD"
_TWINS = "C"
"""The request with two samples in the act where the mode depends on the number of samples."""
_PROMPT_TOKENS, _OUTPUT_TOKENS = 48, 36
_OPTIONS: dict[str, Any] = {
    "policy": "vllm-v0",
    # Below 100 blocks the default watermark is 0, and a preempted request would resume in the next step, to
    # be preempted again.
    "policy_set": ("preemption_mode=recompute", "prefix_caching=false", "watermark_blocks=1"),
    "worker_args": (
        *("--dtype", "float32", "--max-model-len", "256", "--swap-space", "8MiB", "--block-size", str(BLOCK_SIZE)),
        *("--num-gpu-blocks-override", str(NUM_BLOCKS)),
    ),
}


@dataclass(frozen=True, slots=True)
class Departure:
    """One preemption.

    `amount`: tokens lost, or blocks copied out, as reported by `quire why`; `by`: the request that got the
    blocks. `back`: (step number, the request's first entry afterwards).
    """

    act: str
    name: str
    step: int
    mode: str
    amount: int
    by: str
    back: tuple[int, dict[str, Any]] | None


@dataclass(frozen=True, slots=True)
class Act:
    """The four requests under one preemption mode."""

    name: str
    steps: Sequence[Step]
    departures: Sequence[Departure]
    outputs: Sequence[RequestOutput]
    undisturbed: Sequence[RequestOutput]

    @property
    def is_equal(self) -> bool:
        """True if the tokens are those of an undisturbed run."""
        return [_tokens(output) for output in self.outputs] == [_tokens(output) for output in self.undisturbed]

    def of_mode(self, mode: str) -> list[Departure]:
        """Preemptions by this mode."""
        return [departure for departure in self.departures if departure.mode == mode]


def show(stage: Stage) -> Screen:
    """Four requests that need more blocks together than there are, under each mode."""
    with stage.stack(**_OPTIONS) as stack:
        undisturbed = {who: stack.together([_request(f"alone-{who}", who, 1)])[0] for who in _LETTERS}
        twins = stack.together([_request(f"alone-{_TWINS}{_TWINS}", _TWINS, 2)])[0]
        alone = {RECOMPUTE: undisturbed, SWAP: undisturbed, BY_NUMBER: undisturbed | {_TWINS: twins}}
        acts = [_act(stack, name, list(alone[name].values())) for name in ACTS]
        pool = stack.blocks()["gpu"]
    return Screen(
        "Preemption: computed again, or copied to the host and back",
        ("R3", "R27", "R60", "R73", "R76", "R77", "R78"),
        [
            f"Four prompts of {_PROMPT_TOKENS} tokens, {_OUTPUT_TOKENS} tokens each to come, {pool['total']} blocks of "
            f"{BLOCK_SIZE}: at the end they would need 24. Policy vllm-v0.",
            *(part for act in acts[:2] for part in _timetable(act)),
            pictures.legend(*pictures.TIMETABLE_LEGEND, (step_facts.LEAVES, step_facts.LEAVES_STYLE, "has to leave")),
            _departure_table([departure for act in acts for departure in act.departures]),
        ],
        _checks(acts, pool),
        _numbers(acts),
    )


# --- driving -------------------------------------------------------------------------------------------------------


def _act(stack: TourStack, act: str, undisturbed: Sequence[RequestOutput]) -> Act:
    mode = "null" if act == BY_NUMBER else act
    stack.admin.set_policy([f"preemption_mode={mode}"])
    names = [f"{ACTS[act]}{who}" for who in _LETTERS]
    widths = {who: 2 if act == BY_NUMBER and who == _TWINS else 1 for who in _LETTERS}
    outputs = arrivals.one_by_one(stack, [_request(f"{ACTS[act]}{who}", who, widths[who]) for who in _LETTERS])
    steps = step_facts.about(stack.steps(), names)
    departures = [
        departure for name in names for departure in _departures(act, name, steps, stack.why(name)["episodes"])
    ]
    return Act(act, steps, sorted(departures, key=lambda one: one.step), outputs, undisturbed)


def _request(name: str, who: str, num_samples: int) -> TourRequest:
    seed = _LETTERS.index(who)
    prompt = [100 + 60 * seed + place for place in range(_PROMPT_TOKENS)]
    params = SamplingParams(n=num_samples, seed=seed, temperature=0.8, max_tokens=_OUTPUT_TOKENS, ignore_eos=True)
    return TourRequest(name, prompt, params)


def _departures(act: str, name: str, steps: Sequence[Step], episodes: Sequence[dict[str, Any]]) -> Iterator[Departure]:
    for episode in episodes:
        numbers = episode["numbers"]
        if episode["reason"] == "PREEMPTED":
            amount = numbers["blocks" if numbers["mode"] == SWAP else "lost_tokens"]
            back = step_facts.next_share(steps, name, episode["from_step"])
            yield Departure(act, name, episode["from_step"], numbers["mode"], amount, numbers["by"], back)


def _tokens(output: RequestOutput) -> list[list[int]]:
    return [list(choice.token_ids) for choice in output.outputs]


# --- what is shown -------------------------------------------------------------------------------------------------


def _timetable(act: Act) -> tuple[str, Any]:
    names = [f"{ACTS[act.name]}{who}" for who in _LETTERS]
    steps = step_facts.fitting(act.steps, 94)
    return f"preemption_mode={act.name}", pictures.timetable(steps, names, step_facts.mark_with_leavings)


def _departure_table(departures: Sequence[Departure]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("mode", "step", "who", "for", "by", "which costs", "back", "and then"):
        table.add_column(name, no_wrap=True)
    for one in departures:
        cost = f"{one.amount} blocks copied out" if one.mode == SWAP else f"{one.amount} tokens lost"
        number, then = ("never", "") if one.back is None else (str(one.back[0]), _return(one, one.back[1]))
        table.add_row(one.act, str(one.step), one.name, one.by, one.mode, cost, number, then)
    return table


def _return(departure: Departure, group: dict[str, Any]) -> str:
    if departure.mode == SWAP:
        return f"copied in, {group['tokens']} more"
    return f"computes {group['tokens']} from {group['computed_before']}"


def _numbers(acts: Sequence[Act]) -> list[Number]:
    recompute, swap, by_number = acts
    return [
        Number("recompute: times somebody left", len(recompute.departures), "R77"),
        Number("recompute: tokens lost", sum(one.amount for one in recompute.departures), "R27"),
        Number("recompute: tokens computed again", sum(_tokens_back(one) for one in recompute.departures), "R26"),
        Number("by number: one alone, recomputed", len(by_number.of_mode(RECOMPUTE)), "R76"),
        Number("swap: times somebody left", len(swap.departures), "R78"),
        Number("swap: blocks copied out", sum(one.amount for one in swap.departures), "R73"),
        Number("swap: blocks copied in", sum(len(step["swap_in"]) for step in swap.steps), "R73"),
        Number("by number: two samples, swapped", len(by_number.of_mode(SWAP)), "R76"),
    ]


def _tokens_back(departure: Departure) -> int:
    return 0 if departure.back is None else int(departure.back[1]["tokens"])


# --- checks --------------------------------------------------------------------------------------------------------


def _checks(acts: Sequence[Act], pool: Mapping[str, int]) -> list[Check]:
    recompute, swap, by_number = acts
    return [
        _last_leaves(acts),
        Check("who is computed again starts over", *_starts_over(recompute)),
        Check("who is copied comes back whole", *_comes_back(swap)),
        Check("no step copies both ways", *_one_way(acts)),
        Check("one sample is computed again, two are copied", *_goes_by_number(by_number)),
        Check(
            "tokens are those of an undisturbed run",
            all(act.is_equal for act in acts),
            ", ".join(f"{act.name}: {'equal' if act.is_equal else 'different'}" for act in acts),
        ),
        Check("all blocks are free at the end", pool["free"] == pool["total"], f"{pool['free']} of {pool['total']}"),
    ]


def _last_leaves(acts: Sequence[Act]) -> Check:
    """Check that the victim is the tail of the running queue, which has the order of the steps' requests."""
    wrong, count = [], 0
    for act in acts:
        running: list[str] = []
        for step in act.steps:
            for name in step_facts.left(step):
                count += 1
                over = [who for who in running if step_facts.next_share(act.steps, who, step["step"] - 1) is None]
                running = [who for who in running if who not in over]
                if not running or running.pop() != name:
                    wrong.append(f"{name} in step {step['step']}")
            here = step_facts.ids(step)
            running = [*running, *here] if step_facts.is_prefill(step) else here
    return Check("who leaves is the last that runs", count > 0 and not wrong, ", ".join(wrong) or f"{count} of {count}")


def _starts_over(act: Act) -> tuple[bool, str]:
    """Check that a recompute starts at token 0 with prompt and generated tokens, and loses what had been computed."""
    for one in act.departures:
        made = step_facts.num_sampled(act.steps, one.name, before=one.step)
        computed = step_facts.num_computed(act.steps, one.name, one.step)
        back = one.back[1] if one.back is not None else {"computed_before": -1, "tokens": -1}
        if (back["computed_before"], back["tokens"], one.amount) != (0, _PROMPT_TOKENS + made, computed):
            return False, f"{one.name} in step {one.step}: {back}, {computed} had been computed, {one.amount} lost"
    return bool(act.departures) and {one.mode for one in act.departures} == {RECOMPUTE}, "from 0, with what it had made"


def _comes_back(act: Act) -> tuple[bool, str]:
    """Check that a swap brings back as many blocks as were copied out, and that decoding then continues."""
    out, back = (sum(len(step[way]) for step in act.steps) for way in ("swap_out", "swap_in"))
    told = sum(one.amount for one in act.departures)
    goes_on = all(one.back is not None and one.back[1]["tokens"] == 1 for one in act.departures)
    only = {one.mode for one in act.departures} == {SWAP}
    return only and out == back == told and goes_on, f"{out} blocks out, {back} in, nothing computed again"


def _one_way(acts: Sequence[Act]) -> tuple[bool, str]:
    """Check that no step swaps both in and out."""
    both = [step["step"] for act in acts for step in act.steps if step["swap_out"] and step["swap_in"]]
    ways = sum(bool(step["swap_out"] or step["swap_in"]) for act in acts for step in act.steps)
    return ways > 0 and not both, f"{ways} steps copy, {len(both)} of them both ways"


def _goes_by_number(act: Act) -> tuple[bool, str]:
    """Check that the default mode depends on the number of unfinished sequences: one is recomputed, several are swapped."""
    twins = f"{ACTS[BY_NUMBER]}{_TWINS}"
    wrong = [one for one in act.departures if (one.mode == SWAP) is not (one.name == twins)]
    both = {one.mode for one in act.departures} == {RECOMPUTE, SWAP}
    return both and not wrong, ", ".join(f"{one.name} by {one.mode}" for one in act.departures)


STOP = Stop(
    "preempt",
    "Who has to leave when blocks run out, how, and what it costs.",
    ("R60", "R72", "R76", "R77", "R78"),
    show,
)
