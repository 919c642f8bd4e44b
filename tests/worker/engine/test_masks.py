"""Masks: a layer's window counts where its mask alone says so; a mask that cannot be carried out is refused, with its layer."""

import json
from dataclasses import replace
from functools import partial

import pytest
import torch
from transformers import masking_utils
from transformers.models.llama import modeling_llama
from transformers.models.qwen2 import modeling_qwen2

from svc_common.errors import ConfigError
from tests.support.checkpoints import CHUNK, SLIDING_WINDOW, make_checkpoint
from tests.support.worker.driver import new_engine
from tests.worker.engine.families import Family, check_lives, make_world
from tests.worker.engine.test_window import check_ring
from worker_svc.model import masks
from worker_svc.model.fused import operators
from worker_svc.model.masks import MaskKind

_TOKENS = 8
_QWEN2 = {"use_sliding_window": True, "sliding_window": SLIDING_WINDOW, "layer_types": ["sliding_attention"] * 2}


def load(path) -> None:
    new_engine(path).load(lambda _stage, _fraction: None)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return make_checkpoint("llama", tmp_path_factory.mktemp("checkpoint") / "llama")


# --- windows in masks alone ------------------------------------------------------------------------------------------


def test_windows_of_some_layers(tmp_path):
    """Qwen2-MoE tells attention nothing of its windows: whatever a scheduler does to rows, tokens are those of generate."""
    world = make_world(Family("qwen2_moe", make_checkpoint("qwen2_moe", tmp_path / "m")), _TOKENS)
    check_lives(world, seeds=range(1), num_tokens=_TOKENS)
    assert world.engine._loaded.limits.sliding_window == 0


def test_windows_of_all_layers_need_few_blocks(families):
    """Phi-3.5-MoE, too: its limits name the window, by which blocks are freed, and few blocks used over and over are enough."""
    family = families["phimoe"]
    assert family.engine._loaded.limits.sliding_window == SLIDING_WINDOW
    check_ring(family.engine, family, 64)


def test_a_fused_decoder_has_the_windows_of_masks(tmp_path, monkeypatch):
    """A decoder that runs as one program looks back as far as its masks say."""
    inner = modeling_qwen2.Qwen2Attention.__init__

    def without_window(self, *given, **named):
        inner(self, *given, **named)
        self.sliding_window = None

    monkeypatch.setattr(modeling_qwen2.Qwen2Attention, "__init__", without_window)
    world = make_world(Family("qwen2", make_checkpoint("qwen2", tmp_path / "m", **_QWEN2)), _TOKENS)
    assert world.engine._loaded.limits.sliding_window == SLIDING_WINDOW
    check_lives(world, seeds=range(1), num_tokens=_TOKENS)


def test_a_fused_decoder_has_chunks(tmp_path, monkeypatch):
    """Chunks in every layer of a decoder that runs as one program: tokens are those of generate, limits name a window of
    their size, and few blocks used over and over are enough."""
    monkeypatch.setattr(modeling_llama, "create_causal_mask", masking_utils.create_chunked_causal_mask)
    family = Family("llama", make_checkpoint("llama", tmp_path / "m", attention_chunk_size=CHUNK))
    world = make_world(family, _TOKENS)
    assert world.engine._loaded.model.is_fused
    assert world.engine._loaded.limits.sliding_window == CHUNK
    check_lives(world, seeds=range(1), num_tokens=_TOKENS)
    check_ring(world.engine, family, 64)


def test_the_trial_finds_chunks_that_are_off(tmp_path, monkeypatch):
    """A program whose chunks are one token longer is not used."""
    monkeypatch.setattr(modeling_llama, "create_causal_mask", masking_utils.create_chunked_causal_mask)
    inner = operators.Attend
    longer = lambda layer, rule, group: inner(layer, replace(rule, chunk=CHUNK + 1), group)  # noqa: E731
    monkeypatch.setattr(operators, "Attend", longer)
    engine = new_engine(make_checkpoint("llama", tmp_path / "m", attention_chunk_size=CHUNK))
    engine.load(lambda _stage, _fraction: None)
    assert not engine._loaded.model.is_fused


def test_windows_that_a_mask_of_chunks_contradicts_are_refused(tmp_path, monkeypatch):
    """As for windows: generate obeys the mask."""
    monkeypatch.setattr(modeling_qwen2, "create_sliding_window_causal_mask", masking_utils.create_chunked_causal_mask)
    path = make_checkpoint("qwen2", tmp_path / "m", **_QWEN2, attention_chunk_size=32)
    with pytest.raises(ConfigError, match="sliding_window=24 to attention, but its mask has chunks of 32"):
        load(path)


# --- what is refused -------------------------------------------------------------------------------------------------


def _prefix_and_chunks(_batch, _head, query, key):
    return (key < 3) | (key >= query // 32 * 32)


def _prefix(_batch, _head, _query, key):
    return key < 3


def _sinks_and_window(_batch, _head, query, key):
    return (key < 2) | (key > query - 5)


MASKS = {
    "chunks": (
        partial(masking_utils.create_causal_mask, and_mask_function=_prefix_and_chunks),
        "neither causal nor a sliding window nor of chunks",
    ),
    "or": (partial(masking_utils.create_causal_mask, or_mask_function=_prefix), "neither causal nor a sliding window"),
    "and": (
        partial(masking_utils.create_causal_mask, and_mask_function=_sinks_and_window),
        "neither causal nor a sliding window",
    ),
    "own": (lambda **_: torch.zeros(1, 1, 4, 4), "a mask of its own"),
}


@pytest.mark.parametrize("name", MASKS)
def test_other_masks_are_refused_with_their_layer(name, llama, monkeypatch):
    """Chunks, unions, intersections and tensors that a model makes by itself: never served as if causal."""
    make_mask, words = MASKS[name]
    monkeypatch.setattr(modeling_llama, "create_causal_mask", make_mask)
    with pytest.raises(ConfigError, match=rf"LlamaAttention of layer 0 uses .*{words}") as caught:
        load(llama)
    assert caught.value.reason == "MODEL_UNSUPPORTED"


def test_an_argument_of_attention_that_is_not_known_is_refused(llama, monkeypatch):
    """Whatever its type: it might change what attention computes."""
    inner = modeling_llama.LlamaAttention.forward
    monkeypatch.setattr(
        modeling_llama.LlamaAttention, "forward", lambda self, *given, **named: inner(self, *given, **named, sparsity=3)
    )
    with pytest.raises(ConfigError, match=r"LlamaAttention of layer 0 passes sparsity to attention"):
        load(llama)


def test_a_window_that_its_mask_contradicts_is_refused(tmp_path, monkeypatch):
    """generate obeys the mask: a call that says another window cannot be right for both."""
    inner = modeling_qwen2.Qwen2Attention.__init__

    def with_another(self, *given, **named):
        inner(self, *given, **named)
        self.sliding_window = 8

    monkeypatch.setattr(modeling_qwen2.Qwen2Attention, "__init__", with_another)
    path = make_checkpoint("qwen2", tmp_path / "m", **_QWEN2)
    with pytest.raises(ConfigError, match="sliding_window=8 to attention, but its mask has a window of 24"):
        load(path)


def test_a_window_of_the_cache_alone_is_refused(llama):
    """Moshi's is like that: nothing but transformers' cache forgets tokens. Where no sequence is that long, it is served."""
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps(config | {"sliding_window": SLIDING_WINDOW}))
    try:
        with pytest.raises(
            ConfigError, match=r"LlamaAttention of layer 0 attends to all .* cache keeps 24: set --max-model-len 24"
        ):
            load(llama)
        assert new_engine(llama, max_model_len=SLIDING_WINDOW).load(lambda *_: None).max_model_len == SLIDING_WINDOW
    finally:
        (llama / "config.json").write_text(json.dumps(config))


# --- what a mask function means --------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_positions", [1, 7, 24, 25, 100, 2048])
def test_functions_of_transformers_are_read(num_positions):
    """Causal masks and windows, for few positions and many: a window that no sequence exceeds is none."""
    assert masks.read(masking_utils.causal_mask_function, num_positions) == MaskKind()
    for size in (1, 2, 16, 17, 24, 99, 1000):
        window = masking_utils.sliding_window_causal_mask_function(size)
        assert masks.read(window, num_positions) == MaskKind(size if size < num_positions else None)


@pytest.mark.parametrize("num_positions", [2, 25, 1000, 2048, 4096, 8192, 131_072])
@pytest.mark.parametrize("size", [2, 3, 16, 17, 24, 32, 100, 128, 512, 8192])
def test_chunks_are_no_windows(size, num_positions):
    """The last token of a chunk sees as much as a window of its size would; the first one does not. One chunk of all
    positions is causal."""
    chunks = masking_utils.chunked_causal_mask_function(size, torch.zeros(1, dtype=torch.int64))
    assert masks.read(chunks, num_positions) == MaskKind(chunk=size if size < num_positions else None)


@pytest.mark.parametrize("size", [16, 24, 100])
def test_almost_chunks_are_not_taken_for_chunks(size):
    """Chunks that begin elsewhere, see a token of the chunk before, or change their size."""
    odd = (
        lambda _b, _h, query, key: (key <= query) & ((key + 1) // size == (query + 1) // size),
        lambda _b, _h, query, key: (key <= query) & (key >= (query // size * size - 1)),
        lambda _b, _h, query, key: (
            (key <= query) & (key // size == query // size) & ((query < 3 * size) | (key == query))
        ),
    )
    assert all("nor of chunks" in masks.read(function, 2048).problem for function in odd)


def test_functions_that_cannot_be_read():
    """Both directions, a prefix, and what depends on this batch's tokens."""
    blocks = masking_utils.blockwise_overlay(torch.tensor([[-1, 0, 0, -1]]))
    odd = (
        masking_utils.bidirectional_mask_function,
        masking_utils.or_masks(masking_utils.causal_mask_function, _prefix),
    )
    assert all("neither causal" in masks.read(function, 100).problem for function in odd)
    assert (
        "more than positions"
        in masks.read(masking_utils.or_masks(masking_utils.causal_mask_function, blocks), 100).problem
    )
    assert masks.read(None, 100).problem


def test_masks_are_described_only_inside():
    """While serving, transformers gets None: no mask is built."""
    causal = masking_utils.causal_mask_function
    with masks.described("quire_test", 10):
        mask = masks.answer(mask_function=causal, q_length=4, kv_length=4)
        assert mask.shape == (1, 1, 4, 4)
        assert masks.kind_of(mask) == MaskKind()
        assert masks.kind_of(mask[:, :, :2]).problem
    assert masks.answer(mask_function=causal, q_length=4, kv_length=4) is None
