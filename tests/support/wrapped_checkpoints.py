"""Tiny random checkpoints of models that also take images: each with a decoder, a head, a tower and a projector."""

import copy
from pathlib import Path
from typing import Any

from tests.support.checkpoints import (
    BOS_TOKEN_ID,
    EOS_TOKEN_ID,
    HIDDEN,
    VOCAB_SIZE,
    config_of,
    experts,
    gated,
    latent,
    make_model,
)

_TOWER = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
_IMAGES = {"image_size": 28, "patch_size": 14}
_QWEN_TOWER = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": HIDDEN,
    "patch_size": 14,
}
_QWEN_TOKENS = {"image_token_id": 505, "video_token_id": 506, "vision_start_token_id": 507, "vision_end_token_id": 508}


def _text(config: dict[str, object]) -> dict[str, object]:
    """`text_config`: all of a decoder's."""
    ids = {"bos_token_id": BOS_TOKEN_ID, "eos_token_id": EOS_TOKEN_ID, "pad_token_id": 0}
    return config | {"vocab_size": VOCAB_SIZE} | ids


def _wrapped(model_type: str, text: dict[str, object], vision: dict[str, object], **extra: object) -> dict[str, object]:
    parts = {"text_config": _text(text), "vision_config": vision}
    return {"model_type": model_type, "tie_word_embeddings": False, **parts, **extra}


def _rotated(*sections: int) -> dict[str, object]:
    """Positions of three kinds, time, height and width, which are equal for text."""
    return {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": list(sections)}


WRAPPED: dict[str, dict[str, Any]] = {
    "qwen3_vl": _wrapped(
        "qwen3_vl",
        gated("qwen3_vl_text", head_dim=32, rope_parameters=_rotated(6, 5, 5)),
        _QWEN_TOWER | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
        **_QWEN_TOKENS,
    ),
    "mistral3": _wrapped(
        "mistral3", gated("mistral", head_dim=16), {"model_type": "pixtral"} | _TOWER | _IMAGES, image_token_index=505
    ),
    "gemma3": _wrapped(
        "gemma3", config_of("gemma3_text"), _TOWER | _IMAGES, mm_tokens_per_image=4, image_token_index=505
    ),
    "llama4": _wrapped(
        "llama4",
        config_of("llama4_text"),
        _TOWER
        | _IMAGES
        | {"vision_output_dim": HIDDEN, "projector_input_dim": HIDDEN, "projector_output_dim": HIDDEN}
        | {"intermediate_size": 128},
    ),
    "qwen3_vl_moe": _wrapped(
        "qwen3_vl_moe",
        experts(
            "qwen3_vl_moe_text",
            head_dim=32,
            num_experts=4,
            moe_intermediate_size=HIDDEN,
            rope_parameters=_rotated(6, 5, 5),
        ),
        _QWEN_TOWER | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
        **_QWEN_TOKENS,
    ),
    "qwen2_5_vl": _wrapped(
        "qwen2_5_vl",
        gated("qwen2_5_vl_text", rope_parameters=_rotated(2, 3, 3)),
        _QWEN_TOWER | {"fullatt_block_indexes": [0]},
        **_QWEN_TOKENS,
    ),
    "kimi_k25": _wrapped(
        "kimi_k25",
        latent("deepseek_v3", first_k_dense_replace=1, n_group=2, topk_group=1),
        _TOWER | {"patch_size": 14},
    ),
    "llava": _wrapped(
        "llava", gated("llama"), {"model_type": "clip_vision_model"} | _TOWER | _IMAGES, image_token_index=505
    ),
    "internvl": _wrapped(
        "internvl",
        gated("qwen2"),
        {"model_type": "internvl_vision"} | _TOWER | {"image_size": [28, 28], "patch_size": [14, 14]},
        image_token_id=505,
    ),
}


def make_wrapped(name: str, path: Path, **text: object) -> Path:
    """Writes a random checkpoint of a model of WRAPPED into folder `path`; returns `path`. `text`: overrides of `text_config`."""
    config = copy.deepcopy(WRAPPED[name])
    config["text_config"] |= text
    if "out_hidden_size" in config["vision_config"]:
        config["vision_config"]["out_hidden_size"] = config["text_config"]["hidden_size"]
    return make_model(config, path)
