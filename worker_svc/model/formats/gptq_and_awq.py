"""quantization_config of GPTQ and AWQ checkpoints, as GPTQModel, AutoGPTQ, AutoAWQ and transformers write it."""

from collections.abc import Mapping
from typing import Any

from worker_svc.model.formats.fields import Allowed, check_fields, choice, group_size, refused
from worker_svc.model.formats.forms import Layout, MatrixForm, UniformFormat

_GPTQ = "GPTQ weights"
_LAYOUTS = {"gptq": Layout.GPTQ, "gptq_v2": Layout.GPTQ_V2}
_HEAD = "lm_head"
_CALIBRATION = frozenset(
    {
        *("dataset", "tokenizer", "damp_percent", "damp_auto_increment", "true_sequential", "static_groups", "mse"),
        *("act_group_aware", "hyb_act", "batch_size", "pad_token_id", "cache_block_outputs", "model_seqlen"),
        *("block_name_to_quantize", "module_name_preceding_first_block", "modules_in_block_to_quantize", "backend"),
        *("max_input_length", "use_cuda_fp16", "use_exllama", "disable_exllama", "exllama_config", "meta", "quantizer"),
        *("model_name_or_path", "model_file_base_name", "sym", "desc_act", "lm_head"),
    }
)
"""Fields that say how weights were found, or how others multiply with them."""
_GPTQ_FIELDS: Allowed = {
    "quant_method": ("gptq",),
    "method": ("gptq",),
    "bits": (4, 8),
    "group_size": None,
    "checkpoint_format": tuple(_LAYOUTS),
    "format": tuple(_LAYOUTS),
    "pack_dtype": ("int32",),
    "is_marlin_format": (False,),
    "awq_gemm_checkpoint": (False,),
    "dynamic": None,
    "rotation": (),
    "adapter": (),
    **dict.fromkeys(_CALIBRATION),
}


def gptq(given: Mapping[str, Any]) -> UniformFormat:
    """The format. Raises UnsupportedWeights naming the field that is not supported.

    Zero points and the order of depths (`desc_act`) are read from the tensors.
    """
    check_fields(given, _GPTQ_FIELDS, _GPTQ)
    bits = choice(given, "bits", (4, 8), _GPTQ)
    dynamic = given.get("dynamic") or {}
    if not isinstance(dynamic, dict) or any(not str(pattern).startswith("-:") for pattern in dynamic):
        raise refused(_GPTQ, "dynamic", dynamic)
    layout = _LAYOUTS[given.get("checkpoint_format") or given.get("format") or "gptq"]
    form = MatrixForm(layout, bits, (1, group_size(given, "group_size", _GPTQ)), has_zeros=given.get("sym") is False)
    return UniformFormat("gptq", form, () if given.get("lm_head") else (_HEAD,))


# --- AWQ ----------------------------------------------------------------------------------------------------------------

_AWQ = "AWQ weights"
_GEMM = ("gemm", "GEMM")
_OLD = {"w_bit": "bits", "q_group_size": "group_size"}
_AWQ_FIELDS: Allowed = {
    **dict.fromkeys(_CALIBRATION),
    "quant_method": ("awq",),
    "method": ("awq",),
    "bits": (4,),
    "group_size": None,
    "zero_point": (True,),
    "version": _GEMM,
    "format": _GEMM,
    "checkpoint_format": _GEMM,
    "pack_dtype": ("int32",),
    "backend": ("auto", "autoawq"),
    "modules_to_not_convert": None,
    "do_fuse": None,
    "fuse_max_seq_len": None,
    "modules_to_fuse": None,
    "desc_act": (False,),
    "dynamic": (),
    "rotation": (),
    "adapter": (),
}


def awq(given: Mapping[str, Any]) -> UniformFormat:
    """The format. Raises UnsupportedWeights naming the field that is not supported."""
    given = {_OLD.get(field, field): value for field, value in given.items()}
    check_fields(given, _AWQ_FIELDS, _AWQ)
    choice(given, "bits", (4,), _AWQ)
    choice(given, "zero_point", (True,), _AWQ)
    if not any(given.get(field) for field in ("version", "format", "checkpoint_format")):
        raise refused(_AWQ, "version", None, _GEMM[:1])
    form = MatrixForm(Layout.AWQ, 4, (1, group_size(given, "group_size", _AWQ)), has_zeros=True)
    skipped = given.get("modules_to_not_convert") or []
    return UniformFormat("awq", form, (_HEAD, *map(str, skipped)))
