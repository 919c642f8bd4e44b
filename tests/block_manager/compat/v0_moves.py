"""What tests do by hand with the rules of 0.6.3 and 2023. Blocks of 4 tokens; one step per move, all known at once."""

from block_manager import integrity
from block_manager.cache_rules import AllocStatus, Growth, PrefixHit
from block_manager.compat.vllm_063 import Vllm063Rules
from block_manager.compat.vllm_2023 import Vllm2023Rules
from tests.support.core.sequences import KnownSequence

OK, LATER, NEVER = AllocStatus.OK, AllocStatus.LATER, AllocStatus.NEVER
Rules = Vllm063Rules | Vllm2023Rules


def make_063(num_gpu: int = 16, num_cpu: int = 16, *, caching: bool = False, **more: int) -> Vllm063Rules:
    return Vllm063Rules.make(
        block_size=4,
        num_gpu_blocks=num_gpu,
        num_cpu_blocks=num_cpu,
        max_model_len=64,
        prefix_caching=caching,
        **more,
    )


def make_2023(num_gpu: int = 16, num_cpu: int = 16, *, caching: bool = False, **more: int) -> Vllm2023Rules:
    return Vllm2023Rules.make(
        block_size=4,
        num_gpu_blocks=num_gpu,
        num_cpu_blocks=num_cpu,
        max_model_len=64,
        prefix_caching=caching,
        **more,
    )


def can_admit(rules: Rules, *sequences: KnownSequence, num_lookahead: int = 0) -> AllocStatus:
    return rules.can_admit(sequences, PrefixHit(), len(sequences[0].token_ids), num_lookahead)


def compute(rules: Rules, *sequences: KnownSequence, now: float = 1.0) -> None:
    """The rest of a step that computes all they know."""
    for sequence in sequences:
        sequence.num_scheduled_tokens = len(sequence.token_ids) - sequence.num_computed_tokens
    rules.commit(sequences, now)
    for sequence in sequences:
        sequence.num_computed_tokens = len(sequence.token_ids)
    assert integrity.check(rules.ledger) == []


def begin(rules: Rules, *sequences: KnownSequence, now: float = 1.0) -> None:
    """A step that starts them."""
    assert can_admit(rules, *sequences) is OK
    rules.admit(sequences, PrefixHit(), len(sequences[0].token_ids))
    compute(rules, *sequences, now=now)


def append(rules: Rules, sequence: KnownSequence, *tokens: int, num_lookahead: int = 0) -> Growth:
    """A step that computes new tokens of it."""
    sequence.token_ids += tokens
    assert rules.can_extend([sequence], len(tokens), num_lookahead)
    growth = rules.extend(sequence, len(tokens), num_lookahead)
    compute(rules, sequence, now=2.0)
    return growth


def append_each(rules: Rules, sequence: KnownSequence, *tokens: int) -> list[Growth]:
    """A step for each token."""
    return [append(rules, sequence, token) for token in tokens]


def fork(rules: Rules, parent: KnownSequence, name: str) -> KnownSequence:
    child = KnownSequence(name, list(parent.token_ids), parent.num_prompt_tokens, parent.num_computed_tokens)
    rules.fork(parent, child)
    return child
