"""Models with states on the worker: tokens of `generate` through whatever a scheduler may do, and guards of what it may not."""

import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from protos.common.v1 import common_pb2
from protos.worker.v1 import worker_pb2
from svc_common.errors import ConfigError, FailedPrecondition
from tests.support.checkpoints import STATE_FAMILIES
from tests.support.cuda import NEEDS_INVARIANCE, TEST_DEVICE
from tests.support.worker.adapter_folders import Oracle, make_adapter
from tests.support.worker.driver import BLOCK_SIZE, Driver, generate, make_engine, new_engine, state_ids_of
from tests.support.worker.generated import Generated, greedy, last_hidden, reference_model
from tests.worker.families.outcomes import EQUAL
from tests.worker.families.tiny_checkpoints import state_checkpoint
from tests.worker.families.trial import tried
from worker_svc.executor.model_engine import ModelEngine
from worker_svc.model.architecture import check_one_rank
from worker_svc.model.checkpoint import model_class, open_checkpoint
from worker_svc.model.states.sequences import SequenceStates

# Gated delta nets, Mamba-2 and Mamba, convolutions; beside attention in a layer, with experts, and with layers that have neither.
_QUICK = ("lfm2", "qwen3_next", "falcon_h1")
NUM_TOKENS = 12
ON_THE_HOST = pytest.mark.skipif(
    TEST_DEVICE != "cpu", reason="a device is not waited for: rows get NaN instead of an error"
)


@pytest.mark.parametrize(
    "model_type", [name if name in _QUICK else pytest.param(name, marks=pytest.mark.long) for name in STATE_FAMILIES]
)
def test_tokens_of_states_are_those_of_generate(model_type):
    """Tokens equal those of `generate` through chunks, recompute, swap, hits at checkpoints, copies of states and multi-step
    decode, with NaN in all blocks that were freed or never written."""
    if TEST_DEVICE == "fake-cuda" and model_type.startswith("qwen3"):
        pytest.skip("transformers' own code for chunks of a gated delta net takes more than the device's 64 MiB")
    found = tried(model_type)
    assert (found.outcome, found.why) == (EQUAL, "")


@dataclass(frozen=True, slots=True)
class World:
    """An engine with Mamba-2 beside attention or short convolutions, and what transformers makes of a prompt."""

    path: Path
    engine: ModelEngine
    prompt: list[int]
    expected: Generated


@pytest.fixture(scope="module", params=["falcon_h1", "lfm2"])
def world(request, tmp_path_factory) -> World:
    path = state_checkpoint(request.param, tmp_path_factory.mktemp("states") / "model")
    rng = random.Random(5)
    prompt = [rng.randrange(256) for _ in range(3 * BLOCK_SIZE + 5)]
    return World(path, make_engine(path), prompt, greedy(reference_model(path), prompt, NUM_TOKENS))


def test_a_checkpoint_serves_rows_of_the_same_step(world):
    """Two rows begin with a checkpoint that a third keeps in the same step, whatever their order; the checkpoint stays as it is."""
    driver = Driver(world.engine)
    world.engine.cache.device_pool.fill_(float("nan"))
    count = 2 * BLOCK_SIZE
    blocks = [10, 11]
    driver.add("first", world.prompt, blocks=blocks, computed=count, state=0, reads=9, room=NUM_TOKENS)
    driver.add("keeper", world.prompt, blocks=blocks, state=1, room=NUM_TOKENS)
    driver.keep("keeper", count, 9)
    driver.add("last", world.prompt, blocks=blocks, computed=count, state=2, reads=9, room=NUM_TOKENS)
    driver.run()
    kept = world.engine.cache.device_pool[:, :, state_ids_of(world.engine, [9])].clone()
    for _ in range(NUM_TOKENS - 1):
        driver.run()
    for name in ("first", "keeper", "last"):
        world.expected.check(driver.tokens[name], driver.logprobs[name])
    assert torch.equal(
        kept.view(torch.int32), world.engine.cache.device_pool[:, :, state_ids_of(world.engine, [9])].view(torch.int32)
    )


def test_checkpoints_at_every_block(world):
    """One step keeps the states at each end of a block; a row goes on from each of them."""
    driver = Driver(world.engine)
    row = driver.add("keeper", world.prompt, state=0)
    lengths = range(BLOCK_SIZE, len(world.prompt), BLOCK_SIZE)
    for place, length in enumerate(lengths):
        driver.keep("keeper", length, 20 + place)
    driver.run()
    driver.remove("keeper")
    for place, length in enumerate(lengths):
        name, blocks = f"from {length}", row.blocks[: length // BLOCK_SIZE]
        driver.add(
            name, world.prompt, blocks=blocks, computed=length, state=1 + place, reads=20 + place, room=NUM_TOKENS
        )
    for _ in range(NUM_TOKENS):
        driver.run()
    for length in lengths:
        name = f"from {length}"
        world.expected.check(driver.tokens[name], driver.logprobs[name])


@ON_THE_HOST
@pytest.mark.parametrize("computed", [BLOCK_SIZE - 4, BLOCK_SIZE + 4])
def test_a_token_is_never_taken_in_twice(world, computed):
    """States that have taken in another number of tokens fail the step with both numbers; the row can begin anew."""
    driver = Driver(world.engine)
    row = driver.add("row", world.prompt, BLOCK_SIZE, state=0)
    driver.run()
    driver.remove("row")
    driver.add("row", world.prompt, blocks=row.blocks, computed=computed, state=0)
    told = f"row 0: its states have taken in {BLOCK_SIZE} tokens, and the step begins at token {computed};"
    with pytest.raises(FailedPrecondition, match=told) as caught:
        driver.run()
    assert caught.value.reason == "STATES_OUT_OF_STEP"
    driver = Driver(world.engine)
    world.expected.check(generate(driver, "row", world.prompt, NUM_TOKENS), driver.logprobs["row"])


@ON_THE_HOST
def test_checkpoints_that_were_not_kept_are_unusable(world):
    """What blocks held before is not taken for the checkpoint of a row that failed, or of a step that did."""
    driver, count = Driver(world.engine), BLOCK_SIZE
    row = driver.add("older", [*world.prompt[1:], 0], state=0)
    driver.keep("older", count, 9)
    driver.run()
    blocks = row.blocks[:1]
    driver.remove("older")
    driver.add("keeper", world.prompt, BLOCK_SIZE, state=1)
    driver.run()
    world.engine._runner._rows.fail(np.array([driver.rows["keeper"].index], np.int32))
    driver.compute("keeper")
    driver.keep("keeper", 2 * BLOCK_SIZE, 9)
    driver.run()
    driver.remove("keeper")
    driver.add("reader", world.prompt, blocks=blocks, computed=count, state=2, reads=9)
    with pytest.raises(FailedPrecondition, match="its states have taken in -1 tokens, and the step begins at token 16"):
        driver.run()


def test_what_the_guard_does_on_a_device(world, monkeypatch):
    """Where the host does not wait, a row with other states gets NaN instead, and fails; rows beside it do not."""
    monkeypatch.setattr("worker_svc.model.states.sequences._waits_for", lambda _content: False)
    driver = Driver(world.engine)
    row = driver.add("row", world.prompt, BLOCK_SIZE, state=0)
    driver.run()
    driver.remove("row")
    driver.add("row", world.prompt, blocks=row.blocks, computed=BLOCK_SIZE - 4, state=0)
    driver.add("beside", world.prompt, state=1, room=NUM_TOKENS)
    driver.run()
    assert driver.flags["row"] and not driver.flags["beside"]
    driver.remove("row")
    for _ in range(NUM_TOKENS - 1):
        driver.run()
    world.expected.check(driver.tokens["beside"], driver.logprobs["beside"])


@ON_THE_HOST
def test_what_is_left_out_is_seen(world, monkeypatch):
    """The tests above can fail: without writing states, the guard stops the second step."""
    world.engine.cache.device_pool.fill_(float("nan"))
    monkeypatch.setattr(SequenceStates, "write", lambda *_: None)
    driver = Driver(world.engine)
    driver.add("row", world.prompt, state=0, room=NUM_TOKENS)
    driver.run()
    with pytest.raises(FailedPrecondition, match="its states have taken in"):
        driver.run()


@pytest.mark.parametrize(
    "settings",
    [{"dtype": "bfloat16"}, {"kv_cache_dtype": "int8"}, {"kv_cache_dtype": "bfloat16"}, {"fuse": False}],
    ids=str,
)
def test_forms_of_weights_and_cache(world, settings):
    """States keep their own types whatever the cache's: logprobs after a prompt in chunks deviate from float32's no more than 1.5
    times as much as those of transformers in bfloat16."""
    driver = Driver(make_engine(world.path, **settings))
    driver.add("row", world.prompt, 7, state=3)
    driver.run()
    while left := len(world.prompt) - driver.rows["row"].computed:
        driver.compute("row", min(7, left))
        driver.run()
    found = driver.logits["row"][len(world.prompt)].cpu().float().log_softmax(-1)
    reference = reference_model(world.path)
    wanted = last_logprobs(reference, world.prompt)
    deviation = float((found - wanted).abs().max())
    own = float((last_logprobs(reference.to(torch.bfloat16), world.prompt) - wanted).abs().max())
    assert deviation < (1e-4 if settings == {"fuse": False} else 1.5 * own)


@torch.inference_mode()
def last_logprobs(model: PreTrainedModel, prompt: list[int]) -> torch.Tensor:
    return model(torch.tensor([prompt])).logits[0, -1].float().log_softmax(-1)


@pytest.mark.parametrize("model_type", ["falcon_h1", "jamba"])
def test_adapters_of_state_modules(model_type, tmp_path):
    """A row with an adapter of all linear modules, and rows without, equal PEFT alone, in prompts and beside each other."""
    base = state_checkpoint(model_type, tmp_path / "base")
    targets = ["in_proj", "q_proj"] if model_type == "falcon_h1" else ["in_proj", "x_proj", "out_proj"]
    path = make_adapter(base, tmp_path / "a", 1, r=4, target_modules=targets)
    engine = make_engine(base)
    driver, rng = Driver(engine), random.Random(1)
    engine.load_adapter(1, str(path))
    prompts = {
        name: [rng.randrange(256) for _ in range(count)] for name, count in (("with", 35), ("without", 20), ("too", 9))
    }
    ids = {"with": 1, "without": 0, "too": 1}
    for name, prompt in prompts.items():
        driver.add(name, prompt, room=8, rare={"adapter_id": ids[name]})
    for _ in range(8):
        driver.run()
    oracle = Oracle(base, {1: path})
    for name, prompt in prompts.items():
        logits = oracle.logits([*prompt, *driver.tokens[name]], ids[name])
        for position, found in driver.logits[name].items():
            torch.testing.assert_close(
                found.cpu().log_softmax(-1), logits[position - 1].log_softmax(-1), atol=2e-3, rtol=1e-3
            )
    plain = oracle.logits(prompts["with"], 0)[-1]
    assert (driver.logits["with"][35].cpu() - plain).abs().max() > 0.01


# --- start-up --------------------------------------------------------------------------------------------------------


def test_sizes(world):
    """Limits say how many blocks a sequence's states take and how far checkpoints are apart; the report counts them."""
    engine = new_engine(world.path, num_blocks=400)
    limits = engine.load(lambda _stage, _fraction: None)
    assert limits.num_state_blocks > 0 and list(limits.cache_windows) == [0]
    assert limits.checkpoint_tokens == limits.num_state_blocks * BLOCK_SIZE
    found = engine.profile(64, 8)
    requests = found.num_gpu_blocks / (limits.num_state_blocks + limits.max_model_len // BLOCK_SIZE)
    assert f"{limits.num_state_blocks} of the blocks for each request" in found.readable
    assert f"{requests:.1f} requests of {limits.max_model_len}" in found.readable


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_several_ranks_are_refused(world, num_ranks):
    """By name, before weights are read."""
    found = open_checkpoint(world.path)
    given = model_class(found), found.text_config, num_ranks
    if num_ranks == 1:
        check_one_rank(*given)
        return
    with pytest.raises(
        ConfigError, match="ForCausalLM has layers with states of sequences, which are not divided over ranks"
    ):
        check_one_rank(*given)


def test_checkpoint_tokens(world):
    """--checkpoint-tokens sets their distance; it must be a multiple of the block size."""
    assert new_engine(world.path, checkpoint_tokens=64).load(lambda *_: None).checkpoint_tokens == 64
    with pytest.raises(ConfigError, match="--checkpoint-tokens: 40 is not a multiple of --block-size 16; use 48, or 0"):
        new_engine(world.path, checkpoint_tokens=40)


@NEEDS_INVARIANCE
def test_invariance_is_not_claimed(world):
    """Results depend on chunks: `--invariant` is refused, and the default does without."""
    assert not world.engine.invariant
    engine = new_engine(world.path, invariant=True)
    engine.load(lambda _stage, _fraction: None)
    with pytest.raises(ConfigError, match="states depend on how prompts are cut into chunks"):
        engine.profile(64, 8)


# --- beside generation -------------------------------------------------------------------------------------------------


def test_prompt_logprobs_and_embeddings(world):
    """Rows that ask for logprobs of their prompts, which run in passes of their own, and embeddings beside others, in chunks."""
    driver, results = Driver(world.engine), list[worker_pb2.WorkerOutputs]()
    sampling = common_pb2.ResolvedSampling(num_prompt_logprobs=0)
    driver.add("scored", world.prompt, 20, state=0, rare={"sampling": sampling})
    driver.add("pooled", world.prompt, 30, state=1, rare={"task": common_pb2.TASK_EMBED_MEAN})
    driver.add("row", world.prompt, 10, state=2)
    results.append(driver.run())
    for name, most in (("scored", 17), ("pooled", 9), ("row", 40)):
        while left := len(world.prompt) - driver.rows[name].computed:
            driver.compute(name, min(most, left))
            for other in driver.rows.keys() - {name}:
                driver.pause(other)
            results.append(driver.run())
    reference, ids = reference_model(world.path), torch.tensor([world.prompt])
    with torch.inference_mode():
        wanted = reference(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    scores = b"".join(part.logprobs for made in results for part in made.prompt_logprobs)
    torch.testing.assert_close(torch.frombuffer(bytearray(scores), dtype=torch.float32), wanted, atol=1e-3, rtol=1e-3)
    [embedding] = [found for made in results for found in made.embeddings]
    vector = torch.frombuffer(bytearray(embedding.values), dtype=torch.float32)
    torch.testing.assert_close(vector, last_hidden(reference, world.prompt).mean(0), atol=1e-3, rtol=1e-3)
    world.expected.check(driver.tokens["row"], driver.logprobs["row"])
