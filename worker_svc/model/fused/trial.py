"""Whether a fused decoder computes what its modules did: both run the same made-up sequences before anybody is served."""

import logging

import numpy as np
import torch

from worker_svc.invariance import FREE
from worker_svc.model.fused.fused_decoder import Fusing
from worker_svc.model.input_batch import model_inputs
from worker_svc.model.made_up import Chunk, pack
from worker_svc.model.packed_model import PackedModel

log = logging.getLogger(__name__)

_LENGTHS = (37, 5)
# Mean deviation of a hidden state, as a share of its size. Another formula gives about one.
_TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 1e-1}
_MIB = 2**20


def fuse_tried(model: PackedModel, given: Fusing, vocab_size: int) -> None:
    """Fuses `model` if a trial shows that it computes the same; else its modules go on computing, with packed weights.

    With weights of 8 bits the modules of the trial have these too; a line in the log says how far they are from full weights.
    """
    expected = _hidden(model, given, vocab_size)
    model.fuse(given)
    if given.stored != "plain":
        expected = _with_rounded_weights(model, given, vocab_size, expected)
    if not model.is_fused:
        log.info("the decoder is of a build that is not known: its modules compute one by one")
        return
    off = _deviation(_hidden(model, given, vocab_size), expected)
    if not off <= _TOLERANCES[model.dtype]:
        model.unfuse()
        log.warning("the fused decoder is off by %.2g: its modules compute one by one, which is slower", off)


def _with_rounded_weights(model: PackedModel, given: Fusing, vocab_size: int, full: torch.Tensor) -> torch.Tensor:
    with model.computed_by_modules():
        found = _hidden(model, given, vocab_size)
    log.info(
        "%s weights: %.1f of %.1f MiB of weights are stored so; hidden states deviate from those of full weights by %.2g %%",
        given.stored,
        model.int8_bytes / _MIB,
        model.weight_bytes / _MIB,
        100 * _deviation(found, full),
    )
    return found


def _hidden(model: PackedModel, given: Fusing, vocab_size: int) -> torch.Tensor:
    """Last hidden states: two prompts side by side, then one of them goes on."""
    size = given.shape.block_size
    width = -(-sum(_LENGTHS) // size)
    tables = np.arange(2 * width, dtype=np.int32)[::-1].reshape(2, width).copy()
    pool = torch.zeros(len(given.calls), 2, 2 * width, given.shape.block_elements, dtype=given.cache_dtype)
    model.bind(given.shape, pool)
    tokens = [(17 + 31 * i) % vocab_size for i in range(sum(_LENGTHS))]
    first, rest = tokens[: _LENGTHS[0]], tokens[_LENGTHS[0] :]
    steps = [[Chunk(0, 0, first), Chunk(1, 0, rest)], [Chunk(1, len(rest), first[:1]), Chunk(0, len(first), rest)]]
    return torch.cat([model.hidden(model_inputs(pack(step, tables, size), tables, FREE)) for step in steps])


def _deviation(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm(dim=-1).div(expected.norm(dim=-1)).mean())
