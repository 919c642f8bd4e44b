"""How v0 starts prompts."""

import pytest

from scheduler_svc.core.request import SequenceStatus
from tests.support.core.v0_builders import add, chunks, make_chunked, make_v0, names, one_step, queues, steps, until

IGNORED = SequenceStatus.FINISHED_IGNORED


def test_a_prompt_starts_as_a_whole() -> None:
    """R49, R55: all its tokens in one step, as a chunk of that size, blocks for all of them, counted in both budgets."""
    core = make_v0()
    request = add(core, "a", 11, n=2)
    [plan] = core.schedule(0)
    [entry] = plan.scheduled
    assert (entry.num_tokens, entry.is_prefill, entry.samples, len(entry.new_block_ids)) == (11, True, True, 3)
    assert (plan.num_batched_tokens, core.state.num_running_seqs) == (11, 2)
    assert request.sequences[0].status is SequenceStatus.RUNNING
    assert queues(core) == {"waiting": [], "running": ["a"], "swapped": []}


def test_a_prompt_beyond_the_limit_is_ignored_and_the_next_one_looked_at() -> None:
    """R50, R196, R207: every one that is too long ends in the step that finds it, told even if no prompt starts (2023: one
    a step, and lost)."""
    core = make_v0(max_model_len=16, max_num_batched_tokens=16)
    for name, length in (("long1", 17), ("long2", 40), ("fits", 15)):
        add(core, name, length)
    plan, _ = one_step(core)
    assert [(e.request_id, e.status) for e in plan.ended] == [("long1", IGNORED), ("long2", IGNORED)]
    assert chunks(plan) == [("fits", 15)]
    add(core, "long3", 17)
    plan, _ = one_step(core)
    assert ([e.request_id for e in plan.ended], chunks(plan)) == (["long3"], [("fits", 1)])


def test_without_chunks_the_budget_limits_a_prompt_too() -> None:
    """R50: min(max_model_len, max_num_batched_tokens), also with chunks when there are several steps per plan; else only the
    model's length."""
    by_steps = {}
    for num_steps in (1, 2):
        core = make_chunked(num_scheduler_steps=num_steps)
        add(core, "a", 9)
        plan, _ = one_step(core)
        by_steps[num_steps] = (chunks(plan), [e.request_id for e in plan.ended])
    assert by_steps == {1: ([("a", 8)], []), 2: ([], ["a"])}
    core = make_chunked(max_num_batched_tokens=80)
    add(core, "b", 65)
    add(core, "c", 64)
    plan, _ = one_step(core)
    assert (chunks(plan), [e.request_id for e in plan.ended]) == ([("c", 64)], ["b"])


def test_an_adapter_for_long_prompts_has_its_own_limit() -> None:
    """R50: it overrides the model's."""
    core = make_v0(num_gpu_blocks=40, max_num_batched_tokens=100)
    add(core, "plain", 65, lora_id=1)
    add(core, "too long", 81, lora_id=2, long_lora_max_len=80)
    add(core, "long", 80, lora_id=2, long_lora_max_len=80)
    plan, _ = one_step(core)
    assert ([e.request_id for e in plan.ended], chunks(plan)) == (["plain", "too long"], [("long", 80)])


def test_a_prompt_that_can_never_have_its_blocks_is_ignored() -> None:
    """R51, R196: total less needed is below the watermark; the next one is looked at."""
    core = make_v0(num_gpu_blocks=10, watermark_blocks=1)
    add(core, "never", 37)
    add(core, "just", 36)
    plan, _ = one_step(core)
    assert [(e.request_id, e.status) for e in plan.ended] == [("never", IGNORED)]
    assert chunks(plan) == [("just", 36)]


def test_a_prompt_without_blocks_now_waits_and_blocks_those_behind() -> None:
    """R51: free less needed is below the watermark: later; head-of-line blocking."""
    core = make_v0(num_gpu_blocks=10, watermark_blocks=1)
    add(core, "a", 18)
    one_step(core)
    add(core, "b", 17)
    add(core, "c", 1)
    assert chunks(one_step(core)[0]) == [("a", 1)]
    assert queues(core)["waiting"] == ["b", "c"]
    core.abort(["b"])
    assert chunks(one_step(core)[0]) == [("c", 1)]


def test_down_to_the_watermark_a_prompt_starts() -> None:
    """R51: equal is enough."""
    core = make_v0(num_gpu_blocks=10, watermark_blocks=1)
    add(core, "a", 18)
    one_step(core)
    add(core, "b", 16)
    plan, _ = one_step(core)
    assert (chunks(plan), plan.free_gpu) == ([("b", 16)], 1)


def test_what_is_cached_does_not_count_when_a_prompt_starts() -> None:
    """R51, R120: blocks needed are those of all its tokens, although all but one would be found."""
    core = make_v0(num_gpu_blocks=10, prefix_caching=True)
    prompt = list(range(1, 22))
    add(core, "a", prompt)
    one_step(core)
    add(core, "b", prompt)
    assert chunks(one_step(core)[0]) == [("a", 1)]


@pytest.mark.parametrize("preset", ["vllm-v0", "vllm-2023"])
@pytest.mark.parametrize(("num_blocks", "watermark"), [(99, 0), (100, 1), (199, 1), (250, 2)])
def test_one_percent_of_the_blocks_is_the_watermark(preset: str, num_blocks: int, watermark: int) -> None:
    """R52: rounded down; a prompt of all others starts, one block more never does."""
    for extra, ignored in ((0, []), (1, ["a"])):
        core = make_v0(preset, num_gpu_blocks=num_blocks, max_model_len=2000, max_num_batched_tokens=2000)
        add(core, "a", 4 * (num_blocks - watermark + extra))
        assert [e.request_id for e in one_step(core)[0].ended] == ignored


def test_adapters_beyond_the_slots_are_passed_over() -> None:
    """R53: set aside, put back at the head in their order; those with known adapters or none start."""
    core = make_v0(max_loras=1)
    for name, lora in (("a", 1), ("b", 2), ("c", 0), ("d", 3), ("e", 1)):
        add(core, name, 3, lora_id=lora)
    assert names(one_step(core)[0]) == ["c/0", "a/0", "e/0"]
    assert queues(core)["waiting"] == ["b", "d"]
    core.abort("ae")
    assert names(one_step(core)[0]) == ["b/0"]
    assert queues(core)["waiting"] == ["d"]


def test_adapters_that_run_already_take_slots() -> None:
    """R40, R53: those of running groups are collected first."""
    core = make_v0(max_loras=2)
    add(core, "a", 3, lora_id=1)
    one_step(core)
    for name, lora in (("b", 2), ("c", 3)):
        add(core, name, 3, lora_id=lora)
    assert names(one_step(core)[0]) == ["b/0"]


def test_a_prompt_that_the_budget_stops_is_not_passed() -> None:
    """R54: by tokens; a smaller one behind it waits too."""
    core = make_v0(max_model_len=20, max_num_batched_tokens=20)
    for name, length in (("a", 12), ("b", 9), ("c", 1)):
        add(core, name, length)
    assert [chunks(p) for p in steps(core, 2)] == [[("a", 12)], [("b", 9), ("c", 1)]]


def test_the_number_of_sequences_stops_a_prompt() -> None:
    """R54, R56, R196: n > 1 counts n from the prompt on, beside those that run; S0's shortened listing omits the sequence
    budget, as it omits the status of ignored groups (R50) and adapters (R53)."""
    core = make_v0(max_num_seqs=4)
    add(core, "a", 3)
    one_step(core)
    add(core, "b", 3, n=2)
    add(core, "c", 3, n=2)
    add(core, "d", 3)
    assert chunks(one_step(core)[0]) == [("b", 3)]
    assert queues(core)["waiting"] == ["c", "d"]


def test_an_empty_waiting_queue_is_no_prompt_step() -> None:
    """R196: neither with nor without running groups."""
    core = make_v0()
    [plan] = core.schedule(0)
    assert (plan.is_empty, plan.num_prefill_groups) == (True, 0)
    add(core, "a", 3)
    assert [p.num_prefill_groups for p in steps(core, 2)] == [1, 0]


class TestDelay:
    """R57: prompts wait for company while others run."""

    @staticmethod
    def core():
        """A prompt step at 100 s; the next step shows that it took 4 s: with a factor of 0.5 newcomers wait more than 2 s."""
        core = make_v0(delay_factor=0.5)
        add(core, "a", 3, arrival=100.0)
        assert chunks(one_step(core, 100.0)[0]) == [("a", 3)]
        return core

    def test_a_newcomer_waits_its_share_of_the_last_prompt_step(self) -> None:
        """R57: (now - earliest arrival) > factor x latency, strictly; the latency is measured once, by the next step."""
        core = self.core()
        add(core, "b", 3, arrival=103.0)
        seen = [chunks(one_step(core, now)[0])[0] for now in (104.0, 105.0, 105.01)]
        assert seen == [("a", 1), ("a", 1), ("b", 3)]

    def test_the_gate_is_asked_at_every_turn(self) -> None:
        """R57: the earliest of those still waiting decides: one that may start does not bring the others along."""
        core = self.core()
        add(core, "b", 3, arrival=101.0)
        add(core, "c", 3, arrival=103.0)
        assert chunks(one_step(core, 104.0)[0]) == [("b", 3)]

    def test_a_second_turn_has_forgotten_that_the_last_step_was_a_prompt(self) -> None:
        """R57: else it would measure a latency of 0 in the second pass and admit all."""
        core = self.core()
        add(core, "b", 3, arrival=101.0)
        add(core, "c", 3, arrival=103.9)
        assert chunks(one_step(core, 104.0)[0]) == [("b", 3)]
        assert chunks(one_step(core, 104.1)[0]) == [("c", 3)], "the step of b took 0.1 s"

    def test_with_nothing_running_all_may_start(self) -> None:
        """R57: an empty running queue opens the gate."""
        core = self.core()
        core.abort(["a"])
        add(core, "b", 3, arrival=103.9)
        assert chunks(one_step(core, 104.0)[0]) == [("b", 3)]

    def test_the_head_is_not_always_the_earliest(self) -> None:
        """R57: the earliest arrival of all that wait counts."""
        core = self.core()
        add(core, "b", 3, arrival=103.9)
        add(core, "c", 3, arrival=101.0)
        assert chunks(one_step(core, 104.0)[0]) == [("b", 3), ("c", 3)]

    def test_without_a_factor_no_prompt_waits(self) -> None:
        """R57, R201: time enters by the factor alone."""
        core = make_v0()
        add(core, "a", 3, arrival=100.0)
        one_step(core, 100.0)
        add(core, "b", 3, arrival=103.9)
        assert chunks(one_step(core, 104.0)[0]) == [("b", 3)]


def test_a_preempted_group_starts_again_before_newcomers() -> None:
    """R49, R77: its chunk is prompt and outputs."""
    core = make_v0(num_gpu_blocks=5)
    add(core, "a", 7, 4)
    add(core, "b", 7)
    until(core, "preempted")
    add(core, "c", 1)
    seen = until(core, "num_prefill_groups")
    assert seen.scheduled[0].name == "b/0"
    assert seen.scheduled[0].num_tokens > 7
