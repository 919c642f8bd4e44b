"""What is scheduled: requests, their groups and sequences. Pure data with the counters that rules are written in.

A *request* is what the client sent. A *group* is what is scheduled as a whole: all its live sequences act together (R28). Under v0
a request is one group; under v1 each sample is a group of its own, and only beams share one (`grouping`). A *sequence* is one
token stream. Counters replace mode flags: `num_tokens` known tokens, `num_computed_tokens` of them with KV in blocks (or promised
by a step under way), `num_placeholders` tokens that steps under way will make, `prefill_end` where the prefill is over.
"""

import enum
import math
from dataclasses import dataclass, field

from scheduler_svc.core.reasons import Reason
from scheduler_svc.core.request_rules import BeamRules, StopRules


class SequenceStatus(enum.IntEnum):
    """Where a sequence stands; finished means any value beyond SWAPPED (R23)."""

    WAITING = 0
    RUNNING = 1
    PREEMPTED = 2
    SWAPPED = 3
    FINISHED_STOPPED = 4
    FINISHED_LENGTH_CAPPED = 5
    FINISHED_ABORTED = 6
    FINISHED_IGNORED = 7

    @property
    def is_finished(self) -> bool:
        """True for every final status."""
        return self > SequenceStatus.SWAPPED

    @property
    def finish_reason(self) -> str | None:
        """The article's words; an ignored request reports "length" (R23). None while it lives."""
        return _FINISH_REASONS.get(self)


_FINISH_REASONS = {
    SequenceStatus.FINISHED_STOPPED: "stop",
    SequenceStatus.FINISHED_LENGTH_CAPPED: "length",
    SequenceStatus.FINISHED_ABORTED: "abort",
    SequenceStatus.FINISHED_IGNORED: "length",
}


@dataclass(slots=True, eq=False)
class Sequence:
    """One token stream. Owned by the scheduler core; `token_ids` is the prompt followed by the output.

    `draft_token_ids`: guesses that the next step verifies. `num_scheduled_tokens`: its share of the step last planned.
    `num_shared_tokens`: those that an older sequence of its group computes for it, when all are computed again.
    """

    group: "Group"
    index: int
    token_ids: list[int]
    num_prompt_tokens: int
    status: SequenceStatus = SequenceStatus.WAITING
    num_computed_tokens: int = 0
    num_placeholders: int = 0
    num_shared_tokens: int = 0
    num_scheduled_tokens: int = 0
    prefill_end: int = 0
    draft_token_ids: list[int] = field(default_factory=list)
    stop_token_id: int | None = None
    num_preemptions: int = 0
    cumulative_logprob: float = 0.0
    name: str = field(init=False)

    def __post_init__(self) -> None:
        self.name = f"{self.group.request.request_id}/{self.index}"
        self.prefill_end = self.prefill_end or len(self.token_ids)

    @property
    def request(self) -> "Request":
        """The request it belongs to."""
        return self.group.request

    @property
    def cache_salt(self) -> str:
        """The request's: only equal salts share prefix blocks."""
        return self.group.request.cache_salt

    @property
    def lora_id(self) -> int:
        """The request's adapter, 0 = none."""
        return self.group.request.lora_id

    @property
    def lane(self) -> int | None:
        """Its group's: which of several caches holds its blocks."""
        return self.group.lane

    @property
    def no_cache_reuse(self) -> bool:
        """The request's: compute everything afresh."""
        return self.group.request.no_cache_reuse

    @property
    def sibling_names(self) -> tuple[str, ...]:
        """Older samples of its request that are scheduled apart from it and may hold blocks of the same prompt."""
        groups = self.group.request.groups
        if len(groups) == 1:
            return ()
        return tuple(g.sequences[0].name for g in groups if g.sequences[0].index < self.index)

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and output."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far; they survive preemption (R27)."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def in_prefill(self) -> bool:
        """Its prompt, or what it must compute again, is not all computed yet (R26)."""
        return self.num_computed_tokens < self.prefill_end

    def restart(self) -> None:
        """Nothing of it is computed any more; generated tokens are kept (R27)."""
        self.num_computed_tokens = self.num_shared_tokens = self.num_scheduled_tokens = 0
        self.prefill_end = len(self.token_ids)

    def fork(self, index: int) -> "Sequence":
        """A sequence of the same group with the same past (R94)."""
        return Sequence(
            self.group,
            index,
            list(self.token_ids),
            self.num_prompt_tokens,
            status=self.status,
            num_computed_tokens=self.num_computed_tokens,
            prefill_end=self.prefill_end,
            cumulative_logprob=self.cumulative_logprob,
        )


class Place(enum.Enum):
    """Which queue holds a group."""

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    NOWHERE = "nowhere"


@dataclass(slots=True, eq=False)
class Group:
    """Sequences scheduled as a whole. `width`: how many there will be once the prompt is done (R25).

    `num_fruitless`: preemptions in one situation since anybody gained a token; the progress guard counts it. `ticket`: order of
    coming into running. `is_steady`: its counters are in the columns of the fast path (`steady.rows.SteadyRows`).
    `lane`: where it was planned last, or stays for life, as its placement has it.
    `num_charged`: output tokens that its tenant's account has of it, from its start to its end (`tenant_shares`).
    `mask_debt_s`, `is_paused`: seconds that its masks held others up, and whether it sits out for that (`mask_pace`).
    `waits_for`, `seen_heads`: what the journal told of it last, and how often it had told of heads of queues by then.
    """

    request: "Request"
    sequences: list[Sequence] = field(default_factory=list)
    width: int = 1
    place: Place = Place.NOWHERE
    num_fruitless: int = 0
    num_indexes: int = 1
    ticket: int = -1
    is_steady: bool = False
    lane: int | None = None
    num_charged: int = 0
    mask_debt_s: float = 0.0
    is_paused: bool = False
    waits_for: Reason | None = None
    seen_heads: int = 0

    @property
    def live(self) -> list[Sequence]:
        """Sequences that still produce tokens, oldest first."""
        return [s for s in self.sequences if s.status <= SequenceStatus.SWAPPED]

    @property
    def is_finished(self) -> bool:
        """All its sequences are (R30)."""
        return all(s.status.is_finished for s in self.sequences)

    @property
    def needs_result(self) -> bool:
        """What it does next depends on what its last step gave: it cannot be scheduled ahead. Of a beam, too, that is alone: its
        next token is not the worker's to draw."""
        return self.width > 1 or self.request.beam is not None

    @property
    def num_children(self) -> int:
        """Sequences that its next sample makes: all of them at the end of the prompt (R25); beams fork by choice."""
        return self.width if len(self.sequences) == 1 and self.request.beam is None else 1

    @property
    def max_num_running_seqs(self) -> int:
        """Sequences it takes of `max_num_seqs`: all it will have while in its prompt, then those alive; beams, which come back
        when others finish, always all (R25)."""
        if self.request.beam is not None or self.width > len(self.sequences):
            return self.width
        return len(self.live)

    @property
    def in_prefill(self) -> bool:
        """Decided by live sequences alone, whatever their finished siblings were (R203)."""
        return any(s.in_prefill for s in self.live)

    def new_index(self) -> int:
        """The next index for a forked sequence; indexes count creations and are never used twice."""
        self.num_indexes += 1
        return self.num_indexes - 1

    def find(self, index: int) -> Sequence:
        """The sequence of that index. ValueError when there is none (R30)."""
        for sequence in self.sequences:
            if sequence.index == index:
                return sequence
        raise ValueError(f"request {self.request.request_id} has no sequence {index}")

    def add(self, sequence: Sequence) -> None:
        """Takes a forked sequence in. ValueError for an index that is there (R30)."""
        if any(s.index == sequence.index for s in self.sequences):
            raise ValueError(f"request {self.request.request_id} has a sequence {sequence.index} already")
        self.sequences.append(sequence)

    def remove(self, index: int) -> None:
        """Drops a sequence that lost (R94). ValueError when there is none (R30)."""
        self.sequences.remove(self.find(index))


@dataclass(slots=True, eq=False)
class Request:
    """A client's request as the core sees it.

    `priority`: lower = sooner (R24). `arrival_time`: seconds on the caller's clock. `n` of `best_of` samples are wanted (default: n
    of n); `beam`: they are beams. `lora_id`: adapter, 0 = none; `long_lora_max_len`: the prompt that it was made for, under v0 in
    place of the usual limit (R50). `cache_salt`: only equal salts share prefix blocks (R138).
    `committed`: output tokens made in an earlier life, one sample's behind the other's; `committed_counts`: of each sample, empty =
    they are the first one's; `over`: samples that had ended then. `deadline`: when its client stops waiting, seconds on the same
    clock, None = never. `tenant`: whose share it takes, where a policy is fair between tenants; a word that means nothing here.
    """

    request_id: str
    prompt_token_ids: list[int]
    stop: StopRules
    arrival_time: float
    priority: int = 0
    n: int = 1
    best_of: int | None = None
    beam: BeamRules | None = None
    lora_id: int = 0
    long_lora_max_len: int | None = None
    cache_salt: str = ""
    no_cache_reuse: bool = False
    deadline: float | None = None
    tenant: str = ""
    committed: list[int] = field(default_factory=list)
    committed_counts: list[int] = field(default_factory=list)
    over: list[int] = field(default_factory=list)
    groups: list[Group] = field(init=False, default_factory=list)
    num_cached_tokens: int | None = None
    first_scheduled_time: float | None = None
    first_token_time: float | None = None

    def __post_init__(self) -> None:
        self.as_one_group()

    @property
    def num_samples(self) -> int:
        """Sequences it makes: `best_of` replaces n (R25)."""
        return self.n if self.best_of is None else self.best_of

    @property
    def sequences(self) -> list[Sequence]:
        """All it has, those of one group together."""
        return [s for group in self.groups for s in group.sequences]

    @property
    def is_finished(self) -> bool:
        """All sequences are."""
        return all(group.is_finished for group in self.groups)

    @property
    def unfinished(self) -> list[Sequence]:
        """Sequences that still produce tokens."""
        return [s for s in self.sequences if not s.status.is_finished]

    def as_one_group(self) -> None:
        """One group, with one sequence until the prompt is done (R29), or with all that were made in an earlier life."""
        num_known = self.num_samples if self.committed_counts else 1
        group = Group(self, width=self.num_samples, num_indexes=num_known)
        group.sequences += [self._sequence(group, index) for index in range(num_known)]
        self.groups = [group]

    def as_samples(self) -> None:
        """A group for each sample; beams stay together, as they compete."""
        if self.beam is not None or self.num_samples == 1:
            return
        self.groups = [Group(self) for _ in range(self.num_samples)]
        for index, group in enumerate(self.groups):
            group.sequences.append(self._sequence(group, index))

    def _sequence(self, group: Group, index: int) -> Sequence:
        start = sum(self.committed_counts[:index])
        count = self.committed_counts[index] if self.committed_counts else (0 if index else len(self.committed))
        outputs = self.committed[start : start + count]
        sequence = Sequence(group, index, [*self.prompt_token_ids, *outputs], len(self.prompt_token_ids))
        if index in self.over:
            sequence.status = SequenceStatus.FINISHED_STOPPED
        return sequence

    def score(self, sequence: Sequence) -> float:
        """What its samples are ranked by: logprob, with beams over output length ** penalty."""
        if self.beam is None:
            return sequence.cumulative_logprob
        return sequence.cumulative_logprob / math.pow(max(1, sequence.num_output_tokens), self.beam.length_penalty)

    def best_sequences(self) -> list[Sequence]:
        """The `n` best finished samples, best first; ties: older first. Ignored and aborted ones come last."""
        failed = (SequenceStatus.FINISHED_ABORTED, SequenceStatus.FINISHED_IGNORED)
        ranked = sorted(self.sequences, key=lambda s: (s.status in failed, -self.score(s), s.index))
        return ranked[: self.n] if self.num_samples > self.n or self.beam else sorted(ranked, key=lambda s: s.index)
