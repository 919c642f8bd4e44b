"""What one step may take."""

import pytest

from scheduler_svc.core.parts.budget import StepBudget


def test_a_budget_starts_empty_and_counts_both() -> None:
    """R37: token budget, sequence limit, and what is taken of each."""
    budget = StepBudget(10, 3)
    assert (budget.token_budget, budget.max_num_seqs, budget.num_tokens, budget.num_seqs) == (10, 3, 0, 0)
    budget.add_num_tokens("a", 4)
    budget.add_num_seqs("a", 2)
    assert (budget.num_tokens, budget.num_seqs) == (4, 2)


@pytest.mark.parametrize(("tokens", "seqs", "fits"), [(6, 1, True), (7, 1, False), (6, 2, False), (1, 1, True)])
def test_both_must_fit_up_to_the_limit(tokens: int, seqs: int, fits: bool) -> None:
    """R38: up to and including the limits."""
    budget = StepBudget(10, 3)
    budget.add_num_tokens("a", 4)
    budget.add_num_seqs("a", 2)
    assert budget.can_schedule(tokens, seqs) is fits


@pytest.mark.parametrize(("tokens", "seqs"), [(0, 1), (1, 0)])
def test_asking_for_nothing_is_a_bug(tokens: int, seqs: int) -> None:
    """R38: neither number may be 0."""
    with pytest.raises(AssertionError):
        StepBudget(10, 3).can_schedule(tokens, seqs)


def test_a_request_counts_once_whatever_the_amount() -> None:
    """R39: the second add of a request is ignored, for tokens and sequences apart."""
    budget = StepBudget(10, 5)
    for amount in (3, 7):
        budget.add_num_tokens("a", amount)
        budget.add_num_seqs("a", amount - 2)
    assert (budget.num_tokens, budget.num_seqs, budget.num_tokens_left) == (3, 1, 7)


def test_only_what_was_added_is_taken_off_and_then_forgotten() -> None:
    """R39: subtract acts once and only on known requests; after it an add works again."""
    budget = StepBudget(10, 5)
    budget.subtract_num_tokens("a", 3)
    budget.subtract_num_seqs("a", 3)
    assert (budget.num_tokens, budget.num_seqs) == (0, 0)
    budget.add_num_tokens("a", 3)
    budget.add_num_seqs("a", 2)
    for _ in range(2):
        budget.subtract_num_tokens("a", 3)
        budget.subtract_num_seqs("a", 2)
    assert (budget.num_tokens, budget.num_seqs) == (0, 0)
    budget.add_num_tokens("a", 5)
    budget.add_num_seqs("a", 1)
    assert (budget.num_tokens, budget.num_seqs) == (5, 1)
