"""Perplexity by transformers in float32. Imported by peers' environments too: torch and transformers only."""

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

Windows = Sequence[Sequence[int]]
"""Token ids of pieces of a text, each with a context of its own."""


def perplexity(checkpoint: Path, windows: Windows) -> float:
    """Perplexity of all tokens of the windows but their first ones. `checkpoint`: a folder that transformers reads."""
    disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    total = 0.0
    with torch.inference_mode():
        for window in windows:
            ids = torch.tensor(window)
            total += float(cross_entropy(model(ids[None]).logits[0, :-1], ids[1:], reduction="sum"))
    return math.exp(total / sum(len(window) - 1 for window in windows))
