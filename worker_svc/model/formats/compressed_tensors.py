"""quantization_config of compressed-tensors, as llm-compressor writes it: groups of modules with a scheme each."""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from worker_svc.model.formats.fields import Allowed, check_fields, choice, refused
from worker_svc.model.formats.forms import Layout, MatrixForm

_METHOD = "compressed-tensors"
_WHAT = f"weights of {_METHOD}"
_CLASSES = frozenset({"Linear", "LinearBase"})
_PATTERN = "re:"
_MIXED = "mixed-precision"
_LAYOUTS: dict[str, dict[str, tuple[Layout, tuple[int, ...]]]] = {
    "pack-quantized": {"int": (Layout.WORDS, (4, 8))},
    "int-quantized": {"int": (Layout.BYTES, (4, 8))},
    "float-quantized": {"float": (Layout.FP8, (8,))},
    "naive-quantized": {"int": (Layout.BYTES, (4, 8)), "float": (Layout.FP8, (8,))},
    "mxfp4-pack-quantized": {"float": (Layout.MXFP4, (4,))},
    "nvfp4-pack-quantized": {"float": (Layout.NVFP4, (4,))},
    "mxfp8-quantized": {"float": (Layout.FP8, (8,))},
}
"""By format and type of numbers: their layout, and bits that are supported."""
_FP4_GROUPS = {Layout.MXFP4: 32, Layout.NVFP4: 16}
_FIELDS: Allowed = {
    "quant_method": (_METHOD,),
    "config_groups": None,
    "format": (*_LAYOUTS, _MIXED),
    "quantization_status": ("compressed",),
    "kv_cache_scheme": None,
    "global_compression_ratio": None,
    "ignore": None,
    "version": None,
    "sparsity_config": None,
    "transform_config": (),
    "moe_sparsity_config": (),
    "run_compressed": None,
    "dequantize": None,
    "use_optimized_inference": None,
}
_GROUP_FIELDS: Allowed = {
    "targets": None,
    "weights": None,
    "input_activations": None,
    "output_activations": None,
    "format": tuple(_LAYOUTS),
}
_WEIGHT_FIELDS: Allowed = {
    "num_bits": (4, 8),
    "type": ("int", "float"),
    "symmetric": (True, False),
    "strategy": ("tensor", "channel", "group", "tensor_group", "block"),
    "group_size": None,
    "block_structure": None,
    "dynamic": (False,),
    "actorder": ("weight", "static", "group", "dynamic", False),
    "scale_dtype": None,
    "zp_dtype": None,
    "observer": None,
    "observer_kwargs": None,
}


@dataclass(frozen=True, slots=True)
class _Scheme:
    """Form of the modules that `targets` match: names, patterns of names, classes of modules."""

    targets: tuple[str, ...]
    form: MatrixForm


class CompressedTensors:
    """The `WeightFormat` of these configurations."""

    name = _METHOD

    def __init__(self, schemes: tuple[_Scheme, ...], ignored: tuple[str, ...]) -> None:
        self._schemes, self._ignored = schemes, ignored
        self.layouts = tuple(dict.fromkeys(scheme.form.layout for scheme in schemes))

    def form_of(self, module: str) -> MatrixForm | None:
        """See WeightFormat. A name or pattern counts before a class."""
        named = (scheme.form for scheme in self._schemes if _matches(module, scheme.targets))
        of_class = (scheme.form for scheme in self._schemes if _CLASSES.intersection(scheme.targets))
        return next(named, None) or next(of_class, None)

    def skips(self, module: str) -> bool:
        """See WeightFormat."""
        return _matches(module, self._ignored) or self.form_of(module) is None

    def with_tensors(self, names: Collection[str]) -> "CompressedTensors":
        """See WeightFormat."""
        return self


def compressed_tensors(given: Mapping[str, Any]) -> CompressedTensors:
    """The format. Raises UnsupportedWeights naming the field that is not supported.

    Activations and KV cache are not rounded as the configuration asks.
    """
    check_fields(given, _FIELDS, _WHAT)
    sparsity = given.get("sparsity_config") or {}
    if not isinstance(sparsity, dict) or sparsity.get("format", "dense") != "dense":
        raise refused(_WHAT, "sparsity_config", sparsity)
    groups = given.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise refused(_WHAT, "config_groups", groups)
    schemes = (_scheme(f"config_groups.{name}", group, given.get("format")) for name, group in groups.items())
    found = tuple(scheme for scheme in schemes if scheme is not None)
    if not found:
        raise refused(_WHAT, "config_groups", groups)
    return CompressedTensors(found, _names(given.get("ignore") or [], "ignore"))


def _scheme(where: str, group: Any, overall: Any) -> _Scheme | None:
    """None for a group without quantized weights."""
    if not isinstance(group, dict):
        raise refused(_WHAT, where, group)
    what = f"{_WHAT} in {where}"
    check_fields(group, _GROUP_FIELDS, what)
    if group.get("weights") is None:
        return None
    layouts = _LAYOUTS[choice({"format": group.get("format") or overall}, "format", tuple(_LAYOUTS), what)]
    return _Scheme(
        _names(group.get("targets"), f"{where}.targets"), _form(group["weights"], layouts, f"{what}.weights")
    )


def _form(given: Any, layouts: Mapping[str, tuple[Layout, tuple[int, ...]]], what: str) -> MatrixForm:
    check_fields(given, _WEIGHT_FIELDS, what)
    given = {"num_bits": 8, "type": "int"} | given
    layout, widths = layouts[choice(given, "type", tuple(layouts), what)]
    bits = choice(given, "num_bits", widths, what)
    symmetric = choice(
        {"symmetric": True} | given, "symmetric", (True,) if given["type"] == "float" else (True, False), what
    )
    block = _block(given, what)
    if layout in _FP4_GROUPS and block != (1, _FP4_GROUPS[layout]):
        raise refused(what, "group_size", given.get("group_size"), (_FP4_GROUPS[layout],))
    return MatrixForm(layout, bits, block, has_zeros=not symmetric)


def _block(given: Mapping[str, Any], what: str) -> tuple[int, int]:
    """Columns and depths with a scale in common, 0 = all."""
    size, strategy = given.get("group_size"), given.get("strategy")
    if strategy is None:
        strategy = "tensor" if size is None else "channel" if size == -1 else "group"
    if strategy in {"tensor", "channel"}:
        return (0 if strategy == "tensor" else 1), 0
    if strategy != "block":
        if not _is_size(size):
            raise refused(what, "group_size", size)
        return 1, size
    block = given.get("block_structure")
    parts = [int(part) if part.isdigit() else 0 for part in block.split("x")] if isinstance(block, str) else block
    if not isinstance(parts, list) or len(parts) != 2 or not all(_is_size(part) for part in parts):
        raise refused(what, "block_structure", block)
    return parts[0], parts[1]


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _names(given: Any, field: str) -> tuple[str, ...]:
    """Names and patterns. Raises UnsupportedWeights for one that is none."""
    if not isinstance(given, list) or not all(isinstance(name, str) for name in given):
        raise refused(_WHAT, field, given)
    for name in given:
        try:
            re.compile(name.removeprefix(_PATTERN))
        except re.error as error:
            if name.startswith(_PATTERN):
                raise refused(_WHAT, field, name) from error
    return tuple(given)


def _matches(module: str, targets: Iterable[str]) -> bool:
    return any(
        re.match(target.removeprefix(_PATTERN), module) is not None if target.startswith(_PATTERN) else target == module
        for target in targets
    )
