"""`LLM` in this process: R4-R8, against `transformers.generate`."""

import re
import runpy
import sys
from collections.abc import Iterator

import pytest

from quire import LLM, RequestOutput, SamplingParams
from quire.built_in_model import default_model
from quire.offline.in_process import KeptSteps
from svc_common.errors import (
    AlreadyExists,
    ConfigError,
    FailedPrecondition,
    InvalidArgument,
    OutOfRange,
    ResourceExhausted,
)
from tests.support.stack.oracle import expected, mixed_jobs
from tests.support.stack.up_process import ROOT

MAX_MODEL_LEN = 256
PROMPTS = [
    "Hello, my name is",
    "The president of the United States is",
    "The capital of France is",
    "The future of AI is",
]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """`models/tiny` in float32, with a budget that forces chunks and a pool that forces preemption."""
    with LLM(
        dtype="float32",
        max_model_len=MAX_MODEL_LEN,
        num_gpu_blocks_override=32,
        max_num_batched_tokens=64,
        max_num_seqs=16,
        swap_space="1MiB",
        policy_set={"restraint": None},
        log_steps=True,
    ) as made:
        yield made


def _greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=True)


def test_greedy_equals_transformers_in_input_order(llm: LLM) -> None:
    """Tokens equal and logprobs within 1e-4, chunked and preempted; outputs in the order of the prompts (R7)."""
    jobs = mixed_jobs(12, 4000, seed=1)
    outputs = llm.generate([list(job.prompt) for job in jobs], [_greedy(job.max_tokens) for job in jobs])
    for job, output in zip(jobs, outputs, strict=True):
        want = expected(default_model(), job)
        got = output.outputs[0]
        assert output.prompt_token_ids == list(job.prompt)
        assert got.token_ids == want.token_ids
        values = [entry[token].logprob for token, entry in zip(got.token_ids, got.logprobs, strict=True)]
        assert values == pytest.approx(want.logprobs, abs=1e-4)
        assert got.cumulative_logprob == pytest.approx(sum(values))
        assert (got.finish_reason, output.finished) == ("length", True)
    assert sum(output.num_preemptions for output in outputs) > 0, "the pool was to force preemption"


def test_its_steps_are_told(llm: LLM) -> None:
    """R5: as `quire steps --json --tables` prints them: what each step computed, sampled, held and preempted."""
    before = len(llm.steps())
    outputs = llm.generate([[7, index, *range(40)] for index in range(12)], _greedy(40))
    steps = llm.steps(tables=True)[before:]
    sampled = {output.request_id: list[int]() for output in outputs}
    for step in steps:
        assert step["computed_tokens"] == sum(group["tokens"] for group in step["scheduled"]) <= 64
        held = {block for blocks in step["tables"].values() for block in blocks}
        assert len([block for block in held if block[0] == "g"]) + step["free"][0] == 31
        for name, tokens in step["sampled"].items():
            sampled[name.rpartition("/")[0]] += tokens
    assert sampled == {output.request_id: output.outputs[0].token_ids for output in outputs}
    assert sum(len(step["preempted"]) for step in steps) == sum(output.num_preemptions for output in outputs) > 0


def test_a_step_that_cannot_run_ends_its_requests(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the engine's own error; the step is kept with it, and the next request runs as ever."""
    engine = llm._backend._engine  # type: ignore[attr-defined]
    execute = engine.execute
    with monkeypatch.context() as patch:

        def out_of_memory(message: object) -> None:
            execute(message)
            raise ResourceExhausted("no device memory left", reason="OUT_OF_MEMORY")

        patch.setattr(engine, "execute", out_of_memory)
        with pytest.raises(ResourceExhausted, match="no device memory left"):
            llm.generate([[3, 4, 5]], _greedy(4))
    assert llm.steps()[-1]["error"] == "no device memory left"
    [output] = llm.generate([[3, 4, 5]], _greedy(4))
    assert output.error is None and len(output.outputs[0].token_ids) == 4


def test_steps_are_kept_where_asked_for() -> None:
    """FailedPrecondition that says how; behind a gateway they are not this program's."""
    with pytest.raises(FailedPrecondition, match="log_steps=True"):
        KeptSteps(is_on=False).as_json(tables=False)
    with pytest.raises(ConfigError, match="log_steps"):
        LLM(target="127.0.0.1:1", log_steps=True)


def test_forms_of_prompts(llm: LLM) -> None:
    """One or many of: text, ids, dicts as in vLLM; equal prompts, equal greedy outputs."""
    ids = llm.generate("import os", _greedy(4))[0].prompt_token_ids
    forms = ["import os", ids, {"prompt": "import os"}, {"prompt_token_ids": ids}]
    texts = {llm.generate(form, _greedy(4))[0].text for form in [*forms, [ids]]}
    texts |= {output.text for output in llm.generate(forms, _greedy(4))}
    assert len(texts) == 1
    assert llm.generate([], _greedy(4)) == []


def test_defaults_seeds_and_stops(llm: LLM) -> None:
    """16 tokens unless said otherwise; a drawn seed is told and repeats the output; stop strings are cut off."""
    first = llm.generate("def f(", SamplingParams(ignore_eos=True))[0]
    assert len(first.outputs[0].token_ids) == 16
    again = llm.generate("def f(", SamplingParams(ignore_eos=True, seed=first.seed))[0]
    assert again.outputs[0].token_ids == first.outputs[0].token_ids
    drawn = {llm.generate("def f(", SamplingParams())[0].seed for _ in range(3)}
    assert len(drawn) == 3
    stop = first.text[5:8]
    stopped = llm.generate("def f(", SamplingParams(ignore_eos=True, seed=first.seed, stop=stop))[0]
    assert stopped.text == first.text[: first.text.index(stop)]
    assert (stopped.outputs[0].finish_reason, stopped.outputs[0].stop_reason) == ("stop", stop)
    token = first.outputs[0].token_ids[3]
    ended = llm.generate("def f(", SamplingParams(ignore_eos=True, seed=first.seed, stop_token_ids=[token]))[0]
    assert (ended.outputs[0].finish_reason, ended.outputs[0].stop_reason) == ("stop", token)
    assert ended.outputs[0].token_ids[-1] == token


def test_wrong_requests_disturb_no_other_request(llm: LLM) -> None:
    """Typed errors, nothing left running, and the next call works."""
    for prompt, error in [("", InvalidArgument), ([10**6], InvalidArgument), ([1] * MAX_MODEL_LEN, OutOfRange)]:
        with pytest.raises(error):
            llm.generate(["fine", prompt], _greedy(4))
        assert not llm.has_unfinished_requests()
    with pytest.raises(InvalidArgument, match="sampling_params"):
        llm.generate(["a", "b"], [SamplingParams()])
    assert len(llm.generate("fine", _greedy(4))[0].outputs[0].token_ids) == 4


def test_step_by_step_with_abort(llm: LLM) -> None:
    """R4, R5: add, step, abort; cumulative outputs; each request told as finished once; unknown ids are ignored."""
    for name in ("a", "b", "c"):
        llm.add_request(name, f"class {name}:", _greedy(20))
    with pytest.raises(AlreadyExists):
        llm.add_request("a", "again", _greedy(1))
    with pytest.raises(FailedPrecondition):
        llm.generate("x")
    ends: dict[str, RequestOutput] = {}
    lengths: dict[str, int] = {}
    steps = 0
    while llm.has_unfinished_requests():
        steps += 1
        for output in llm.step():
            num_tokens = len(output.outputs[0].token_ids)
            assert num_tokens >= lengths.get(output.request_id, 0)
            lengths[output.request_id] = num_tokens
            if output.finished:
                assert output.request_id not in ends
                ends[output.request_id] = output
        if steps == 5:
            llm.abort(["b", "unknown"])
    assert {name: output.outputs[0].finish_reason for name, output in ends.items()} == {
        "a": "length",
        "b": "abort",
        "c": "length",
    }
    assert 0 < lengths["b"] < 20
    assert lengths["a"] == lengths["c"] == 20


def test_chats_are_lists_of_turns(llm: LLM) -> None:
    """One conversation or many; what is none is refused by name, and so is what the template refuses."""
    turns = [{"role": "user", "content": "x"}]
    short = SamplingParams(max_tokens=2)
    assert [len(llm.chat(given, short)) for given in ("x", turns, [turns, turns, "x"])] == [1, 1, 3]
    for wrong in (3, [3], [{"role": "wizard", "content": "x"}]):
        with pytest.raises(InvalidArgument, match="messages"):
            llm.chat(wrong, short)  # type: ignore[arg-type]


def test_wrong_sizes() -> None:
    """ConfigError names the option, before anything is loaded."""
    with pytest.raises(ConfigError, match="kv_cache_memory"):
        LLM(kv_cache_memory="lots")


def test_the_overview_articles_program(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Four prompts, temperature 0.8, top_p 0.95: runs as it stands, outputs in input order."""
    monkeypatch.setattr(sys, "argv", ["offline.py"])
    made = runpy.run_path(str(ROOT / "examples/offline.py"), run_name="__main__")
    made["llm"].close()
    lines = re.findall(r"^Prompt: (.*), Generated text: (['\"].+['\"])$", capsys.readouterr().out, re.M)
    assert [prompt for prompt, _ in lines] == [repr(prompt) for prompt in PROMPTS]
    assert all(len(text) > len("''") for _, text in lines)
