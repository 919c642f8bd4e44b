"""The simulated worker: the engine's protocol with a cost model instead of a model, for load, scale, chaos and what-if.

Its KV cache is real where it matters: each slot holds a hash of the tokens up to it, swaps and copies move those hashes, and tokens
are drawn from the hash read back through the block table. So a scheduler that gives a block away too early, shares the wrong prefix
or swaps to the wrong place is caught here, and recomputing a sequence gives the same tokens. No torch.
"""

import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from protos.common.v1 import common_pb2
from protos.worker.v1 import worker_pb2
from svc_common.errors import FailedPrecondition
from worker_svc import simulated_bundle
from worker_svc.engine import Progress, StepTokens
from worker_svc.rows import Limits, RowTable, StepBatch
from worker_svc.settings import SimulatedWorkerSettings
from worker_svc.simulated_cache import SimulatedCache, mix

U64Array = NDArray[np.uint64]

_BLOCK_BYTES_PER_TOKEN = 8
_LETTERS = np.frombuffer(b"etaoin shrdlu cmfwyp", np.uint8).astype(np.int32)
_ONE = np.uint64(1)


class SimulatedEngine:
    """An `Engine` without a model. Owner of the rows and of the simulated cache; `sleep` takes seconds."""

    def __init__(self, settings: SimulatedWorkerSettings, *, sleep: Callable[[float], None] = time.sleep) -> None:
        self.device = "simulated"
        self.backend = "simulated"
        self._settings = settings
        self._sleep = sleep
        self._bundle, self._limits = simulated_bundle.build(settings)
        self._rows: RowTable | None = None
        self._cache: SimulatedCache | None = None

    def load(self, progress: Progress) -> common_pb2.ModelLimits:
        """Takes `load_s`."""
        stages = 10
        for i in range(stages):
            progress("weights", i / stages)
            self._wait(self._settings.load_s / stages)
        return self._limits

    def bundle(self) -> bytes:
        """A byte-level tokenizer and a chat template: a gateway serves it like any model."""
        return self._bundle

    def profile(self, max_num_batched_tokens: int, max_num_seqs: int) -> worker_pb2.ProfileCacheResponse:
        """The counts of the settings."""
        s = self._settings
        block_bytes = s.block_size * _BLOCK_BYTES_PER_TOKEN
        readable = (
            f"simulated cache: {s.num_gpu_blocks} device blocks and {s.num_cpu_blocks} host blocks of {s.block_size} tokens\n"
            f"largest step: {max_num_batched_tokens} tokens, {max_num_seqs} sequences"
        )
        return worker_pb2.ProfileCacheResponse(
            num_gpu_blocks=s.num_gpu_blocks,
            num_cpu_blocks=s.num_cpu_blocks,
            block_size=s.block_size,
            block_bytes=block_bytes,
            total_bytes=s.num_gpu_blocks * block_bytes,
            utilization=1.0,
            swap_space_bytes=s.num_cpu_blocks * block_bytes,
            readable=readable,
        )

    def allocate(self, num_gpu_blocks: int, num_cpu_blocks: int) -> None:
        """Allocates the hashes."""
        s = self._settings
        self._cache = SimulatedCache(num_gpu_blocks, num_cpu_blocks, s.block_size)
        self._rows = RowTable(Limits(s.vocab_size, s.max_model_len, s.block_size, num_gpu_blocks, num_cpu_blocks))

    def reset(self) -> None:
        """Forgets all rows; cached hashes are void."""
        rows, cache = self._ready()
        rows.reset()
        cache.clear()

    def execute(self, outputs: worker_pb2.SchedulerOutputs) -> worker_pb2.WorkerOutputs:
        """One step: waits as long as the cost model says and draws tokens from the cache's content.

        FailedPrecondition: KV_LOST when a row's blocks do not hold what it computed, BLOCK_WRITTEN_TWICE when different contents go
        to one slot.
        """
        rows, cache = self._ready()
        begin = time.monotonic_ns()
        batch = rows.apply(outputs)
        cache.move(batch.swap_in, batch.swap_out, batch.copies)
        moved = time.monotonic_ns()
        logprobs = bool(rows.logprobs[batch.sampled_rows].any())
        step, num_computed = StepTokens(), 0
        for i in range(batch.num_decode_steps):
            batch = rows.next_decode(batch) if i else batch
            self._run(rows, cache, batch, step)
            num_computed += batch.num_tokens
        end = time.monotonic_ns()
        timings = worker_pb2.StepTimings(cache_ns=moved - begin, model_ns=end - moved)
        return step.outputs(num_computed, timings, logprobs=logprobs)

    def _ready(self) -> tuple[RowTable, SimulatedCache]:
        if self._rows is None or self._cache is None:
            raise FailedPrecondition("the cache is not allocated; call AllocateCache first", reason="WORKER_STATE")
        return self._rows, self._cache

    def _wait(self, seconds: float) -> None:
        if seconds > 0 and self._settings.time_scale > 0:
            self._sleep(seconds * self._settings.time_scale)

    def _run(self, rows: RowTable, cache: SimulatedCache, batch: StepBatch, step: StepTokens) -> None:
        try:
            content = cache.compute(rows, batch, rows.pack(batch))
        except Exception:
            rows.void(batch)
            raise
        self._wait(self._cost_s(batch))
        drawn = self._draw(rows, batch, content)
        sampled = batch.sampled_rows
        logprobs = -((drawn >> np.uint64(40)) % np.uint64(1000)).astype(np.float32) / np.float32(1000)
        tokens = self._tokens(drawn)
        step.add(sampled, rows.incarnations[sampled], tokens, logprobs=np.where(rows.logprobs[sampled], logprobs, 0))
        rows.commit(batch, tokens)

    def _cost_s(self, batch: StepBatch) -> float:
        s = self._settings
        decode = batch.samples & (batch.counts == 1)
        num_decode = int(decode.sum())
        return (
            s.step_base_s
            + s.prefill_token_s * (batch.num_tokens - num_decode)
            + s.decode_row_s * num_decode
            + s.context_token_s * int((batch.starts + batch.counts).sum(dtype=np.int64))
        )

    def _draw(self, rows: RowTable, batch: StepBatch, content: U64Array) -> U64Array:
        """One random word per sampling row: a function of its tokens, and with a temperature also of (seed, sequence index)."""
        sampled = batch.sampled_rows
        key = mix(rows.seeds[sampled] + mix(rows.sequence_indexes[sampled].astype(np.uint64) + _ONE))
        key = np.where(rows.temperatures[sampled] > 0, key, np.uint64(0))
        position = (batch.starts + batch.counts)[batch.samples].astype(np.uint64)
        return mix(content ^ mix(key + position))

    def _tokens(self, drawn: U64Array) -> NDArray[np.int32]:
        letters = _LETTERS[(drawn % np.uint64(len(_LETTERS))).astype(np.int64)]
        if not self._settings.eos_probability:
            return letters
        chance = (drawn >> np.uint64(11)).astype(np.float64) / 2**53
        return np.where(chance < self._settings.eos_probability, simulated_bundle.END_OF_TEXT, letters).astype(np.int32)
