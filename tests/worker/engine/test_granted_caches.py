"""Granted steps of models with several cache groups or with states, through scheduler and worker: tokens are those of
`generate`.
"""

import asyncio
from pathlib import Path

import pytest

from tests.support.checkpoints import make_checkpoint
from tests.support.services.harness import run_async, stack
from tests.support.worker.driver import new_engine
from tests.support.worker.generated import greedy, reference_model
from tests.worker.families.tiny_checkpoints import state_checkpoint

_PROMPTS = ([3, 1, 4, 1, 5], [2, 7, 1, 8], [1, 6, 1, 8, 0, 3, 3])
_NUM_TOKENS = 70


def _checkpoint(kind: str, folder: Path) -> Path:
    return state_checkpoint("lfm2", folder) if kind == "states" else make_checkpoint("gemma3_text", folder)


@pytest.mark.parametrize("kind", ["groups", "states"])
@run_async
async def test_granted_steps_of_groups_and_states(kind: str, tmp_path: Path) -> None:
    """Most steps are repeated by the worker; blocks leave the window and checkpoints are kept in the steps between."""
    path = _checkpoint(kind, tmp_path / kind)
    reference = reference_model(path)
    async with stack(
        make_engine=lambda _: new_engine(path, num_blocks=120, max_model_len=256), overlap=False, grants=True
    ) as running:
        handles = [await running.gateway.submit(list(p), max_tokens=_NUM_TOKENS) for p in _PROMPTS]
        outputs = await asyncio.gather(*(running.gateway.end_of(handle) for handle in handles))
        log = await running.admin.steps()
        await running.admin.assert_all_free()
    for prompt, output in zip(_PROMPTS, outputs, strict=True):
        assert output.tokens == greedy(reference, list(prompt), _NUM_TOKENS).token_ids
    assert sum(step.is_repeat for step in log) > len(log) / 2
