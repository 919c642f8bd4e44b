"""The configuration of transformers' class for a GGUF file, from its metadata. Unknown metadata of the model is refused."""

from typing import Any

from worker_svc.model.gguf.header import PLAIN, GgufHeader, TensorType, problem

_IGNORED = frozenset({"vocab_size", "tensor_data_layout", "rope.scaling.finetuned", "rope.scale_linear"})
_READ = frozenset(
    {
        *(
            "context_length",
            "embedding_length",
            "block_count",
            "feed_forward_length",
            "expert_count",
            "expert_used_count",
        ),
        *(
            "attention.head_count",
            "attention.head_count_kv",
            "attention.layer_norm_rms_epsilon",
            "attention.key_length",
        ),
        *(
            "attention.value_length",
            "rope.dimension_count",
            "rope.freq_base",
            "rope.scaling.type",
            "rope.scaling.factor",
        ),
        "rope.scaling.original_context_length",
    }
)
_CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def config_of(header: GgufHeader) -> dict[str, Any]:
    """Content of config.json. Raises ConfigError for metadata that is missing, or that asks for something unknown."""
    given = header.own
    unknown = sorted(given.keys() - _READ - _IGNORED)
    if unknown or given.get("expert_count"):
        what = f"has {header.architecture}.{unknown[0] if unknown else 'expert_count'} in its metadata, which is not known here"
        raise problem("MODEL_UNSUPPORTED", header.path, what)
    try:
        return _config(header, given)
    except KeyError as error:
        raise problem("MODEL_INCOMPLETE", header.path, f"lacks {header.architecture}.{error.args[0]}") from error


def _config(header: GgufHeader, given: dict[str, Any]) -> dict[str, Any]:
    hidden, heads = given["embedding_length"], given["attention.head_count"]
    if isinstance(heads, list) or isinstance(given.get("attention.head_count_kv"), list):
        raise problem("MODEL_UNSUPPORTED", header.path, "has layers with different numbers of heads")
    head_dim = given.get("attention.key_length", hidden // heads)
    widths = {head_dim, given.get("attention.value_length", head_dim), given.get("rope.dimension_count", head_dim)}
    if len(widths) > 1:
        what = f"has heads whose keys, values and rotated elements differ in width ({sorted(widths)})"
        raise problem("MODEL_UNSUPPORTED", header.path, what)
    names = header.tensors.keys()
    return {
        "architectures": [_CLASSES[header.architecture]],
        "model_type": header.architecture,
        "hidden_size": hidden,
        "intermediate_size": given["feed_forward_length"],
        "num_hidden_layers": given["block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": given.get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": given["attention.layer_norm_rms_epsilon"],
        "max_position_embeddings": given["context_length"],
        "vocab_size": int(header.tensors["token_embd.weight"].shape[1]),
        "tie_word_embeddings": "output.weight" not in names,
        "attention_bias": any(name.endswith("attn_q.bias") for name in names),
        "mlp_bias": any(name.endswith("ffn_up.bias") for name in names),
        "rope_parameters": _rope(header, given),
        "bos_token_id": header.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": end_tokens(header),
        "dtype": _dtype(header),
    }


def end_tokens(header: GgufHeader) -> list[int]:
    """Ids that end a sequence: of the text, of a turn, of a message."""
    found = (header.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    return sorted({int(token) for token in found if token is not None})


def _rope(header: GgufHeader, given: dict[str, Any]) -> dict[str, Any]:
    theta = {"rope_theta": given.get("rope.freq_base", 10_000.0)}
    kind = given.get("rope.scaling.type", "none")
    if kind == "none":
        return {"rope_type": "default", **theta}
    if kind == "linear":
        return {"rope_type": "linear", "factor": given["rope.scaling.factor"], **theta}
    if kind == "yarn":
        original = given["rope.scaling.original_context_length"]
        factor = given["rope.scaling.factor"]
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original, **theta}
    raise problem(
        "MODEL_UNSUPPORTED", header.path, f"scales positions by {kind!r}; none, linear and yarn are supported"
    )


def _dtype(header: GgufHeader) -> str:
    """That of unquantized matrices; quantized ones are multiplied with bfloat16."""
    types = {tensor.tensor_type for tensor in header.tensors.values() if len(tensor.shape) > 1}
    if types <= PLAIN and TensorType.BF16 not in types:
        return "float16" if TensorType.F16 in types else "float32"
    return "bfloat16"
