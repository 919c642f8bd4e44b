"""Models with several cache groups: random lives under every policy that serves them, and what plans and reports say."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from scheduler_svc.core.composition import live_change, presets
from scheduler_svc.core.limits import CoreLimits
from scheduler_svc.core.parts.preemption import num_lost_tokens
from scheduler_svc.core.reasons import Reason
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.observe import memory_view
from svc_common.errors import ConfigError, OutOfRange
from tests.support.core.builders import answer, make_request, one_step
from tests.support.core.preset_lives import POLICIES, live
from tests.support.core.quire_builders import quire_core, request, running, serve

Record = Callable[[str, object], None]
MODERN = [name for name in POLICIES if presets.preset(name).has("cache groups")]
LIMITS = CoreLimits(
    4, 65, 64, num_cpu_blocks=33, max_num_seqs=8, max_num_batched_tokens=16, cache_windows=(0, 6)
)  # fmt: skip


def live_for(policy: str, num_steps: int, first_seed: int, *, several: bool = False) -> str:
    """Lives until so many steps were planned; what was done."""
    done, seed = 0, first_seed
    while done < num_steps:
        try:
            done += live(policy, seed, several=several, grouped=True).num_steps
        except Exception as error:
            error.add_note(f"live({policy!r}, {seed}, several={several}, grouped=True)")
            raise
        seed += 1
    return f"core under {policy}: {done} random steps with cache groups in {seed - first_seed} lives"


@pytest.mark.parametrize("policy", [*MODERN, "vllm-v0", "vllm-v0-chunked"])
def test_random_lives(policy: str, record_property: Record) -> None:
    """R3, R28, R105, R200: each sequence reads its own past in each group; those of vLLM v0 in part with Quire's cache."""
    record_property("size", live_for(policy, 1500, 0))


@pytest.mark.parametrize("policy", [policy for policy in MODERN if policy != "chitu-dp"])
def test_random_lives_of_several_workers(policy: str, record_property: Record) -> None:
    """R2, R200: pools of several sizes, workers that are lost and drained."""
    record_property("size", live_for(policy, 500, 0, several=True))


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("policy", MODERN)
def test_many_random_lives(policy: str, several: bool, record_property: Record) -> None:
    """The same in many more lives."""
    record_property("size", live_for(policy, 50_000, 700_000, several=several))


# --- plans -----------------------------------------------------------------------------------------------------------


def grouped(policy: str = "vllm-v1", limits: CoreLimits = LIMITS, **knobs: Any) -> Scheduler:
    """A core for two groups: one for the whole sequence, one with a window of 6 tokens."""
    return presets.build(policy, limits, **knobs)


def test_plans_have_the_blocks_of_each_group_at_each_position() -> None:
    """The first plan has all of a table, later ones what was appended; blocks behind the window are freed meanwhile."""
    core = grouped()
    core.add(make_request("a", 20, 12))
    [first] = core.schedule(0.0)
    assert first.scheduled[0].new_block_ids == [1, 5, 2, 6, 3, 7, 4, 8]
    core.update(answer(first))
    plan, _ = one_step(core)
    assert (plan.scheduled[0].computed_before, plan.scheduled[0].new_block_ids) == (16, [9, 10])
    assert core.block_tables()["a/0"] == ["g1", "g0", "g2", "g0", "g3", "g7", "g4", "g8", "g9", "g10"]
    while core.has_unfinished:
        plan, _ = one_step(core)
        assert plan.fast is not None
        assert len(plan.scheduled[0].new_block_ids) in (0, 2)
        table = core.state.cache.ledger.tables.get("a/0", [])
        assert sum(map(bool, table[1::2])) <= 4 and all(table[::2])
    assert core.check_integrity() == [] and core.pool_report().refs == {}


def test_tokens_are_those_of_one_group() -> None:
    """Groups change which blocks there are, and with room for all nothing else."""

    def tokens(limits: CoreLimits) -> list[tuple[str, list[int]]]:
        core = presets.build("quire", limits, batch_queue=1, fast_path=False)
        for name, length in (("a", 30), ("b", 7), ("c", 19)):
            core.add(make_request(name, length, 9))
        found = []
        while core.has_unfinished:
            _, outcome = one_step(core)
            found += [(entry.name, list(entry.token_ids)) for entry in outcome.entries]
        return found

    roomy = replace(LIMITS, num_gpu_blocks=400)
    assert tokens(roomy) == tokens(replace(roomy, cache_windows=()))


def test_a_prefix_is_found_behind_what_the_window_has_lost() -> None:
    """R137: the first blocks of the window are freed and overwritten while the request runs; its prefix is a hit all the
    same, of the blocks that the next token attends to.
    """
    core = grouped(limits=replace(LIMITS, num_gpu_blocks=21, max_num_batched_tokens=64))
    prompt = [*range(1, 26)]
    core.add(make_request("a", prompt, 9))
    one_step(core)
    one_step(core)
    core.add(make_request("b", 14, 9))
    one_step(core)
    core.add(make_request("c", prompt, 1))
    [plan] = core.schedule(0.0)
    [entry] = [entry for entry in plan.scheduled if entry.request_id == "c"]
    assert plan.lookups == [("c", 24)] and entry.num_tokens == 1
    assert entry.new_block_ids == [1, 0, 2, 0, 3, 0, 4, 0, 5, 12, 6, 13, 10, 11]
    assert core.check_integrity() == []


def test_what_is_too_long_for_the_cache_is_refused_at_once() -> None:
    """R197: 20 blocks: a sequence of n tokens needs n / 4 and at most 10 of the window, with steps of 16 tokens."""
    core = grouped(limits=replace(LIMITS, num_gpu_blocks=21))
    assert core.state.cache.capacity_tokens == 40
    core.add(make_request("fits", 40, 4))
    with pytest.raises(OutOfRange, match="cache 40 tokens"):
        core.add(make_request("long", 41, 4))
    assert presets.build("vllm-v1", replace(LIMITS, num_gpu_blocks=26)).state.cache.capacity_tokens == 60


def test_a_slot_is_reserved_for_what_a_window_holds() -> None:
    """R186: two tasks of 60 tokens need 15 + 10 blocks each, of which 52 are enough; without the window it would be 60."""
    for windows, num_running in (((0, 6), 2), ((0, 0), 1)):
        limits = replace(LIMITS, num_gpu_blocks=53, max_num_batched_tokens=16, cache_windows=windows)
        core = presets.build("chitu-skew", limits, prefill_chunk_size=16, max_reqs=2)
        for name in "ab":
            core.add(make_request(name, 50, 11))
        most = 0
        while core.has_unfinished:
            for plan in core.schedule(0.0):
                if not plan.is_empty:
                    core.update(answer(plan))
            most = max(most, core.queue_lengths[1])
        assert most == num_running


def test_restraint_lets_in_what_windows_leave_room_for() -> None:
    """R52: of 24 blocks, two requests that grow to 32 tokens take 8 each and 3 or 4 of a window, or 8 again without one."""
    for windows, started in (((0, 4), ["a", "b"]), ((0, 0), ["a"])):
        core = quire_core({"num_gpu_blocks": 27, "cache_windows": windows}, restraint="expected_peak", caution=1.0)
        core.add(request("a", 8, max_tokens=24))
        core.add(request("b", 8, max_tokens=24, at=1.0))
        [plan] = core.schedule(0.0)
        assert running(core) == started
        reasons = [event.reason for event in plan.events if event.request_id == "b"]
        assert reasons[-1] is (Reason.RUNNING if "b" in started else Reason.RESERVED)
        core.update(answer(plan))
        serve(core)


# --- reports ---------------------------------------------------------------------------------------------------------


def test_the_memory_report_counts_slots_of_each_group() -> None:
    """R209: 18 tokens at 5 positions: 5 blocks and 3 of the window, with 2 empty slots in both last ones."""
    core = grouped()
    core.add(make_request("a", 17, 4))
    one_step(core)
    one_step(core)
    report = memory_view.memory_report([core.state])
    assert (report.paged.num_tokens, report.paged.physical_blocks, report.paged.waste_tokens) == (18, 8, 4)
    assert report.paged.max_waste_tokens == 2 and report.contiguous.used == 18


def test_blocks_that_others_share_are_not_lost() -> None:
    """R73: 16 tokens of the first are in blocks that the second holds too, behind its window in none; the second has blocks
    of the window for itself from token 8 on.
    """
    core = grouped("quire", replace(LIMITS, max_num_batched_tokens=64))
    prompt = [*range(1, 22)]
    core.add(make_request("a", prompt, 9))
    one_step(core)
    core.add(make_request("b", [*prompt[:16], 99], 9))
    one_step(core)
    groups = core.state.running
    assert [num_lost_tokens(group, core.state) for group in groups] == [22 - 16, 17 - 8]


# --- what does not go with groups -------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["vllm-2023", "vllm-v0", "vllm-v0-chunked"])
def test_one_table_for_all_layers_is_refused(policy: str) -> None:
    """The error says which part, and what to do."""
    limits = replace(LIMITS, max_num_batched_tokens=64)
    with pytest.raises(
        ConfigError, match=r"cache='vllm_\d+': keeps one block table .* 2 cache groups; .*--no-cache-groups"
    ):
        presets.build(policy, limits)
    with pytest.raises(ConfigError, match=r"cache='none': .*--no-cache-groups"):
        presets.build("vllm-v1", limits, cache="none")
    assert presets.build(policy, replace(limits, cache_windows=(6,))).state.cache.ledger.num_groups == 1


def test_groups_are_fixed_at_start_and_parts_are_not() -> None:
    """A live change keeps requests and their tables; other windows would be another model's."""
    core = grouped("quire")
    core.add(make_request("a", 20, 12))
    one_step(core)
    with pytest.raises(ConfigError, match=r"cache_windows .* cannot be changed while the scheduler runs"):
        live_change.reconfigure(core, core.spec, replace(core.limits, cache_windows=(0, 7)))
    before = core.block_tables()
    live_change.reconfigure(core, core.spec.with_knobs(policy="fcfs"), replace(core.limits, num_gpu_blocks=41))
    assert core.block_tables() == before and core.state.cache.capacity_blocks == 40
    while core.has_unfinished:
        one_step(core)
    assert core.check_integrity() == [] and core.pool_report().refs == {}
