"""How a step's tokens are shared among sequences under mixed phases; here long prompts are cut (chunked prefill)."""

import numpy as np

from block_manager.cache_rules import PrefixHit
from scheduler_svc.core.fast_decode.blocks import RowProgress
from scheduler_svc.core.fast_decode.rows import FastRows, Ints
from scheduler_svc.core.plan_builder import PlanBuilder
from scheduler_svc.core.request import Group, Sequence
from scheduler_svc.core.state import CoreState

Share = tuple[Sequence, int]


class StepShares:
    """Decide how many tokens of a step each sequence gets. Asking changes nothing.

    All phases of mixed policies ask here: the running groups, swapped and waiting ones, fast decode, and the
    forecast of `RankPreemption`. A further limit on a step's tokens, such as one on its prompt tokens, belongs here.
    """

    def __init__(self, progress: RowProgress) -> None:
        self._progress = progress

    def left(self, builder: PlanBuilder, num_reserved: int = 0) -> int:
        """Tokens of the step that are free once others got `num_reserved`; negative if they want more than that."""
        return builder.budget.token_budget - builder.budget.num_tokens - num_reserved

    def running(self, group: Group, state: CoreState, builder: PlanBuilder) -> list[Share]:
        """Tokens of each sequence of a running or swapped group; empty while it must wait."""
        live = group.live
        wanted = [(s, self._num_wanted(s, state)) for s in live]
        left = self.left(builder)
        if len(live) == 1:
            return [(s, min(n, left)) for s, n in wanted if min(n, left) > 0]
        return joint_shares(wanted, left)

    def wanted_to_start(self, sequence: Sequence, hit: PrefixHit, state: CoreState) -> int:
        """Tokens that a waiting sequence would take of an empty step, behind its cached prefix."""
        return _capped(sequence.num_tokens - hit.num_tokens, state)

    def starting(self, num_wanted: int, state: CoreState, builder: PlanBuilder, num_reserved: int = 0) -> int:
        """Of the tokens that a waiting group wants, those that it gets besides `num_reserved` for others; 0 = none."""
        left = self.left(builder, num_reserved)
        return max(0, min(num_wanted, left)) if num_wanted <= left or state.limits.chunked_prefill else 0

    def plain(
        self, rows: FastRows, others: list[Group], state: CoreState, builder: PlanBuilder
    ) -> tuple[Ints, list[Share]] | None:
        """The rows that take one token each, and the shares of the other running groups; None if the step is not plain.

        In a plain step all rows fit the budget, each with at most one token, the other groups have one sequence
        each, and none is cut but the last. Fast decode plans only such steps, as order makes no difference in them.
        """
        wanted = np.minimum(self._progress.num_pending_rows(rows), state.limits.max_model_len - 1 - rows.computed)
        if int(wanted.max()) > 1:
            return None
        scheduled = np.flatnonzero(wanted > 0)
        left = self.left(builder, len(scheduled))
        if left < 0:
            return None
        shares: list[Share] = []
        for group in others:
            if len(group.sequences) > 1 or group.needs_result:
                return None
            sequence = group.sequences[0]
            num_tokens = self._num_wanted(sequence, state)
            if num_tokens > left and (left <= 0 or group.ticket < int(rows.tickets[-1])):
                return None
            if num_tokens > 0:
                shares.append((sequence, min(num_tokens, left)))
                left -= min(num_tokens, left)
        return scheduled, shares

    def _num_wanted(self, sequence: Sequence, state: CoreState) -> int:
        """Tokens that a sequence with blocks would take of an empty step; 0 while it waits for a result or sits out
        (`slow_masks`).
        """
        if sequence.group.is_paused:
            return 0
        pending = _capped(self._progress.num_pending(sequence), state)
        return min(pending, state.limits.max_model_len - 1 - sequence.num_computed_tokens)


def _capped(num_tokens: int, state: CoreState) -> int:
    """At most `long_prefill_token_threshold` tokens of one sequence."""
    threshold = state.limits.long_prefill_token_threshold
    return threshold if 0 < threshold < num_tokens else num_tokens


def joint_shares(wanted: list[Share], left: int) -> list[Share]:
    """Shares of sequences that sample together or not at all: all they want, else tokens that bring one closer to
    that.

    No sequence reaches its last token before all can do so in the same step. The oldest that lags goes first,
    as the others' prefix is in blocks that it fills.
    """
    amounts = {n for _, n in wanted}
    if min(amounts) <= 0:
        return []
    fits = len(amounts) == 1 and sum(n for _, n in wanted) <= left
    if fits and all(s.num_computed_tokens + n >= s.num_tokens for s, n in wanted):
        return wanted
    for sequence, num_tokens in wanted:
        take = min(num_tokens, sequence.num_tokens - 1 - sequence.num_computed_tokens, left)
        if take > 0:
            return [(sequence, take)]
    return []
