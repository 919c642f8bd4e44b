"""Ownership: epochs, leases, resuming, fencing. Time is a number here."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from svc_common.errors import Aborted, FailedPrecondition
from worker_svc.shell.ownership import Grant, Hello, Ownership, StepVerdict

BOOT = "worker-boot"
LEASE_S = 10.0


def ownership(depth: int = 4) -> Ownership[str]:
    return Ownership(BOOT, lease_s=LEASE_S, ring_depth=depth)


def run_steps(owned: Ownership[str], grant: Grant[str], first: int, last: int) -> None:
    for step_id in range(first, last + 1):
        assert owned.accept(grant.stream, grant.epoch, step_id) is StepVerdict.RUN
        assert owned.record(grant.epoch, step_id, f"result {step_id}")


def back(boot_id: str, epoch: int, last_step_id: int = 0, *, force: bool = False) -> Hello:
    return Hello(boot_id, epoch, BOOT, last_step_id, force)


def test_epochs_count_up_by_one_for_each_new_owner() -> None:
    owned = ownership()
    a = owned.hello(Hello("a"), 0)
    assert (a.epoch, a.resumed) == (1, False)
    owned.leave(a.stream, 5)
    b = owned.hello(Hello("b"), 5 + LEASE_S)
    assert (b.epoch, b.resumed) == (2, False)


def test_another_scheduler_is_refused_while_the_stream_is_open_or_the_lease_runs() -> None:
    """Both identities and a retry time are named."""
    owned = ownership()
    a = owned.hello(Hello("a"), 0)
    with pytest.raises(FailedPrecondition, match=r"scheduler a owns .* so scheduler b") as caught:
        owned.hello(Hello("b"), 1_000)
    assert caught.value.retry_after_s == LEASE_S
    owned.leave(a.stream, 1_000)
    with pytest.raises(FailedPrecondition) as caught:
        owned.hello(Hello("b"), 1_004)
    assert caught.value.retry_after_s == 6
    assert owned.hello(Hello("b"), 1_010).epoch == 2


def test_force_takes_over_from_an_open_stream_and_fences_the_other() -> None:
    owned = ownership()
    a = owned.hello(Hello("a"), 0)
    run_steps(owned, a, 1, 1)
    b = owned.hello(Hello("b", force=True), 1)
    assert (b.epoch, b.resumed) == (2, False)
    with pytest.raises(Aborted, match="owner of the worker in epoch 2: b"):
        owned.accept(a.stream, a.epoch, 2)
    assert not owned.record(a.epoch, 1, "late"), "a late result of an older epoch is dropped"
    run_steps(owned, b, 1, 1)


def test_goodbye_frees_the_worker_at_once_but_its_owner_may_still_come_back() -> None:
    owned = ownership()
    a = owned.hello(Hello("a"), 0)
    owned.leave(a.stream, 1, goodbye=True)
    assert owned.hello(back("a", 1), 1).resumed
    owned.leave(2, 1, goodbye=True)
    assert owned.hello(Hello("b"), 1).epoch == 2


def test_resume_sends_again_what_was_not_read() -> None:
    owned = ownership()
    a = owned.hello(Hello("a"), 0)
    run_steps(owned, a, 1, 5)
    assert owned.accept(a.stream, 1, 6) is StepVerdict.RUN
    owned.leave(a.stream, 1)
    again = owned.hello(back("a", 1, 3), 2)
    assert (again.epoch, again.resumed, again.results) == (1, True, ("result 4", "result 5"))
    assert owned.num_open == 1
    assert owned.accept(again.stream, 1, 6) is StepVerdict.PENDING
    assert owned.record(1, 6, "result 6")
    run_steps(owned, again, 7, 7)


def test_own_reconnect_replaces_a_stream_that_still_looks_open() -> None:
    owned = ownership()
    a = owned.hello(Hello("a"), 0)
    again = owned.hello(back("a", 1), 0)
    assert again.resumed
    with pytest.raises(Aborted):
        owned.accept(a.stream, 1, 1)
    owned.leave(a.stream, 0)
    assert owned.is_current(again.stream), "the old stream's end says nothing about the new one"


def test_resume_after_the_lease_without_another_owner() -> None:
    owned = ownership()
    a = owned.hello(Hello("a"), 0)
    owned.leave(a.stream, 0)
    assert owned.hello(back("a", 1), 1_000).resumed


@pytest.mark.parametrize(
    "hello",
    [
        back("a", 1, 0),
        back("a", 1, 7),
        back("a", 2, 6),
        Hello("a", 1, "another worker's boot", 6),
        Hello("a"),
    ],
    ids=["results-gone", "ahead-of-worker", "other-epoch", "other-boot", "wants-new"],
)
def test_what_cannot_be_resumed_starts_an_empty_epoch(hello: Hello) -> None:
    owned = ownership()
    a = owned.hello(Hello("a"), 0)
    run_steps(owned, a, 1, 6)
    owned.leave(a.stream, 0)
    grant = owned.hello(hello, 1)
    assert (grant.epoch, grant.resumed, grant.results) == (2, False, ())
    run_steps(owned, grant, 1, 1)


def test_older_epoch_is_aborted() -> None:
    """A scheduler that was overtaken learns it, instead of a plain refusal."""
    owned = ownership()
    owned.hello(Hello("a"), 0)
    owned.hello(Hello("b", force=True), 0)
    with pytest.raises(Aborted, match="scheduler b owns this worker in epoch 2"):
        owned.hello(back("a", 1), 1)


def test_duplicate_gap_and_stale_steps() -> None:
    owned = ownership()
    a = owned.hello(Hello("a"), 0)
    run_steps(owned, a, 1, 6)
    assert owned.accept(a.stream, 1, 5) is StepVerdict.ANSWERED
    assert owned.result(5) == "result 5"
    with pytest.raises(FailedPrecondition, match="step 7 is next"):
        owned.accept(a.stream, 1, 8)
    with pytest.raises(FailedPrecondition, match="no longer held"):
        owned.accept(a.stream, 1, 2)
    with pytest.raises(FailedPrecondition, match="no longer held"):
        owned.accept(a.stream, 1, 0)
    with pytest.raises(Aborted, match="epoch 9"):
        owned.accept(a.stream, 9, 7)
    assert owned.accept(a.stream, 1, 7) is StepVerdict.RUN, "refusals change nothing"


class Machine(RuleBasedStateMachine):
    """Random hellos, losses, takeovers and steps of three schedulers that remember what they were told."""

    def __init__(self) -> None:
        super().__init__()
        self.owned = ownership()
        self.now = 0.0
        self.epoch_seen = 0
        self.streams: dict[str, Grant[str]] = {}
        self.read: dict[str, int] = {}
        self.sent: dict[str, int] = {}

    schedulers = st.sampled_from(["a", "b", "c"])

    @rule(seconds=st.integers(0, 15))
    def wait(self, seconds: int) -> None:
        self.now += seconds

    @rule(who=schedulers, force=st.booleans(), resume=st.booleans())
    def hello(self, who: str, force: bool, resume: bool) -> None:
        known = self.streams.get(who)
        hello = back(who, known.epoch, self.read[who], force=force) if known and resume else Hello(who, force=force)
        before = self.owned.epoch
        try:
            grant = self.owned.hello(hello, self.now)
        except (FailedPrecondition, Aborted) as refused:
            assert not force
            assert refused.metadata["owner"] != who
            assert 0 < refused.retry_after_s <= LEASE_S
            assert self.owned.epoch == before
            return
        if grant.resumed:
            assert grant.epoch == before
            unread = [f"{grant.epoch}:{i}" for i in range(self.read[who] + 1, self.owned.last_answered + 1)]
            assert list(grant.results) == unread, "every unread result, once, in order"
            self.read[who] = self.owned.last_answered
            self.sent[who] = self.owned.last_accepted
        else:
            assert grant.epoch == before + 1
            self.read[who] = self.sent[who] = 0
        self.streams[who] = grant

    @rule(who=schedulers, goodbye=st.booleans())
    def lose_stream(self, who: str, goodbye: bool) -> None:
        if who in self.streams:
            self.owned.leave(self.streams[who].stream, self.now, goodbye=goodbye)

    @rule(who=schedulers, ahead=st.integers(-5, 3))
    def send(self, who: str, ahead: int) -> None:
        grant = self.streams.get(who)
        if grant is None:
            return
        step_id, accepted = self.sent[who] + ahead, self.owned.last_accepted
        current = self.owned.is_current(grant.stream)
        try:
            verdict = self.owned.accept(grant.stream, grant.epoch, step_id)
        except Aborted:
            assert not current
        except FailedPrecondition:
            assert current
            assert step_id > accepted + 1 or step_id <= self.owned.last_answered - 4 or step_id < 1
        else:
            assert current
            assert (verdict is StepVerdict.RUN) == (step_id == accepted + 1)
            if verdict is StepVerdict.RUN:
                self.sent[who] = step_id
            if verdict is StepVerdict.ANSWERED:
                assert self.owned.result(step_id) == f"{grant.epoch}:{step_id}"

    @rule(read=st.booleans())
    def answer(self, read: bool) -> None:
        if not self.owned.num_open:
            return
        step_id = self.owned.last_answered + 1
        assert self.owned.record(self.owned.epoch, step_id, f"{self.owned.epoch}:{step_id}")
        for who, grant in self.streams.items():
            if read and self.owned.is_current(grant.stream) and self.read[who] == step_id - 1:
                self.read[who] = step_id

    @invariant()
    def at_most_one_owner_and_epochs_only_grow(self) -> None:
        assert sum(self.owned.is_current(grant.stream) for grant in self.streams.values()) <= 1
        assert self.owned.epoch >= self.epoch_seen
        self.epoch_seen = self.owned.epoch
        held = list(self.owned.held())
        assert held == list(range(self.owned.last_answered - len(held) + 1, self.owned.last_answered + 1))
        assert len(held) <= 4


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
