"""Apply step results to sequences: append tokens, check stop rules, fork samples, drop losing beams.

`OutputRules` is the protocol. `AtOnce` handles a result when it arrives, `late_outputs.OneStepLate` during the
next step.
"""

from typing import Protocol

from scheduler_svc.core import beam_search
from scheduler_svc.core.entries import SequenceInFlight
from scheduler_svc.core.parts.interfaces import Progress
from scheduler_svc.core.plan import EndedSequence, SequenceTokens, StepOutcome, StepResult
from scheduler_svc.core.request import Group, QueueKind, Sequence, SequenceStatus
from scheduler_svc.core.state import CoreState
from scheduler_svc.core.stop_rules import check_stop

Children = dict[str, list[tuple[int, float]]]


class OutputRules(Protocol):
    """When and how results are applied."""

    def before_plan(self, state: CoreState) -> list[EndedSequence]:
        """Handle pending ends before a step is planned; returns the sequences that ended."""

    def apply(self, flights: list[SequenceInFlight], result: StepResult, state: CoreState) -> StepOutcome:
        """Apply the result of a plan."""

    def set_aside(self, group: Group, state: CoreState) -> bool:
        """True if a running group must not be scheduled again because its end is decided but not yet handled."""

    def drain(self, group: Group, state: CoreState) -> list[EndedSequence]:
        """Handle pending results of a group before it is preempted; returns its sequences that ended."""

    def reset(self) -> None:
        """Results of plans in flight will never arrive."""


class AtOnce:
    """Output rules that handle a result completely when it arrives."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def before_plan(self, state: CoreState) -> list[EndedSequence]:
        """Return an empty list: no end is ever pending."""
        return []

    def set_aside(self, group: Group, state: CoreState) -> bool:
        """Return False: no end is ever pending."""
        return False

    def drain(self, group: Group, state: CoreState) -> list[EndedSequence]:
        """Return an empty list: no result is ever pending."""
        return []

    def reset(self) -> None:
        """No-op: no result is ever pending."""

    def apply(self, flights: list[SequenceInFlight], result: StepResult, state: CoreState) -> StepOutcome:
        """Apply a result group by group, in scheduled order. Sequences that are gone are skipped."""
        outcome = StepOutcome()
        for members in by_group(flights):
            self.apply_group(members, result, state, outcome)
        return outcome

    def apply_group(
        self, members: list[SequenceInFlight], result: StepResult, state: CoreState, outcome: StepOutcome
    ) -> None:
        """Apply a result to unfinished sequences of one group; adds to `outcome`."""
        for flight in members:
            self._progress.on_result(flight.sequence, flight.num_tokens)
        alive = end_failed(members, result, state, outcome) if result.failed else members
        if children := self._children(members[0].sequence.group, alive, result, state):
            for flight in alive:
                self._progress.on_tokens(flight.sequence, 1, 1, 0)
            branch(members[0].sequence.group, children, state, outcome)
        else:
            self._continue(alive, result, state, outcome)

    def _children(
        self, group: Group, flights: list[SequenceInFlight], result: StepResult, state: CoreState
    ) -> Children:
        """The group's branches: those in the result, or those that beam search chooses from its candidates."""
        if not (result.children or result.candidates):
            return {}
        names = [flight.sequence.name for flight in flights]
        if any(name in result.candidates for name in names):
            return beam_search.decide(group, result.candidates, state.max_total_tokens)
        children: Children = {}
        for name in names:
            if name in result.children:
                tokens = result.children[name]
                children[name] = list(zip(tokens, result.logprobs.get(name) or [0.0] * len(tokens), strict=True))
        return children

    def _continue(
        self, flights: list[SequenceInFlight], result: StepResult, state: CoreState, outcome: StepOutcome
    ) -> None:
        """Append tokens to all sequences of a group, then end those that stop."""
        ended, progress = [], self._progress
        for flight in flights:
            sequence = flight.sequence
            if tokens := result.tokens.get(sequence.name):
                status = append(sequence, tokens, result, state, outcome)
                taken = len(outcome.entries[-1].token_ids)
                progress.on_tokens(sequence, len(tokens), taken, flight.num_drafts)
                if sequence.group.place is QueueKind.RUNNING:
                    progress.commit_sampled(sequence, state.cache)
                if status is not None:
                    ended.append((sequence, status))
        outcome.ended += [state.retire(sequence, status) for sequence, status in ended]


def by_group(flights: list[SequenceInFlight]) -> list[list[SequenceInFlight]]:
    """Unfinished sequences by group, ordered by the first sequence of each."""
    groups: dict[int, list[SequenceInFlight]] = {}
    for flight in flights:
        if not flight.sequence.status.is_finished:
            groups.setdefault(id(flight.sequence.group), []).append(flight)
    return list(groups.values())


def append(
    sequence: Sequence, tokens: list[int], result: StepResult, state: CoreState, outcome: StepOutcome
) -> SequenceStatus | None:
    """Append tokens up to a stop and report them. Returns the final status, or None."""
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
    """Report the tokens of a sequence from output offset `offset` on, and add their logprobs to its total."""
    taken = sequence.token_ids[sequence.num_prompt_tokens + offset :]
    if result.logprobs:
        sequence.cumulative_logprob += sum(result.logprobs.get(sequence.name, ())[: len(taken)])
    outcome.entries.append(SequenceTokens(sequence.name, sequence.request.request_id, sequence.index, offset, taken))


def note_first_tokens(flights: list[SequenceInFlight], outcome: StepOutcome, now: float) -> None:
    """Set `first_token_time` of requests that got their first token with this result."""
    without = [f.sequence.request for f in flights if f.sequence.request.first_token_time is None]
    given = {run.request_id for run in outcome.entries} if without else ()
    for request in without:
        if request.request_id in given:
            request.first_token_time = now


def end_failed(
    flights: list[SequenceInFlight], result: StepResult, state: CoreState, outcome: StepOutcome
) -> list[SequenceInFlight]:
    """End the sequences that failed (beams: all, as they compete). Returns the shares of the others."""
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
    """Branch a group. `children`: (token, logprob) pairs by parent: the first continues it, the others fork it;
    empty drops it.

    Where no child is left at all the parents end instead, so that the request ends with them.
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
    """Add children to the group, sharing blocks unless they ended at once; free the ended ones last."""
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
    """(child, parent) pairs, the parent itself last. Forks copy the parent before its own token is appended."""
    family = [parent, *(parent.fork(parent.group.new_index()) for _ in tokens[1:])]
    offset = parent.num_output_tokens
    for child, (token, logprob) in zip(family, tokens, strict=True):
        child.token_ids.append(token)
        child.cumulative_logprob += logprob
        source = None if child is parent else parent.name
        request_id = parent.request.request_id
        outcome.entries.append(SequenceTokens(child.name, request_id, child.index, offset, [token], source))
    return [(child, parent) for child in [*family[1:], parent]]
