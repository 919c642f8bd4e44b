"""What the states of a sequence take, for default configurations of transformers; docs/models.md shows it."""

from typing import NamedTuple


class StateFigures(NamedTuple):
    """Modules with states, layers with keys and values, blocks of the states, their MiB, and the default of --checkpoint-tokens."""

    modules: int
    layers: int
    blocks: int
    mib: float
    checkpoint_tokens: int


# In bfloat16, with blocks of 16 tokens.
STATE_SHAPES = {
    "qwen3_next": StateFigures(36, 12, 199, 74.6, 3184),
    "qwen3_5_text": StateFigures(24, 8, 100, 50.0, 1600),
    "falcon_h1": StateFigures(32, 32, 17, 34.0, 272),
    "jamba": StateFigures(28, 4, 64, 16.0, 1024),
}
