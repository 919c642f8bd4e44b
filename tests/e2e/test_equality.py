"""Greedy tokens and logprobs through gateway, scheduler and worker equal `transformers.generate` in float32.

A sample here (the built-in model, 16 requests at once), the whole in `make test-long` (every family, 64 at once); both sizes are
printed.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from quire import SamplingParams
from quire.built_in_model import default_model
from quire.client.outputs import RequestOutput
from quire.client.sync_client import Client
from quire.local_stack.stack import LocalStack
from tests.e2e import tight_stacks
from tests.support.checkpoints import FAMILIES, SAMPLE_STATE_FAMILIES, STATE_FAMILIES
from tests.support.stack.commands import steps
from tests.support.stack.oracle import Expected, Job, expected, greedy_after, mixed_jobs
from tests.support.stack.supervised import Supervised
from tests.support.worker.driver import limits_of
from tests.worker.families.tiny_checkpoints import family_checkpoint

TINY = "tiny"
# Outputs of as many requests are made by `generate`; those of the others are checked in one pass each, which is ten times faster.
_GENERATED = 4
# 64 tokens a step cut every longer prompt; 31 blocks of 16 hold two or three of the longer requests, and none waits for
# others to end. Of models with states, those of six requests have theirs beside them.
_SCHEDULER_ARGS = ("--max-num-batched-tokens", "64", "--max-num-seqs", "64", "--set", "restraint=null")
_NUM_BLOCKS, _NUM_STATES = 32, 6


def _checkpoint(name: str, folder: Path) -> tuple[Path, int]:
    if name == TINY:
        return default_model(), 4000
    return family_checkpoint(name, folder / name), 510


def _worker_args(path: Path) -> tuple[str, ...]:
    limits = limits_of(path)
    num_full = list(limits.cache_windows).count(0) or 1  # groups that keep whole sequences
    num_blocks = _NUM_BLOCKS * num_full + _NUM_STATES * limits.num_state_blocks
    args = ("--dtype", "float32", "--num-gpu-blocks-override", str(num_blocks), "--max-model-len", "256")
    return (*args, "--checkpoint-tokens", "32") if limits.num_state_blocks else args


def _ask(client: Client, job: Job) -> RequestOutput:
    params = SamplingParams(temperature=0, max_tokens=job.max_tokens, ignore_eos=True, logprobs=True)
    return client.generate(list(job.prompt), params, timeout_s=240)


def _check(output: RequestOutput, want: Expected, tolerance: float) -> None:
    got = output.outputs[0]
    assert got.token_ids == want.token_ids
    values = [next(iter(entry.values())).logprob for entry in got.logprobs]
    assert values == pytest.approx(want.logprobs, abs=tolerance)
    assert got.finish_reason == "length"


def _compare(name: str, count: int, folder: Path) -> str:
    path, vocab_size = _checkpoint(name, folder)
    if name != TINY:
        long = expected(path, Job(mixed_jobs(count, vocab_size)[0].prompt, 48))
        assert len(set(long.token_ids)) >= 15, "the model says too little to be a witness"
    with LocalStack(model=path, worker_args=_worker_args(path), scheduler_args=_SCHEDULER_ARGS) as stack:
        return _compare_on(stack, name, path, mixed_jobs(count, vocab_size), grants=True)


def _compare_on(stack: LocalStack, name: str, path: Path, jobs: list[Job], *, grants: bool = False) -> str:
    wanted = [expected(path, job) for job in jobs[:_GENERATED]]
    tolerance = tight_stacks.tolerance(name)
    with Client(stack.grpc_address) as client:
        for job, want in zip(jobs[:3], wanted[:3], strict=True):
            _check(_ask(client, job), want, tolerance)
        if grants:
            assert any("is_repeat" in step for step in steps(stack.admin_address)), "decode steps were to be granted"
        again = max(jobs, key=lambda job: len(job.prompt))
        _ask(client, again)
        assert _ask(client, again).num_cached_tokens, "a prompt that came before was to hit"
        with ThreadPoolExecutor(len(jobs)) as pool:
            outputs = list(pool.map(lambda job: _ask(client, job), jobs))
        for output, job in list(zip(outputs, jobs, strict=True))[_GENERATED:]:
            wanted.append(greedy_after(path, job, output.outputs[0].token_ids))
        for output, want in zip(outputs, wanted, strict=True):
            _check(output, want, tolerance)
        assert sum(output.num_preemptions for output in outputs) > 0, "the pool was to force preemption"
    num_tokens = sum(len(want.token_ids) for want in wanted)
    return f"equal to generate: {name}, {len(jobs)} requests at once, {num_tokens} tokens"


def test_answers_are_those_of_generate(tight: LocalStack, record_property: Callable[[str, object], None]) -> None:
    """Through all services, tokens and logprobs equal those of `generate`: alone, then 16 at once, chunked and preempted."""
    record_property("size", _compare_on(tight, TINY, default_model(), mixed_jobs(16, 4000)))


def test_answers_of_a_model_with_states_are_those_of_generate(
    state_model: Path, killable_states: Supervised, record_property: Callable[[str, object], None]
) -> None:
    """The same for a model with states, whose prefixes end at checkpoints."""
    name = SAMPLE_STATE_FAMILIES[0]
    record_property("size", _compare_on(killable_states.stack, name, state_model, mixed_jobs(16, 510)))


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", [TINY, *FAMILIES, *STATE_FAMILIES])
def test_answers_of_every_family_are_those_of_generate(
    name: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Tokens and logprobs equal those of `generate`: alone, several granted steps each, then 64 at once, chunked and preempted."""
    record_property("size", _compare(name, 64, tmp_path))
