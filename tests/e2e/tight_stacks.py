"""Requests to models whose vocabulary is bytes, what they give, and a stack with so little room that everything happens to them."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from random import Random

from quire import SamplingParams
from tests.support.stack import kill_requests, oracle
from tests.support.stack.supervised import Case
from tests.support.worker.driver import limits_of

_LENGTHS = {"greedy": 40, "penalties": 17, "two": 33, "beams": 20, "schema": 15, "logprobs": 50, "long prompt": 300}
# Few enough that sequences are preempted: the longest prompt in each cache group, and the states of six sequences.
_NUM_BLOCKS, _NUM_STATES = 34, 6
LOGPROB_TOLERANCE = 1e-4
# transformers itself gives log probabilities of these up to 1e-3 apart for all tokens in one pass and one by one: norms of their
# heads divide by values near zero.
_ROUGH_FAMILIES = {"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "kimi_linear"}
_ROUGH_TOLERANCE = 2e-3


def tolerance(family: str) -> float:
    """How far log probabilities may be apart."""
    return _ROUGH_TOLERANCE if family in _ROUGH_FAMILIES else LOGPROB_TOLERANCE


def tight(path: Path) -> tuple[str, ...]:
    """Options of a worker with few blocks, on the device and on the host, and with checkpoints of states close to each other."""
    limits = limits_of(path)
    num_states = _NUM_STATES * limits.num_state_blocks
    num_blocks = _NUM_BLOCKS * max(1, len(limits.cache_windows)) + num_states
    sizes = ("--num-gpu-blocks-override", str(num_blocks), "--swap-space", "8MiB", "--max-model-len", "512")
    return ("--dtype", "float32", *sizes, *(("--checkpoint-tokens", "32") if num_states else ()))


def cases() -> dict[str, Case]:
    """The requests of `kill_requests` with prompts of ids. The vocabulary has one byte per token, so a schema needs more tokens."""
    draw, found = Random(4), kill_requests.cases()
    found["schema"] = replace(found["schema"], params=replace(found["schema"].params, max_tokens=320))
    return {
        name: replace(case, prompt=[draw.randrange(256) for _ in range(_LENGTHS[name])]) for name, case in found.items()
    }


def expected(address: str, path: Path, wanted: Mapping[str, Case]) -> dict[str, kill_requests.Output]:
    """What the requests give without kills. Asserts that those without drawn tokens are what `generate` gives."""
    found = kill_requests.undisturbed(address, wanted)
    for name in ("greedy", "long prompt"):
        job = _job(wanted[name])
        assert found[name][0].token_ids == oracle.expected(path, job).token_ids
    assert [choice.token_ids for choice in found["beams"]] == oracle.beams(path, _job(wanted["beams"]))
    return found


def _job(case: Case) -> oracle.Job:
    assert isinstance(case.prompt, list) and isinstance(case.params, SamplingParams) and case.params.max_tokens
    return oracle.Job(tuple(case.prompt), case.params.max_tokens)
