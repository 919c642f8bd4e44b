"""Presets with a real model: whatever schedules, greedy tokens are those of an undisturbed run (float32, models/tiny)."""

from collections.abc import Iterator

import pytest

from quire import LLM, RequestOutput, SamplingParams
from quire.cli import CONFIG_ERROR_STATUS
from quire.client.sync_client import Client
from quire.local_stack.stack import LocalStack
from tests.support.stack.commands import quire_here, steps
from tests.support.stack.oracle import mixed_jobs
from tests.support.stack.sizes import SMALL_STEP

JOBS = mixed_jobs(8, 4000, seed=1)
TIGHT = {"max_model_len": 192, "num_gpu_blocks_override": 20, "swap_space": "1MiB", "max_num_seqs": 8}


def _generate(llm: LLM) -> list[RequestOutput]:
    params = [SamplingParams(temperature=0, max_tokens=job.max_tokens, ignore_eos=True) for job in JOBS]
    return llm.generate([list(job.prompt) for job in JOBS], params)


@pytest.fixture(scope="module")
def undisturbed() -> Iterator[list[list[int]]]:
    """With room for everything."""
    with LLM(dtype="float32", kv_cache_memory="64MiB", max_num_batched_tokens=SMALL_STEP) as llm:
        outputs = _generate(llm)
    assert sum(output.num_preemptions for output in outputs) == 0
    yield [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize(
    ("policy", "keys"),
    [
        ("vllm-2023", {"preemption_mode": "swap"}),
        ("vllm-v0", {"preemption_mode": "swap"}),
        ("vllm-v0", {"async_output": True}),
        ("vllm-v0-chunked", {"max_num_batched_tokens": 64}),
        ("vllm-v1", {"max_num_batched_tokens": 64}),
        ("vllm-v1-async", {"max_num_batched_tokens": 64}),
        ("quire", {"restraint": None}),
        ("quire", {"restraint": None, "preemption_mode": "swap", "max_num_batched_tokens": 64}),
        ("static", {"prefix_caching": False}),
        ("chitu", {"infer.prefill_chunk_size": 50, "infer.pp_size": 2}),
    ],
    ids=str,
)
def test_every_preset_gives_the_same_tokens(policy: str, keys: dict[str, object], undisturbed: list[list[int]]) -> None:
    """R27, R76: chosen by name with knobs, in blocks that force preemption."""
    step = {} if "max_num_batched_tokens" in keys else {"max_num_batched_tokens": SMALL_STEP}
    with LLM(dtype="float32", policy=policy, policy_set=keys, **TIGHT, **step) as llm:
        outputs = _generate(llm)
    assert [output.outputs[0].token_ids for output in outputs] == undisturbed
    if policy != "static":
        assert sum(output.num_preemptions for output in outputs) > 0, "the pool was to force preemption"


def test_a_policy_file_through_the_services(tight: LocalStack) -> None:
    """`--policy FILE --set KEY=VALUE` as an operator gives them; `quire steps` says whose decisions they are."""
    with Client(tight.grpc_address) as client:
        params = SamplingParams(max_tokens=6, ignore_eos=True)
        assert len(client.generate("import ", params).outputs[0].token_ids) == 6
    assert {step["policy"] for step in steps(tight.admin_address)} == {"tight"}


def test_wrong_policies_end_the_commands(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Status 2 and one line that names option or file and field, before anything starts."""
    path = tmp_path_factory.mktemp("policy") / "wrong.yaml"
    path.write_text("base: vllm-v0\nset:\n  delay: 1\n", encoding="utf-8")
    for arguments, text in (
        (("--policy", str(path)), f"error: {path}:3: set.delay: unknown key 'delay'"),
        (("--set", "sliding_window=64", "--policy", "vllm-v0"), "error: --set sliding_window=64: "),
        (("--set", "batch_queue"), "error: --set batch_queue: is no KEY=VALUE"),
    ):
        done = quire_here(
            *("up", "--simulated", "--grpc-port", "0", "--http-port", "0", "--admin-http-port", "0"), *arguments
        )
        assert (done.returncode, done.stdout) == (CONFIG_ERROR_STATUS, "")
        assert done.stderr.startswith(text), done.stderr


def test_up_ends_when_the_worker_does_not_suit_the_policy() -> None:
    """What only the worker can tell ends `quire up` as well."""
    done = quire_here(
        *("up", "--simulated", "--grpc-port", "0", "--http-port", "0", "--admin-port", "0", "--admin-http-port", "0"),
        *("--policy", "vllm-v0", "--max-num-batched-tokens", "512"),
    )
    assert done.returncode == CONFIG_ERROR_STATUS
    assert "max_num_batched_tokens (512) must not be less than max_model_len (4096)" in done.stderr
