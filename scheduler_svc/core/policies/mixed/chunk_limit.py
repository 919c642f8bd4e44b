"""Prompt tokens of a step, limited by the time that they add to the decodes in it."""

import math
from itertools import chain, takewhile

from scheduler_svc.core.plan_builder import PlanBuilder
from scheduler_svc.core.request import Group
from scheduler_svc.core.state import CoreState


class ChunkLimit:
    """First phase of a step: while requests decode, prompts get at most the tokens that `chunk_s` seconds compute.

    Without it, a step with a full budget of prompt tokens delays the next token of all decoding requests. Where
    none decodes, prompts get the whole budget. The cost of a token is measured; until it is known there is no
    limit. A chunk may take as long as the shortest step, so that reading the weights again for each chunk at
    most doubles the time of a long prompt. The prompts at hand are split evenly, in chunks of 2/3 to 3/2 of
    that size: a small remainder would be computed in a step with the next newcomers, and wait for them.
    Stall-free batching of Sarathi-Serve (arXiv 2403.02310), with a time in place of a number of tokens.
    """

    def __init__(self, chunk_s: float, num_spec_tokens: int) -> None:
        self._chunk_s = chunk_s
        self._tokens_per_row = 1 + num_spec_tokens

    def run(self, state: CoreState, builder: PlanBuilder) -> None:
        """Lower the token budget of the step: one token for each running sequence, and the chunk."""
        costs = state.costs.now
        if not (costs.compute_token_s and state.limits.chunked_prefill and any(map(_decodes, state.running))):
            return
        chunk = _even(state, costs.tokens_in(max(self._chunk_s, costs.step_s)))
        # A group on the host comes back with a token for each of its sequences, or not at all.
        widest = max((len(group.live) for group in state.swapped), default=1)
        builder.budget.limit(state.num_running_seqs * self._tokens_per_row + max(widest, chunk))


def _even(state: CoreState, chunk: int) -> int:
    """Prompt tokens at hand, divided by a whole number of chunks; `chunk` if one or more than four are needed.

    Prompts in progress are at the end of the running queue. Prefix hits of waiting requests are not known here.
    """
    num_tokens = 0
    for group in chain(takewhile(_is_in_prompt, reversed(state.running)), state.waiting):
        first = group.sequences[0]
        num_tokens += first.num_tokens - first.num_computed_tokens
        if num_tokens > 4 * chunk:
            return chunk
    return chunk if num_tokens <= chunk else math.ceil(num_tokens / round(num_tokens / chunk))


def _is_in_prompt(group: Group) -> bool:
    return not _decodes(group)


def _decodes(group: Group) -> bool:
    """Whether the group has a token, or will have by a step in flight, and waits for its next.

    True for all rows of fast decode.
    """
    first = group.sequences[0]
    return first.num_output_tokens + first.num_placeholders > 0 and not first.in_prefill
