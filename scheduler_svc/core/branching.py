"""Forks and drops of one group in one step (R94): append to all, ask the stop rules of all, fork, then free."""

from scheduler_svc.core.plan import StepOutcome, TokenRun
from scheduler_svc.core.request import Group, Sequence, SequenceStatus
from scheduler_svc.core.state import CoreState
from scheduler_svc.core.stop_rules import check_stop

Children = dict[str, list[tuple[int, float]]]


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
