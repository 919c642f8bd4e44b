"""Tiny random checkpoints as folders, for tests: safetensors weights, config, byte-level tokenizer. Nothing is downloaded.

A wide init range (0.3): models with the default one repeat one or two tokens and hardly look at their context, so they would
not notice a wrong cache.
"""

import json
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel

    AutoClass = type[AutoModelForCausalLM] | type[AutoModelForImageTextToText]

FAMILIES = (
    "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "gpt2", "gpt_neox", "opt", "mixtral", "qwen3_moe",
    "phimoe", "gpt_oss", "deepseek_v3", "glm4_moe_lite", "llama4_text", "mistral4", "cohere2",
    "glm4_moe", "gemma4_text", "gemma3n_text", "mimo_v2_flash",
)  # fmt: skip
MIXTURES = (
    "mixtral", "qwen3_moe", "phimoe", "gpt_oss", "deepseek_v3", "glm4_moe_lite", "llama4_text", "mistral4", "glm4_moe",
    "mimo_v2_flash",
)  # fmt: skip
# Not one kind of layers with one cache of keys and values: windows or chunks beside full layers, several shapes, keys and values
# that layers share, sinks, latents.
CACHE_FAMILIES = (
    "gpt_oss", "deepseek_v3", "glm4_moe_lite", "llama4_text", "mistral4", "cohere2", "gemma4_text", "gemma3n_text",
    "mimo_v2_flash",
)  # fmt: skip
DENSE_FAMILIES = tuple(family for family in FAMILIES if family not in MIXTURES)
# For samples: a window in every layer and rotary positions; neither of them, and biases.
SAMPLE_FAMILIES = ("mistral", "gpt2")
# Recurrent states and convolutions beside attention: gated delta nets, Mamba-2 and Mamba, Kimi's delta attention. Their checkpoints
# are made by `tests/worker/families/tiny_checkpoints.py`.
STATE_FAMILIES = (
    "lfm2", "lfm2_moe", "jamba", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "falcon_h1", "nemotron_h", "bamba",
    "granitemoehybrid", "kimi_linear", "olmo_hybrid",
)  # fmt: skip
SAMPLE_STATE_FAMILIES = ("falcon_h1",)
VOCAB_SIZE = 512
EOS_TOKEN_ID = 511
BOS_TOKEN_ID = 510
MAX_POSITIONS = 2048
INIT_RANGE = 0.3
HIDDEN = 64
LAYERS = 2
HEADS = 4
SCALED_FROM = 16
SLIDING_WINDOW = CHUNK = 24  # no multiple of any block size in use: windows and chunks begin within blocks


def gated(model_type: str, **extra: object) -> dict[str, object]:
    return {
        "model_type": model_type,
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 2,
        "max_position_embeddings": MAX_POSITIONS,
        "initializer_range": INIT_RANGE,
        "tie_word_embeddings": False,
        **extra,
    }


def _gemma(model_type: str, **extra: object) -> dict[str, object]:
    """Windowed and full layers in turn, a query scale of its own (not head_dim ** -0.5)."""
    return gated(
        model_type,
        num_hidden_layers=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
        head_dim=16,
        query_pre_attn_scalar=4,
        sliding_window=SLIDING_WINDOW,
        **extra,
    )


def latent(model_type: str, **extra: object) -> dict[str, object]:
    """Keys and values from one latent vector, and experts; keys have 24 elements and values 16."""
    return gated(
        model_type,
        num_key_value_heads=HEADS,
        q_lora_rank=48,
        kv_lora_rank=32,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=HIDDEN,
        **extra,
    )


def experts(model_type: str, **extra: object) -> dict[str, object]:
    return gated(model_type, **{"num_local_experts": 4, "num_experts_per_tok": 2, **extra})


CONFIGS: dict[str, dict[str, object]] = {
    "llama": gated("llama"),
    "mistral": gated("mistral", head_dim=16, sliding_window=SLIDING_WINDOW),
    "qwen2": gated("qwen2"),
    "qwen3": gated("qwen3", head_dim=32),
    "gemma2": _gemma("gemma2", attn_logit_softcapping=4.0, final_logit_softcapping=20.0),
    "gemma3_text": _gemma("gemma3_text"),
    "phi3": gated("phi3"),
    "gpt2": {
        "model_type": "gpt2",
        "n_embd": HIDDEN,
        "n_layer": LAYERS,
        "n_head": HEADS,
        "n_positions": MAX_POSITIONS,
        "initializer_range": INIT_RANGE,
    },
    "gpt_neox": {
        "model_type": "gpt_neox",
        # A quarter, the default, would leave two pairs of so small a head.
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "max_position_embeddings": MAX_POSITIONS,
        "initializer_range": INIT_RANGE,
    },
    "opt": {
        "model_type": "opt",
        "hidden_size": HIDDEN,
        "ffn_dim": 2 * HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "max_position_embeddings": MAX_POSITIONS,
        "word_embed_proj_dim": HIDDEN,
        "init_std": INIT_RANGE,
    },
    "mixtral": experts("mixtral", sliding_window=None),
    "qwen3_moe": experts("qwen3_moe", head_dim=16, moe_intermediate_size=HIDDEN, norm_topk_prob=True),
    # Its window is in its masks alone: attention is not told.
    "phimoe": experts("phimoe", sliding_window=SLIDING_WINDOW),
    # Sinks in every layer, and windows in some.
    "gpt_oss": experts(
        "gpt_oss",
        head_dim=16,
        sliding_window=SLIDING_WINDOW,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "deepseek_v3": latent("deepseek_v3", first_k_dense_replace=1, n_group=2, topk_group=1),
    "glm4_moe_lite": latent("glm4_moe_lite", mlp_layer_types=["dense", "sparse"]),
    # Chunks in some layers; the others have no positions, but queries that grow with them. Experts in every second layer.
    "llama4_text": experts(
        "llama4_text",
        num_hidden_layers=4,
        num_experts_per_tok=1,
        head_dim=16,
        intermediate_size_mlp=2 * HIDDEN,
        interleave_moe_layer_step=2,
        attention_chunk_size=CHUNK,
        no_rope_layer_interval=2,
        attn_temperature_tuning=True,
        floor_scale=8,
        attn_scale=0.5,
    ),
    # Queries grow with their positions, from SCALED_FROM tokens on.
    "mistral4": latent(
        "mistral4",
        first_k_dense_replace=1,
        n_group=2,
        topk_group=1,
        n_shared_experts=1,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": MAX_POSITIONS / SCALED_FROM,
            "original_max_position_embeddings": SCALED_FROM,
            "llama_4_scaling_beta": 0.5,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    ),
    # Windows with positions, full layers without; attention and gated part side by side.
    "cohere2": gated(
        "cohere2", head_dim=16, sliding_window=SLIDING_WINDOW, layer_types=["sliding_attention", "full_attention"]
    ),
    # Heads of full layers are twice as wide; the last layers read the keys and values of earlier ones of their type.
    "gemma4_text": gated(
        "gemma4_text",
        num_hidden_layers=6,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        head_dim=16,
        global_head_dim=32,
        num_kv_shared_layers=2,
        sliding_window=SLIDING_WINDOW,
        hidden_size_per_layer_input=16,
        vocab_size_per_layer_input=VOCAB_SIZE,
    ),
    "gemma3n_text": gated(
        "gemma3n_text",
        num_hidden_layers=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
        intermediate_size=[2 * HIDDEN] * 4,
        activation_sparsity_pattern=[0.95, 0.95, 0.0, 0.0],
        head_dim=16,
        num_kv_shared_layers=2,
        sliding_window=SLIDING_WINDOW,
        hidden_size_per_layer_input=16,
        laurel_rank=8,
        vocab_size_per_layer_input=VOCAB_SIZE,
    ),
    # Windowed layers have twice the kv heads, and sinks; keys are wider than values.
    "mimo_v2_flash": gated(
        "mimo_v2_flash",
        num_hidden_layers=4,
        layer_types=["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
        num_key_value_heads=1,
        head_dim=24,
        v_head_dim=16,
        sliding_window=SLIDING_WINDOW,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=HIDDEN,
    ),
    "glm4_moe": gated(
        "glm4_moe",
        head_dim=16,
        use_qk_norm=True,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_shared_experts=1,
        moe_intermediate_size=HIDDEN,
        first_k_dense_replace=1,
        n_group=2,
        topk_group=1,
    ),
    # Windows of some layers, in its masks alone; an expert that computes all tokens.
    "qwen2_moe": gated(
        "qwen2_moe",
        use_sliding_window=True,
        sliding_window=SLIDING_WINDOW,
        layer_types=["full_attention", "sliding_attention"],
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=HIDDEN,
        shared_expert_intermediate_size=HIDDEN,
    ),
    # Its router asks what its weights are made of.
    "hunyuan_v1_moe": experts("hunyuan_v1_moe", num_experts=4, moe_topk=2, head_dim=16),
}


def config_of(family: str) -> dict[str, object]:
    """`config.json` of a family, without what all share."""
    return dict(CONFIGS[family])


def byte_tokenizer() -> object:
    """A `tokenizers.Tokenizer`: one token per byte (ids 0..255), filler words, `<s>` and `</s>` at the end."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    filler = [f"<unused{i}>" for i in range(BOS_TOKEN_ID - len(alphabet))]
    vocab = {piece: i for i, piece in enumerate([*alphabet, *filler, "<s>", "</s>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def _write_tokenizer(path: Path) -> None:
    byte_tokenizer().save(str(path / "tokenizer.json"))
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}[assistant]"
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "chat_template": template,
        "model_max_length": MAX_POSITIONS,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config))


def auto_class(config: "PreTrainedConfig") -> "AutoClass":
    """transformers' auto class for a configuration: of models that also take images, with all their parts unless saved without."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    saved_by = {*(config.architectures or ())}
    takes_images = type(config) in AutoModelForImageTextToText._model_mapping
    takes_images = takes_images and not saved_by & {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()}
    return AutoModelForImageTextToText if takes_images else AutoModelForCausalLM


def load_reference(path: Path, **options: object) -> "PreTrainedModel":
    """A checkpoint as transformers runs it, in float32 unless `options` say another `dtype`."""
    import torch
    from transformers import AutoConfig

    options = {"dtype": torch.float32, **options}
    return auto_class(AutoConfig.from_pretrained(path)).from_pretrained(path, **options).eval()


def make_checkpoint(family: str, path: Path, seed: int = 0, dtype: str = "float32", **config: object) -> Path:
    """Writes a random checkpoint of `family` (one of FAMILIES) into folder `path`; returns `path`.

    Vocabulary 512 (bytes are ids 0..255), 2,048 positions, end of sequence 511 (unlikely). `config` overrides fields of its
    config.json. Equal arguments give equal weights.
    """
    return make_model(config_of(family) | config, path, seed=seed, dtype=dtype)


def make_model(config: dict[str, object], path: Path, seed: int = 0, dtype: str = "float32") -> Path:
    """As `make_checkpoint`, for any architecture, from the fields of its config.json."""
    path.mkdir(parents=True, exist_ok=True)
    for name, content in _files(json.dumps(config), seed, dtype).items():
        (path / name).write_bytes(content)
    return path


@lru_cache(maxsize=16)
def _files(config: str, seed: int, dtype: str) -> Mapping[str, bytes]:
    """Contents of a checkpoint's files: many tests make the same one, each for itself."""
    with TemporaryDirectory() as folder:
        _write(json.loads(config), Path(folder), seed, dtype)
        return {file.name: file.read_bytes() for file in Path(folder).iterdir()}


def _write(config: dict[str, object], path: Path, seed: int, dtype: str) -> None:
    from transformers import AutoConfig

    shared = {
        "vocab_size": VOCAB_SIZE,
        "bos_token_id": BOS_TOKEN_ID,
        "eos_token_id": EOS_TOKEN_ID,
        "pad_token_id": None,
    }
    merged = shared | config
    save_random(AutoConfig.for_model(merged.pop("model_type"), **merged), path, seed, dtype, vary=_vary_biases)


def save_random(
    config: "PreTrainedConfig",
    path: Path,
    seed: int,
    dtype: str,
    *,
    vary: "Callable[[PreTrainedModel], None]",
    auto: "AutoClass | None" = None,
) -> None:
    """Writes a random checkpoint of a configuration, with the tokenizer. `vary`: changes weights that are constant when created.

    `auto`: None = `auto_class`.
    """
    import torch

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = (auto or auto_class(config)).from_config(config).eval()
        with torch.no_grad():
            vary(model)
    if dtype != "float32":
        model.to(getattr(torch, dtype))
    model.save_pretrained(path, safe_serialization=True)
    _write_tokenizer(path)


def _vary_biases(model: "PreTrainedModel") -> None:
    """They are zero by default, which would hide a lost bias."""
    import torch

    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.1)
