"""Finds the quantized matrices of a checkpoint by the headers of its files, and checks their tensors' types and shapes."""

from collections.abc import Iterator
from math import ceil, prod

from worker_svc.model.formats.forms import Entries, Layout, Matrix, MatrixForm, UnsupportedWeights, WeightFormat

WORD = 32
"""Bits of a word."""
_PLAIN = frozenset({"F64", "F32", "F16", "BF16"})
_SCALES = frozenset({"F32", "F16", "BF16"})
_OF_ACTIVATIONS = ("_scale", "_zero_point", "_global_scale", "_g_idx")
_ACTIVATIONS = tuple(
    f".{what}{suffix}" for what in ("input", "output", "k", "v", "q", "k_proj.output", "v_proj.output")
    for suffix in _OF_ACTIVATIONS
)  # fmt: skip
_PARTS = (
    *("_packed", "_scale", "_scale_inv", "_zero_point", "_shape", "_g_idx", "_global_scale"),
    *(".qweight", ".qzeros", ".scales", ".g_idx"),
)


def matrices_of(given: WeightFormat, entries: Entries) -> dict[str, Matrix]:
    """Quantized matrices by target. Raises UnsupportedWeights for tensors that do not fit quantization_config."""
    given = given.with_tensors(entries)
    found = [matrix for name in entries if (matrix := _matrix(given, name, entries)) is not None]
    if not found:
        raise UnsupportedWeights(
            f"has a quantization_config with quant_method {given.name!r}, and no weight that is stored so"
        )
    used = {name for matrix in found for name in _names(matrix, entries)}
    for name in entries:
        if name not in used and not is_of_activations(name):
            _check_plain(given, name, entries)
    return {matrix.target: matrix for matrix in found}


def plain_names(matrices: dict[str, Matrix], entries: Entries) -> list[str]:
    """Tensors that are no part of a matrix and no factors of activations, which are not rounded."""
    used = {name for matrix in matrices.values() for name in _names(matrix, entries)}
    return [name for name in entries if name not in used and not is_of_activations(name)]


def is_of_activations(name: str) -> bool:
    """True for scales of activations and of a KV cache."""
    return name.endswith(_ACTIVATIONS)


def _names(matrix: Matrix, entries: Entries) -> Iterator[str]:
    layout = matrix.form.layout
    suffixes = {
        layout.numbers,
        layout.scales,
        layout.zeros or layout.scales,
        "_shape",
        "_g_idx",
        "_global_scale",
        "g_idx",
    }
    return (name for suffix in suffixes if (name := matrix.stem + suffix) in entries)


def _check_plain(given: WeightFormat, name: str, entries: Entries) -> None:
    if name.endswith(".weight") and entries[name]["dtype"] not in _PLAIN:
        raise UnsupportedWeights(
            f"stores {name} as {entries[name]['dtype']}, beside weights of quant_method {given.name!r}"
        )
    owner = next((name.removesuffix(part) for part in _PARTS if name.endswith(part)), "")
    if owner and (owner.endswith(".weight") or name.startswith(f"{owner}.")):
        raise UnsupportedWeights(f"has {name}, and no quantized weights for it")


def _matrix(given: WeightFormat, name: str, entries: Entries) -> Matrix | None:
    entry = entries[name]
    stems = {layout: stem for layout in given.layouts if (stem := layout.stem(name, entry["dtype"])) is not None}
    if not stems or name.endswith(("_scale", "_scale_inv")):
        return None
    stem, target = next((stem, layout.target(stem)) for layout, stem in stems.items())
    if target != name and target in entries:
        raise UnsupportedWeights(f"has both {name} and {target}")
    form = given.form_of(target.removesuffix(".weight"))
    if form is None or form.layout not in stems:
        raise UnsupportedWeights(
            f"stores {name} as {entry['dtype']}, and quantization_config does not say how to read it"
        )
    matrix = Matrix(target, stem, form, _shape(name, form, entry["shape"]))
    _check_scales(matrix, entries)
    _check_rest(matrix, entries)
    return matrix


def _shape(name: str, form: MatrixForm, stored: list[int]) -> tuple[int, ...]:
    """Shape of the weights, by that of their numbers."""
    if len(stored) != 2 and not (form.layout.is_float and len(stored) > 2):
        raise UnsupportedWeights(f"has {name} of shape {stored}: quantized weights of two dimensions are supported")
    per_word = WORD // form.bits
    if form.layout is Layout.AWQ:
        return stored[1] * per_word, stored[0]
    if form.layout.in_words:
        return stored[1], stored[0] * per_word
    if form.layout is Layout.WORDS:
        return stored[0], stored[1] * per_word
    return (stored[0], stored[1] * 2) if form.layout in {Layout.MXFP4, Layout.NVFP4} else tuple(stored)


def grid_of(matrix: Matrix) -> tuple[int, int]:
    """Number of blocks along columns and depth."""
    (columns, depth), (rows, group) = matrix.shape[-2:], matrix.form.block
    return ceil(columns / rows) if rows else 1, ceil(depth / group) if group else 1


def _check_scales(matrix: Matrix, entries: Entries) -> None:
    layout, name = matrix.form.layout, matrix.stem + matrix.form.layout.scales
    entry = entries.get(name)
    if entry is None:
        raise UnsupportedWeights(f"has no scales for {matrix.target}: {name} is missing")
    allowed = {
        Layout.MXFP4: {"U8", "F8_E8M0"}, Layout.NVFP4: {"F8_E4M3"}, Layout.FP8: _SCALES | {"U8", "F8_E8M0"},
        Layout.FP8_BLOCKS: _SCALES | {"F8_E8M0"},
    }.get(layout, _SCALES)  # fmt: skip
    if entry["dtype"] not in allowed:
        raise UnsupportedWeights(f"stores {name} as {entry['dtype']}; {', '.join(sorted(allowed))} are supported")
    _check_shape(matrix, name, entries, transposed=layout.in_words)


def _check_shape(matrix: Matrix, name: str, entries: Entries, *, transposed: bool) -> None:
    """One factor for each block; where there is one along the depth, or in all, dimensions of 1 may be left out."""
    shape, grid, lead = list(entries[name]["shape"]), grid_of(matrix), list(matrix.shape[:-2])
    allowed = [[*lead, *(reversed(grid) if transposed else grid)]]
    if grid[1] == 1 and not transposed:
        allowed.append([*lead, grid[0]])
    if not (shape in allowed or (prod(grid) == 1 and prod(shape) == prod(lead))):
        rows, group = (size or "all" for size in matrix.form.block)
        raise UnsupportedWeights(
            f"has {name} of shape {shape} for {matrix.target} of {list(matrix.shape)}: not blocks of {rows} x {group}"
        )


def _check_rest(matrix: Matrix, entries: Entries) -> None:
    """Zero points, order of depths, shape and global scale."""
    layout, (columns, depth) = matrix.form.layout, matrix.shape[-2:]
    zeros = entries.get(matrix.stem + layout.zeros) if layout.zeros else None
    if zeros is None and matrix.form.has_zeros:
        raise UnsupportedWeights(f"has no zero points for {matrix.target}: {matrix.stem}{layout.zeros} is missing")
    if zeros is not None:
        words = ceil(columns * matrix.form.bits / WORD)
        if zeros["dtype"] == "I8" and not layout.in_words:
            _check_shape(matrix, matrix.stem + layout.zeros, entries, transposed=False)
        elif layout is Layout.BYTES:
            raise UnsupportedWeights(f"stores {matrix.stem}{layout.zeros} as {zeros['dtype']}; I8 is supported")
        else:
            groups = grid_of(matrix)[1]
            _expect(matrix, layout.zeros, entries, "I32", [groups, words] if layout.in_words else [words, groups])
    order = "g_idx" if layout.in_words else "_g_idx"
    if matrix.stem + order in entries:
        _expect(matrix, order, entries, "I32", [depth])
    if layout is Layout.WORDS:
        _expect(matrix, "_shape", entries, "I64", [2])
    if layout is Layout.NVFP4:
        _expect(matrix, "_global_scale", entries, "F32", [1])


def _expect(matrix: Matrix, suffix: str, entries: Entries, dtype: str, shape: list[int]) -> None:
    name = matrix.stem + suffix
    entry = entries.get(name)
    if entry is None:
        raise UnsupportedWeights(f"lacks {name}")
    if entry["dtype"] != dtype or list(entry["shape"]) != shape:
        raise UnsupportedWeights(
            f"has {name} as {entry['dtype']} of shape {list(entry['shape'])}: not {dtype} of {shape}"
        )
