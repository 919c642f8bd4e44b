"""Programs in the compiled library's form: its structures of cpu/decoder.h, and the conversion of operators to them."""

import ctypes
from collections.abc import Sequence
from functools import singledispatchmethod

from paged_kernels import program
from paged_kernels.program import Operator, PackedForm, PackedWeights, Rows
from paged_kernels.ranks import RankSums, SharedSums
from paged_kernels.weight_packing import STORED, pointer

_ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}
_NORM, _LINEAR, _GATED, _PLACE, _ATTEND, _EMBED, _HEAD, _CHOOSE, _REDUCE, _GATHER = range(10)
_ROUTER, _ROUTE, _GROUP, _EXPERT_GATED, _EXPERT_DOWN, _MIX = range(10, 16)
_SCORINGS = {"softmax": 0, "sigmoid": 1}
_INT, _FLOAT, _I64, _POINTER = ctypes.c_int32, ctypes.c_float, ctypes.c_int64, ctypes.c_void_p


class CpuOperator(ctypes.Structure):
    """QuireOperator of cpu/decoder.h."""

    _fields_ = [
        *((name, _INT) for name in ("kind", "source", "target", "adds", "columns", "depth", "activation", "one_plus")),
        *((name, _INT) for name in ("layer", "window")),
        *((name, _FLOAT) for name in ("eps", "scale", "softcap")),
        ("rotary", _INT),
        *((name, _POINTER) for name in ("weights", "bias", "second", "second_bias")),
        *((name, _INT) for name in ("stored", "group", "offsets", "half", "cache_group", "chunk", "experts", "chosen")),
    ]


class CpuStep(ctypes.Structure):
    """QuireStep of cpu/decoder.h."""

    _fields_ = [
        ("buffers", _POINTER),
        ("widths", _POINTER),
        ("pool", _POINTER),
        ("num_blocks", _I64),
        ("tables", _POINTER),
        ("table_stride", _I64),
        ("sequences", _POINTER),
        ("positions", _POINTER),
        ("slots", _POINTER),
        ("token_ids", _POINTER),
        ("logits", _POINTER),
        ("finite", _POINTER),
        ("tokens", _I64),
        *((name, _INT) for name in ("heads", "kv_heads", "head_dim", "block_size", "threads", "groups")),
    ]


def translated(operators: Sequence[Operator]) -> ctypes.Array[CpuOperator]:
    """The operators in the library's form; their tensors must outlive it. TypeError for one that the library lacks."""
    made = [one for given in operators for one in _parts(given)]
    return (CpuOperator * len(made))(*made)


def _parts(given: Operator) -> Sequence[CpuOperator]:
    """One operator of the library for most, some for those of experts."""
    if isinstance(given, program.Route):
        return _route(given)
    if isinstance(given, program.Experts):
        return _experts(given)
    return (_Translator().operator(given),)


def _route(given: program.Route) -> Sequence[CpuOperator]:
    routing = given.routing
    sizes = {"experts": routing.num_experts, "chosen": routing.top_k}
    if not 0 < routing.top_k <= routing.num_experts == given.router.columns:
        raise ValueError(
            f"{routing.top_k} of {routing.num_experts} experts, and a router of {given.router.columns} columns"
        )
    router = CpuOperator(
        kind=_ROUTER, source=given.source, adds=routing.exact, **_product_fields(given.router), **sizes
    )  # fmt: skip
    route = CpuOperator(
        kind=_ROUTE, activation=_SCORINGS[routing.scoring], one_plus=routing.normalised, layer=routing.groups,
        window=routing.kept_groups, chunk=routing.best_of_group, scale=routing.scale, bias=pointer(routing.bias),
        half=routing.rounds, **sizes,
    )  # fmt: skip
    return router, route, CpuOperator(kind=_GROUP, **sizes)


def _experts(given: program.Experts) -> Sequence[CpuOperator]:
    weights, number = given.weights, given.weights.num_experts
    sizes = {"experts": number, "chosen": given.top_k}
    gated = CpuOperator(
        kind=_EXPERT_GATED, source=given.source, target=Rows.GATED, activation=_ACTIVATIONS[weights.activation],
        **_product_fields(weights.gate_up) | {"columns": weights.inner}, **sizes,
    )  # fmt: skip
    down = CpuOperator(
        kind=_EXPERT_DOWN, source=Rows.GATED, target=Rows.PARTS,
        **_product_fields(weights.down) | {"columns": weights.width}, **sizes,
    )  # fmt: skip
    return gated, down


class _Translator:
    """See `translated`."""

    @singledispatchmethod
    def operator(self, given: object) -> CpuOperator:
        """Raise TypeError for an operator that the library does not have."""
        raise TypeError(f"unknown operator: {given!r}")

    @operator.register
    def _(self, given: program.Norm) -> CpuOperator:
        return CpuOperator(
            kind=_NORM, source=given.source, target=given.target, adds=given.adds, one_plus=given.one_plus, eps=given.eps,
            weights=given.weight.data_ptr(),
        )  # fmt: skip

    @operator.register
    def _(self, given: program.Linear) -> CpuOperator:
        weights = given.weights
        return CpuOperator(
            kind=_LINEAR, source=given.source, target=given.target, adds=given.adds, **_product_fields(weights)
        )  # fmt: skip

    @operator.register
    def _(self, given: program.Gated) -> CpuOperator:
        gate, up = given.gate, given.up
        if gate.form != up.form:
            raise ValueError(f"gate is packed as {gate.form}, up as {up.form}; both must have the same form")
        return CpuOperator(
            kind=_GATED, source=given.source, target=given.target, columns=gate.columns, depth=gate.depth,
            activation=_ACTIVATIONS[given.activation], weights=gate.data.data_ptr(), bias=pointer(gate.bias),
            second=up.data.data_ptr(), second_bias=pointer(up.bias), **form_fields(gate.form),
        )  # fmt: skip

    @operator.register
    def _(self, given: program.RotateAndStore) -> CpuOperator:
        norm = given.norm
        made = CpuOperator(
            kind=_PLACE, source=Rows.HEADS, target=Rows.HEADS, layer=given.layer, cache_group=given.group,
            second=pointer(given.cosines),
            second_bias=pointer(given.sines), rotary=0 if given.cosines is None else given.cosines.shape[1],
        )  # fmt: skip
        if norm is not None:
            made.weights, made.bias = norm.queries.data_ptr(), norm.keys.data_ptr()
            made.eps, made.one_plus = norm.eps, norm.one_plus
        return made

    @operator.register
    def _(self, given: program.Attend) -> CpuOperator:
        rule = given.rule
        return CpuOperator(
            kind=_ATTEND, source=Rows.HEADS, target=Rows.ATTENDED, layer=given.layer, cache_group=given.group,
            window=rule.sliding_window or 0, scale=rule.scale, softcap=rule.softcap or 0.0, weights=pointer(rule.sinks),
            chunk=rule.chunk or 0,
        )  # fmt: skip

    @operator.register
    def _(self, given: program.Embed) -> CpuOperator:
        return CpuOperator(kind=_EMBED, target=Rows.STREAM, scale=given.scale, weights=given.table.data_ptr())

    @operator.register
    def _(self, given: program.Head) -> CpuOperator:
        width = given.width or given.weights.columns
        return CpuOperator(
            kind=_HEAD, source=Rows.STREAM, layer=given.begin, window=width, **_product_fields(given.weights)
        )

    @operator.register
    def _(self, given: program.Gather) -> CpuOperator:
        return CpuOperator(kind=_GATHER, columns=given.columns, weights=_native(given.sums))

    @operator.register
    def _(self, given: program.Choose) -> CpuOperator:
        return CpuOperator(kind=_CHOOSE, columns=given.vocab_size)

    @operator.register
    def _(self, given: program.Mix) -> CpuOperator:
        routing = given.routing
        return CpuOperator(
            kind=_MIX, source=Rows.PARTS, target=given.target, adds=given.adds, half=routing.rounds,
            layer=Rows.SHARED if given.has_shared else -1, group=Rows.SHARED_GATE if given.is_gated else -1,
            experts=routing.num_experts, chosen=routing.top_k,
        )  # fmt: skip

    @operator.register
    def _(self, given: program.Reduce) -> CpuOperator:
        return CpuOperator(
            kind=_REDUCE, source=given.source, target=given.target, adds=given.adds,
            weights=_native(given.sums),
        )  # fmt: skip


def _native(sums: RankSums) -> int:
    if not isinstance(sums, SharedSums):
        raise TypeError(f"programs cannot sum by {type(sums).__name__}")
    return ctypes.addressof(sums.native)


def sums_of(operators: Sequence[Operator]) -> RankSums | None:
    """What the operators sum with; None if they run in one process."""
    return next((op.sums for op in operators if isinstance(op, program.Reduce)), None)


def _product_fields(weights: PackedWeights) -> dict[str, int | None]:
    return {
        "columns": weights.columns,
        "depth": weights.depth,
        "weights": weights.data.data_ptr(),
        "bias": pointer(weights.bias),
        **form_fields(weights.form),
    }


def form_fields(form: PackedForm) -> dict[str, int]:
    """How packed weights are stored, as arguments and fields are named."""
    return {
        "stored": STORED[form.stored],
        "group": form.group,
        "offsets": int(form.has_offsets),
        "half": int(form.half),
    }
