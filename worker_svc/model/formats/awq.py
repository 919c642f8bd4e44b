"""quantization_config of AWQ checkpoints, as AutoAWQ, GPTQModel and transformers write it."""

from collections.abc import Mapping
from typing import Any

from worker_svc.model.formats.fields import Allowed, check_fields, choice, group_size, refused
from worker_svc.model.formats.forms import Layout, MatrixForm, UniformFormat
from worker_svc.model.formats.gptq import CALIBRATION

_WHAT = "AWQ weights"
_GEMM = ("gemm", "GEMM")
_OLD = {"w_bit": "bits", "q_group_size": "group_size"}
_FIELDS: Allowed = {
    **dict.fromkeys(CALIBRATION),
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
    check_fields(given, _FIELDS, _WHAT)
    choice(given, "bits", (4,), _WHAT)
    choice(given, "zero_point", (True,), _WHAT)
    if not any(given.get(field) for field in ("version", "format", "checkpoint_format")):
        raise refused(_WHAT, "version", None, _GEMM[:1])
    form = MatrixForm(Layout.AWQ, 4, (1, group_size(given, "group_size", _WHAT)), has_zeros=True)
    skipped = given.get("modules_to_not_convert") or []
    return UniformFormat("awq", form, ("lm_head", *map(str, skipped)))
