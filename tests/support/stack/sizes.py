"""Sizes and limits of stacks that tests start."""

SMALL_STEP = 256
"""Tokens of the largest step. A worker runs such a step before it serves: of the default, 2,048 tokens, it takes longer than
loading the built-in model."""
MASK_BUDGET_MS = 0.5
"""A twentieth of the default: hundreds of tokens of an ambiguous grammar exceed it, a small schema's tokens do not."""
