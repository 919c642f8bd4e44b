"""Start-up of the engine: what is refused and with which words, how many blocks fit (R8, R9), what the bundle holds."""

import hashlib
import json
import logging
import shutil

import pytest
import torch
from tokenizers import Tokenizer

from protos.worker.v1 import worker_pb2
from svc_common.errors import ConfigError, FailedPrecondition
from tests.support.checkpoints import EOS_TOKEN_ID, HEADS, HIDDEN, VOCAB_SIZE, config_of, make_checkpoint, make_model
from tests.support.worker.driver import make_engine
from worker_svc.executor.model_engine import ModelEngine
from worker_svc.model import memory
from worker_svc.model.bundle import eos_token_ids
from worker_svc.model.memory import MIB, BlockCounts, MemoryBudget, check_blocks, count_blocks, cpu_cache_bytes
from worker_svc.settings import WorkerSettings


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return make_checkpoint("llama", tmp_path_factory.mktemp("checkpoint") / "my-llama")


def engine_of(path, **settings) -> ModelEngine:
    return ModelEngine(WorkerSettings.of(model=path, **settings))


def load(path, **settings):
    return engine_of(path, **settings).load(lambda _stage, _fraction: None)


@pytest.fixture
def copied(llama, tmp_path):
    return shutil.copytree(llama, tmp_path / "copy")


# --- refusals --------------------------------------------------------------------------------------------------------


def test_pickled_weights_are_refused_with_the_way_to_convert(copied):
    """Only safetensors are read; the message says how to convert."""
    (copied / "model.safetensors").rename(copied / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"isolated process: quire convert FOLDER NEW_FOLDER") as caught:
        load(copied)
    assert caught.value.reason == "PICKLED_WEIGHTS"


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_missing_files_are_named(copied, name):
    """Each needed file, by name."""
    (copied / name).unlink()
    with pytest.raises(ConfigError, match=name.replace(".", r"\.")):
        load(copied)


def test_damaged_weights(copied):
    """A cut weight file is an error about the checkpoint, not a traceback."""
    file = copied / "model.safetensors"
    file.write_bytes(file.read_bytes()[:2000])
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load(copied)


def test_missing_weights(copied):
    """Weights that the file lacks are not made up."""
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(ConfigError, match=r"lacks 9 weights, model\.layers\.2"):
        load(copied)


def test_code_of_the_checkpoint_is_never_run(copied):
    """A checkpoint that wants its own code is refused, and the code is not touched."""
    (copied / "evil.py").write_text("raise SystemExit('ran')")
    (copied / "config.json").write_text(json.dumps({"auto_map": {"AutoConfig": "evil.Config"}}))
    with pytest.raises(ConfigError, match="never run"):
        load(copied)


def test_unknown_model_type(copied):
    """A type that this transformers does not know is named."""
    (copied / "config.json").write_text(json.dumps({"model_type": "nonesuch"}))
    with pytest.raises(ConfigError, match="nonesuch"):
        load(copied)


_BLT_PART = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
REFUSED = {
    "falcon": (
        {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
        "self_attention .FalconAttention",
    ),
    "bloom": ({"hidden_size": 64, "n_layer": 2, "n_head": 4}, "self_attention .BloomAttention"),
    "gptj": ({"n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8}, "attn .GPTJAttention"),
    "mpt": ({"d_model": 64, "n_layers": 2, "n_heads": 4}, "attn .MptAttention"),
    "mamba": ({"hidden_size": 64, "num_hidden_layers": 2, "state_size": 8}, "mixer .MambaMixer"),
    "recurrent_gemma": (
        config_of("llama") | {"block_types": ["recurrent", "attention"], "lru_width": 64},
        r"temporal_block \(RecurrentGemmaRecurrentBlock",
    ),
    "bert": (
        {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
        "BertSelfAttention of layer 0 is not causal",
    ),
    "doge": (config_of("llama"), "DogeAttention of layer 0 uses a mask of its own"),
    "blt": (
        {f"{part}_config": _BLT_PART for part in ("patcher", "encoder", "decoder", "global")}
        | {"encoder_hash_byte_group_vocab": 64},
        "BltForCausalLM cannot be served: its module",
    ),
}


@pytest.mark.parametrize("model_type", REFUSED)
def test_what_is_not_attention_is_named(model_type, tmp_path):
    """Mixers that do not come through AttentionInterface are refused by naming the module."""
    config, words = REFUSED[model_type]
    path = make_model(config | {"model_type": model_type}, tmp_path / model_type)
    with pytest.raises(ConfigError, match=words) as caught:
        load(path)
    assert caught.value.reason == "MODEL_UNSUPPORTED"


def test_an_encoder_and_decoder_is_refused(copied):
    """T5 is no causal language model: said by name, from its configuration alone."""
    (copied / "config.json").write_text(
        json.dumps({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]})
    )
    with pytest.raises(
        ConfigError, match=r"T5ForConditionalGeneration, which is not a causal language model"
    ) as caught:
        load(copied)
    assert caught.value.reason == "MODEL_UNSUPPORTED"


FORWARDS = {
    "position_ids": lambda self, input_ids, logits_to_keep=0: None,
    "logits_to_keep": lambda self, input_ids, position_ids=None: None,
}


@pytest.mark.parametrize("name", FORWARDS)
def test_a_forward_that_cannot_be_packed_is_refused(llama, monkeypatch, name):
    """A model that takes no positions, or computes logits of every token, says which argument it lacks."""
    from transformers import LlamaForCausalLM

    monkeypatch.setattr(LlamaForCausalLM, "forward", FORWARDS[name])
    with pytest.raises(
        ConfigError, match=f"LlamaForCausalLM cannot be served: its forward\\(\\) has no parameter {name}"
    ) as caught:
        load(llama)
    assert caught.value.reason == "MODEL_UNSUPPORTED"


def test_hidden_states_that_cannot_be_seen(llama, monkeypatch):
    """A model whose forward goes round its own decoder could not give embeddings: refused."""
    from transformers import LlamaForCausalLM

    monkeypatch.setattr(LlamaForCausalLM, "get_decoder", lambda self: self.lm_head)
    with pytest.raises(ConfigError, match="LlamaForCausalLM cannot be served: its last hidden states"):
        load(llama)


def test_a_layer_that_is_not_reached_is_found_by_the_probe(llama, monkeypatch):
    """The class says it supports the interface, one layer does not use it: refused by name."""
    from transformers.models.llama import modeling_llama

    inner = modeling_llama.LlamaAttention.forward

    def forward(self, hidden_states, *args, **kwargs):
        return (hidden_states, None) if self.layer_idx == 1 else inner(self, hidden_states, *args, **kwargs)

    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", forward)
    with pytest.raises(ConfigError, match=r"model\.layers\.1\.self_attn \(LlamaAttention\) called .* 0 times"):
        load(llama)


def test_dynamic_rotary_scaling_is_refused(tmp_path):
    """`dynamic` depends on the longest sequence of a batch."""
    scaling = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    path = make_checkpoint("llama", tmp_path / "m", rope_parameters=scaling)
    with pytest.raises(ConfigError, match="dynamic"):
        load(path)


def test_settings_that_this_release_lacks(llama):
    """CUDA, and invariance on the reference backend: said before anything is loaded."""
    with pytest.raises(ConfigError, match="--device cpu"):
        engine_of(llama, device="cuda")
    with pytest.raises(ConfigError, match="--backend cpu"):
        engine_of(llama, backend="reference", invariant=True)


def test_max_model_len(llama):
    """The checkpoint's own by default; less on request; never more."""
    assert load(llama).max_model_len == 2048
    assert load(llama, max_model_len=100).max_model_len == 100
    with pytest.raises(ConfigError, match="2048"):
        load(llama, max_model_len=4096)


def test_order_of_calls(llama):
    """Each phase says what is missing."""
    engine = engine_of(llama)
    with pytest.raises(FailedPrecondition, match="LoadModel"):
        engine.profile(16, 1)
    with pytest.raises(FailedPrecondition, match="AllocateCache"):
        engine.execute(worker_pb2.SchedulerOutputs(num_decode_steps=1))


def test_the_context_is_shortened_to_the_memory(llama, caplog):
    """With `auto`: to the longest that the blocks hold, said in one line; not where they hold all, and not silently to nothing."""
    engine = engine_of(llama, max_model_len="auto", num_gpu_blocks_override=3, invariant=False)
    whole = engine.load(lambda *_: None).max_model_len
    answer = engine.profile(16, 1)
    assert (answer.max_model_len, engine._loaded.limits.max_model_len) == (48, 48)
    assert [r.levelname for r in caplog.records if f"48 tokens, not the model's {whole}" in r.getMessage()] == [
        "WARNING"
    ]
    assert engine.profile(32, 2).max_model_len == 48, "a later profile says the same"
    enough = engine_of(llama, max_model_len="auto", invariant=False)
    enough.load(lambda *_: None)
    assert enough.profile(16, 1).max_model_len == whole
    none = engine_of(llama, max_model_len="auto", kv_cache_memory_bytes=1, invariant=False)
    none.load(lambda *_: None)
    with pytest.raises(ConfigError, match="does not hold a single block"):
        none.profile(16, 1)


# --- loading ---------------------------------------------------------------------------------------------------------


def test_progress_and_limits(llama):
    """Progress never falls and ends at 1; limits say what was loaded, and as what."""
    seen: list[tuple[str, float]] = []
    limits = engine_of(llama).load(lambda stage, fraction: seen.append((stage, fraction)))
    fractions = [fraction for _, fraction in seen]
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0
    weights = [stage for stage, _ in seen if stage.startswith("weights: ")]
    size = weights[0].rpartition(" of ")[2]
    assert len(weights) > 5 and weights[-1] == f"weights: {size} of {size}, 0 s left", weights
    assert (limits.model, limits.vocab_size, limits.block_size) == ("my-llama", VOCAB_SIZE, 16)
    assert (list(limits.eos_token_ids), limits.dtype) == ([EOS_TOKEN_ID], "float32")
    assert load(llama, served_model_name="other", dtype="bfloat16").dtype == "bfloat16"


def test_digest_is_of_configuration_and_weight_files(llama, copied):
    """Equal folders have equal digests; another configuration has another."""
    assert load(llama).model_digest == load(copied).model_digest
    config = (copied / "config.json").read_text()
    (copied / "config.json").write_text(config + "\n")
    assert load(llama).model_digest != load(copied).model_digest


def test_longrope_is_fixed_by_max_model_len(tmp_path):
    """Short factors when no sequence can be long, long ones otherwise; never by what else is in the batch."""
    scaling = {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "factor": 4.0,
        "short_factor": [1.0] * 8,
        "long_factor": [3.0] * 8,
        "original_max_position_embeddings": 64,
    }
    path = make_checkpoint("llama", tmp_path / "m", rope_parameters=scaling, max_position_embeddings=256)
    found = {}
    for length in (64, 256):
        engine = make_engine(path, max_model_len=length)
        rotary = engine._loaded.model._model.model.rotary_emb
        before = rotary.inv_freq.clone()
        for longest in (3, 255):
            rotary(torch.zeros(1), torch.tensor([[longest]]))
            assert torch.equal(rotary.inv_freq, before)
        found[length] = before
    assert torch.allclose(found[64], found[256] * 3)


def test_bundle(llama):
    """Tokenizer verbatim, template, special tokens, generation config, limits; its digest is in the limits, not in itself."""
    engine = engine_of(llama)
    limits = engine.load(lambda _stage, _fraction: None)
    data = engine.bundle()
    bundle = worker_pb2.ModelBundle.FromString(data)
    assert bundle.tokenizer_json == (llama / "tokenizer.json").read_bytes()
    assert Tokenizer.from_str(bundle.tokenizer_json.decode()).get_vocab_size() == VOCAB_SIZE
    assert "message" in bundle.chat_template or "m.role" in bundle.chat_template
    assert bundle.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert json.loads(bundle.generation_config_json)["eos_token_id"] == EOS_TOKEN_ID
    assert limits.bundle_digest == hashlib.sha256(data).hexdigest()
    assert bundle.limits.bundle_digest == ""
    limits.bundle_digest = ""
    assert bundle.limits == limits


def test_chat_template_file_and_several_eos(copied):
    """chat_template.jinja goes before tokenizer_config.json; generation_config's ids before config's."""
    (copied / "chat_template.jinja").write_text("{{ messages[0].content }}")
    (copied / "generation_config.json").write_text('{"eos_token_id": [9, 4]}')
    engine = engine_of(copied)
    assert list(engine.load(lambda _stage, _fraction: None).eos_token_ids) == [4, 9]
    assert worker_pb2.ModelBundle.FromString(engine.bundle()).chat_template == "{{ messages[0].content }}"
    (copied / "generation_config.json").unlink()
    assert eos_token_ids(copied, engine) == []


# --- memory (R8, R9) -------------------------------------------------------------------------------------------------


def budget(**changes) -> MemoryBudget:
    plain = {
        "block_size": 16,
        "block_bytes": 1000,
        "weight_bytes": 30_000,
        "activation_bytes": 5_500,
        "swap_bytes": 4_999,
        "total_bytes": 100_000,
        "utilization": 0.9,
    }
    return MemoryBudget(**plain | changes)


def test_r9_is_exact():
    """floor((total x utilization - peak) / block bytes), floor(swap / block bytes), both clamped at 0; the override replaces."""
    assert count_blocks(budget()) == BlockCounts(54, 4)
    assert count_blocks(budget(activation_bytes=90_000)) == BlockCounts(0, 4)
    assert count_blocks(budget(swap_bytes=0)) == BlockCounts(54, 0)
    assert count_blocks(budget(block_bytes=0)) == BlockCounts(0, 0)
    assert count_blocks(budget(num_gpu_blocks_override=7)) == BlockCounts(7, 4)
    assert count_blocks(budget(cache_bytes=12_999)) == BlockCounts(12, 4)
    sizes = {"dtype_bytes": 2, "num_layers": 3, "block_size": 16, "num_kv_heads": 5, "head_dim": 64}
    assert memory.block_bytes(**sizes) == 2 * 3 * 2 * 16 * 5 * 64
    assert memory.block_bytes(**sizes, scale_bytes=4) == 3 * 2 * 16 * 5 * (2 * 64 + 4)


def test_too_little_memory_names_the_longest_length():
    """R9's two errors: no block at all, or fewer tokens than one request may have."""
    check_blocks(BlockCounts(10, 0), budget(), 160)
    with pytest.raises(ConfigError, match=r"--max-model-len 160 .the longest that fits") as caught:
        check_blocks(BlockCounts(10, 0), budget(), 161)
    assert caught.value.metadata["longest"] == "160"
    with pytest.raises(ConfigError, match=r"not hold a single block.*--kv-cache-memory"):
        check_blocks(BlockCounts(0, 0), budget(cache_bytes=10), 100)


def test_cpu_cache_memory():
    """512 MiB unless less is free beside the swap space; what was asked for if it is there."""
    assert cpu_cache_bytes(None, 4096 * MIB, 256 * MIB) == 512 * MIB
    assert cpu_cache_bytes(None, 600 * MIB, 256 * MIB) == 344 * MIB
    assert cpu_cache_bytes(MIB, 600 * MIB, 0) == MIB
    with pytest.raises(ConfigError, match=r"600\.0 MiB are free"):
        cpu_cache_bytes(500 * MIB, 600 * MIB, 256 * MIB)


def test_profile_counts_what_fits(llama):
    """The engine's own figures add up, and the table says the same."""
    engine = engine_of(llama, kv_cache_memory_bytes=10 * MIB, swap_space_gib=0.01, max_model_len=512)
    engine.load(lambda _stage, _fraction: None)
    found = engine.profile(256, 16)
    assert found.block_bytes == 4 * 2 * 2 * 16 * 2 * (HIDDEN // HEADS)
    assert found.num_gpu_blocks == 10 * MIB // found.block_bytes
    assert found.num_cpu_blocks == int(0.01 * 2**30) // found.block_bytes
    assert found.weight_bytes >= (llama / "model.safetensors").stat().st_size - 10_000
    assert found.utilization == 1.0
    for words in ("weights", "KV cache", "10.0 MiB", f"{found.num_gpu_blocks} blocks of 16 tokens"):
        assert words in found.readable


def test_profile_refuses_a_cache_too_small(llama):
    """`--kv-cache-memory` that one request of max_model_len does not fit in: the longest that fits is named."""
    engine = engine_of(llama, kv_cache_memory_bytes=MIB // 2)
    engine.load(lambda _stage, _fraction: None)
    with pytest.raises(ConfigError, match=r"--max-model-len \d+ \(the longest that fits\)"):
        engine.profile(64, 4)


def test_mixture_of_experts_says_that_invariance_is_off(tmp_path, caplog):
    """On modules, experts get as many rows as the batch sends them: seen by the check, said once; --invariant is refused."""
    path = make_checkpoint("phimoe", tmp_path / "moe")
    with caplog.at_level(logging.WARNING):
        engine = make_engine(path)
    if engine.invariant:
        pytest.skip("on this processor products have the same bits at every row count")
    assert "batch invariance is off" in caplog.text
    with pytest.raises(ConfigError, match="--invariant"):
        make_engine(path, invariant=True)


def test_a_profile_that_failed_can_be_asked_for_again(tmp_path):
    """The second caller gets the same error: the longest length that fits, not an internal error."""
    path = make_checkpoint("llama", tmp_path / "m", dtype="bfloat16")
    engine = engine_of(path, dtype="bfloat16", num_gpu_blocks_override=2)
    engine.load(lambda _stage, _fraction: None)
    for _ in range(2):
        with pytest.raises(ConfigError, match="--max-model-len 32"):
            engine.profile(64, 4)
