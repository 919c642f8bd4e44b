"""What the log of a preset's life must show: each sign raises AssertionError where it is missing. `Life` is in served_life."""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

from tests.e2e.served_life import Life, Step, request_of
from tests.support.stack.mixed_requests import Ask

Sign = Callable[[Life], None]


def _types(step: Step) -> set[bool]:
    """True: a prompt is computed in it; False: a decode."""
    return {group["prefill"] for group in step["scheduled"]}


# --- which requests share a step ----------------------------------------------------------------------------------------


def never_mixes(life: Life) -> None:
    """R41, R193: a step is one of prompts or one of decodes."""
    assert all(len(_types(step)) <= 1 for step in life.steps)


def mixes(life: Life) -> None:
    """R127: prompts and decodes share steps."""
    assert any(len(_types(step)) == 2 for step in life.steps)


def cuts(life: Life) -> None:
    """R87: a prompt's tokens are spread over steps, each part behind the one before."""
    ends: dict[str, int] = {}
    num_parts = 0
    for step in life.steps:
        for group in step["scheduled"]:
            if group["prefill"] and len(group["seqs"]) == 1:
                num_parts += ends.get(group["id"]) == group["computed_before"]
                ends[group["id"]] = group["computed_before"] + group["tokens"]
    assert num_parts


def no_request_joins(life: Life) -> None:
    """R1: an admitted request finds none of the batch before; a preempted one waits for the next batch as well.

    Where a worker was lost (its connection, on a starved machine), a new epoch begins with a new batch.
    """
    batch: set[str] = set()
    epoch = 0
    for step in life.steps:
        here = {request_of(name) for name in step["tables"]}
        batch, epoch = batch if step["epoch"] == epoch else set(), step["epoch"]
        where = f"step {step['step']} of epoch {epoch}"
        assert not here - batch or not batch & here, f"{where}: {here - batch} joined {batch & here}"
        batch = here
    assert life.replayed.reasons["BATCH_UNDER_WAY"]


# --- which request is preempted, and how --------------------------------------------------------------------------------


def never_swaps(life: Life) -> None:
    """R130: swap maps are empty."""
    assert not any(step["swap_in"] or step["swap_out"] for step in life.steps)


def preempts(life: Life) -> None:
    """R72, R130: the pool was to force it."""
    assert life.preemptions


def never_preempts(life: Life) -> None:
    """Blocks for all tokens that a request can reach are reserved when it is admitted."""
    assert not life.preemptions


def swaps(life: Life) -> None:
    """R75, R76: a preempted request is copied to the host, and back."""
    assert {mode for _, mode in life.preemptions} == {"swap"}
    assert any(step["swap_out"] for step in life.steps) and any(step["swap_in"] for step in life.steps)


def recomputes(life: Life) -> None:
    """R27: a preempted request is recomputed."""
    assert {mode for _, mode in life.preemptions} == {"recompute"}


def _widths(steps: Sequence[Step], name: str) -> Iterator[int]:
    """Sequences of a request in the steps that it takes part in."""
    return (len(group["seqs"]) for step in steps for group in step["scheduled"] if group["id"] == name)


def leaves_by_number(life: Life) -> None:
    """R76: several sequences are copied, one alone (what is left of several, too) is computed again."""
    modes = set()
    for place, step in enumerate(life.steps):
        for name, mode in step["preempted"]:
            on_host = sum(request_of(sequence) == name for sequence in step["tables"])
            assert on_host > 1 if mode == "swap" else next(_widths(life.steps[place:], name), 1) == 1
            modes.add(mode)
    assert modes == {"swap", "recompute"}


# --- which request is first ---------------------------------------------------------------------------------------------


def waits_for_room(life: Life) -> None:
    """R181: the pool was to make requests wait."""
    assert life.replayed.reasons["RESERVED"]


def waits_for_blocks(life: Life) -> None:
    """R51: the same, where what is needed now counts."""
    assert life.replayed.reasons["NEED_BLOCKS"]


def delays(life: Life) -> None:
    """R57: prompts wait for company."""
    assert life.replayed.reasons["DELAY"]


def important_first(wanted: list[Ask]) -> Sign:
    """R81: the most important of `wanted` start sooner than the least important, in the mean."""
    priorities = {ask.request_id: ask.priority for ask in wanted}

    def sign(life: Life) -> None:
        starts: dict[str, int] = {}
        for step, name in life.sequences:
            starts.setdefault(request_of(name), step["step"])
        high, low = ([at for name, at in starts.items() if priorities[name] == p] for p in (5, 0))
        assert sum(high) / len(high) < 0.8 * sum(low) / len(low)

    return sign


# --- lanes --------------------------------------------------------------------------------------------------------------


def has_in_flight(depth: int) -> Sign:
    """R147, R179: at most so many steps are sent without a result, and so many there were."""

    def sign(life: Life) -> None:
        assert life.replayed.depth == depth

    return sign


def _tasks(life: Life) -> list[set[str]]:
    """Of each step. Beams are one task, by their request's name; other samples are one each."""
    beams = {group["id"] for step in life.steps for group in step["scheduled"] if len(group["seqs"]) > 2}
    names = [[name for group in step["scheduled"] for name in group["seqs"]] for step in life.steps]
    return [{request_of(name) if request_of(name) in beams else name for name in found} for found in names]


def stays(life: Life) -> None:
    """R183, R190: a step is one slot's or one rank's, and a request keeps the one that it has until its worker is lost; there are
    two."""
    lanes: dict[tuple[int, str], set[int]] = {}
    for step, name in life.sequences:
        lanes.setdefault((step["epoch"], name), set()).add(step["lane"])
    assert all(len(found) == 1 for found in lanes.values())
    assert set().union(*lanes.values()) == {0, 1}


def has_places(count: int) -> Sign:
    """R179, R184: no slot has more residents than places, and some have several."""

    def sign(life: Life) -> None:
        spans: dict[tuple[int, str], list[int]] = {}
        for i, (step, names) in enumerate(zip(life.steps, _tasks(life), strict=True)):
            for name in names:
                spans.setdefault((step["lane"], name), []).append(i)
        most = 0
        for i, step in enumerate(life.steps):
            here = [name for (lane, name), at in spans.items() if lane == step["lane"] and at[0] <= i <= at[-1]]
            most = max(most, len(here))
        assert 1 < most <= count

    return sign


def threshold_moves(life: Life) -> None:
    """R174, R175: each eviction halves it, the next end restores it at once, maybe before evictions of the same plan."""
    values = [value for value, _ in life.replayed.thresholds]
    whole = max(values)
    for (before, _), (after, evictions) in pairwise(life.replayed.thresholds):
        passed = [before, *evictions]
        assert all(lowered in (max(1, last // 2), max(1, whole // 2)) for last, lowered in pairwise(passed))
        assert after in (passed[-1], whole)
    assert min(values) < whole == values[-1]


# --- blocks and tokens --------------------------------------------------------------------------------------------------


def takes_blocks_from(first: str) -> Sign:
    """R99: the first block that is allocated."""

    def sign(life: Life) -> None:
        [table, *_] = life.steps[0]["tables"].values()
        assert table[0] == first

    return sign


def yields_several(life: Life) -> None:
    """R91, R150: some step brings a sequence more than one token."""
    assert any(len(tokens) > 1 for step in life.steps for tokens in step["sampled"].values())


def some_leave(life: Life) -> None:
    """R198: requests are cancelled while they run."""
    assert life.replayed.left_running
