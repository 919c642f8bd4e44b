"""LoRA adapters of `LLM` in this process: PEFT's tokens, prefixes kept apart, errors that say what to do."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from quire import LLM, SamplingParams
from quire.built_in_model import default_model
from svc_common.errors import ConfigError, InvalidArgument, NotFound
from tests.support.checkpoints import make_checkpoint
from tests.support.stack.sizes import SMALL_STEP
from tests.support.worker.adapter_folders import Oracle, make_adapter

PROMPT = list(range(40, 90))
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
NAMES = ["", "one", "two"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two adapters that change every linear module."""
    root = tmp_path_factory.mktemp("adapters")
    return {
        name: make_adapter(default_model(), root / name, seed, r=4, target_modules="all-linear")
        for seed, name in enumerate(NAMES[1:], 1)
    }


@pytest.fixture(scope="module")
def llm(folders: dict[str, Path]) -> Iterator[LLM]:
    """The built-in model with both."""
    with LLM(
        dtype="float32", kv_cache_memory="64MiB", adapters=folders, max_adapters=2, max_num_batched_tokens=SMALL_STEP
    ) as made:
        yield made


def test_two_adapters_and_the_base_in_one_batch(llm: LLM, folders: dict[str, Path]) -> None:
    """R138: each has PEFT's tokens; the same prompt under another adapter is no cache hit, under the same one it is."""
    oracle = Oracle(default_model(), dict(enumerate(folders.values(), 1)))
    expected = []
    for adapter_id in range(3):
        tokens = list(PROMPT)
        for _ in range(PARAMS.max_tokens or 0):
            tokens.append(int(oracle.logits(tokens, adapter_id)[-1].argmax()))
        expected.append(tokens[len(PROMPT) :])
    assert len({tuple(tokens) for tokens in expected}) == 3, "the adapters change nothing: no witnesses"
    for num_cached in (0, 48):
        outputs = llm.generate([PROMPT] * 3, PARAMS, adapter=NAMES, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == expected
        assert [output.num_cached_tokens for output in outputs] == [num_cached] * 3
        assert [output.model for output in outputs] == ["tiny", "one", "two"]


def test_vectors_and_requests_step_by_step(llm: LLM) -> None:
    """`embed` and `add_request` take an adapter too, and the model's own name means the model."""
    base, one, again = (llm.embed([PROMPT], adapter=name, use_tqdm=False)[0].outputs for name in ("tiny", "one", "one"))
    assert base.embedding != one.embedding == again.embedding
    llm.add_request("a", PROMPT, PARAMS, adapter="two")
    last = None
    while llm.has_unfinished_requests():
        (last,) = llm.step()
    assert last is not None
    assert (
        last.outputs[0].token_ids
        == llm.generate([PROMPT], PARAMS, adapter="two", use_tqdm=False)[0].outputs[0].token_ids
    )


def test_unknown_names(llm: LLM) -> None:
    """Told with those there are; what was asked for beside it does not run."""
    with pytest.raises(NotFound, match="no model or adapter 'three' here; there are: tiny, one, two"):
        llm.generate([PROMPT, PROMPT], PARAMS, adapter=["one", "three"], use_tqdm=False)
    with pytest.raises(InvalidArgument, match="2 of them"):
        llm.generate([PROMPT, PROMPT], PARAMS, adapter=["one"], use_tqdm=False)
    assert not llm.has_unfinished_requests()


def test_adapters_that_cannot_be_loaded(folders: dict[str, Path], tmp_path: Path) -> None:
    """ConfigError with the adapter's name: a folder that is missing, another base, more than may be, a name of no use."""
    base = make_checkpoint("llama", tmp_path / "base", hidden_size=96, head_dim=24)
    other = make_adapter(base, tmp_path / "other", 1, r=8, target_modules=["q_proj"])
    sizes = {"kv_cache_memory": "8MiB", "max_num_batched_tokens": SMALL_STEP}
    for adapters, said, options in (
        ({"gone": tmp_path / "gone"}, r"adapters\['gone'\]: .*gone", {}),
        ({"other": other}, r"adapters\['other'\]: .*q_proj needs lora_A of", {}),
        (folders, r"adapters\['two'\]: .*max_adapters", {"max_adapters": 1}),
        ({"tiny": folders["one"]}, r"adapters\['tiny'\]: has the name of the model", {}),
        ({"": folders["one"]}, "adapters: the name '' must have 1 to 128", {}),
        ([folders["one"]], "adapters: write", {}),
    ):
        with pytest.raises(ConfigError, match=said):
            LLM(dtype="float32", adapters=adapters, **sizes, **options)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="adapters: settings of an engine in this process"):
        LLM(target="127.0.0.1:1", adapters=folders)
