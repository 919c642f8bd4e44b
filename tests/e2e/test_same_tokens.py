"""The same (seed, request) gives the same tokens: alone, among 64, swapped, computed again, after kills, with guesses, either loop.

Under every preset: test_presets. Requests have penalties, biases, min-p, a schema, two choices, beams (mixed_requests).
A sample in one process here, the whole in `make test-long`.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire import LLM
from quire.built_in_model import default_model
from quire.local_stack.stack import LocalStack
from tests.e2e import preset_signs as signs
from tests.e2e.preset_cases import Case, compare
from tests.support.stack import mixed_requests
from tests.support.stack.commands import steps
from tests.support.stack.mixed_requests import Outputs
from tests.support.stack.sizes import SMALL_STEP
from tests.support.stack.supervised import Case as Asked
from tests.support.stack.supervised import kills, read_all, supervised

Recorder = Callable[[str, object], None]
_COUNT, _SAMPLE_COUNT = 64, 15

_TIGHT = {
    "num_gpu_blocks_override": 28,
    "max_model_len": 192,
    "max_num_seqs": 12,
    "max_num_batched_tokens": SMALL_STEP,
    "swap_space": "8MiB",
}
_NO_OVERLAP = (signs.has_in_flight(1),)
_GUESSES = (signs.yields_several, signs.preempts)
WAYS = [
    Case("quire", _NO_OVERLAP, args=("--no-overlap",)),
    Case("quire", (*_GUESSES, signs.has_in_flight(2)), ("num_spec_tokens=3", "restraint=null"), args=("--overlap",)),
    Case("quire", (*_GUESSES, *_NO_OVERLAP), ("num_spec_tokens=3", "preemption_mode=swap"), args=("--no-overlap",)),
    Case("vllm-v1-async", (*_GUESSES, signs.has_in_flight(2)), ("num_spec_tokens=3",), args=("--overlap",)),
    Case("vllm-v0", (signs.yields_several, signs.preempts), ("num_scheduler_steps=4",)),
    Case("vllm-v0", (signs.never_mixes, signs.preempts), ("async_output=true",)),
    Case("quire", (signs.cuts,), ("max_num_batched_tokens=48",)),
]
KILLED = [
    Case("quire", (), ("restraint=null", "num_spec_tokens=3"), args=("--overlap",)),
    Case("vllm-v0", (), ("preemption_mode=swap",)),
    Case("chitu-dp", (), stack={"workers": 2}),
]


@pytest.mark.parametrize(
    ("policy", "sets"),
    [
        ("quire", {"restraint": None, "preemption_mode": "swap", "num_spec_tokens": 3}),
        ("vllm-v0", {"preemption_mode": "recompute", "num_scheduler_steps": 3}),
    ],
)
def test_in_one_process(policy: str, sets: dict[str, Any], record_property: Recorder) -> None:
    """R21, R25, R27, R151: alone and together, with swaps and guesses, computed again and in several steps at once."""
    staying = [ask for ask in mixed_requests.asks(_SAMPLE_COUNT) if not ask.leaves]
    expected = mixed_requests.undisturbed(default_model(), _SAMPLE_COUNT)
    with LLM(dtype="float32", policy=policy, policy_set=sets, **_TIGHT) as llm:
        outputs = llm.generate([list(ask.prompt) for ask in staying], [ask.params for ask in staying], use_tqdm=False)
    found = {ask.number: mixed_requests.tokens_of(output) for ask, output in zip(staying, outputs, strict=True)}
    assert found == expected
    num_preemptions = sum(output.num_preemptions for output in outputs)
    assert num_preemptions, "the pool was to force it"
    record_property("size", f"{policy} {sets}: {len(staying)} requests in one process, {num_preemptions} preemptions")


@pytest.mark.long
def test_alone_and_in_a_batch_of_64(record_property: Recorder) -> None:
    """R25, R151: through the services, one after the other and then all at once."""
    wanted = mixed_requests.asks(_COUNT)
    staying = [ask for ask in wanted if not ask.leaves]
    expected = mixed_requests.undisturbed(default_model(), _COUNT)
    with LocalStack(worker_args=("--dtype", "float32"), scheduler_args=("--max-num-seqs", "160")) as stack:
        alone = mixed_requests.run(stack.grpc_address, staying, at_once=False)
        num_alone = len(steps(stack.admin_address))
        assert mixed_requests.run(stack.grpc_address, wanted) == alone == expected
        log = steps(stack.admin_address)
    widths = [sum(len(group["seqs"]) for group in step["scheduled"]) for step in log]
    assert max(widths[:num_alone]) <= 4 and max(widths) >= 64
    record_property(
        "size", f"{len(staying)} requests alone, then among {_COUNT}: up to {max(widths)} sequences in a step"
    )


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", WAYS, ids=str)
def test_every_way_to_disturb_a_run(case: Case, tmp_path: Path, record_property: Recorder) -> None:
    """R25, R27, R94, R151: guesses, either loop, several steps at once, results one step late, chunks; all of them preempt."""
    record_property("size", compare(case, _COUNT, tmp_path))


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", KILLED, ids=str)
def test_after_kills(case: Case, record_property: Recorder) -> None:
    """R25, R27: a worker is killed twice while all run."""
    expected: Outputs = mixed_requests.undisturbed(default_model(), _COUNT)
    staying = [ask for ask in mixed_requests.asks(_COUNT) if not ask.leaves]
    num_tokens = sum(len(tokens) for choices in expected.values() for tokens in choices)
    with supervised(**case.options) as running:
        name = sorted(running.stack.pids)[-1]
        disturb = kills(running, name, 2, num_tokens, seed=3)
        found = read_all(running.stack.grpc_address, [Asked(list(ask.prompt), ask.params) for ask in staying], disturb)
        assert len(running.deaths) == 2
    assert dict(zip((ask.number for ask in staying), found, strict=True)) == expected
    record_property("size", f"{case}: {len(staying)} requests, {num_tokens} tokens, 2 kills of the {name}")
