"""Progress: when tokens count as computed."""

import numpy as np

from block_manager.cache_rules import CacheRules
from scheduler_svc.core.policies.mixed.fast_decode.rows import Ints, SteadyRows
from scheduler_svc.core.request import Group, Sequence


class AfterResult:
    """When the step that computes them came back (v0): the plain loop needs result k before plan k+1."""

    def num_pending(self, sequence: Sequence) -> int:
        """Known tokens less computed ones in the prefill, then one (R26)."""
        return sequence.num_tokens - sequence.num_computed_tokens if sequence.in_prefill else 1

    def may_resume(self, sequence: Sequence) -> bool:
        """Always."""
        return True

    def on_preempted(self, sequence: Sequence) -> None:
        """Nothing: there are no guesses."""

    def on_scheduled(self, sequence: Sequence, num_tokens: int, num_drafts: int) -> None:
        """Nothing yet."""

    def on_result(self, sequence: Sequence, num_tokens: int) -> None:
        """Counts them."""
        sequence.num_computed_tokens += num_tokens

    def on_tokens(self, sequence: Sequence, num_new: int, num_taken: int, num_drafts: int) -> None:
        """Of several decode steps each computed a token (R91)."""
        sequence.num_computed_tokens += num_new - 1

    def settle(self, sequence: Sequence, cache: CacheRules) -> None:
        """Nothing: blocks are registered when their step is planned."""


class AtSchedule:
    """As soon as a step is planned, before it runs (R127, R135)."""

    def num_pending(self, sequence: Sequence) -> int:
        """Known and guessed tokens less computed ones; 0 while its next token is on the way (R147)."""
        return sequence.num_tokens + len(sequence.draft_token_ids) - sequence.num_computed_tokens

    def may_resume(self, sequence: Sequence) -> bool:
        """Always."""
        return True

    def on_preempted(self, sequence: Sequence) -> None:
        """Nothing: its guesses follow the same tokens as before; the step that computes the last of those verifies them."""

    def on_scheduled(self, sequence: Sequence, num_tokens: int, num_drafts: int) -> None:
        """Counts them."""
        sequence.num_computed_tokens += num_tokens

    def on_result(self, sequence: Sequence, num_tokens: int) -> None:
        """Nothing: they count already."""

    def on_tokens(self, sequence: Sequence, num_new: int, num_taken: int, num_drafts: int) -> None:
        """Guesses that were wrong were never computed (R151)."""
        if num_drafts and sequence.num_computed_tokens > 0:
            sequence.num_computed_tokens -= num_drafts - (num_new - 1)

    def settle(self, sequence: Sequence, cache: CacheRules) -> None:
        """Nothing: blocks are registered by its next step (R136)."""

    def num_pending_rows(self, rows: SteadyRows) -> Ints:
        """Of every row; rows have no guesses."""
        return rows.known - rows.computed

    def on_scheduled_rows(self, rows: SteadyRows, scheduled: Ints) -> None:
        """Counts one token each."""
        rows.computed[rows.pick(scheduled)] += 1

    def on_tokens_rows(self, rows: SteadyRows, given: Ints) -> None:
        """Nothing: nothing was promised."""

    def settled_rows(self, rows: SteadyRows, given: Ints) -> Ints | None:
        """Left to the next step."""
        return None


class OneUnderWay(AtSchedule):
    """At schedule, and a sequence is in one plan at a time: Chitu's tasks wait for their result, of chunks too.

    `num_scheduled_tokens` are those of the plan under way, 0 = it came back.
    """

    def num_pending(self, sequence: Sequence) -> int:
        """0 while its plan is under way."""
        return 0 if sequence.num_scheduled_tokens else super().num_pending(sequence)

    def on_result(self, sequence: Sequence, num_tokens: int) -> None:
        """It may be planned again."""
        sequence.num_scheduled_tokens = 0

    @staticmethod
    def is_under_way(group: Group) -> bool:
        """Whether any of its sequences is in a plan without a result."""
        return any(sequence.num_scheduled_tokens for sequence in group.live)


class WithPlaceholders:
    """At schedule, and tokens that steps under way will make count as known: plan k+1 goes out before result k (R149-R152).

    `num_spec_tokens`: guesses per step; the worker fills them in where the scheduler puts placeholders (R150).
    """

    def __init__(self, num_spec_tokens: int = 0) -> None:
        self._guesses = [-1] * num_spec_tokens

    def num_pending(self, sequence: Sequence) -> int:
        """0 also when a step under way surely reaches max_tokens (R152), and for groups that need their last result."""
        placeholders = sequence.num_placeholders
        if placeholders > 0 and (sequence.group.needs_result or self._reaches_the_end(sequence)):
            return 0
        known = sequence.num_tokens + placeholders + len(sequence.draft_token_ids)
        return known - sequence.num_computed_tokens

    def may_resume(self, sequence: Sequence) -> bool:
        """Not while a step from before its preemption is under way: what it gives is not known yet, and would be made twice."""
        return not sequence.num_placeholders

    def on_preempted(self, sequence: Sequence) -> None:
        """Its guesses were placeholders, and no worker has any for it now (R150)."""
        sequence.draft_token_ids = []

    def on_scheduled(self, sequence: Sequence, num_tokens: int, num_drafts: int) -> None:
        """Counts them; a step that reaches the end promises a token and all guesses with it (R149)."""
        sequence.num_computed_tokens += num_tokens
        if sequence.num_computed_tokens == sequence.num_tokens + sequence.num_placeholders + num_drafts:
            sequence.num_placeholders += 1 + num_drafts
            # Sequences that go on together give a token each: forks have no guesses, so their parents have none either.
            sequence.draft_token_ids = [] if sequence.group.needs_result else list(self._guesses)

    def on_result(self, sequence: Sequence, num_tokens: int) -> None:
        """Nothing: they count already."""

    def on_tokens(self, sequence: Sequence, num_new: int, num_taken: int, num_drafts: int) -> None:
        """What was promised came, and guesses that were wrong are off both counts (R151)."""
        rejected = num_drafts - (num_new - 1) if num_drafts else 0
        if sequence.num_computed_tokens > 0:
            sequence.num_computed_tokens -= rejected
        sequence.num_placeholders = max(0, sequence.num_placeholders - rejected - num_taken)

    def settle(self, sequence: Sequence, cache: CacheRules) -> None:
        """Its next step may be planned already, without knowing them: blocks that are full and sure are registered now (R151)."""
        cache.settle(sequence)

    def num_pending_rows(self, rows: SteadyRows) -> Ints:
        """Of every row; 0 for those that a step under way surely brings to max_tokens (R152)."""
        pending: Ints = rows.known + rows.placeholders - rows.computed
        sure = rows.computed + 2 - rows.placeholders
        pending[(rows.placeholders > 0) & (sure >= rows.ends_at)] = 0
        return pending

    def on_scheduled_rows(self, rows: SteadyRows, scheduled: Ints) -> None:
        """Counts one token each and promises the next."""
        at = rows.pick(scheduled)
        rows.computed[at] += 1
        rows.placeholders[at] += rows.computed[at] == rows.known[at] + rows.placeholders[at]

    def on_tokens_rows(self, rows: SteadyRows, given: Ints) -> None:
        """What was promised came."""
        at = rows.pick(given)
        rows.placeholders[at] = np.maximum(0, rows.placeholders[at] - 1)

    def settled_rows(self, rows: SteadyRows, given: Ints) -> Ints | None:
        """What is computed without what is promised (R151)."""
        at = rows.pick(given)
        settled: Ints = rows.computed[at] - rows.placeholders[at]
        return settled

    @staticmethod
    def _reaches_the_end(sequence: Sequence) -> bool:
        sure = sequence.num_computed_tokens + 2 - sequence.num_placeholders
        return sure >= sequence.num_prompt_tokens + sequence.request.stop.max_tokens
