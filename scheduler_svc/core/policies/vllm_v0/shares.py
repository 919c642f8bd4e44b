"""How many tokens of a group a step of v0 takes, and how they are spread over its sequences (R49, R58, R87, R91)."""

from dataclasses import dataclass

from scheduler_svc.core.request import Group, Place, Sequence
from scheduler_svc.core.state import CoreState
from scheduler_svc.core.step_draft import StepDraft


@dataclass(slots=True)
class ScheduledGroup:
    """A group's share of a step. `num_tokens`: its chunk, or one per sequence that decodes."""

    group: Group
    num_tokens: int
    is_prefill: bool

    def put(self, draft: StepDraft) -> None:
        """Schedules its sequences."""
        for sequence, num_tokens in spread(self.group, self.num_tokens):
            sequence.num_computed_tokens = max(sequence.num_computed_tokens, sequence.num_shared_tokens)
            draft.add(sequence, num_tokens)


def spread(group: Group, num_tokens: int) -> list[tuple[Sequence, int]]:
    """A group's tokens by sequence: the only one takes them, or each takes what it has pending.

    Where that is more, the oldest that lags takes them all (`catch_up`).
    """
    live = group.live
    if len(live) == 1:
        return [(live[0], num_tokens)]
    if num_tokens == sum(pending(sequence) for sequence in live):
        return [(sequence, pending(sequence)) for sequence in live]
    return [(_lagging(group), num_tokens)]


def catch_up(group: Group, left: int) -> int:
    """Tokens that bring the oldest sequence that lags nearer to its last one, which all compute in one step, to sample together."""
    return max(0, min(pending(_lagging(group)) - 1, left))


def _lagging(group: Group) -> Sequence:
    live = group.live
    return next((sequence for sequence in live if pending(sequence) > 1), live[0])


def pending(sequence: Sequence) -> int:
    """What it has to compute before it gives a token."""
    done = max(sequence.num_computed_tokens, sequence.num_shared_tokens)
    return sequence.num_tokens - done if sequence.in_prefill else 1


class WholePrompts:
    """A prompt is computed in one step or not at all."""

    is_chunked = False

    def __init__(self, num_lookahead_slots: int = 0) -> None:
        self._num_lookahead = num_lookahead_slots

    def num_new_tokens(self, group: Group, state: CoreState, draft: StepDraft) -> int:
        """All that is pending, whatever the budget.

        Several sequences to be computed again may be more than any step takes: then they catch up one by one, and who is left of
        them when the others end goes on alone.
        """
        num_tokens = num_pending(group, state)
        if not group.in_prefill:
            return num_tokens
        if group.place is Place.RUNNING:
            return self._go_on(group, num_tokens, draft)
        fits = len(group.live) == 1 or num_tokens <= draft.budget.token_budget
        return num_tokens if fits else catch_up(group, draft.budget.num_tokens_left)

    @staticmethod
    def _go_on(group: Group, num_tokens: int, draft: StepDraft) -> int:
        """What all others that run do not need for their next token, which they are given whatever the budget (R63)."""
        budget = draft.budget
        others = budget.num_seqs - group.max_num_running_seqs + draft.num_caught_up
        left = max(0, min(budget.num_tokens_left, budget.token_budget - others))
        if num_tokens <= left:
            return num_tokens
        return left if len(group.live) == 1 else catch_up(group, left)

    def least(self, group: Group, state: CoreState) -> int:
        """The fewest tokens of a step that it can start with."""
        num_tokens = num_pending(group, state)
        fits = len(group.live) == 1 or num_tokens <= state.limits.max_num_batched_tokens
        return num_tokens if fits else 1

    def prompt_limit(self, state: CoreState) -> int:
        """A longer prompt would never fit a step (R50)."""
        return min(state.limits.max_model_len, state.limits.max_num_batched_tokens)

    def num_lookahead(self, *, in_prefill: bool) -> int:
        """Slots to keep free behind the new tokens (R68)."""
        return 0 if in_prefill else self._num_lookahead


class Chunks(WholePrompts):
    """A group of one sequence takes what the budget leaves; with prefix caching whole blocks of it (R87)."""

    is_chunked = True

    def num_new_tokens(self, group: Group, state: CoreState, draft: StepDraft) -> int:
        """0 where the budget leaves nothing."""
        if len(group.live) > 1:
            return super().num_new_tokens(group, state, draft)
        num_tokens, left = num_pending(group, state), draft.budget.num_tokens_left
        if num_tokens <= left:
            return num_tokens
        size = state.limits.block_size
        return left // size * size if state.limits.prefix_caching else left

    def least(self, group: Group, state: CoreState) -> int:
        """One token, with prefix caching a block of them."""
        if len(group.live) > 1:
            return super().least(group, state)
        return min(num_pending(group, state), state.limits.block_size if state.limits.prefix_caching else 1)

    def prompt_limit(self, state: CoreState) -> int:
        """Only the model limits it (R50)."""
        return state.limits.max_model_len


class WholeChunks(WholePrompts):
    """Several decode steps per plan: prompts join decodes but are not cut; what does not fit waits (R91)."""

    is_chunked = True

    def num_new_tokens(self, group: Group, state: CoreState, draft: StepDraft) -> int:
        """0 where it does not fit; too long a prompt as it is, so that it is refused."""
        if len(group.live) > 1:
            return super().num_new_tokens(group, state, draft)
        num_tokens = num_pending(group, state)
        if num_tokens > self.prompt_limit(state):
            return num_tokens
        return num_tokens if num_tokens <= draft.budget.num_tokens_left else 0

    def num_lookahead(self, *, in_prefill: bool) -> int:
        """A prompt's first token is followed by the other steps' (R68)."""
        return self._num_lookahead + 1 if in_prefill else self._num_lookahead


def num_pending(group: Group, state: CoreState) -> int:
    """Tokens of all its live sequences. A waiting group of several shares the full blocks of its prompt (design.md 4)."""
    live = group.live
    total = sum(pending(sequence) for sequence in live)
    if len(live) > 1 and group.place is Place.WAITING:
        total -= (len(live) - 1) * shared_prompt_tokens(group, state)
    return total


def shared_prompt_tokens(group: Group, state: CoreState) -> int:
    """Tokens in full blocks of the prompt: what siblings need not compute again."""
    size = state.limits.block_size
    return group.live[0].num_prompt_tokens // size * size
