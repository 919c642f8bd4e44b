"""Models with states: random lives under every policy that serves them, what is computed again, and what is refused."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from scheduler_svc.core.composition import presets
from scheduler_svc.core.limits import CoreLimits, PoolSize
from scheduler_svc.core.plan import StepPlan, StepResult
from scheduler_svc.core.request import Request
from scheduler_svc.core.request_rules import BeamRules, StopRules
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.observe import memory_view
from svc_common.errors import ConfigError, InvalidArgument, OutOfRange
from tests.support.core.builders import answer, hash_free, make_request, one_step
from tests.support.core.preset_lives import POLICIES, live
from tests.support.core.quire_builders import quire_core, request, running, serve

Record = Callable[[str, object], None]
MODERN = [name for name in POLICIES if presets.preset(name).has("cache groups")]
_WITHOUT_DRAFTS = ("chitu", "chitu-skew", "chitu-dp")
LIMITS = CoreLimits(
    4, 65, 64, num_cpu_blocks=33, max_num_seqs=8, max_num_batched_tokens=16, num_state_blocks=3, checkpoint_tokens=8
)  # fmt: skip


def live_for(policy: str, num_steps: int, first_seed: int, **kinds: bool) -> str:
    """Lives until so many steps were planned; what was done. Of one worker, checkpoints must have been kept and read."""
    done, seed, num_kept, num_read, num_copied, num_swapped, num_drafts = 0, first_seed, 0, 0, 0, 0, 0
    while done < num_steps:
        try:
            life = live(policy, seed, states=True, grouped=seed % 2 == 0, **kinds)
        except Exception as error:
            error.add_note(f"live({policy!r}, {seed}, states=True, grouped={seed % 2 == 0}, **{kinds})")
            raise
        done += life.num_steps
        num_kept += sum(len(plan.states.to_keep) for plan in life.seen if plan.states)
        num_read += sum(len(plan.states.to_read) for plan in life.seen if plan.states)
        num_copied += sum(bool(plan.copy) for plan in life.seen)
        num_swapped += sum(bool(plan.swap_in) for plan in life.seen)
        num_drafts += sum(entry.num_drafts for plan in life.seen for entry in plan.scheduled)
        seed += 1
    assert kinds.get("several") or (num_kept and num_read)
    assert kinds.get("several") or num_drafts > 50 or policy in _WITHOUT_DRAFTS
    return (
        f"core under {policy}: {done} random steps with states in {seed - first_seed} lives; {num_kept} checkpoints kept, "
        f"{num_read} read, {num_copied} steps with copies, {num_swapped} with swap-ins, {num_drafts} draft tokens"
    )


@pytest.mark.parametrize("policy", MODERN)
def test_random_lives(policy: str, record_property: Record) -> None:
    """R3, R28, R102, R137, R200: in every step each sequence begins with the states after exactly its own tokens."""
    record_property("size", live_for(policy, 2500, 0))


@pytest.mark.parametrize("policy", [policy for policy in MODERN if policy != "chitu-dp"])
def test_random_lives_of_several_workers(policy: str, record_property: Record) -> None:
    """R2, R200: pools of several sizes, workers that are lost and drained."""
    record_property("size", live_for(policy, 1000, 0, several=True))


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("policy", MODERN)
def test_many_random_lives(policy: str, several: bool, record_property: Record) -> None:
    """The same in many more lives."""
    record_property("size", live_for(policy, 50_000, 700_000, several=several and policy != "chitu-dp"))


# --- plans -----------------------------------------------------------------------------------------------------------


def served(core: Scheduler, *requests: Request) -> list[StepPlan]:
    """All plans until these have ended."""
    for each in requests:
        core.add(each)
    plans = []
    while core.has_unfinished:
        for plan in core.schedule(float(len(plans))):
            plans.append(plan)
            if not plan.is_empty:
                core.update(answer(plan))
    return plans


def test_plans_say_what_is_read_and_kept() -> None:
    """The first plan has all of a table, states first; checkpoints are kept in the steps that reach them."""
    core = presets.build("vllm-v1", LIMITS)
    first, second, *_ = served(core, make_request("a", 22, 3))
    assert first.scheduled[0].new_block_ids == [1, 2, 3, 4, 5, 6, 7] and second.scheduled[0].new_block_ids == [14, 15]
    assert [(k.name, k.num_tokens) for k in first.states.to_keep] == [("a/0", 16), ("a/0", 8)]
    assert first.states.to_keep[0].block_ids == (8, 9, 10)
    assert [(k.name, k.num_tokens) for k in second.states.to_keep] == [("a/0", 20)]
    again, *_ = served(core, make_request("b", core_prompt("a", 22), 1))
    assert again.lookups == [("b", 20)] and again.num_tokens == 2 and not again.states.to_keep
    assert again.states.to_read == [("b/0", 20, second.states.to_keep[0].block_ids)]
    assert core.check_integrity() == [] and core.pool_report().refs == {}


def core_prompt(name: str, length: int) -> list[int]:
    """The prompt of the request with that name."""
    return [1 + hash_free(name, i) for i in range(length)]


@pytest.mark.parametrize("policy", MODERN)
def test_a_repeated_prompt_is_computed_from_its_last_checkpoint(policy: str) -> None:
    """R137: of 2,000 tokens at most one distance, and of one that goes on otherwise at most one from where it does."""
    limits = replace(
        LIMITS, max_model_len=2100, num_gpu_blocks=2200, max_num_batched_tokens=2100, checkpoint_tokens=256
    )
    knobs = {"dp_prefix_affinity": 8} if policy == "chitu-dp" else {}
    core = presets.build(policy, limits, **knobs)
    prompt = [1 + i % 97 for i in range(2000)]
    counts = []
    for name, tokens in (("a", prompt), ("b", prompt), ("c", [*prompt[:1500], *range(500, 1000)])):
        plans = served(core, make_request(name, tokens, 1))
        counts.append(sum(plan.num_tokens for plan in plans))
    assert counts == [2000, 4, 500 + 1500 % 256]


@pytest.mark.parametrize(
    ("policy", "mode"), [("vllm-v1", None), ("quire", "swap"), ("quire", "recompute"), ("chitu", None)]
)
def test_checkpoints_change_no_schedule_where_nothing_repeats(policy: str, mode: str | None) -> None:
    """They take only free blocks, and none of them when a plan is made: with caching off all plans are the same."""

    def schedule(*, caching: bool) -> list[object]:
        limits = replace(LIMITS, num_gpu_blocks=26, prefix_caching=caching, checkpoint_tokens=4)
        knobs = {"preemption_mode": mode, "restraint": None, "makes_way": False} if mode else {}
        core = presets.build(policy, replace(limits, max_num_batched_tokens=64), **knobs)
        requests = [make_request(name, 9 + 5 * i, 20, arrival=float(i)) for i, name in enumerate("abcdef")]
        for each in requests:
            each.no_cache_reuse = True
        plans = served(core, *requests)
        assert any(plan.states and plan.states.to_keep for plan in plans) is caching
        assert any(plan.preempted for plan in plans)
        return [
            (
                [(e.name, e.num_tokens, e.computed_before) for e in p.scheduled],
                p.preempted,
                p.free_gpu,
                p.free_cpu,
                p.num_waiting,
            )
            for p in plans
        ]

    assert schedule(caching=True) == schedule(caching=False)


def test_tokens_are_those_of_a_model_without_states() -> None:
    """States change which blocks there are, and with room for all and nothing cached nothing else."""
    for policy in MODERN:
        limits = replace(LIMITS, num_gpu_blocks=400, prefix_caching=False, max_num_batched_tokens=64)
        of_kinds = []
        for each in (limits, replace(limits, num_state_blocks=0, cache_windows=())):
            core = presets.build(policy, each)
            plans = served(core, make_request("a", 30, 9), make_request("b", 7, 9), make_request("c", 19, 9))
            of_kinds.append([[(e.name, e.num_tokens) for e in plan.scheduled] for plan in plans])
        assert of_kinds[0] == of_kinds[1]


def test_beams_that_were_preempted_each_compute_their_own_states() -> None:
    """R77: they share the blocks of the prompt, whose KV each writes again, as states cannot be shared."""
    core = presets.build("vllm-v1", replace(LIMITS, max_num_batched_tokens=64))
    prompt = core_prompt("a", 17)
    core.add(Request("a", prompt, StopRules(max_tokens=8), 0.0, n=2, beam=BeamRules()))
    for _ in range(4):
        [plan] = core.schedule(0.0)
        core.update(
            StepResult(
                plan.step,
                candidates={e.name: [(5 + e.index, -0.1), (6, -0.3), (7, -2), (8, -3)] for e in plan.scheduled},
            )
        )
    names = [sequence.name for sequence in core.state.running[0].live]
    core.reset_sequences_of_lost_worker()
    computed: dict[str, list[tuple[int, int]]] = {name: [] for name in names}
    while not all(len(shares) > 1 for shares in computed.values()):
        [plan] = core.schedule(0.0)
        for entry in plan.scheduled:
            computed[entry.name].append((entry.computed_before, entry.num_tokens))
        core.update(
            StepResult(
                plan.step,
                candidates={e.name: [(5, -0.1), (6, -0.2), (7, -1), (8, -2)] for e in plan.scheduled if e.samples},
            )
        )
    assert len(names) == 2 and all(shares[:2] == [(0, 20), (20, 1)] for shares in computed.values())


def test_restraint_counts_states() -> None:
    """R52: of 26 blocks, two requests that grow to 32 tokens take 8 each, and 3 of states, or 6."""
    for num_states, started in ((3, ["a", "b"]), (6, ["a"])):
        limits = {"num_gpu_blocks": 27, "num_state_blocks": num_states, "checkpoint_tokens": 4}
        core = quire_core(limits, restraint="expected_peak", caution=1.0)
        core.add(request("a", 8, max_tokens=24))
        core.add(request("b", 8, max_tokens=24, at=1.0))
        [plan] = core.schedule(0.0)
        assert running(core) == started
        core.update(answer(plan))
        serve(core)


@pytest.mark.parametrize("num_states", [0, 3])
def test_what_a_failed_step_was_to_compute_for_a_request_sent_back_is_no_prefix(num_states: int) -> None:
    """R28: an operator moves the requests of a worker while its step is in flight; then that fails."""
    limits = replace(LIMITS, max_num_batched_tokens=32, num_state_blocks=num_states, cache_windows=())
    core = presets.build("quire", limits)
    core.add(make_request("a", 22, 3))
    [plan] = core.schedule(0.0)
    core.send_back(0)
    core.fail_step(plan.step, "broken")
    [again] = core.schedule(1.0)
    assert again.lookups == [("a", 0)] and again.num_tokens == 22


# --- sizes and reports -----------------------------------------------------------------------------------------------


def test_what_is_too_long_for_the_cache_is_refused_at_once() -> None:
    """R197: of 12 blocks 3 hold states."""
    core = presets.build("vllm-v1", replace(LIMITS, num_gpu_blocks=13))
    assert core.state.cache.capacity_tokens == 36
    core.add(make_request("fits", 36, 4))
    with pytest.raises(OutOfRange, match="cache 36 tokens"):
        core.add(make_request("long", 37, 4))


def test_the_memory_report_counts_states_as_blocks_without_slots() -> None:
    """R209: 19 tokens: 5 blocks with an empty slot, and 3 of states."""
    core = presets.build("vllm-v1", replace(LIMITS, max_num_batched_tokens=32))
    core.add(make_request("a", 17, 4))
    one_step(core)
    one_step(core)
    report = memory_view.memory_report([core.state])
    assert (report.paged.num_tokens, report.paged.physical_blocks, report.paged.waste_tokens) == (19, 8, 1)
    assert report.contiguous.used == 19


@pytest.mark.parametrize("policy", ["chitu-skew", "chitu-dp"])
def test_reserved_blocks_suffice_for_states_and_what_a_start_reads(policy: str) -> None:
    """R186: nothing is given up for lack of blocks that was reserved; all that repeats is read from a checkpoint."""
    limits = replace(LIMITS, num_gpu_blocks=48, max_num_batched_tokens=64)
    core = presets.build(policy, limits, max_reqs=4)
    prompt = core_prompt("p", 18)
    plans = served(core, *(make_request(f"{i}", prompt, 9, arrival=float(i)) for i in range(9)))
    assert not any(end.error for plan in plans for end in plan.ended)
    assert sum(len(plan.states.to_read) for plan in plans if plan.states) >= 4


# --- what does not go with states -------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["vllm-2023", "vllm-v0", "vllm-v0-chunked"])
def test_policies_of_v0_are_refused(policy: str) -> None:
    """The error says which part, and what to do."""
    limits = replace(LIMITS, max_num_batched_tokens=64)
    with pytest.raises(ConfigError, match=r"cache=.* keeps no states of sequences.*use cache=v1_pool or quire"):
        presets.build(policy, limits)
    if policy != "vllm-2023":
        with pytest.raises(ConfigError, match=r"phases=.*use policy quire or vllm-v1"):
            presets.build(policy, limits, cache="quire")


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_no_checkpoint_ends_with_tokens_that_may_be_drafts(num_drafts: int) -> None:
    """Without drafts a checkpoint may end with a token that a step in flight generates; that of the prompt is kept always."""
    core = presets.build("quire", LIMITS, num_spec_tokens=num_drafts, batch_queue=2)
    core.add(make_request("a", 21, 30))
    kept, in_flight = [], []
    while core.has_unfinished:
        for plan in core.schedule(0.0):
            in_flight += [] if plan.is_empty else [plan]
            kept += [keep.num_tokens for keep in plan.states.to_keep] if plan.states else []
        if len(in_flight) == 2 or plan.is_empty:
            core.update(answer(in_flight.pop(0)))
    assert kept == ([16, 8, 20] if num_drafts else [16, 8, 20, 24, 32, 40, 48])
    assert core.check_integrity() == [] and core.pool_report().refs == {}


def test_prefilled_requests_are_refused() -> None:
    """States are not in blocks of KV."""
    core = presets.build("vllm-v1", LIMITS)
    with pytest.raises(InvalidArgument, match="committed: cannot be taken over"):
        core.add_prefilled(Request("b", [1, 2, 3], StopRules(max_tokens=4), 0.0, committed=[4]))


def test_the_distance_of_checkpoints_is_whole_blocks() -> None:
    """And there is one cache group where the worker says none."""
    for distance in (0, 6):
        with pytest.raises(
            ConfigError, match=rf"checkpoint_tokens \({distance}\) must be a multiple of block_size \(4\)"
        ):
            replace(LIMITS, checkpoint_tokens=distance)
    assert LIMITS.cache_windows == (0,) and replace(LIMITS, cache_windows=(6,)).cache_windows == (6,)


def test_checkpoints_are_kept_by_plans() -> None:
    """Fast decode plans all steps of decode but those that keep a checkpoint."""
    limits: dict[str, Any] = {"max_granted_steps": 4}
    core = presets.build("quire", replace(LIMITS, **limits), pools=[PoolSize(65), PoolSize(65)], batch_queue=1)
    core.add(make_request("a", 9, 20))
    decodes = []
    for _ in range(12):
        for plan in core.schedule(0.0):
            if not plan.is_empty:
                kept = [blocks.num_tokens for blocks in plan.states.to_keep] if plan.states else []
                decodes.append((plan.fast is not None, kept))
                core.update(answer(plan))
    assert decodes[0] == (False, [8])
    assert [at for at, (is_fast, _) in enumerate(decodes) if not is_fast] == [0, 7]
    assert decodes[7] == (False, [16])
    assert running(core) == ["a"]
