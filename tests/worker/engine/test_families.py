"""Every model family on the worker: tokens and logprobs of `transformers.generate` through whatever a scheduler may do to a row,
vectors of AutoModel's hidden states. A sample here, the whole in `make test-long`; both sizes are printed.

docs/models.md is made from the names below (`tests/models_page.py`).
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from paged_kernels.backend import AttentionRule
from tests.support.checkpoints import FAMILIES, make_checkpoint
from tests.support.worker.driver import make_engine
from tests.support.worker.generated import last_hidden
from tests.worker.engine.families import SPARE, Family, World, check_lives, make_world, prompts_of
from worker_svc.invariance import FREE
from worker_svc.model import attention
from worker_svc.model.cache.cache_engine import CacheEngine
from worker_svc.model.decoder.part import PackedPast
from worker_svc.model.dummy_batch import Chunk, of_groups, pack
from worker_svc.model.input_batch import model_inputs
from worker_svc.model.pooling import LAST, MEAN, PoolingSums

_SAMPLE_TOKENS = 8
_HIDDEN_TOLERANCE = 1e-4
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
    "long_factor": [2.0, 2.2, 2.4, 2.6, 2.8, 3.0, 3.2, 3.4],
}


@pytest.fixture(scope="module", params=FAMILIES)
def world(request, families) -> World:
    return make_world(families[request.param], _SAMPLE_TOKENS)


def test_tokens_are_those_of_generate(world, record_property):
    """R123: tokens equal those of `generate` through chunks, recompute, swap, prefix hits, copy on write, multi-step decode and
    batches of long and short sequences, with NaN in all blocks that were freed or never written, and shuffled free lists."""
    size = check_lives(world, seeds=range(1), num_tokens=_SAMPLE_TOKENS, poisoned=True)
    record_property("size", f"equal to generate with NaN in free blocks: {size}")


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_generate_in_many_schedules(family, families, record_property):
    """The same in 16 random schedules of at least 48 tokens each, half of them with NaN in all free blocks."""
    world = make_world(families[family], 48)
    plain = check_lives(world, seeds=range(8), num_tokens=48)
    poisoned = check_lives(world, seeds=range(8, 16), num_tokens=48, poisoned=True)
    record_property("size", f"equal to generate on the worker: {plain}")
    record_property("size", f"equal to generate with NaN in free blocks: {poisoned}")


@pytest.fixture(scope="module")
def gemma(families) -> World:
    """Gemma 2, module by module."""
    family = families["gemma2"]
    return replace(make_world(family, _SAMPLE_TOKENS), engine=make_engine(family.path, fuse=False))


@pytest.mark.parametrize("part", ["scale", "sliding_window", "softcap"])
def test_what_is_left_out_is_seen(part, gemma, monkeypatch):
    """The tests above can fail: Gemma 2 without its query scale, its windows or its soft cap gives other tokens."""
    inner, plain = attention._rule, AttentionRule(16**-0.5)
    monkeypatch.setattr(attention, "_rule", lambda *given: replace(inner(*given), **{part: getattr(plain, part)}))
    with pytest.raises(AssertionError):
        check_lives(gemma, seeds=range(1), num_tokens=_SAMPLE_TOKENS)


@pytest.mark.parametrize("part", ["chunk", "positions"])
def test_what_llama_4_needs_is_seen(part, families, monkeypatch):
    """The same for Llama 4 without its chunks, and without positions for the temperature of its queries."""
    world = make_world(families["llama4_text"], _SAMPLE_TOKENS)
    if part == "chunk":
        engine, inner = make_engine(families["llama4_text"].path), attention._rule
        monkeypatch.setattr(attention, "_rule", lambda *given: replace(inner(*given), chunk=None))
        world = replace(world, engine=engine)
    else:
        monkeypatch.setattr(PackedPast, "get_seq_length", lambda *_: 0)
    with pytest.raises(AssertionError):
        check_lives(world, seeds=range(1), num_tokens=_SAMPLE_TOKENS)


def test_moves_that_are_left_out_are_seen(families, monkeypatch):
    """The same for block moves: without copies, and without swaps, tokens are others."""
    world = make_world(families["llama"], _SAMPLE_TOKENS)
    for move in ("copy", "swap_in", "swap_out"):
        with monkeypatch.context() as patch, pytest.raises(AssertionError):
            patch.setattr(CacheEngine, move, lambda *_: None)
            check_lives(world, seeds=range(3), num_tokens=_SAMPLE_TOKENS, poisoned=True)


@pytest.mark.parametrize("original", [256, 8], ids=["short", "long"])
def test_phi3_longrope(original, tmp_path):
    """Phi-3's rotary scaling follows max_model_len, whatever else is in the packed row: short factors where no sequence can be
    long, long ones otherwise; equal to generate where generate takes the same ones for the whole sequence."""
    rope = _LONGROPE | {"original_max_position_embeddings": original}
    path = make_checkpoint("phi3", tmp_path / "m", rope_parameters=rope, original_max_position_embeddings=original)
    family = Family("phi3", path)
    prompts = {name: prompt for name, prompt in prompts_of(2).items() if original == 256 or len(prompt) > original}
    expected = {name: family.greedy(prompt, _SAMPLE_TOKENS + SPARE) for name, prompt in prompts.items()}
    engine = make_engine(path, max_model_len=256)
    check_lives(World("phi3", engine, family.reference, prompts, expected), seeds=range(3), num_tokens=_SAMPLE_TOKENS)


# --- embeddings ------------------------------------------------------------------------------------------------------


def _chunked(model_shape, num_groups, prompts, cuts):
    """Packed steps in which several prompts come in chunks: (packed tokens, rows, done) each, over tables of their own."""
    width = -(-max(map(len, prompts)) // model_shape.block_size)
    tables = np.arange(len(prompts) * width, dtype=np.int32)[::-1].reshape(len(prompts), width).copy()
    tables = of_groups(tables, num_groups)
    done = [0] * len(prompts)
    while any(n < len(prompt) for n, prompt in zip(done, prompts, strict=True)):
        chunks = []
        for row, prompt in enumerate(prompts):
            count = min(cuts[row], len(prompt) - done[row])
            if count:
                chunks.append(Chunk(row, done[row], prompt[done[row] : done[row] + count], samples=row == 0))
                done[row] += count
        rows = np.array([chunk.row for chunk in chunks], np.int32)
        ends = np.array([done[row] == len(prompts[row]) for row in rows], np.bool_)
        yield pack(chunks, tables, model_shape.block_size), tables, rows, ends


def test_vectors_are_of_the_last_hidden_states(world):
    """Mean and last-token embeddings of chunked prompts in one batch equal AutoModel's, also in passes that compute logits."""
    model, shape = world.engine._loaded.model, world.engine._loaded.shape
    prompts = [world.prompts[name] for name in ("p33", "p130", "p15", "p16", "p1")]
    tasks = {1: MEAN, 2: LAST, 3: MEAN, 4: MEAN}  # row 0 wants tokens
    pools = PoolingSums(model.hidden_size, world.engine.cache.device_pool.device)
    for row, task in tasks.items():
        pools.open(row, task)
    vectors = {}
    for packed, tables, rows, done in _chunked(shape, world.engine._loaded.num_groups, prompts, cuts=(7, 40, 4, 16, 1)):
        inputs = list(model_inputs(packed, torch.from_numpy(tables), FREE))
        logits, hidden = model.logits_and_hidden(inputs)
        assert torch.equal(logits, model.logits(inputs))
        assert torch.equal(hidden, model.hidden(inputs))
        assert pools.wants(rows) == bool(set(rows.tolist()) & tasks.keys())
        vectors |= dict(pools.step(hidden, rows, packed.row_offsets, done))
        assert not pools.wants(rows[done])
    assert vectors.keys() == tasks.keys()
    for row, vector in vectors.items():
        states = last_hidden(world.reference, prompts[row])
        wanted = states.mean(0) if tasks[row] == MEAN else states[-1]
        assert np.abs(vector - wanted.numpy()).max() < _HIDDEN_TOLERANCE
