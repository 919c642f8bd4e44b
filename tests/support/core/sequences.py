"""Sequences as cache rules see them, and the few moves that tests make with them. One step per move, all known at once."""

from collections.abc import Iterable
from dataclasses import dataclass

from block_manager.cache_rules import AllocStatus, Growth, PrefixHit
from block_manager.rules.v1_rules import V1PoolRules


@dataclass(slots=True, eq=False)
class KnownSequence:
    """`num_prompt_tokens` None: all of its tokens are the prompt."""

    name: str
    token_ids: list[int]
    num_prompt_tokens: int | None = None
    num_computed_tokens: int = 0
    num_scheduled_tokens: int = 0
    num_placeholders: int = 0
    cache_salt: str = ""
    lora_id: int = 0
    lane: int | None = None
    no_cache_reuse: bool = False
    has_siblings: bool = False
    sibling_names: tuple[str, ...] = ()
    num_scheduled_tokens: int = 0

    def __post_init__(self) -> None:
        if self.num_prompt_tokens is None:
            self.num_prompt_tokens = len(self.token_ids)


def prompt(name: str, tokens: Iterable[int], **fields: object) -> KnownSequence:
    """A sequence that knows only its prompt."""
    return KnownSequence(name, list(tokens), **fields)


def start(rules: V1PoolRules, sequence: KnownSequence, num_tokens: int | None = None) -> PrefixHit:
    """Admits it behind its hit with `num_tokens` (None: all that are left), and computes them."""
    hit = rules.lookup(sequence)
    num_tokens = len(sequence.token_ids) - hit.num_tokens if num_tokens is None else num_tokens
    assert rules.can_admit([sequence], hit, num_tokens) is AllocStatus.OK
    rules.admit([sequence], hit, num_tokens)
    sequence.num_computed_tokens = hit.num_tokens + num_tokens
    return hit


def go_on(rules: V1PoolRules, sequence: KnownSequence, token: int = 7) -> Growth:
    """One more output token of it, computed."""
    sequence.token_ids.append(token)
    assert rules.can_extend([sequence], 1)
    growth = rules.extend(sequence, 1)
    sequence.num_computed_tokens += 1
    return growth


def fork(rules: V1PoolRules, parent: KnownSequence, name: str) -> KnownSequence:
    """A child that stands where its parent stands."""
    child = KnownSequence(name, list(parent.token_ids), parent.num_prompt_tokens, parent.num_computed_tokens)
    rules.fork(parent, child)
    return child
