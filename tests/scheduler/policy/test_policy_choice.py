"""Policies as operators write them: names, files and KEY=VALUE; every mistake is named by where it was written."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scheduler_svc.core.composition import presets
from scheduler_svc.policy.assembly import choose
from scheduler_svc.policy.choice import PolicyChoice, WorkerSize
from svc_common.errors import ConfigError

WORKER = WorkerSize(block_size=16, num_gpu_blocks=100, num_cpu_blocks=8, max_model_len=4096)


def refused(policy: str, *sets: str, worker: WorkerSize = WORKER, **limits: Any) -> str:
    """The message of the refusal, at the start or once the worker is known."""
    with pytest.raises(ConfigError) as error:
        choice = choose(policy, sets, **limits)
        choice.check()
        choice.core_limits(worker)
    return error.value.message


def written(folder: Path, text: str, name: str = "mine.yaml") -> str:
    """The path of a file with that text."""
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("name", presets.policy_names())
def test_a_name_is_its_preset_ordered_by_priority(name: str) -> None:
    """R48: only the order of the queues differs from the preset, unless it is given or is the preset's own. Tasks have scorers."""
    choice = choose(name)
    preset = presets.preset(name)
    orders_itself = preset.schedules_tasks or preset.policy != "fcfs" or preset.phases == "decode_then_prefill"
    assert choice.spec == (preset if orders_itself else presets.preset(name, policy="priority"))
    assert choose(name, ["policy=fcfs"]).spec == presets.preset(name, policy="fcfs", makes_way=False)
    core = choice.build(choice.core_limits(WORKER))
    assert core.policy == name and core.state.limits.num_gpu_blocks == 100


@pytest.mark.parametrize(
    ("text", "field", "value"),
    [
        ("preemption_mode=swap", "preemption_mode", "swap"),
        ("preemption_mode=null", "preemption_mode", None),
        ("delay_factor=1e-1", "delay_factor", 0.1),
        ("delay_factor=2", "delay_factor", 2.0),
        ("max_loras=3", "max_loras", 3),
        ("max_loras=null", "max_loras", None),
        ("async_output=true", "async_output", True),
        (" watermark_blocks = 0", "watermark_blocks", 0),
        ("chunked_prefill=true", "phases", "decode_then_prefill"),
    ],
)
def test_values_are_yaml_scalars_in_their_types(text: str, field: str, value: object) -> None:
    """R48: numbers, words, true, false and null; a whole number is a number."""
    found = getattr(choose("vllm-v0", [text]).spec, field)
    assert found == value and type(found) is type(value)


def test_the_last_word_counts(tmp_path: Path) -> None:
    """Preset, then file, then --set, and a later --set before an earlier one."""
    path = written(tmp_path, "base: vllm-v0\nset: {delay_factor: 0.5, max_loras: 2, max_num_seqs: 7}\n")
    choice = choose(path, ["delay_factor=1", "delay_factor=2.5"], max_num_seqs=9)
    assert (choice.spec.delay_factor, choice.spec.max_loras, choice.spec.name) == (2.5, 2, "mine")
    assert choice.largest_step(100)[1] == 9


@pytest.mark.parametrize("name", ["p.yaml", "p.yml", "p.json"])
def test_files_in_yaml_and_json(tmp_path: Path, name: str) -> None:
    """Both say the same; tabs in JSON do not matter."""
    content = {"base": "vllm-v0-chunked", "name": "steady", "set": {"delay_factor": 0.5, "policy": "fcfs"}}
    choice = choose(written(tmp_path, json.dumps(content, indent="\t" if name.endswith("json") else 1), name))
    assert choice.spec == presets.preset("vllm-v0-chunked", name="steady", delay_factor=0.5)


@pytest.mark.parametrize(
    ("base", "sets", "expected"),
    [
        ("vllm-v1", ["async=true"], ("placeholders", 2)),
        ("vllm-v1", ["async=true", "batch_queue=3"], ("placeholders", 3)),
        ("vllm-v1-async", ["async=false"], ("at_schedule", 1)),
        ("vllm-v1", ["batch_queue=2"], ("at_schedule", 2)),
    ],
)
def test_async_chooses_the_parts_of_v1(base: str, sets: list[str], expected: tuple[str, int]) -> None:
    """R149: placeholders and two plans in flight, unless the depth is given."""
    spec = choose(base, sets).spec
    assert (spec.progress, spec.batch_queue) == expected


@pytest.mark.parametrize(
    ("policy", "sets", "max_model_len", "expected"),
    [
        ("vllm-v0", [], 4096, (4096, 256)),
        ("vllm-v0", [], 512, (2048, 256)),
        ("vllm-2023", [], 4096, (4096, 256)),
        ("vllm-v0-chunked", [], 4096, (512, 256)),
        ("vllm-v0", ["chunked_prefill=true"], 4096, (512, 256)),
        ("vllm-v0-chunked", ["chunked_prefill=false"], 4096, (4096, 256)),
        ("vllm-v1", [], 4096, (2048, 256)),
        ("vllm-v1", ["chunked_prefill=false"], 4096, (4096, 256)),
        ("vllm-v1", ["max_num_batched_tokens=40"], 4096, (40, 40)),
        ("static", ["max_num_seqs=3"], 4096, (2048, 3)),
    ],
)
def test_limits_that_are_not_given(policy: str, sets: list[str], max_model_len: int, expected: tuple[int, int]) -> None:
    """R48: chunked 512 tokens, whole prompts max(max_model_len, 2048); sequences follow the budget."""
    assert choose(policy, sets).largest_step(max_model_len) == expected


def test_limits_reach_the_core() -> None:
    """Each limit key is a field of the core's limits; the worker fills in the others."""
    sets = ["num_gpu_blocks=20", "num_cpu_blocks=0", "max_model_len=64", "prefix_caching=false", "block_size=16"]
    limits = choose("vllm-v1", [*sets, "long_prefill_token_threshold=5"]).core_limits(WORKER)
    assert (limits.num_gpu_blocks, limits.num_cpu_blocks, limits.max_model_len, limits.block_size) == (20, 0, 64, 16)
    assert (limits.prefix_caching, limits.long_prefill_token_threshold) == (False, 5)


@pytest.mark.parametrize(
    ("sets", "texts"),
    [
        (["delay_facto=0.5"], ["policy_set delay_facto=0.5: unknown key 'delay_facto'", "delay_factor"]),
        (["infer.chunks=64"], ["unknown key 'infer.chunks'", "there are: async"]),
        (["name=x"], ["unknown key 'name'"]),
        (["delay_factor"], ["policy_set delay_factor: is no KEY=VALUE"]),
        (["=1"], ["is no KEY=VALUE"]),
        (["delay_factor=[1"], ["is no value"]),
        (["delay_factor=[1]"], ["delay_factor must be a number, not [1]"]),
        (["delay_factor=fast"], ["policy_set delay_factor=fast: delay_factor must be a number, not 'fast'"]),
        (["delay_factor=.nan"], ["must be a number"]),
        (["delay_factor=true"], ["must be a number, not true"]),
        (["delay_factor=-1"], ["policy_set delay_factor=-1: ", "at least 0"]),
        (["max_loras=1.5"], ["max_loras must be a whole number or null, not 1.5"]),
        (["async_output=1"], ["async_output must be true or false, not 1"]),
        (["phases=sideways"], ["policy_set phases=sideways: ", "prefill_or_decode, decode_then_prefill, mixed"]),
        (["preemption_mode=swop"], ["policy_set preemption_mode=swop: ", "must be one of null, recompute, swap;"]),
        (["preemption_mode=none"], ["preemption_mode='none': ", "the word for nothing is null"]),
        (["policy=null"], ["policy=null: must be one of fcfs, priority"]),
        (["max_num_seqs=" + "9" * 5000], ["policy_set max_num_seqs=999", "too many digits"]),
        (
            ["max_num_seqs=0x" + "f" * 5000],
            ["policy_set max_num_seqs=0xfff", "max_num_seqs must be at most 2147483647"],
        ),
        (["async_output=0x" + "f" * 5000], ["async_output must be at most"]),
        (["delay_factor=" + "9" * 400], ["delay_factor must be at most"]),
        (["max_num_batched_tokens=2147483648"], ["must be at most 2147483647"]),
        (["max_loras=" + "[" * 1000], ["policy_set max_loras=[["]),
        (["max_loras=*a"], ["policy_set max_loras=*a: *a is a YAML alias"]),
        (["async_output=!!bool x"], ["async_output=!!bool x: !!bool is a YAML tag"]),
        (["policy=[a]"], ["policy_set policy=[a]: ", "fcfs, priority"]),
        (["max_num_seqs=0"], ["max_num_seqs must be at least 1"]),
        (["max_num_seqs=null"], ["max_num_seqs must be a whole number, not null"]),
        (["num_gpu_blocks=1"], ["num_gpu_blocks must be at least 2"]),
        (["num_lookahead_slots=-1"], ["policy_set num_lookahead_slots=-1: ", "at least 0"]),
        (["num_scheduler_steps=0"], ["policy_set num_scheduler_steps=0: ", "at least 1"]),
    ],
)
def test_wrong_sets_are_named(sets: list[str], texts: list[str]) -> None:
    """R48: the key, the value and what is allowed; for an unknown key those that look like it, and all there are."""
    message = refused("vllm-v0", *sets)
    assert all(text in message for text in texts), message


@pytest.mark.parametrize(
    ("policy", "sets", "texts"),
    [
        ("vllm-v0", ["max_num_batched_tokens=512"], ["max_num_batched_tokens (512)", "max_model_len (4096)"]),
        ("vllm-v1", ["chunked_prefill=false", "max_num_batched_tokens=512"], ["max_num_batched_tokens (512)"]),
        ("vllm-v1", ["max_num_batched_tokens=8", "max_num_seqs=9"], ["max_num_batched_tokens (8)", "max_num_seqs (9)"]),
        ("vllm-v0-chunked", ["max_num_batched_tokens=500"], ["must be a multiple of block_size (16)"]),
        ("vllm-v0", ["chunked_prefill=true", "phases=prefill_or_decode"], ["policy_set phases=", "contradicts"]),
        ("vllm-v1", ["async=true", "progress=at_schedule"], ["policy_set progress=at_schedule: contradicts"]),
        (
            "vllm-v0",
            ["async=true"],
            ["policy_set async=true: async needs mixed steps (phases=mixed); policy vllm-v0 has"],
        ),
        ("vllm-v1", ["watermark_blocks=5"], ["policy_set watermark_blocks=5: ", "vllm_2023 or vllm_063 or quire"]),
        ("vllm-v0", ["watermark_blocks=100"], ["policy_set watermark_blocks=100: ", "less than num_gpu_blocks (100)"]),
        ("vllm-v1", ["num_cpu_blocks=4"], ["policy_set num_cpu_blocks=4: ", "vllm-v1 (phases=mixed) never swaps"]),
        ("static", ["num_cpu_blocks=4"], ["policy_set num_cpu_blocks=4: ", "never swaps"]),
        ("vllm-v0", ["num_cpu_blocks=4", "preemption_mode=recompute"], ["(preemption_mode=recompute) never swaps"]),
        ("vllm-v1", ["preemption_mode=swap"], ["policy_set preemption_mode=swap: "]),
        (
            "vllm-v0",
            ["long_prefill_token_threshold=4"],
            ["long_prefill_token_threshold=4: needs mixed steps (phases=mixed)"],
        ),
        ("vllm-v1", ["num_gpu_blocks=101"], ["num_gpu_blocks is 101, only 100 blocks fit"]),
        ("vllm-v1", ["max_model_len=5000"], ["max_model_len is 5000, only 4096"]),
        ("vllm-v1", ["block_size=8"], ["block_size=8: the worker's blocks have 16", "--block-size 8"]),
    ],
)
def test_contradictions_are_refused(policy: str, sets: list[str], texts: list[str]) -> None:
    """R48, R87: limits and parts that do not go together, also with what the worker has."""
    message = refused(policy, *sets)
    assert all(text in message for text in texts), message


def test_an_option_and_a_set_that_disagree() -> None:
    """It is unknown which one was meant; equal ones are accepted."""
    assert "contradicts max_num_seqs, which says 9" in refused("vllm-v1", "max_num_seqs=8", max_num_seqs=9)
    assert choose("vllm-v1", ["max_num_seqs=8"], max_num_seqs=8).largest_step(64)[1] == 8


@pytest.mark.parametrize("text", ["num_spec_tokens=2", "cache=none", "defects=recorded"])
def test_what_no_service_can_run_yet(text: str) -> None:
    """The core plans these, no worker executes them: refused at the start instead of going wrong later."""
    policy = "vllm-v0" if text.startswith("defects") else "vllm-v1"
    assert f"policy_set {text}: {text}: the core plans it" in refused(policy, text)


def test_the_window_is_the_models() -> None:
    """R105: only the worker reports it; a choice takes it into account where its cache rules can."""
    assert "sliding_window is the model's" in refused("vllm-v0", "sliding_window=64")
    size = replace(WORKER, sliding_window=32)
    for policy, sets, window in (
        ("quire", [], 32), ("chitu-dp", [], 32), ("vllm-v0", [], None), ("vllm-v0", ["prefix_caching=false"], 32)
    ):  # fmt: skip
        choice = choose(policy, sets)
        assert choice.for_model(size).spec.sliding_window == window
        assert choice.for_model(WORKER) is choice


def test_cache_groups_are_the_models() -> None:
    """Only the worker reports their windows; one window is not several groups; what keeps one table refuses them and says
    what to do.
    """
    grouped = replace(WORKER, cache_windows=[0, 1024])
    for policy in ("vllm-v1", "vllm-v1-async", "static", "quire", "chitu", "chitu-skew", "chitu-dp"):
        limits = choose(policy).core_limits(grouped)
        assert limits.cache_windows == (0, 1024)
        assert choose(policy).build(limits).state.cache.ledger.num_groups == 2
    assert choose("quire").core_limits(replace(WORKER, cache_windows=[1024])).cache_windows == ()
    for policy, cache in (("vllm-v0", "vllm_063"), ("vllm-v0-chunked", "vllm_063"), ("vllm-2023", "vllm_2023")):
        message = refused(policy, worker=grouped, max_num_batched_tokens=4096)
        assert f"cache={cache!r}: keeps one block table for all layers" in message and "--no-cache-groups" in message
        assert choose(policy, max_num_batched_tokens=4096).core_limits(WORKER).cache_windows == ()
    assert choose("vllm-v0", ["cache=quire"]).core_limits(grouped).cache_windows == (0, 1024)
    assert "unknown key 'cache_windows'" in refused("quire", "cache_windows=64")


def test_unknown_names() -> None:
    """A preset that looks like it, all of them, and that a file would do."""
    message = refused("vllm-v0-chunk")
    assert "policy: unknown policy 'vllm-v0-chunk'" in message and "vllm-v0-chunked" in message and ".yaml" in message


@pytest.mark.parametrize(
    ("text", "name", "at", "texts"),
    [
        ("base: vllm-v0\nset:\n  delay_factor: fast\n", "p.yaml", ":3: set.delay_factor: ", ["must be a number"]),
        ("base: vllm-v0\nset:\n  delay: 1\n", "p.yaml", ":3: set.delay: ", ["unknown key 'delay'", "delay_factor"]),
        ("base: vllm-v0\nset:\n  phases: sideways\n", "p.yaml", ":3: set.phases: ", ["prefill_or_decode"]),
        ("base: vllm-v0\nset:\n  infer:\n    chunk: 1\n", "p.yaml", ":4: set.infer.chunk: ", ["'infer.chunk'"]),
        ("base: vllm-v0\nset:\n  max_loras: [1]\n", "p.yaml", ":3: set.max_loras: ", ["not a list"]),
        ("base: vllm-v0\nset: swap\n", "p.yaml", ":2: set: ", ["must be a mapping"]),
        ("base: vllm-v0\nset:\n  max_loras: 1\n  max_loras: 2\n", "p.yaml", ":4: set.max_loras: ", ["is given twice"]),
        ("base: vllm-v0\nsets: {}\n", "p.yaml", ":2: sets: ", ["unknown field", "did you mean set?"]),
        ("base: vllm-v9\n", "p.yaml", ":1: base: ", ["unknown policy 'vllm-v9'"]),
        ("name: x\n", "p.yaml", ": base: ", ["is missing"]),
        ("base: 5\n", "p.yaml", ":1: base: ", ["must be a word, not 5"]),
        ("- base\n", "p.yaml", ": ", ["must be a mapping"]),
        ("", "p.yaml", ": ", ["is empty"]),
        ("base: {\n", "p.yaml", ":2: ", ["cannot be read"]),
        ('{"base": "vllm-v0",\n"set": {}, }', "p.json", ":2: ", ["cannot be read"]),
        ('{"base": "vllm-v0",\n"set": {"max_loras": "x"}}', "p.json", ":2: set.max_loras: ", ["whole number"]),
        ("base: vllm-v0\nset: {max_num_batched_tokens: 9, max_num_seqs: 10}", "p.yaml", ":2: ", ["(9)", "(10)"]),
        ("base: vllm-v0\nset:\n  max_num_batched_tokens: 512\n", "p.yaml", ":3: ", ["(512)", "max_model_len (4096)"]),
        ("base: [vllm-v0]\n", "p.yaml", ":1: base: ", ["must be a word, not a list"]),
        ("base: vllm-v0\nname: {a: b}\n", "p.yaml", ":2: name: ", ["must be a word, not a mapping"]),
        ("base: vllm-v0\nname: null\n", "p.yaml", ":2: name: ", ["must be a word, not null"]),
        ("base: vllm-v0\n? [a]\n: 1\n", "p.yaml", ":2: ", ["a key must be a word, not a list"]),
        ("base: vllm-v0\nset: &a {b: *a}\n", "p.yaml", ":2: ", ["*a is a YAML alias"]),
        ("base: &b vllm-v0\nname: *b\n", "p.yaml", ":2: ", ["*b is a YAML alias"]),
        ("base: vllm-v0\nset:\n  max_loras: !!int 2\n", "p.yaml", ":3: ", ["!!int is a YAML tag"]),
        ("base: vllm-v0\nset: !mine {max_loras: 2}\n", "p.yaml", ":2: ", ["!mine is a YAML tag"]),
        (f"base: vllm-v0\nset:\n  max_loras: {'9' * 5000}\n", "p.yaml", ":3: set.max_loras: ", ["cannot be read"]),
        (f'{{"base": "vllm-v0",\n"set": {{"max_loras": {"9" * 5000}}}}}', "p.json", ": ", ["too many digits"]),
        ("base: vllm-v1\nset:\n  num_cpu_blocks: 4\n", "p.yaml", ":3: set.num_cpu_blocks: ", ["never swaps"]),
        ("base: vllm-v1\nset:\n  watermark_blocks: 4\n", "p.yaml", ":3: set.watermark_blocks: ", ["needs a watermark"]),
        ("base: vllm-v1\nset:\n  cache: none\n", "p.yaml", ":3: set.cache: ", ["service cannot run it"]),
        (
            "base: vllm-v1\nset:\n  cache: vllm_063\n",
            "p.yaml",
            ":3: set.cache: ",
            ["needs steps of v0", "cache can be v1_pool"],
        ),
    ],
)
def test_wrong_files_are_named_with_field_and_line(
    tmp_path: Path, text: str, name: str, at: str, texts: list[str]
) -> None:
    """An unknown part or contradicting limits in a file: file and field."""
    path = written(tmp_path, text, name)
    message = refused(path)
    assert message.startswith(path + at) and all(part in message for part in texts), message


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    """Not there, a folder, no text, and a path that ends in something else."""
    missing, folder = str(tmp_path / "no.yaml"), tmp_path / "folder.yaml"
    folder.mkdir()
    (tmp_path / "bytes.yaml").write_bytes(b"base: \xff")
    assert refused(missing) == f"{missing}: cannot be read: No such file or directory"
    assert refused(str(folder)).startswith(f"{folder}: cannot be read: ")
    assert "no UTF-8" in refused(str(tmp_path / "bytes.yaml"))
    assert ".yaml, .yml, .json" in refused(str(tmp_path / "policy.toml"))


def test_a_sound_choice_passes_its_checks() -> None:
    """The checks refuse nothing that works, whatever the model's length turns out to be."""
    for name in presets.policy_names():
        sets = ["dp_size=1"] if presets.preset(name).dp_size > 1 else []
        choice: PolicyChoice = choose(name, sets, num_cpu_blocks=4, max_num_seqs=400)
        choice.check()
        assert choice.core_limits(WORKER).max_num_seqs == 400


def test_the_watermark_is_checked_once_the_pool_is_known() -> None:
    """R52: at the start any size may come; with a pool, one block less than it has is the most."""
    choice = choose("vllm-v0", ["watermark_blocks=99"])
    choice.check()
    assert choice.core_limits(WORKER).num_gpu_blocks == 100
    assert "less than num_gpu_blocks (9)" in refused("vllm-v0", "watermark_blocks=9", "num_gpu_blocks=9")


def test_host_blocks_are_for_policies_that_swap() -> None:
    """The service's own setting says what may be used; none at all can be asked of any policy."""
    assert choose("vllm-v0", ["num_cpu_blocks=4"]).core_limits(WORKER).num_cpu_blocks == 4
    assert choose("vllm-v1", ["num_cpu_blocks=0"]).core_limits(WORKER).num_cpu_blocks == 0
    assert choose("vllm-v1", num_cpu_blocks=4).core_limits(WORKER).num_cpu_blocks == 4
