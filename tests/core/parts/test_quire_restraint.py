"""Admission by forecast peak usage: prompts wait while running requests are expected to need the blocks; fewer tokens are lost."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from quire_tools.simulation.cost_model import GPU
from quire_tools.simulation.history import Figures
from quire_tools.simulation.simulation import Simulation
from quire_tools.simulation.workloads import WORKLOADS
from scheduler_svc.core.composition import presets
from scheduler_svc.core.limits import CoreLimits
from scheduler_svc.core.parts.admission_forecast import BlockDemand, TableGrowth
from scheduler_svc.core.parts.costs import Costs
from scheduler_svc.core.parts.output_lengths import MOST_KEPT, OutputLengths
from scheduler_svc.core.reasons import Reason
from tests.support.core.quire_builders import quire_core, request, running, serve, waiting


def floats(*numbers: float) -> np.ndarray:
    return np.array(numbers, np.float64)


def test_without_any_experience_outputs_are_taken_to_be_as_long_as_they_may() -> None:
    """The careful guess."""
    assert OutputLengths().remaining(floats(0, 5), floats(10, 3)).tolist() == [10.0, 3.0]


def test_what_is_left_is_the_mean_of_those_that_became_longer() -> None:
    """Of lengths 10, 20, 60 one with 15 tokens gets 25 more; one with 60 gets what it may; none gets more than that."""
    lengths = OutputLengths()
    for length in (10, 20, 60):
        lengths.note(length, 1_000)
    assert lengths.remaining(floats(0, 15, 60, 15), floats(1_000, 985, 940, 4)).tolist() == [30.0, 25.0, 940.0, 4.0]


def test_max_tokens_is_believed_where_it_foretells_lengths() -> None:
    """Clients that ask for what they need are told from those that ask for the moon."""
    knowing, careless = OutputLengths(), OutputLengths()
    for number in range(100):
        length = 10 + 37 * number % 400
        knowing.note(length, length)
        careless.note(length, 4_000 - 31 * number)
    assert knowing.remaining(floats(0, 0), floats(40, 400)).tolist() == [40.0, 400.0]
    assert 150 < careless.remaining(floats(0), floats(3_000))[0] < 250


def test_experience_is_bounded_and_the_oldest_goes() -> None:
    """Only the last outputs count."""
    lengths = OutputLengths()
    for _ in range(MOST_KEPT):
        lengths.note(900, 1_000)
    for _ in range(MOST_KEPT):
        lengths.note(10, 1_000)
    assert lengths.remaining(floats(0), floats(1_000)).tolist() == pytest.approx([10.0])


def test_the_peak_is_when_the_next_to_end_is_at_its_end() -> None:
    """Blocks of 4; one with 8 tokens to come and one with 16, each holding 2 full blocks of its own: 2 + 2 now, at most
    2 + 2 + 4 when the first ends, then 2 + 4; and half a block each."""
    demand = BlockDemand(floats(8, 8), floats(2, 2), floats(2, 2), floats(8, 16), floats(1, 1))
    assert demand.peak(4, TableGrowth(4)) == 4 + 2 + 2 + 2 / 2
    alone = BlockDemand(floats(8), floats(2), floats(2), floats(16), floats(1))
    assert alone.peak(2, TableGrowth(4)) == 2 + 4 + 1 / 2


def test_blocks_of_a_window_stop_growing() -> None:
    """Blocks of 4; one group for the whole sequence and one with a window of 8: that has at most 8 tokens and half a block in
    front, where a second whole one would have all 40.
    """
    alone = BlockDemand(floats(8), floats(4), floats(4), floats(32), floats(1))
    assert alone.peak(4, TableGrowth(4, 2)) == 4 + 2 * 8 + 1
    assert alone.peak(4, TableGrowth(4, 1, (8,))) == 4 + 8 + 0.5 + 1 == 4 + alone.growth(TableGrowth(4, 1, (8,)))
    two = BlockDemand(floats(8, 20), floats(4, 7), floats(4, 7), floats(32, 4), floats(1, 1))
    first_ends = (12 + 24) / 4 + (10 + 10) / 4 + 2 - 4 - 7
    second_ends = 40 / 4 + 10 / 4 + 1 - 4 - 7
    assert two.peak(11, TableGrowth(4, 1, (8,))) == 11 + max(first_ends, second_ends)
    short = BlockDemand(floats(2), floats(2), floats(2), floats(3), floats(1))
    assert short.peak(2, TableGrowth(4, 1, (8,))) == short.peak(2, TableGrowth(4, 2))


@pytest.mark.parametrize(("num_whole", "windows"), [(1, ()), (1, (6, 6)), (0, (3, 20))])
def test_the_peak_is_at_most_what_all_grow_to(num_whole: int, windows: tuple[int, ...]) -> None:
    """Random groups, with one after another added, as a step admits them; from the computed peak on where there is one."""
    draw = np.random.default_rng(3)
    for _ in range(200):
        count, size = int(draw.integers(1, 12)), int(draw.choice([1, 4, 16]))
        tables = TableGrowth(size, num_whole, windows)
        tokens, remaining = draw.integers(1, 90, count).astype(float), draw.uniform(1, 90, count)
        blocks = np.ceil(tokens / size) - draw.integers(0, 2, count)
        groups = [
            BlockDemand(*(floats(values[i]) for values in (tokens, blocks, blocks / 2, remaining)), floats(1 + i % 3))
            for i in range(count)
        ]
        all_of_them, bound = groups[0], 40 + groups[0].growth(tables)
        for group in groups[1:]:
            assert all_of_them.peak(40, tables) <= bound + 1e-9
            if draw.random() < 0.3:
                bound = all_of_them.peak(40, tables)
                all_of_them.order = None
            all_of_them, bound = all_of_them + group, bound + group.growth(tables)


def test_a_peak_that_is_not_computed_changes_no_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same requests, with the peak computed for each prompt."""
    given, peak, computed = ("quire", "bursts", 50.0, 30, 600), BlockDemand.peak, list[float]()

    def counted(*args: Any) -> float:
        computed.append(peak(*args))
        return computed[-1]

    monkeypatch.setattr(BlockDemand, "peak", counted)
    bounded, num_computed = simulate(*given), len(computed)
    monkeypatch.setattr(BlockDemand, "growth", lambda *_: float("inf"))
    assert simulate(*given) == bounded and bounded.num_done == 30
    assert 0 < num_computed < len(computed) - num_computed


def test_a_prompt_waits_for_those_that_will_need_the_blocks_and_says_so() -> None:
    """R52, R132: with room for the prompt but not for the forecast peak; none is preempted, and alone any request starts."""
    core = quire_core({"num_gpu_blocks": 13}, restraint="expected_peak", caution=1.0)
    core.add(request("a", 8, max_tokens=24))
    core.add(request("b", 8, max_tokens=24, at=1.0))
    [plan] = core.schedule(0.0)
    assert (running(core), waiting(core)) == (["a"], ["b"])
    [event] = [event for event in plan.events if event.reason is Reason.RESERVED]
    assert event.request_id == "b"
    assert event.numbers["need"] > event.numbers["capacity"] == 12
    core.reset_sequences_of_lost_worker()
    seen: list[str] = []
    serve(core, look=lambda plan: seen.extend(mode for _, mode in plan.preempted))
    assert seen == []


def test_enough_blocks_and_it_starts() -> None:
    """The numbers of the reason are true: with the blocks that it names as needed the prompt starts, with one less it waits."""
    for num_blocks, names in ((18, ["a", "b"]), (17, ["a"])):
        core = quire_core({"num_gpu_blocks": num_blocks}, restraint="expected_peak", caution=1.0)
        core.add(request("a", 8, max_tokens=24))
        core.add(request("b", 8, max_tokens=24, at=1.0))
        core.schedule(0.0)
        assert running(core) == names, num_blocks


def test_shared_prefixes_take_no_room() -> None:
    """R22, R134: blocks that others hold already are not needed again."""
    core = quire_core({"num_gpu_blocks": 13, "prefix_caching": True}, restraint="expected_peak", caution=1.0)
    for name in ("a", "b"):
        each = request(name, 25, max_tokens=4)
        each.prompt_token_ids[:] = range(1, 26)
        each.as_one_group()
        core.add(each)
    core.schedule(0.0)
    assert running(core) == ["a", "b"]


def simulate(policy: str, workload: str, rate: float, num: int, num_blocks: int, costs: Costs | None = None) -> Figures:
    """So many requests on a modelled GPU, which has as many host blocks; `costs`: what is known of it."""
    jobs = WORKLOADS[workload](3, num, rate)
    whole = presets.preset(policy).phases == "prefill_or_decode"
    limits = CoreLimits(
        block_size=16,
        num_gpu_blocks=num_blocks,
        num_cpu_blocks=num_blocks,
        max_model_len=8_192,
        max_num_batched_tokens=8_192 if whole else 2_048,
        prefix_caching=not whole,
    )
    core = presets.build(policy, limits)
    core.observe_costs(costs or Costs())
    return Simulation(core, jobs.arrivals(), jobs.tokens(), GPU, seed=3).run().figures()


@pytest.mark.parametrize(
    ("workload", "rate", "num", "num_blocks"),
    [
        ("bursts", 50.0, 30, 300),
        pytest.param("bursts", 50.0, 60, 600, marks=pytest.mark.long),
        pytest.param("bursts", 50.0, 200, 1_500, marks=pytest.mark.long),
        pytest.param("long-prompts", 15.0, 200, 1_500, marks=pytest.mark.long),
    ],
)
def test_fewer_tokens_are_lost_than_by_any_teacher(
    workload: str, rate: float, num: int, num_blocks: int, record_property: Callable[[str, object], None]
) -> None:
    """R131, R202: where blocks are short the teachers compute much twice; `quire` no more than the best of them or a
    hundredth, once it knows costs a hundredth at most, and it is done sooner."""
    teachers = [simulate(policy, workload, rate, num, num_blocks) for policy in ("vllm-v0", "vllm-v1")]
    assert teachers[1].num_lost_tokens > 0.01 * teachers[1].num_computed_tokens
    for costs in (None, GPU.costs):
        own = simulate("quire", workload, rate, num, num_blocks, costs)
        assert own.num_done == own.num_requests
        least = min(figures.num_lost_tokens for figures in teachers) if costs is None else 0
        assert own.num_lost_tokens <= max(least, 0.01 * own.num_computed_tokens)
        assert own.throughput > max(figures.throughput for figures in teachers)
        record_property(
            "size", f"lost tokens, {workload}: {own.num_requests} requests, {own.num_computed_tokens} tokens"
        )
