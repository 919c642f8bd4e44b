"""A tiny configuration of any causal language model of transformers, made from the defaults of its configuration class.

Every field that is a size is recognised by its name and made small; lists with one entry per layer keep a few
layers that cover all kinds. `fixes.py` has what this cannot know.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.support.checkpoints import (
    BOS_TOKEN_ID,
    EOS_TOKEN_ID,
    HEADS,
    HIDDEN,
    INIT_RANGE,
    MAX_POSITIONS,
    SLIDING_WINDOW,
    VOCAB_SIZE,
)
from tests.worker.families.fixes import FIXES

Fields = dict[str, Any]

NUM_LAYERS, MOST_LAYERS = 2, 4
HEAD_DIM, ROTARY_DIM, NUM_EXPERTS, STATE = 16, 8, 4, 16
# Prompts are of ids below 256. Ids of padding and of images are as unlikely as the end of a sequence.
_PAD_TOKEN_ID, _FIRST_SPECIAL_ID = 509, 490

_LAYERS = re.compile(r"^(num_hidden_layers|n_layers?|num_layers|(num_)?(decoder|encoder)_layers|num_blocks|depth)$")
_QUERY_HEADS = re.compile(r"(^|_)(num_attention_heads|attention_heads|n_heads?|num_heads)$")
# The first that matches a field's name says its size; fields that are None, 0 or not above it stay as they are.
_SIZES: tuple[tuple[str, int], ...] = (
    (r"(^|_)vocab_size(_per_layer_input)?$|^encoder_hash_byte_group_vocab$", VOCAB_SIZE),
    (r"max_(source_|target_)?position(_embedding)?s$|^n_positions$|^n_ctx$|^max_seq_len$|_max_length$", MAX_POSITIONS),
    (r"^context_length$", MAX_POSITIONS),
    (r"expert.*(intermediate|ffn_hidden)_size|^moe.*intermediate_size|^shared_intermediate_size$", HIDDEN),
    (r"intermediate|ffn_dim|^(ffn_hidden_size|dff|dim_ff|d_inner|feed_forward_size|n_inner)$", 2 * HIDDEN),
    (r"^hidden_size_per_layer_input$|^laurel_rank$|^router_hidden_size$|^gated_norm_rank$|^d_rel$", STATE),
    (r"^ple_embed_dim$|^hc_lowrank$|^shape_embed_dim$", STATE),
    (r"(^|_)hidden_size$|^(n_embd|d_model|emb_dim|embedding_dim|word_embed_proj_dim|lru_width)$", HIDDEN),
    (r"embedding_size$|^pronunciation_embed_dim$|^mamba_d_ssm$", HIDDEN),
    (r"qk_rope_head_dim|^rotary_dim$", ROTARY_DIM),
    (r"head_?dim$|^d_head$|^dim_head$|^kv_channels$|^mamba_d_head$|_head_size$", HEAD_DIM),
    (r"^q_lora_rank$", 48),
    (r"lora_rank$", 32),
    (r"^(num_experts|.*_?num_experts|num_local_experts|n_routed_experts)$", NUM_EXPERTS),
    (r"num_experts_per_tok(en)?$|^moe_topk$|^moe_k$|top_k_experts|^zero_expert_num$", 2),
    (r"^(n_group|num_expert_group)$", 2),
    (r"^topk_group$", 1),
    (r"window(_size|_len)?$|^local_attention$|^attention_chunk_size$|^index_topk$|^rel_extent$", SLIDING_WINDOW),
    (r"original_max_position_embeddings|floor_scale|log_scaling_n_floor", 2 * HIDDEN),
    (r"(key_value|kv)_heads$|^num_query_groups$|^kv_n_heads$|^linear_num_key_heads$|^index_n_heads$|^o_groups$", 2),
    (r"^mamba_n(um)?_heads$|^mamba_num_heads$", 2 * HIDDEN // HEAD_DIM),
    (_QUERY_HEADS.pattern, HEADS),
    (r"state_size$|d_state$", STATE),
    (r"chunk_size$|^index_block_size$|chunk_length$", STATE),
    (r"^n_groups$", 2),
    (r"time_step_rank|dt_rank", 4),
    (r"^first_k_dense_replace$|^num_dense_layers$", 1),
    (r"_period$|_interval$|^layer_group_size$|every_n_layers$", 2),
    (r"image_size$", 28),
    (r"patch_size$", 14),
    (r"^ngram_vocab_size_base$", VOCAB_SIZE),
)
# Ends of a model that are tied repeat the last token.
_GIVEN = {"is_decoder": True, "tie_word_embeddings": False, "initializer_range": INIT_RANGE, "init_std": INIT_RANGE}
_FACTORS = re.compile(r"_multipliers?$|^logits_scaling$|^logit_scale$|^route_scale$")
_FACTOR, _ATTENTION_FACTOR = 0.75, 0.2
_NOT_FIELDS = {
    "id2label",
    "label2id",
    "transformers_version",
    "dtype",
    "architectures",
    "qk_head_dim",
    "per_layer_config",
}


def model_types() -> list[str]:
    """Model types of all causal language model classes of the installed transformers, in order of their names."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_config(model_type: str) -> Fields:
    """The fields of config.json of a tiny model of this type; equal calls give equal fields."""
    fixes = FIXES.get(model_type, {})
    config = CONFIG_MAPPING[model_type]
    whole = fixes.get("given", {})
    small = shrunk(config(**whole).to_dict()) | whole
    return {"model_type": model_type} | {name: given for name, given in merged(small, fixes).items() if name != "given"}


def merged(fields: Fields, over: Mapping[str, Any]) -> Fields:
    """`fields` with those of `over`, dictionaries within merged as well; `None` removes one."""
    found = dict(fields)
    for name, value in over.items():
        inner = found.get(name)
        found[name] = merged(inner, value) if isinstance(value, Mapping) and isinstance(inner, dict) else value
    return found


def shrunk(fields: Fields) -> Fields:
    """The fields that a small model has otherwise, those of configurations within included."""
    kept = _kept_layers(fields)
    found: Fields = {}
    for name, value in fields.items():
        small = value if name in _NOT_FIELDS else _shrunk(name, value, fields, kept)
        if small != value:
            found[name] = small
    return found | dict(_tokens(fields))


def _shrunk(name: str, value: Any, fields: Fields, kept: list[int]) -> Any:
    if isinstance(value, dict):
        inner = value.get("model_type")
        return {"model_type": inner} | shrunk(value) if inner else value | shrunk(value)
    if isinstance(value, list):
        return _short_list(name, value, fields, kept)
    if name in _GIVEN:
        return _GIVEN[name]
    if isinstance(value, float):
        return _factor(name, value)
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    count = len(kept) if kept and value == _num_layers(fields) else NUM_LAYERS
    return count if _LAYERS.match(name) else _size(name, value, fields)


def _factor(name: str, value: float) -> float:
    """Chances of dropping something are 0, and factors are not 1: left out, such a one would not be noticed."""
    if re.search("dropout|_pdrop|jitter", name):
        return 0.0
    if value != 1.0 or not _FACTORS.search(name):
        return value
    return _ATTENTION_FACTOR if name == "attention_multiplier" else _FACTOR


def _size(name: str, value: int, fields: Fields) -> int:
    """The small value of one size. Key heads that are as many as query heads stay so."""
    found = next((size for pattern, size in _SIZES if re.search(pattern, name)), value)
    if re.search(r"(key_value|kv)_heads$", name) and value in [fields.get(f) for f in fields if _QUERY_HEADS.search(f)]:
        found = HEADS
    if name == "head_dim" and value == fields.get("qk_rope_head_dim"):
        found = ROTARY_DIM
    return min(value, found)


def _num_layers(fields: Fields) -> int:
    return next((fields[name] for name in fields if _LAYERS.match(name)), 0)


def _kept_layers(fields: Fields) -> list[int]:
    """Layers that cover all kinds, by the fields with an entry for each: up to `MOST_LAYERS`, more if there are more kinds."""
    count = _num_layers(fields)
    columns = [value for value in fields.values() if isinstance(value, list) and len(value) == count > 1]
    columns = [column for column in columns if column != list(range(count))]  # ids of layers
    if not columns:
        return []
    kinds = list(zip(*(map(str, column) for column in columns), strict=True))
    first = {kind: kinds.index(kind) for kind in kinds}
    kept = set(first.values())
    again = (layer for layer in range(count) if layer not in kept)
    for layer in again:  # as in the model: a full layer in the middle, not only behind all windows
        if len(kept) >= (MOST_LAYERS if len(first) > 1 else NUM_LAYERS):
            break
        kept.add(layer)
    return sorted(kept)


def _short_list(name: str, value: list[Any], fields: Fields, kept: list[int]) -> list[Any]:
    if len(value) == _num_layers(fields) and kept:
        small = [value[layer] for layer in kept]
        return [_size(name, entry, fields) if type(entry) is int and "layers" not in name else entry for entry in small]
    if name.endswith("token_id"):
        return value
    if all(type(entry) is int for entry in value) and re.search(r"_idxs$|_ids$|_layers$|_indices$", name):
        return [entry for entry in value if entry < max(len(kept), NUM_LAYERS)]
    return value


def _tokens(fields: Fields) -> Iterator[tuple[str, Any]]:
    """Ids of special tokens, within the vocabulary."""
    special = _FIRST_SPECIAL_ID
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if name in fields:
            pad = None if fields.get("pad_token_id") is None else _PAD_TOKEN_ID
            yield name, {"bos_token_id": BOS_TOKEN_ID, "eos_token_id": EOS_TOKEN_ID, "pad_token_id": pad}[name]
    for name, value in fields.items():
        if re.search(r"_token_(id|index)$", name) and name[:3] not in ("bos", "eos", "pad") and type(value) is int:
            yield name, special
            special += 1
