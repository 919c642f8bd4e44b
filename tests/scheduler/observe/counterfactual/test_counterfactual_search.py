"""The search for what would have ended a wait, on made-up steps whose answer is known."""

from collections.abc import Callable, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.core.reasons import Reason
from scheduler_svc.observe.counterfactual.search import Value, find_counterfactual


class MadeUp:
    """A step that lets the request in when `rule` says so."""

    def __init__(self, now: dict[str, Value], rule: Callable[[Mapping[str, Value]], bool]) -> None:
        self.now, self.rule, self.num_tries = now, rule, 0

    def value(self, key: str) -> Value | None:
        return self.now.get(key)

    def most(self, key: str) -> int:
        return 10_000

    def lets_in(self, values: Mapping[str, Value]) -> bool:
        self.num_tries += 1
        return self.rule({**self.now, **values})


@given(now=st.integers(1, 500), need=st.integers(1, 9_000))
def test_one_key_that_is_enough_is_found_to_the_unit(now: int, need: int) -> None:
    """Just enough admits, one unit less does not."""
    need = max(need, now + 1)
    trial = MadeUp({"num_gpu_blocks": now, "max_num_seqs": 4}, lambda v: v["num_gpu_blocks"] >= need)
    assert find_counterfactual(trial, Reason.NEED_BLOCKS) == {"num_gpu_blocks": need}
    assert trial.num_tries < 40


@given(blocks=st.integers(11, 9_000), tokens=st.integers(101, 9_000))
def test_two_keys_that_are_needed_together_are_both_found(blocks: int, tokens: int) -> None:
    """A request far back in the queue may lack two things; each value is the least beside the other."""
    trial = MadeUp(
        {"num_gpu_blocks": 10, "max_num_batched_tokens": 100, "max_num_seqs": 7},
        lambda v: v["num_gpu_blocks"] >= blocks and v["max_num_batched_tokens"] >= tokens,
    )
    found = find_counterfactual(trial, Reason.BEHIND, "TOKEN_BUDGET")
    assert found == {"num_gpu_blocks": blocks, "max_num_batched_tokens": tokens}


def test_of_a_falling_key_the_largest_value_is_found() -> None:
    """A watermark or a delay that is a little smaller would have done."""
    assert find_counterfactual(
        MadeUp({"watermark_blocks": 50}, lambda v: v["watermark_blocks"] <= 41), Reason.NEED_BLOCKS
    ) == {"watermark_blocks": 41}
    found = find_counterfactual(MadeUp({"delay_factor": 0.5}, lambda v: v["delay_factor"] < 0.3), Reason.DELAY)
    assert found["delay_factor"] == pytest.approx(0.3, abs=1e-5)
    assert found["delay_factor"] < 0.3


def test_nothing_is_found_where_nothing_helps() -> None:
    """A result that is pending is not a matter of any knob."""
    assert find_counterfactual(MadeUp({"num_gpu_blocks": 3}, lambda v: False), Reason.RESULT_PENDING) == {}
