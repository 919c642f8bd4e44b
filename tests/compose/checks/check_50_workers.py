"""Profile `workers`: two of them under one scheduler with policy chitu-dp."""

import pytest

from quire.operators.admin import AdminClient
from tests.compose.checks.conftest import Stacks
from tests.compose.checks.requests import GREEDY, client, undisturbed
from tests.compose.stack import ADMIN, Setup, Stack


@pytest.fixture
def two(stacks: Stacks) -> Stack:
    """Two workers."""
    return stacks.need("workers", Setup("workers"))


def test_both_workers_work(two: Stack) -> None:
    """--profile takes the place of the one in .env; steps ran on both lanes, planned by chitu-dp."""
    services = {"scheduler-dp", "worker-1", "worker-2"}
    assert services <= set(two.services())
    assert not {"scheduler", "worker", "worker-gpu"} & set(two.services())
    with client() as door, AdminClient(ADMIN) as admin:
        assert all(len(tokens) == GREEDY.max_tokens for tokens in undisturbed(door))
        assert len(admin.workers()) == 2
        steps = list(admin.steps())
    assert {step.lane for step in steps} == {0, 1}
    assert {step.policy for step in steps} == {"chitu-dp"}
