"""Stop and beam-search parameters of a request."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopRules:
    """When a sequence stops. `max_tokens` >= 1 output tokens; token ids are vocabulary ids."""

    max_tokens: int
    min_tokens: int = 0
    ignore_eos: bool = False
    eos_token_ids: frozenset[int] = frozenset()
    stop_token_ids: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class BeamRules:
    """Beam search with `best_of` beams: score = sum of logprobs / output tokens ** `length_penalty`, as in
    transformers.

    `early_stopping`: True = end when enough hypotheses are finished; False = when no live beam can beat the
    worst of them at its current length; "never" = when it cannot at any length.
    """

    length_penalty: float = 1.0
    early_stopping: bool | str = False
