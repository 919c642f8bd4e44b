"""One step on the real model: block moves, forward passes, sampling, over as many decode steps as the message asks."""

import contextlib
from collections.abc import Iterator

import torch

from protos.worker.v1 import worker_pb2
from svc_common import clock
from worker_svc.cache_engine import CacheEngine
from worker_svc.engine import StepTokens
from worker_svc.input_batch import model_inputs, sampling_rows
from worker_svc.invariance import RowRule
from worker_svc.packed_model import PackedModel
from worker_svc.rows import RowTable, StepBatch
from worker_svc.sampler import NOTHING, Sampled, sample

Timings = worker_pb2.StepTimings


class StepRunner:
    """Joins model, cache and rows; owns none of them. `model` is bound to `cache`."""

    def __init__(self, model: PackedModel, cache: CacheEngine, rows: RowTable, rule: RowRule) -> None:
        self._model, self._cache, self._rows, self._rule = model, cache, rows, rule

    @torch.inference_mode()
    def run(self, outputs: worker_pb2.SchedulerOutputs) -> worker_pb2.WorkerOutputs:
        """See Engine.execute."""
        batch = self._rows.apply(outputs)
        timings, found, num_computed = Timings(), StepTokens(), 0
        logprobs = bool(self._rows.logprobs[batch.sampled_rows].any())
        with self._voided_on_error(batch):
            self._move_blocks(batch, timings)
        for i in range(batch.num_decode_steps):
            batch = self._rows.next_decode(batch) if i else batch
            num_computed += batch.num_tokens
            self._decode(batch, timings, found)
        return found.outputs(num_computed, timings, logprobs=logprobs)

    def _move_blocks(self, batch: StepBatch, timings: Timings) -> None:
        with _lap(timings, "cache_ns"):
            self._cache.move(
                swap_in=batch.swap_in.tolist(), swap_out=batch.swap_out.tolist(), copies=batch.copies.tolist()
            )

    def _decode(self, batch: StepBatch, timings: Timings, found: StepTokens) -> None:
        """Computes one batch and takes its tokens into the rows."""
        with self._voided_on_error(batch):
            drawn = self._compute(batch, timings)
            tokens, finite = drawn.token_ids.to(torch.int32).numpy(), drawn.finite.numpy()
        rows = batch.sampled_rows
        found.add(rows, self._rows.incarnations[rows], tokens, finite, drawn.logprobs.numpy())
        self._rows.commit(batch, tokens, finite)

    def _compute(self, batch: StepBatch, timings: Timings) -> Sampled:
        with _lap(timings, "prepare_ns"):
            inputs = list(model_inputs(self._rows.pack(batch), self._rows.block_tables, self._rule))
        with _lap(timings, "model_ns"):
            logits = self._model.logits(inputs)
        if not batch.samples.any():
            return NOTHING
        with _lap(timings, "sample_ns"):
            return sample(logits, sampling_rows(self._rows, batch))

    @contextlib.contextmanager
    def _voided_on_error(self, batch: StepBatch) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._rows.void(batch)
            raise


@contextlib.contextmanager
def _lap(timings: Timings, name: str) -> Iterator[None]:
    """Adds the time spent inside to a field of `timings`."""
    begin = clock.monotonic_ns()
    yield
    setattr(timings, name, getattr(timings, name) + clock.monotonic_ns() - begin)
