"""Fields of tiny configurations that cannot be made from defaults by rules, by model type.

`given`: fields to create the default configuration with, where it cannot be created without, or would have no layers.
"""

from typing import Any

# Defaults that are None, in which the model cannot be created.
_HEAD_DIM = {"head_dim": 16}
_MLA_WINDOW = {
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_q_lora_rank": 48,
    "swa_kv_lora_rank": 32,
    "swa_head_dim": 24,
    "swa_qk_nope_head_dim": 16,
    "swa_v_head_dim": 16,
}
_SHARED_KV = {"num_kv_shared_layers": 2}
_GEMMA4 = {"num_hidden_layers": 6, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2}
_GEMMA4_TEXT = {**_GEMMA4, "global_head_dim": 32, "num_kv_shared_layers": 2}
_NO_DENSE = {"n_shared_experts": 1, "n_routed_experts": 4, "num_experts_per_tok": 2}
_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
_INDEXER = {"indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 24, "indexer_compress_ratio": 4}

# A head that transforms states makes few different tokens of weights of the usual width.
_WIDE = {"initializer_range": 0.6}

# Norms of the heads of a gated delta net make small differences between chunkings large where states are near zero.
_SMOOTH = {"rms_norm_eps": 0.01}
# transformers bounds the time steps of chunks from below, and those of single tokens not.
_NO_BOUND = {"time_step_min": 1e-9}
_STATES_AND_ATTENTION = {"num_hidden_layers": 4, "layer_types": ["linear_attention"] * 3 + ["full_attention"]}

FIXES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("bert", "camembert", "data2vec-text", "electra", "ernie", "roberta", "roc_bert"), _WIDE),
    "bamba": {"num_hidden_layers": 4, "attn_layer_indices": [2]},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE}},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10_000.0}, "ffn_config": {"moe_top_k": 2}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"given": _NO_DENSE},
    "dots3_note": {
        "text_config": _MLA_WINDOW,
        "vision_config": {"adapter_in_dim": 64, "adapter_out_dim": 64},
        "audio_config": {"adapter_input_size": 64, "adapter_out_dim": 64},
    },
    "dots3_note_text": _MLA_WINDOW,
    "gemma3n_text": _SHARED_KV,
    "gemma4_text": _GEMMA4_TEXT,
    "gemma4_unified_text": _GEMMA4_TEXT,
    "gemma4": {"text_config": _GEMMA4_TEXT},
    "gemma4_unified": {"text_config": _GEMMA4_TEXT},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": _STATES_AND_ATTENTION,
    "hrm_text": {
        "num_hidden_layers": 1,
        "num_layers_per_stack": None,
        "H_cycles": 1,
        "L_cycles": 2,
        "L_bp_cycles": [1],
    },
    "hunyuan_v1_dense": _HEAD_DIM,
    "hunyuan_v1_moe": _HEAD_DIM,
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8},
    "ministral": _HEAD_DIM,
    "nemotron": {"num_key_value_heads": 2},
    "nemotron_h": _NO_BOUND,
    "qwen3_5": {"text_config": _SMOOTH},
    "qwen3_5_moe": {"text_config": _SMOOTH},
    "qwen3_5_moe_text": _SMOOTH,
    "qwen3_5_text": _SMOOTH,
    "qwen3_next": _SMOOTH,
    "qwen4_exp_text": {**_INDEXER, "indexer_n_heads": 2},
    "qwen4_exp": {"text_config": {**_INDEXER, "indexer_n_heads": 2}},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {"axial_pos_shape": [32, 64], "axial_pos_embds_dim": [32, 32]},
    "xmod": {"default_language": "en_XX"},
    "zamba2": {**_NO_BOUND, "attention_hidden_size": 128, "attention_head_dim": 32, "hybrid_layer_ids": [3]},
    "zamba": {
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
    },
}
