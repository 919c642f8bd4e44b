"""The outside checker: judges a transcript by what was promised to clients and workers, knowing nothing of the core.

It reads facts in order, as an outside observer of all clients and all workers. `judge` returns violations as sentences.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from tests.simulation.transcript import Arrived, Complained, Cut, Dropped, Ended, Fact, Got, Left, LostWorker, Planned

Streams = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Promise:
    """What holds for a run.

    `undisturbed`: tokens of every sequence if nothing disturbs it. `most_tokens`, `most_seqs`: of one plan; `extra_for_groups`:
    groups of several sequences may exceed the tokens by one each (R87); `counts_shares`: the tokens of all shares count, not only
    those that the plan says. `most_len`, `capacity`: tokens that a sequence may have, and that fit the cache. `most_steps`: between
    a request's arrival and its end. A request longer than `most_at_once`, or than the cache without the tokens `kept_free`, may be
    given up, under a policy that `gives_up` requests.
    """

    undisturbed: Streams
    most_tokens: int
    most_seqs: int
    most_len: int
    capacity: int
    most_steps: int
    extra_for_groups: bool = False
    counts_shares: bool = True
    kept_free: int = 0
    most_at_once: int = 1_000_000
    gives_up: bool = False


@dataclass(slots=True)
class _Request:
    arrived: Arrived
    at_step: int
    sequences: list[str] = field(default_factory=list)
    num_ends: int = 0


class Checker:
    """Owner of the accounts of one run: what every client has, which sequences are over."""

    def __init__(self, promise: Promise) -> None:
        self.violations: list[str] = []
        self._promise = promise
        self._requests: dict[str, _Request] = {}
        self._got: dict[str, list[int]] = defaultdict(list)
        self._over: dict[str, str] = {}
        self._num_steps = 0
        self._by_kind: dict[type[Fact], Callable[..., None]] = {
            Arrived: self._arrived,
            Planned: self._planned,
            Got: self._tokens,
            Dropped: self._dropped,
            Cut: self._cut,
            Ended: self._ended,
            Complained: self._complained,
            LostWorker: self._lost_worker,
            Left: self._left,
        }

    def see(self, facts: Iterable[Fact]) -> None:
        """The next facts."""
        for fact in facts:
            self._by_kind[type(fact)](fact)

    def _bad(self, what: str) -> None:
        self.violations.append(what)

    # --- clients ------------------------------------------------------------------------------------------------------

    def _arrived(self, fact: Arrived) -> None:
        promise = self._promise
        is_too_long = fact.num_prompt_tokens > min(promise.most_len - 1, promise.capacity)
        if fact.refusal is None:
            self._requests[fact.request_id] = _Request(fact, self._num_steps)
        elif not (is_too_long or (fact.has_deadline and "INFEASIBLE" in fact.refusal)):
            self._bad(f"{fact.request_id} was refused: {fact.refusal}")

    def _tokens(self, fact: Got) -> None:
        name, request = fact.name, self._requests.get(fact.request_id)
        if request is None or request.num_ends or name in self._over:
            self._bad(f"{name} got tokens after its end, or without having come")
            return
        if name not in self._got and fact.parent is not None:
            self._got[name] = self._got[fact.parent][: fact.offset]
        got = self._got[name]
        if fact.offset != len(got):
            self._bad(f"{name} got tokens from {fact.offset} on, having {len(got)}: some were lost or came twice")
        if name not in request.sequences:
            request.sequences.append(name)
        got += fact.tokens
        expected = self._promise.undisturbed.get(name, ())
        if self._promise.gives_up:
            got = got[: len(expected)]  # a request given up there may have continued here, after its worker was lost
        if tuple(got) != expected[: len(got)]:
            self._bad(f"{name} got {got}, in an undisturbed run {list(expected)}")
        if len(got) > request.arrived.max_tokens:
            self._bad(f"{name} got {len(got)} tokens, having asked for {request.arrived.max_tokens}")

    def _cut(self, fact: Cut) -> None:
        del self._got[fact.name][fact.num_tokens :]

    def _dropped(self, fact: Dropped) -> None:
        if fact.name in self._over:
            self._bad(f"{fact.name} was dropped after its end")
        self._over[fact.name] = "dropped"

    def _ended(self, fact: Ended) -> None:
        request = self._requests.get(fact.request_id)
        if request is None or request.num_ends:
            self._bad(f"{fact.name} ended after its request was over, or without having come")
            return
        if fact.name in self._over:
            self._bad(f"{fact.name} ended twice")
        self._over[fact.name] = fact.status
        request.num_ends += fact.last
        if self._num_steps - request.at_step > self._promise.most_steps:
            self._bad(f"{fact.request_id} took {self._num_steps - request.at_step} steps of work for all: starved")
        got = self._got[fact.name]
        if fact.name not in request.sequences:
            request.sequences.append(fact.name)
        if len(got) != fact.num_tokens:
            self._bad(f"{fact.name} ended with {fact.num_tokens} tokens, its client has {len(got)}")
        self._check_reason(fact, got, request.arrived)
        if fact.last:
            alive = [name for name in request.sequences if name not in self._over]
            if alive:
                self._bad(f"{fact.request_id} is over, but not {alive}")
            fates = {self._over[name] for name in request.sequences if name in self._over} - {"dropped"}
            complete = fates <= {"FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED"}
            if complete and len(request.sequences) < request.arrived.num_samples:
                self._bad(
                    f"{fact.request_id} is over with {request.sequences} of {request.arrived.num_samples} samples"
                )

    def _check_reason(self, fact: Ended, got: list[int], arrived: Arrived) -> None:
        if fact.stop_token is not None and got[-1:] != [fact.stop_token]:
            self._bad(f"{fact.name} stopped at token {fact.stop_token}, its client's last is {got[-1:]}")
        most = min(arrived.max_tokens, self._promise.most_len + 1 - arrived.num_prompt_tokens)
        if fact.status == "FINISHED_LENGTH_CAPPED" and len(got) not in (most, most - 1, arrived.max_tokens):
            self._bad(f"{fact.name} ended for its length with {len(got)} of {most} tokens")
        if fact.status == "FINISHED_IGNORED" and not self._may_be_ignored(arrived, len(got)):
            self._bad(f"{fact.name} was given up after {len(got)} tokens, though it fits: {fact.error}")

    def _may_be_ignored(self, arrived: Arrived, num_got: int) -> bool:
        """Longer than the model or the cache takes; several samples may be too many together."""
        promise, num_tokens = self._promise, arrived.num_prompt_tokens + num_got
        longest = min(promise.most_len, promise.most_at_once, promise.capacity - promise.kept_free) - 1
        return arrived.num_samples > 1 or promise.gives_up or num_tokens > longest

    # --- workers ------------------------------------------------------------------------------------------------------

    def _planned(self, fact: Planned) -> None:
        self._num_steps += 1
        names = [name for name, _, _ in fact.shares]
        if len(set(names)) != len(names):
            self._bad(f"step {fact.step} has a sequence twice")
        for name, request_id, num_tokens in fact.shares:
            request = self._requests.get(request_id)
            if request is None or request.num_ends or name in self._over:
                self._bad(f"step {fact.step} has {name}, which is over or never came")
            if num_tokens < 1:
                self._bad(f"step {fact.step} has {num_tokens} tokens of {name}")
        if fact.swaps_in and fact.swaps_out:
            self._bad(f"step {fact.step} swaps in and out")
        self._check_budget(fact)

    def _check_budget(self, fact: Planned) -> None:
        promise = self._promise
        total = sum(num for _, _, num in fact.shares)
        taken = max(fact.taken, total if promise.counts_shares else 0)
        per_request: dict[str, int] = defaultdict(int)
        for _, request_id, _ in fact.shares:
            per_request[request_id] += 1
        extra = sum(n for n in per_request.values() if n > 1) if promise.extra_for_groups else 0
        if taken > promise.most_tokens + extra:
            self._bad(f"step {fact.step} has {taken} tokens where {promise.most_tokens} may be")
        if len(fact.shares) > promise.most_seqs:
            self._bad(f"step {fact.step} has {len(fact.shares)} sequences where {promise.most_seqs} may be")

    def _complained(self, fact: Complained) -> None:
        self._bad(f"worker: {fact.what}")

    def _lost_worker(self, fact: LostWorker) -> None:
        """Nothing that a client would see."""

    # --- the end ------------------------------------------------------------------------------------------------------

    def _left(self, fact: Left) -> None:
        for request_id, request in self._requests.items():
            if request.num_ends != 1:
                self._bad(f"{request_id} came at {request.arrived.now} and never ended: starved")
        if fact.has_stalled:
            self._bad("requests were left and nothing moved")
        for what, count in (
            ("device blocks", fact.device_blocks),
            ("host blocks", fact.host_blocks),
            ("rows", fact.rows),
            ("requests", fact.requests),
        ):
            if count:
                self._bad(f"{count} {what} are in use when all is over")
        self.violations += fact.violations


def judge(facts: Iterable[Fact], promise: Promise) -> list[str]:
    """Violations of a whole run."""
    checker = Checker(promise)
    checker.see(facts)
    if not any(isinstance(fact, Left) for fact in facts):
        checker.violations.append("the run has no end")
    return checker.violations
