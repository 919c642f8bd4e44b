"""Deliver a step's tokens, log probabilities and embeddings to request outputs."""

from collections import Counter
from collections.abc import Callable
from typing import Protocol

from scheduler_svc.core.plan import SequenceTokens, StepOutcome, StepPlan, StepResult
from scheduler_svc.worker_values import PromptRun, TokenExtras, WorkerResult


class TokenReaders(Protocol):
    """Receiver of outputs, by request id in the core."""

    def put_tokens(self, run: SequenceTokens, step: int, extras: TokenExtras | None) -> None:
        """Append new output tokens of a sequence."""

    def put_prompt(self, core_id: str, run: PromptRun) -> None:
        """Store log probabilities of some of the request's prompt tokens."""

    def put_embedding(self, core_id: str, values: bytes) -> None:
        """Store the prompt's embedding."""

    def drafts_verified(self, core_id: str, num_accepted: int, num_rejected: int) -> None:
        """Count draft tokens that the step accepted and rejected."""


def publish(outcome: StepOutcome, result: WorkerResult, readers: TokenReaders) -> None:
    """Deliver the core's outcome of a step, with the log probabilities and embeddings of the worker's result."""
    step = result.result.step
    if result.plain is not None:
        for tokens in outcome.runs:
            readers.put_tokens(tokens, step, None)
        return
    for name, run in result.prompts:
        readers.put_prompt(_request_of(name), run)
    for name, values in result.embeddings.items():
        readers.put_embedding(_request_of(name), values)
    born: Counter[str] = Counter()
    for tokens in outcome.runs:
        parent = tokens.forked_from or tokens.name
        extras = result.extras.get(parent)
        if parent in result.result.children:
            # The first child continues the sequence; the others are forks of it, in order.
            extras = extras.one(born[parent]) if extras is not None else None
            born[parent] += 1
        if tokens.name not in result.embeddings:
            readers.put_tokens(tokens, step, extras if parent not in result.result.candidates else _NONE)


def count_drafts(plan: StepPlan, result: StepResult, count: Callable[[str, int, int], None]) -> None:
    """Call `count(core_id, num_accepted, num_rejected)` for each sequence with draft tokens in the plan.

    A sequence's last token in the result is not a draft: it follows the accepted ones. Fast decode rows have
    no drafts.
    """
    for entry in plan.entries:
        if entry.num_drafts and (tokens := result.tokens.get(entry.name)):
            num_accepted = len(tokens) - 1
            count(entry.request_id, num_accepted, entry.num_drafts - num_accepted)


_NONE = TokenExtras()


def _request_of(name: str) -> str:
    return name.rpartition("/")[0]
