"""Check, before serving, that a fused decoder computes what its modules did: both run the same dummy sequences."""

import logging

import numpy as np
import torch
from numpy.typing import NDArray

from worker_svc.invariance import FREE
from worker_svc.model.dummy_batch import Chunk, of_groups, pack
from worker_svc.model.fused.fused_decoder import Fusing
from worker_svc.model.input_batch import ModelInput, model_inputs
from worker_svc.model.row_model import RowModel

log = logging.getLogger(__name__)

_LENGTHS = (37, 5)
# Mean deviation of a hidden state relative to its norm. A wrong formula gives about one.
_TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 1e-1, torch.float16: 2e-2}
# Products with integers round rows, caches with scales keys and values: a number on the border between two may become
# either.
_TOLERANCE_OF_ROUNDED_ROWS = 3e-2
_MIB = 2**20


def fuse_tried(model: RowModel, given: Fusing, vocab_size: int) -> None:
    """Fuse `model` if a trial shows equal results; otherwise its modules are used, with packed weights.

    With quantized weights, the modules of the trial have these too; a log line reports their deviation from
    the modules before packing, unless weights were packed before or are read late.
    """
    if model.state_modules:  # its structure is not one of those known
        model.fuse(given)
        log.info("the model has states: its modules run one by one")
        return
    is_packed = model.quantized_bytes > 0
    expected = None if given.reads_late else _hidden(model, given, vocab_size)
    model.fuse(given)
    if expected is None or (given.is_quantized and not is_packed):
        expected = _with_quantized_weights(model, given, vocab_size, expected)
    if not model.is_fused:
        log.info("the decoder's structure is not known: its modules run one by one")
        return
    off = _deviation(_hidden(model, given, vocab_size), expected)
    if not off <= max(_TOLERANCES[model.dtype], _TOLERANCE_OF_ROUNDED_ROWS if given.rounds else 0.0):
        model.unfuse()
        log.warning("the fused decoder's results deviate by %.2g: its modules run one by one, which is slower", off)
        return
    model.find_plain_head(_short_step(given))
    model.find_decode_program(_steps(given, vocab_size)[-1])


def _with_quantized_weights(model: RowModel, given: Fusing, vocab_size: int, full: torch.Tensor | None) -> torch.Tensor:
    """`full`: of the modules before packing, None if they had no weights yet."""
    with model.computed_by_modules():
        found = _hidden(model, given, vocab_size)
    log.info("%.1f of %.1f MiB of weights are quantized", model.quantized_bytes / _MIB, model.weight_bytes / _MIB)
    if full is not None:
        log.info("hidden states deviate by %.2g %% from those before packing", 100 * _deviation(found, full))
    return found


def _hidden(model: RowModel, given: Fusing, vocab_size: int) -> torch.Tensor:
    """Last hidden states of all steps, starting with an empty cache."""
    num_blocks = 2 * _width(given) * len(given.groups.windows)
    sizes = (given.groups.num_layers, 2, num_blocks, given.shape.block_elements(given.cache_dtype))
    pool = torch.zeros(sizes, dtype=given.cache_dtype, device=model.device)
    model.bind(pool)
    return torch.cat([model.hidden([step]) for step in _steps(given, vocab_size)])


def _steps(given: Fusing, vocab_size: int) -> list[ModelInput]:
    """Two prompts side by side, with logits; then a second chunk of each; then a token of each, with logits."""
    tables = np.arange(2 * _width(given), dtype=np.int32)[::-1].reshape(2, -1).copy()
    tokens = [(17 + 31 * i) % vocab_size for i in range(sum(_LENGTHS))]
    first, rest = tokens[: _LENGTHS[0]], tokens[_LENGTHS[0] :]
    both = [Chunk(0, 0, first, samples=True), Chunk(1, 0, rest, samples=True)]
    more = [Chunk(1, len(rest), first[:1]), Chunk(0, len(first), rest)]
    last = [Chunk(1, len(rest) + 1, first[1:2], samples=True), Chunk(0, len(tokens), first[:1], samples=True)]
    return [step for chunks in (both, more, last) for step in _inputs(chunks, tables, given)]


def _short_step(given: Fusing) -> ModelInput:
    """Two sequences of one token each, with logits: the head's rows, at little cost for the decoder."""
    tables = np.arange(2, dtype=np.int32).reshape(2, 1)
    chunks = [Chunk(row, 0, [row], samples=True) for row in range(2)]
    return _inputs(chunks, tables, given)[0]


def _inputs(chunks: list[Chunk], tables: NDArray[np.int32], given: Fusing) -> list[ModelInput]:
    tables = of_groups(tables, len(given.groups.windows))
    return model_inputs(pack(chunks, tables, given.shape.block_size), torch.from_numpy(tables), FREE)


def _width(given: Fusing) -> int:
    """Blocks of each sequence."""
    return -(-(sum(_LENGTHS) + 1) // given.shape.block_size)


def _deviation(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm(dim=-1).div(expected.norm(dim=-1)).mean())
