"""Beam search as decisions to fork, continue and drop sequences of one group.

Scores are sums of logprobs divided by output length ** penalty (`BeamRules`). The rules are those of
transformers, so the hypotheses equal those of `generate(num_beams=...)`. For each live beam the worker returns
enough of its best next tokens to keep as many live beams as the width even if some finish.
"""

from dataclasses import dataclass

from scheduler_svc.core.request import Group, Sequence, SequenceStatus
from scheduler_svc.core.request_rules import BeamRules
from scheduler_svc.core.stop_rules import stop_status

Candidates = dict[str, list[tuple[int, float]]]
Children = dict[str, list[tuple[int, float]]]

_FINISHED = (SequenceStatus.FINISHED_STOPPED, SequenceStatus.FINISHED_LENGTH_CAPPED)


@dataclass(frozen=True, slots=True)
class _Continuation:
    """A live beam with one more token."""

    parent: Sequence
    token_id: int
    logprob: float
    score: float
    finishes: bool


def decide(group: Group, candidates: Candidates, max_total_tokens: int) -> Children:
    """(token, logprob) pairs by live beam: the first continues it, the others fork it, an empty list drops it."""
    width, rules = group.width, group.request.beam or BeamRules()
    found = [
        c for beam in group.live for c in _continuations(beam, candidates.get(beam.name, []), rules, max_total_tokens)
    ]
    found.sort(key=lambda c: -c.score)
    done = sorted((group.request.score(s) for s in group.sequences if s.status in _FINISHED), reverse=True)
    finished, live = _best_finished(found[:width], done, width), [c for c in found if not c.finishes]
    scores = sorted([*done, *(c.score for c in finished)], reverse=True)[:width]
    if live and len(scores) == width and _is_over(live[0], scores[-1], group, rules, max_total_tokens):
        live = []
    chosen = [*live[:width], *finished]
    return {beam.name: [(c.token_id, c.logprob) for c in chosen if c.parent is beam] for beam in group.live}


def _continuations(
    beam: Sequence, candidates: list[tuple[int, float]], rules: BeamRules, max_total_tokens: int
) -> list[_Continuation]:
    found = []
    for token_id, logprob in candidates:
        status = stop_status(
            beam.request.stop, token_id, beam.num_output_tokens + 1, beam.num_tokens + 1, max_total_tokens
        )
        score = (beam.cumulative_logprob + logprob) / (beam.num_output_tokens + 1) ** rules.length_penalty
        found.append(_Continuation(beam, token_id, logprob, score, status is not None))
    return found


def _best_finished(found: list[_Continuation], done: list[float], width: int) -> list[_Continuation]:
    """Of the best continuations, those that finish now and are among the `width` best finished ones overall."""
    finishing = [c for c in found if c.finishes]
    return [c for i, c in enumerate(finishing) if i + sum(score >= c.score for score in done) < width]


def _is_over(best: _Continuation, worst: float, group: Group, rules: BeamRules, max_total_tokens: int) -> bool:
    """True if no live beam can beat the worst of the best finished hypotheses any more."""
    if rules.early_stopping is True:
        return True
    attainable = best.score
    if rules.early_stopping == "never" and rules.length_penalty > 0:
        longest = min(group.request.stop.max_tokens, max_total_tokens - best.parent.num_prompt_tokens)
        attainable = (best.parent.cumulative_logprob + best.logprob) / longest**rules.length_penalty
    return worst >= attainable
