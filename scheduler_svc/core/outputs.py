"""What a step's result does to its sequences: tokens are appended, stop rules asked, samples forked, losers dropped (R94-R97).

`OutputRules` is the seam. `AtOnce` handles a result when it arrives, `late_outputs.OneStepLate` while the next step runs.
"""

from dataclasses import dataclass
from typing import Protocol

from scheduler_svc.core import beam_search
from scheduler_svc.core.parts.interfaces import Progress
from scheduler_svc.core.plan import EndedSequence, StepOutcome, StepResult, TokenRun
from scheduler_svc.core.request import Group, Place, Sequence, SequenceStatus
from scheduler_svc.core.state import CoreState
from scheduler_svc.core.stop_rules import check_stop

Children = dict[str, list[tuple[int, float]]]


@dataclass(slots=True)
class Flight:
    """One sequence's share of a plan that is under way. `ticket`: its group's at that time, ascending in plans of v1."""

    sequence: Sequence
    num_tokens: int
    computed_before: int
    num_drafts: int = 0
    ticket: int = -1

    @property
    def has_left(self) -> bool:
        """Its sequence was preempted since: the blocks that it was to fill are others' now, or free and still found."""
        return self.ticket != self.sequence.group.ticket or self.sequence.status is not SequenceStatus.RUNNING


class OutputRules(Protocol):
    """When and how results are applied."""

    def before_plan(self, state: CoreState) -> list[EndedSequence]:
        """A step is going to be planned; sequences whose end was open and is handled now."""

    def apply(self, flights: list[Flight], result: StepResult, state: CoreState) -> StepOutcome:
        """A plan's result is here."""

    def set_aside(self, group: Group, state: CoreState) -> bool:
        """Whether a running group must not be scheduled again, as only its end is not handled yet (R59)."""

    def drain(self, group: Group, state: CoreState) -> list[EndedSequence]:
        """Handles what is open of a group before it is preempted; its sequences that ended by that (R60)."""

    def reset(self) -> None:
        """Results of plans under way will never come."""


class AtOnce:
    """A result is handled completely when it arrives."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def before_plan(self, state: CoreState) -> list[EndedSequence]:
        """Nothing is open."""
        return []

    def set_aside(self, group: Group, state: CoreState) -> bool:
        """Never."""
        return False

    def drain(self, group: Group, state: CoreState) -> list[EndedSequence]:
        """Nothing is open."""
        return []

    def reset(self) -> None:
        """Nothing is open."""

    def apply(self, flights: list[Flight], result: StepResult, state: CoreState) -> StepOutcome:
        """Group by group, in scheduled order. Vanished sequences are skipped (R139)."""
        outcome = StepOutcome()
        for group, members in by_group(flights):
            for flight in members:
                self._progress.on_result(flight.sequence, flight.num_tokens)
            alive = end_failed(members, result, state, outcome)
            if children := self._children(group, alive, result, state):
                for flight in alive:
                    self._progress.on_tokens(flight.sequence, 1, 1, 0)
                branch(group, children, state, outcome)
            else:
                self._continue(alive, result, state, outcome)
        return outcome

    def _children(self, group: Group, flights: list[Flight], result: StepResult, state: CoreState) -> Children:
        """Where the group branches: what the result says, or what its beams' candidates make of it."""
        names = [flight.sequence.name for flight in flights]
        if any(name in result.candidates for name in names):
            return beam_search.decide(group, result.candidates, state.max_total_tokens)
        children: Children = {}
        for name in names:
            if name in result.children:
                tokens = result.children[name]
                children[name] = list(zip(tokens, result.logprobs.get(name) or [0.0] * len(tokens), strict=True))
        return children

    def _continue(self, flights: list[Flight], result: StepResult, state: CoreState, outcome: StepOutcome) -> None:
        """Appends to all of a group, then ends those that stop."""
        ended = []
        for flight in flights:
            sequence = flight.sequence
            if tokens := result.tokens.get(sequence.name):
                status = append(sequence, tokens, result, state, outcome)
                taken = len(outcome.entries[-1].token_ids)
                self._progress.on_tokens(sequence, len(tokens), taken, flight.num_drafts)
                if sequence.group.place is Place.RUNNING:
                    self._progress.settle(sequence, state.cache)
                if status is not None:
                    ended.append((sequence, status))
        outcome.ended += [state.retire(sequence, status) for sequence, status in ended]


def by_group(flights: list[Flight]) -> list[tuple[Group, list[Flight]]]:
    """Unfinished sequences by group, in order of the first of each."""
    groups: dict[int, tuple[Group, list[Flight]]] = {}
    for flight in flights:
        if not flight.sequence.status.is_finished:
            group = flight.sequence.group
            groups.setdefault(id(group), (group, []))[1].append(flight)
    return list(groups.values())


def append(
    sequence: Sequence, tokens: list[int], result: StepResult, state: CoreState, outcome: StepOutcome
) -> SequenceStatus | None:
    """Appends until a stop rule says so, and reports the run; the final status, or None."""
    offset = sequence.num_output_tokens
    status = None
    for token in tokens:
        sequence.token_ids.append(token)
        status = check_stop(sequence, state.max_total_tokens)
        if status is not None:
            break
    report(sequence, offset, result, outcome)
    return status


def report(sequence: Sequence, offset: int, result: StepResult, outcome: StepOutcome) -> None:
    """Notes what was appended to a sequence from `offset` on."""
    taken = sequence.token_ids[sequence.num_prompt_tokens + offset :]
    sequence.cumulative_logprob += sum(result.logprobs.get(sequence.name, ())[: len(taken)])
    outcome.entries.append(TokenRun(sequence.name, sequence.request.request_id, sequence.index, offset, taken))


def note_first_tokens(flights: list[Flight], outcome: StepOutcome, now: float) -> None:
    """Times the first output of those requests that had none before this result (R98)."""
    without = [f.sequence.request for f in flights if f.sequence.request.first_token_time is None]
    given = {run.request_id for run in outcome.entries} if without else ()
    for request in without:
        if request.request_id in given:
            request.first_token_time = now


def end_failed(flights: list[Flight], result: StepResult, state: CoreState, outcome: StepOutcome) -> list[Flight]:
    """Ends what failed alone (of beams all, as they compete); the flights of the others."""
    why = next((result.failed[f.sequence.name] for f in flights if f.sequence.name in result.failed), None)
    if why is None:
        return flights
    together = flights[0].sequence.request.beam is not None
    for flight in flights:
        if together or flight.sequence.name in result.failed:
            if flight.has_left:
                state.cache.reset_prefixes()
            state.cache.retract(flight.sequence, flight.computed_before)
            flight.sequence.num_computed_tokens = min(flight.sequence.num_computed_tokens, flight.computed_before)
            outcome.ended.append(state.retire(flight.sequence, SequenceStatus.FINISHED_ABORTED, why))
    if together:
        outcome.ended += state.retire_group(flights[0].sequence.group, SequenceStatus.FINISHED_ABORTED, why)
    return [f for f in flights if not f.sequence.status.is_finished]


def branch(group: Group, children: Children, state: CoreState, outcome: StepOutcome) -> None:
    """`children`: (token, logprob) by parent: the first continues it, the others are forks of it, none drops it.

    Where nobody is left the parents end, so that the request ends with them.
    """
    parents = [sequence for sequence in group.live if sequence.name in children]
    if not any(children.values()):
        outcome.ended += [state.retire(parent, SequenceStatus.FINISHED_ABORTED) for parent in parents]
        return
    pairs: list[tuple[Sequence, Sequence]] = []
    for parent in parents:
        if children[parent.name]:
            pairs += _offspring(parent, children[parent.name], outcome)
        else:
            outcome.dropped.append(parent.name)
            state.drop(parent)
    _settle_fates(pairs, state, outcome)


def _settle_fates(pairs: list[tuple[Sequence, Sequence]], state: CoreState, outcome: StepOutcome) -> None:
    """Children join the group and share blocks unless they are over at once; who is over is freed last."""
    statuses = [check_stop(child, state.max_total_tokens) for child, _ in pairs]
    for (child, parent), status in zip(pairs, statuses, strict=True):
        if child is not parent:
            child.group.add(child)
            if status is None:
                state.cache.fork(parent, child)
    for (child, _), status in zip(pairs, statuses, strict=True):
        if status is not None:
            outcome.ended.append(state.retire(child, status))


def _offspring(
    parent: Sequence, tokens: list[tuple[int, float]], outcome: StepOutcome
) -> list[tuple[Sequence, Sequence]]:
    """(child, parent) pairs, the parent itself last. Forks copy the past before the parent goes on."""
    family = [parent, *(parent.fork(parent.group.new_index()) for _ in tokens[1:])]
    offset = parent.num_output_tokens
    for child, (token, logprob) in zip(family, tokens, strict=True):
        child.token_ids.append(token)
        child.cumulative_logprob += logprob
        source = None if child is parent else parent.name
        request_id = parent.request.request_id
        outcome.entries.append(TokenRun(child.name, request_id, child.index, offset, [token], source))
    return [(child, parent) for child in [*family[1:], parent]]
