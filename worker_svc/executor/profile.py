"""Runs before the worker serves: the largest step, for memory profiling, and the batch invariance check.

Both use dummy tokens in a scratch cache, which is discarded. How many
blocks fit beside that step is counted in `model/memory`.
"""

import json
import logging
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from paged_kernels.decoder import KeptRows
from paged_kernels.registry import attention_limits
from worker_svc.device.devices import HOST
from worker_svc.engine import Progress
from worker_svc.invariance import FREE, RowRule, measure
from worker_svc.model.dummy_batch import Chunk, of_groups, pack
from worker_svc.model.fused.recorded_steps import RecordedSteps, most_rows
from worker_svc.model.input_batch import model_inputs, without_lengths
from worker_svc.model.loading import LoadedModel
from worker_svc.ranks.member import ALONE, RankPlace
from worker_svc.sampling.sampler import SamplingRows, rows_at_once, sample

log = logging.getLogger(__name__)

MOST_HOST_TOKENS, MOST_HOST_SEQUENCES = 256, 32
"""Size of the profile step on the host, where no block count depends on its memory, and its time delays the start."""
_CHECK_TOKENS = 6
_CHECK_FILLER = 21


def run_largest_step(loaded: LoadedModel, rule: RowRule, max_num_batched_tokens: int, max_num_seqs: int) -> None:
    """Run one step of this many tokens over this many sequences, with all sampling options on.

    At most as many rows sample as are drawn for at once: others would be drawn for afterwards and take no
    more memory.
    """
    size = loaded.shape.block_size
    num_seqs = min(max_num_seqs, max_num_batched_tokens)
    counts = np.full(num_seqs, max_num_batched_tokens // num_seqs)
    counts[: max_num_batched_tokens % num_seqs] += 1
    longest = min(int(counts.max()), loaded.limits.max_model_len)
    # All sequences share the same blocks: only sizes matter here.
    tables = of_groups(np.tile(np.arange(-(-longest // size), dtype=np.int32), (num_seqs, 1)), loaded.num_groups)
    chunks = [Chunk(row, 0, [0] * min(int(n), longest), samples=True) for row, n in enumerate(counts)]
    num_blocks = tables.shape[2] * loaded.num_groups
    loaded.model.bind(loaded.new_cache(num_blocks + loaded.num_state_blocks).device_pool)
    packed = pack(chunks, tables, size, loaded.state_tables(num_seqs, num_blocks))
    steps = model_inputs(packed, torch.from_numpy(tables), rule)
    if attention_limits(loaded.kernels) is not None:
        # What a library leaves to the Triton kernels may take more memory.
        loaded.model.logits(map(without_lengths, steps))
    logits = loaded.model.logits(steps)
    ones = torch.ones(num_seqs, dtype=torch.int64, device=logits.device)
    half = torch.full((num_seqs,), 0.5, device=logits.device)
    drawn = torch.arange(num_seqs, device=logits.device) < rows_at_once(logits.shape[1])
    temperatures = torch.where(drawn, half, 0.0)
    sample(logits, SamplingRows(temperatures, ones, half, ones, ones, ones, ones.bool()), loaded.draws)


def run_fixed_step(loaded: LoadedModel, max_num_seqs: int) -> None:
    """Run the largest decode step of those that are recorded, if the model has such: recordings keep its memory."""
    loaded.model.bind(loaded.new_cache(loaded.num_groups).device_pool)
    num_rows = most_rows(max_num_seqs)
    steps = loaded.model.fixed_steps(num_rows, kept_rows(loaded, max_num_seqs))
    if steps is not None:
        with torch.inference_mode():
            steps.run(num_rows)


def kept_rows(loaded: LoadedModel, max_num_seqs: int) -> KeptRows:
    """Memory for what the device keeps of so many rows."""
    width = -(-loaded.limits.max_model_len // loaded.shape.block_size)
    return KeptRows.zeros(max_num_seqs, width, loaded.device.torch_device, loaded.num_groups)


def record_decode_steps(
    loaded: LoadedModel, pool: torch.Tensor, max_num_seqs: int, progress: Progress
) -> RecordedSteps | None:
    """Record decode steps over the bound cache `pool`, which holds nothing before and after; None if the model has none.

    Reports how many are made and the time left, and logs the whole time.
    """
    num_groups = loaded.num_groups
    if not max_num_seqs or pool.shape[2] < num_groups or loaded.device is HOST:
        return None
    begun_s, size, table = time.monotonic(), loaded.shape.block_size, of_groups(np.zeros((1, 1), np.int32), num_groups)
    packed = pack([Chunk(0, size - 1, [1], samples=True)], table, size)
    [step] = model_inputs(packed, torch.from_numpy(table), FREE)

    def on_made(made: int, total: int) -> None:
        left_s = (time.monotonic() - begun_s) / made * (total - made)
        progress(f"decode steps: {made} of {total} recorded, {left_s:.0f} s left", made / total)

    kept = kept_rows(loaded, max_num_seqs)
    steps = loaded.model.record(loaded.device, most_rows(max_num_seqs), kept, step, on_made)
    pool[:, :, :num_groups] = 0  # the blocks of the trial
    if steps is not None:
        log.info("recorded decode steps of %d sizes in %.1f s", steps.count, time.monotonic() - begun_s)
    return steps


def settle_row_rule(loaded: LoadedModel, max_num_batched_tokens: int, ranks: RankPlace = ALONE) -> RowRule | None:
    """The row rule that makes this model batch invariant on this processor; None if there is none.

    The same on all ranks of a group, whatever each has measured: they must pad rows alike. None for a model with states: these
    depend on how a prompt is cut into chunks.
    """
    if not loaded.kernels.invariant or loaded.num_state_blocks:
        return None
    with loaded.model.computed_alone():
        measured = measure(loaded.model.row_modules.probes(), max_num_batched_tokens)
    rule = _agreed(measured, ranks)
    return rule if rule is not None and ranks.all_have(_keeps(loaded, rule)) else None


def _agreed(measured: RowRule | None, ranks: RankPlace) -> RowRule | None:
    """The rule that satisfies what every rank has measured. Widths of element-wise functions are equal on all."""
    own = None if measured is None else (measured.minimum, measured.multiple, measured.maximum)
    rule = measured
    for found in ranks.exchange(json.dumps(own).encode()):
        other = json.loads(found)
        joined = None if rule is None or other is None else rule.joined(RowRule(*other))
        rule = None if rule is None or joined is None else replace(joined, elementwise=rule.elementwise)
    return rule


def _keeps(loaded: LoadedModel, rule: RowRule) -> bool:
    """Check both paths a row may take: in a fused model, rows with adapters go through the original modules."""
    if not _company_is_irrelevant(loaded, rule):
        return False
    with loaded.model.computed_by_modules():
        return not loaded.model.is_fused or _company_is_irrelevant(loaded, rule)


def _company_is_irrelevant(loaded: LoadedModel, rule: RowRule) -> bool:
    """Compare the logits of a few tokens run alone with those run in chunks beside other rows and in other blocks.

    Returns True if they are bit-identical. Catches what no row-wise probe sees, such as experts: their row
    count depends on the batch.
    """
    # Block ids for the check sequence and the filler, in two sets.
    size = loaded.shape.block_size
    width = -(-max(_CHECK_TOKENS, _CHECK_FILLER) // size)
    ids = np.arange(4 * width, dtype=np.int32)
    alone, beside = ids[: 2 * width].reshape(2, width), ids[::-1][: 2 * width].reshape(2, width).copy()
    loaded.model.bind(loaded.new_cache(4 * width * loaded.num_groups).device_pool)
    tokens = _spread(_CHECK_TOKENS, loaded.limits.vocab_size)
    filler = _spread(_CHECK_FILLER, loaded.limits.vocab_size)
    expected = _last_logits(loaded, rule, alone, [[Chunk(0, 0, tokens, samples=True)]])
    chunked = [
        [Chunk(1, 0, filler), Chunk(0, 0, tokens[:3])],
        [Chunk(0, 3, tokens[3:5])],
        [Chunk(1, 0, filler[:5], samples=True), Chunk(0, 5, tokens[5:], samples=True)],
    ]
    return torch.equal(expected, _last_logits(loaded, rule, beside, chunked))


def _spread(count: int, vocab_size: int) -> list[int]:
    return [(17 + 31 * i) % vocab_size for i in range(count)]


def _last_logits(
    loaded: LoadedModel, rule: RowRule, tables: np.ndarray, steps: Sequence[Sequence[Chunk]]
) -> torch.Tensor:
    """Logits of the last token of the last step."""
    logits, tables = torch.empty(0), of_groups(tables, loaded.num_groups)
    for chunks in steps:
        packed = pack(chunks, tables, loaded.shape.block_size)
        logits = loaded.model.logits(model_inputs(packed, torch.from_numpy(tables), rule))
    return logits[-1]
