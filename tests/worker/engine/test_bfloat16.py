"""Families of all kinds of caches in bfloat16: as near to float32 as `transformers` is in bfloat16."""

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from tests.support.checkpoints import CACHE_FAMILIES, STATE_FAMILIES, load_reference
from tests.support.worker.driver import Driver, make_engine
from tests.worker.engine.families import prompts_of
from tests.worker.families.tiny_checkpoints import family_checkpoint

QUICK_FAMILIES = ("gpt_oss", "falcon_h1")
_MOST = 1.5
"""Times the deviation of transformers' own bfloat16."""


@pytest.mark.parametrize(
    "family",
    [
        name if name in QUICK_FAMILIES else pytest.param(name, marks=pytest.mark.long)
        for name in (*CACHE_FAMILIES, *STATE_FAMILIES)
    ],
)
def test_rounds_no_more_than_transformers(family: str, tmp_path: Path) -> None:
    """In bfloat16, logits deviate from float32's no more than 1.5 times as much as those of `transformers` in bfloat16."""
    path, prompts = family_checkpoint(family, tmp_path / family), prompts_of(4)
    exact, rounded = [_logits(load_reference(path, dtype=dtype), prompts) for dtype in (torch.float32, torch.bfloat16)]
    found = _served(path, prompts)
    off = {
        name: float((logits - exact).norm() / exact.norm()) for name, logits in (("ours", found), ("theirs", rounded))
    }
    assert 0 < off["ours"] < _MOST * off["theirs"], off


def _logits(model: PreTrainedModel, prompts: dict[str, list[int]]) -> torch.Tensor:
    with torch.inference_mode():
        return torch.stack([model(torch.tensor([prompt])).logits[0, -1].float() for prompt in prompts.values()])


def _served(path: Path, prompts: dict[str, list[int]]) -> torch.Tensor:
    driver = Driver(make_engine(path, dtype="bfloat16"))
    for name, prompt in prompts.items():
        driver.add(name, prompt)
    driver.run()
    return torch.stack([driver.logits[name][len(prompt)].float() for name, prompt in prompts.items()])
