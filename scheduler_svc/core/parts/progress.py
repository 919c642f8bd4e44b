"""Progress: when tokens count as computed."""

from typing import Any

import numpy as np

from block_manager.cache_rules import CacheRules
from scheduler_svc.core.fast_decode.rows import FastRows, Ints
from scheduler_svc.core.request import Group, Sequence


class AfterResult:
    """Tokens count when the step that computes them returned (vLLM v0): result k is needed before plan k+1."""

    def num_pending(self, sequence: Sequence) -> int:
        """Uncomputed tokens during prefill, then one."""
        return sequence.num_tokens - sequence.num_computed_tokens if sequence.in_prefill else 1

    def may_resume(self, sequence: Sequence) -> bool:
        """Return True."""
        return True

    def on_preempted(self, sequence: Sequence) -> None:
        """No-op: there are no draft tokens."""

    def on_scheduled(self, sequence: Sequence, num_tokens: int, num_drafts: int) -> None:
        """No-op until the result arrives."""

    def on_result(self, sequence: Sequence, num_tokens: int) -> None:
        """Count the tokens as computed."""
        sequence.num_computed_tokens += num_tokens

    def on_tokens(self, sequence: Sequence, num_new: int, num_taken: int, num_drafts: int) -> None:
        """Count the tokens of further decode steps: each step of a multi-step plan computed one."""
        sequence.num_computed_tokens += num_new - 1

    def commit_sampled(self, sequence: Sequence, cache: CacheRules) -> None:
        """No-op: blocks are registered when their step is planned."""


class AtSchedule:
    """Tokens count as soon as their step is planned, before it runs (vLLM V1)."""

    def num_pending(self, sequence: Sequence) -> int:
        """Known and draft tokens less computed ones; 0 while its next token is in flight."""
        return sequence.num_tokens + len(sequence.draft_token_ids) - sequence.num_computed_tokens

    def may_resume(self, sequence: Sequence) -> bool:
        """Return True."""
        return True

    def on_preempted(self, sequence: Sequence) -> None:
        """No-op: the draft tokens still follow the same tokens and are verified by the step that recomputes the
        last of those.
        """

    def on_scheduled(self, sequence: Sequence, num_tokens: int, num_drafts: int) -> None:
        """Count the tokens as computed."""
        sequence.num_computed_tokens += num_tokens

    def on_result(self, sequence: Sequence, num_tokens: int) -> None:
        """No-op: the tokens are counted already."""

    def on_tokens(self, sequence: Sequence, num_new: int, num_taken: int, num_drafts: int) -> None:
        """Uncount rejected draft tokens."""
        if num_drafts and sequence.num_computed_tokens > 0:
            sequence.num_computed_tokens -= num_drafts - (num_new - 1)

    def commit_sampled(self, sequence: Sequence, cache: CacheRules) -> None:
        """No-op: the sequence's next step registers its blocks."""

    def num_pending_rows(self, rows: FastRows) -> Ints:
        """`num_pending` for every row; rows have no draft tokens."""
        return rows.known - rows.computed

    def on_scheduled_rows(self, rows: FastRows, at: Any) -> None:
        """Count one token per row."""
        rows.computed[at] += 1

    def on_tokens_rows(self, rows: FastRows, at: Any) -> None:
        """No-op: there are no placeholders."""

    def confirmed_rows(self, rows: FastRows, at: Any) -> Ints | None:
        """Return None: the next step registers blocks."""
        return None


class OneUnderWay(AtSchedule):
    """`AtSchedule` with each sequence in at most one plan: Chitu's tasks wait for every result, of prompt chunks
    too.

    `num_scheduled_tokens` of a sequence are those of its plan in flight, 0 = none.
    """

    def num_pending(self, sequence: Sequence) -> int:
        """Pending tokens; 0 while its plan is in flight."""
        return 0 if sequence.num_scheduled_tokens else super().num_pending(sequence)

    def on_result(self, sequence: Sequence, num_tokens: int) -> None:
        """Allow the sequence to be planned again."""
        sequence.num_scheduled_tokens = 0

    @staticmethod
    def is_in_flight(group: Group) -> bool:
        """True if any of its sequences is in a plan without a result."""
        return any(sequence.num_scheduled_tokens for sequence in group.live)


class WithPlaceholders:
    """Asynchronous scheduling: tokens that steps in flight will generate count as known, so plan k+1 precedes
    result k.

    `num_spec_tokens`: draft tokens per step; the scheduler schedules placeholders and the worker fills them in.
    """

    def __init__(self, num_spec_tokens: int = 0) -> None:
        self._guesses = [-1] * num_spec_tokens

    def num_pending(self, sequence: Sequence) -> int:
        """Pending tokens; 0 once a step in flight surely reaches max_tokens, and for groups that need their last
        result.
        """
        placeholders = sequence.num_placeholders
        if placeholders > 0 and (sequence.group.needs_result or self._reaches_the_end(sequence)):
            return 0
        known = sequence.num_tokens + placeholders + len(sequence.draft_token_ids)
        return known - sequence.num_computed_tokens

    def may_resume(self, sequence: Sequence) -> bool:
        """False while a step from before its preemption is in flight: the token it yields would be generated twice."""
        return not sequence.num_placeholders

    def on_preempted(self, sequence: Sequence) -> None:
        """Drop its draft tokens: they were placeholders, and no worker has drafts for it any more."""
        sequence.draft_token_ids = []

    def on_scheduled(self, sequence: Sequence, num_tokens: int, num_drafts: int) -> None:
        """Count the tokens; a step that reaches the end adds placeholders for its token and draft tokens."""
        sequence.num_computed_tokens += num_tokens
        if sequence.num_computed_tokens == sequence.num_tokens + sequence.num_placeholders + num_drafts:
            sequence.num_placeholders += 1 + num_drafts
            # Sequences that decode in lockstep yield one token each: forks have no draft tokens, so parents
            # have none.
            sequence.draft_token_ids = [] if sequence.group.needs_result else list(self._guesses)

    def on_result(self, sequence: Sequence, num_tokens: int) -> None:
        """No-op: the tokens are counted already."""

    def on_tokens(self, sequence: Sequence, num_new: int, num_taken: int, num_drafts: int) -> None:
        """Replace placeholders by the generated tokens, and uncount rejected draft tokens."""
        rejected = num_drafts - (num_new - 1) if num_drafts else 0
        if sequence.num_computed_tokens > 0:
            sequence.num_computed_tokens -= rejected
        sequence.num_placeholders = max(0, sequence.num_placeholders - rejected - num_taken)

    def commit_sampled(self, sequence: Sequence, cache: CacheRules) -> None:
        """Register full blocks of confirmed tokens now: the next step may be planned already, without knowing
        these tokens.
        """
        cache.commit_sampled(sequence)

    def num_pending_rows(self, rows: FastRows) -> Ints:
        """`num_pending` for every row; 0 for those that a step in flight surely brings to max_tokens."""
        pending: Ints = rows.known + rows.placeholders - rows.computed
        sure = rows.computed + 2 - rows.placeholders
        pending[(rows.placeholders > 0) & (sure >= rows.ends_at)] = 0
        return pending

    def on_scheduled_rows(self, rows: FastRows, at: Any) -> None:
        """Count one token per row, and a placeholder for the next."""
        rows.computed[at] += 1
        rows.placeholders[at] += rows.computed[at] == rows.known[at] + rows.placeholders[at]

    def on_tokens_rows(self, rows: FastRows, at: Any) -> None:
        """Replace one placeholder of each row by its generated token."""
        rows.placeholders[at] = np.maximum(0, rows.placeholders[at] - 1)

    def confirmed_rows(self, rows: FastRows, at: Any) -> Ints | None:
        """Computed tokens of each row, without placeholders."""
        confirmed: Ints = rows.computed[at] - rows.placeholders[at]
        return confirmed

    @staticmethod
    def _reaches_the_end(sequence: Sequence) -> bool:
        sure = sequence.num_computed_tokens + 2 - sequence.num_placeholders
        return sure >= sequence.num_prompt_tokens + sequence.request.stop.max_tokens
