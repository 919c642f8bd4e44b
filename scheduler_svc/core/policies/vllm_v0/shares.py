"""Tokens of a group in a step of v0, and their distribution over its sequences."""

from dataclasses import dataclass

from scheduler_svc.core.plan_builder import PlanBuilder
from scheduler_svc.core.request import Group, QueueKind, Sequence
from scheduler_svc.core.state import CoreState


@dataclass(slots=True)
class ScheduledGroup:
    """A group's share of a step. `num_tokens`: its chunk, or one per decoding sequence."""

    group: Group
    num_tokens: int
    is_prefill: bool

    def put(self, builder: PlanBuilder) -> None:
        """Add the group's sequences to the plan."""
        for sequence, num_tokens in spread(self.group, self.num_tokens):
            sequence.num_computed_tokens = max(sequence.num_computed_tokens, sequence.num_shared_tokens)
            builder.add(sequence, num_tokens)


def spread(group: Group, num_tokens: int) -> list[tuple[Sequence, int]]:
    """A group's tokens by sequence: all to a single sequence, else to each what it has pending.

    Where the pending tokens differ from `num_tokens`, the oldest sequence that lags takes them all
    (`catch_up`).
    """
    live = group.live
    if len(live) == 1:
        return [(live[0], num_tokens)]
    if num_tokens == sum(pending(sequence) for sequence in live):
        return [(sequence, pending(sequence)) for sequence in live]
    return [(_lagging(group), num_tokens)]


def catch_up(group: Group, left: int) -> int:
    """Tokens to compute of the oldest lagging sequence, short of its last one.

    The last tokens of all sequences are computed in one step, so that they sample together.
    """
    return max(0, min(pending(_lagging(group)) - 1, left))


def _lagging(group: Group) -> Sequence:
    live = group.live
    return next((sequence for sequence in live if pending(sequence) > 1), live[0])


def pending(sequence: Sequence) -> int:
    """Tokens to compute before the sequence yields the next one."""
    done = max(sequence.num_computed_tokens, sequence.num_shared_tokens)
    return sequence.num_tokens - done if sequence.in_prefill else 1


class WholePrompts:
    """Prompts are computed in one step or not at all."""

    is_chunked = False

    def __init__(self, num_lookahead_slots: int = 0) -> None:
        self._num_lookahead = num_lookahead_slots

    def num_new_tokens(self, group: Group, state: CoreState, builder: PlanBuilder) -> int:
        """All pending tokens, regardless of the budget.

        Several sequences to be recomputed may exceed the budget of any step: then they catch up one by one; if
        the others end, the remaining one continues alone.
        """
        num_tokens = num_pending(group, state)
        if not group.in_prefill:
            return num_tokens
        if group.place is QueueKind.RUNNING:
            return self._go_on(group, num_tokens, builder)
        fits = len(group.live) == 1 or num_tokens <= builder.budget.token_budget
        return num_tokens if fits else catch_up(group, builder.budget.num_tokens_left)

    @staticmethod
    def _go_on(group: Group, num_tokens: int, builder: PlanBuilder) -> int:
        """Tokens left after one for the next token of each other running sequence, which they get regardless of
        the budget.
        """
        budget = builder.budget
        others = budget.num_seqs - group.max_num_running_seqs + builder.num_caught_up
        left = max(0, min(budget.num_tokens_left, budget.token_budget - others))
        if num_tokens <= left:
            return num_tokens
        return left if len(group.live) == 1 else catch_up(group, left)

    def least(self, group: Group, state: CoreState) -> int:
        """The fewest tokens of a step that the group can start with."""
        num_tokens = num_pending(group, state)
        fits = len(group.live) == 1 or num_tokens <= state.limits.max_num_batched_tokens
        return num_tokens if fits else 1

    def prompt_limit(self, state: CoreState) -> int:
        """Maximum prompt length: a longer one would never fit a step."""
        return min(state.limits.max_model_len, state.limits.max_num_batched_tokens)

    def num_lookahead(self, *, in_prefill: bool) -> int:
        """Slots to keep free behind the new tokens."""
        return 0 if in_prefill else self._num_lookahead


class Chunks(WholePrompts):
    """Chunked prefill: a group of one sequence takes what the budget leaves, with prefix caching in whole blocks."""

    is_chunked = True

    def num_new_tokens(self, group: Group, state: CoreState, builder: PlanBuilder) -> int:
        """Tokens to compute; 0 if the budget is used up."""
        if len(group.live) > 1:
            return super().num_new_tokens(group, state, builder)
        num_tokens, left = num_pending(group, state), builder.budget.num_tokens_left
        if num_tokens <= left:
            return num_tokens
        size = state.limits.block_size
        return left // size * size if state.limits.prefix_caching else left

    def least(self, group: Group, state: CoreState) -> int:
        """One token, or with prefix caching one block."""
        if len(group.live) > 1:
            return super().least(group, state)
        return min(num_pending(group, state), state.limits.block_size if state.limits.prefix_caching else 1)

    def prompt_limit(self, state: CoreState) -> int:
        """Maximum prompt length: the model's."""
        return state.limits.max_model_len


class WholeChunks(WholePrompts):
    """Several decode steps per plan: prompts join decodes but are not chunked; those that do not fit wait."""

    is_chunked = True

    def num_new_tokens(self, group: Group, state: CoreState, builder: PlanBuilder) -> int:
        """Tokens to compute; 0 if they do not fit. A prompt above the limit is returned whole, so that it is refused."""
        if len(group.live) > 1:
            return super().num_new_tokens(group, state, builder)
        num_tokens = num_pending(group, state)
        if num_tokens > self.prompt_limit(state):
            return num_tokens
        return num_tokens if num_tokens <= builder.budget.num_tokens_left else 0

    def num_lookahead(self, *, in_prefill: bool) -> int:
        """Lookahead slots; a prompt gets one more, as its first token is followed by the other decode steps."""
        return self._num_lookahead + 1 if in_prefill else self._num_lookahead


def num_pending(group: Group, state: CoreState) -> int:
    """Pending tokens of all live sequences. Sequences of a waiting group share the full blocks of their prompt."""
    live = group.live
    total = sum(pending(sequence) for sequence in live)
    if len(live) > 1 and group.place is QueueKind.WAITING:
        total -= (len(live) - 1) * shared_prompt_tokens(group, state)
    return total


def shared_prompt_tokens(group: Group, state: CoreState) -> int:
    """Tokens in full blocks of the prompt, which siblings need not recompute."""
    size = state.limits.block_size
    return group.live[0].num_prompt_tokens // size * size
