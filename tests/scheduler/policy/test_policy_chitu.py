"""Chitu's policies as operators write them: its own names for keys, what goes together, what this service cannot run."""

from pathlib import Path
from typing import Any

import pytest

from scheduler_svc.policy.assembly import choose
from scheduler_svc.policy.choice import WorkerSize
from svc_common.errors import ConfigError

WORKER = WorkerSize(block_size=16, num_gpu_blocks=100, num_cpu_blocks=8, max_model_len=4096)


def refused(policy: str, *sets: str, **limits: Any) -> str:
    """The message of the refusal, at the start or once the worker is known."""
    with pytest.raises(ConfigError) as error:
        choice = choose(policy, sets, num_workers=1, **limits)
        choice.check()
        choice.core_limits(WORKER)
    return error.value.message


@pytest.mark.parametrize(
    ("text", "field", "value"),
    [
        ("scheduler.type=stride,fcfs", "scheduler_type", "stride,fcfs"),
        ("scheduler.type=''", "scheduler_type", ""),
        ("scheduler.pp_config.prefill_num_tasks_divided_by_pp=false", "prefill_num_tasks_divided_by_pp", False),
        ("scheduler.pp_config.prefill_num_tasks=3", "prefill_num_tasks", 3),
        ("scheduler.pp_config.enforce_decode_num_tasks_max=false", "enforce_decode_num_tasks_max", False),
        ("scheduler.pp_config.decode_num_tasks=4", "decode_num_tasks", 4),
        ("infer.max_reqs=5", "max_reqs", 5),
        ("infer.pp_size=2", "pp_size", 2),
        ("infer.dp_size=1", "dp_size", 1),
        ("infer.prefill_chunk_size=64", "prefill_chunk_size", 64),
        ("infer.prefill_chunk_size=null", "prefill_chunk_size", None),
    ],
)
def test_chitus_own_names(text: str, field: str, value: object) -> None:
    """R167, R180: the dotted keys of its configuration are other names of ours, in --set."""
    beside = _READ_WITH.get(field, [])
    found = getattr(choose("chitu", [text, *beside]).spec, field)
    assert found == value and type(found) is type(value)
    assert choose("chitu", [f"{field}={text.partition('=')[2]}", *beside]).spec == choose("chitu", [text, *beside]).spec


_READ_WITH = {
    "prefill_num_tasks_divided_by_pp": ["pp_size=2"],
    "prefill_num_tasks": ["pp_size=2", "prefill_num_tasks_divided_by_pp=false"],
    "enforce_decode_num_tasks_max": ["pp_size=2"],
    "decode_num_tasks": ["pp_size=2", "enforce_decode_num_tasks_max=false"],
}
"""Keys that others decide of: alone they would have no effect, and are refused."""


def test_a_file_in_chitus_form(tmp_path: Path) -> None:
    """R180: nested as in its configuration; its blocks are all usable, so one more is the null block."""
    path = tmp_path / "mine.yaml"
    path.write_text(
        "base: chitu\nset:\n  scheduler:\n    type: prefill_first, stride\n"
        "  infer: {max_reqs: 8, num_blocks: 60, block_size: 16, cache_type: skew, pp_size: 2}\n"
    )
    choice = choose(str(path))
    choice.check()
    limits = choice.core_limits(WORKER)
    assert (choice.spec.phases, choice.spec.pp_size, limits.num_gpu_blocks, limits.block_size) == ("skew", 2, 61, 16)
    assert choice.build(limits).pool_report().gpu.total == 60


@pytest.mark.parametrize(
    ("policy", "sets", "phases"),
    [
        ("chitu", ["infer.cache_type=skew"], "skew"),
        ("chitu-skew", ["infer.cache_type=paged"], "scored"),
        ("chitu", ["infer.dp_size=2"], "ranks"),
        ("chitu-skew", ["infer.dp_size=2", "infer.cache_type=skew"], "ranks"),
        ("chitu-dp", ["infer.dp_size=1"], "ranks"),
        ("chitu-dp", ["infer.dp_size=1", "infer.cache_type=paged"], "scored"),
    ],
)
def test_which_of_the_schedulers(policy: str, sets: list[str], phases: str) -> None:
    """R183, R188: several ranks are data parallel, else the cache's type says it."""
    assert choose(policy, sets).spec.phases == phases


def test_the_ordering_is_its_own() -> None:
    """R168: by its scorers, without prefix caching unless it is asked for; prompts run whole unless there is a chunk size."""
    choice = choose("chitu")
    limits = choice.core_limits(WORKER)
    assert (choice.spec.policy, limits.prefix_caching, limits.max_num_batched_tokens) == ("fcfs", False, 4096)
    assert choose("chitu", ["prefill_chunk_size=64"]).core_limits(WORKER).max_num_batched_tokens == 2048
    assert choose("chitu", ["prefix_caching=true"]).core_limits(WORKER).prefix_caching


@pytest.mark.parametrize(
    ("policy", "sets", "texts"),
    [
        ("chitu-dp", ["infer.dp_size=4"], ["infer.dp_size=4: dp_size=4: there must be as many workers", "1 is given"]),
        ("chitu", ["scheduler.type=lifo"], ["scheduler.type=lifo: ", "no scorer 'lifo'", "stride"]),
        ("chitu", ["scheduler.type=prefill_only"], ["cannot run it yet"]),
        ("chitu", ["defects=recorded"], ["cannot run it yet"]),
        ("chitu", ["infer.cache_type=flat"], ["cache_type must be one of paged, skew"]),
        ("chitu", ["infer.max_reqs=0"], ["max_reqs", "at least 1"]),
        ("chitu", ["infer.pp_size=two"], ["pp_size must be a whole number"]),
        ("chitu", ["infer.block_size=8"], ["infer.block_size=8: the worker's blocks have 16 tokens"]),
        ("chitu", ["infer.num_blocks=100"], ["infer.num_blocks is 101, only 100"]),
        ("chitu", ["policy=priority"], ["needs a waiting queue", "policy can be fcfs"]),
        ("chitu", ["async=true"], ["async needs mixed steps (phases=mixed)"]),
        ("chitu", ["chunked_prefill=true"], ["prefill_chunk_size"]),
        ("chitu", ["max_loras=2"], ["needs adapter slots"]),
        ("chitu", ["batch_queue=2"], ["needs mixed steps"]),
        ("chitu", ["cache=quire"], ["v1_pool"]),
        ("chitu", ["max_num_batched_tokens=512"], ["max_num_batched_tokens (512)", "max_model_len (4096)"]),
        ("vllm-v1", ["infer.pp_size=2"], ["infer.pp_size=2: ", "needs tasks"]),
        ("vllm-v0", ["infer.cache_type=skew"], ["is Chitu's; policy vllm-v0"]),
        ("chitu", ["infer.max_req=1"], ["unknown key 'infer.max_req'", "did you mean", "infer.max_reqs"]),
    ],
)
def test_what_cannot_be_is_named(policy: str, sets: list[str], texts: list[str]) -> None:
    """R48, R167, R180: by the key as it was written."""
    message = refused(policy, *sets)
    assert all(text in message for text in texts), message
