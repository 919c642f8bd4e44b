"""The simulated worker: the engine protocol with a cost model instead of a model, for load, scale and chaos tests.

Its KV cache is faithful where it matters: each slot holds a hash of the tokens up to it, swaps and copies
move those hashes, and tokens are drawn from the hash read back through the block table. So a scheduler that
frees a block too early, shares the wrong prefix or swaps to the wrong place is detected, and recomputing a
sequence gives the same tokens. Does not import torch.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from protos.common.v1 import common_pb2
from protos.worker.v1 import worker_pb2
from quire_tools.simulated_worker import bundle as simulated_bundle
from quire_tools.simulated_worker.cache import SimulatedCache, mix
from quire_tools.simulated_worker.draws import SimulatedDraws, logprobs, vector
from quire_tools.simulated_worker.settings import SimulatedWorkerSettings
from quire_tools.simulation.cost_model import StepShape
from svc_common.errors import FailedPrecondition
from worker_svc.adapters.table import AdapterTable
from worker_svc.block_images import BlockImages, check_blocks
from worker_svc.engine import Finished, Progress
from worker_svc.rows.options import NO_PROMPT_LOGPROBS
from worker_svc.rows.table import ChangeLimits, PackedTokens, RowTable, StepBatch
from worker_svc.sampling.draft_verification import Settled, settle
from worker_svc.sampling.draw_plan import DrawPlan, plan_draws
from worker_svc.sampling.step_results import Candidates, StepResults, Yield

U64Array = NDArray[np.uint64]

_BLOCK_BYTES_PER_TOKEN = 8


@dataclass(frozen=True, slots=True)
class _NamedAdapter:
    """An adapter without matrices."""

    digest: str


class SimulatedEngine:
    """An `Engine` without a model. Owns the rows and the simulated cache; `sleep` takes seconds.

    Adapters are names: any path is accepted and no file is read; ids follow the rules of a real worker.
    """

    def __init__(self, settings: SimulatedWorkerSettings, *, sleep: Callable[[float], None] = time.sleep) -> None:
        self.device = "simulated"
        self.backend = "simulated"
        self._settings = settings
        self._sleep = sleep
        self._bundle, self._limits = simulated_bundle.build(settings)
        self._rows: RowTable | None = None
        self._cache: SimulatedCache | None = None
        self._adapters = AdapterTable(lambda path: _NamedAdapter(str(path)), max_adapters=settings.max_adapters)

    def load(self, progress: Progress) -> common_pb2.ModelLimits:
        """Take `load_s` seconds."""
        stages = 10
        for i in range(stages):
            progress("weights", i / stages)
            self._wait(self._settings.load_s / stages)
        return self._limits

    def bundle(self) -> bytes:
        """A byte-level tokenizer and a chat template, which a gateway serves like any model."""
        return self._bundle

    def profile(self, max_num_batched_tokens: int, max_num_seqs: int) -> worker_pb2.ProfileCacheResponse:
        """The block counts of the settings."""
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
        """Allocate the hashes."""
        s = self._settings
        self._cache = SimulatedCache(num_gpu_blocks, num_cpu_blocks, s.block_size)
        self._rows = RowTable(ChangeLimits(s.vocab_size, s.max_model_len, s.block_size, num_gpu_blocks, num_cpu_blocks))
        self._rows.guard(self._adapters.check_rows)

    def load_adapter(self, adapter_id: int, path: str) -> tuple[int, int]:
        """Register a name: 0 bytes, rank 0."""
        self._adapters.load(adapter_id, path)
        return 0, 0

    def unload_adapter(self, adapter_id: int) -> None:
        """See Engine."""
        self._adapters.unload(adapter_id, self._rows)

    @property
    def images(self) -> BlockImages:
        """See Engine."""
        return self._ready()[1].images

    @property
    def block_bytes(self) -> int:
        """See Engine."""
        return self._ready()[1].block_bytes

    @property
    def cache_layout(self) -> str:
        """See Engine."""
        return f"simulated, blocks of {self._settings.block_size}"

    def read_blocks(self, blocks: Sequence[int]) -> memoryview:
        """See Engine."""
        check_blocks(blocks, self._settings.num_gpu_blocks)
        return self._ready()[1].read(blocks)

    def reset(self) -> None:
        """Remove all rows and clear the cache."""
        rows, cache = self._ready()
        rows.reset()
        cache.clear()
        self._adapters.begin_owner()

    def launch(self, outputs: worker_pb2.SchedulerOutputs) -> Finished:
        """Compute the step synchronously."""
        return Finished(self.execute(outputs))

    def execute(self, outputs: worker_pb2.SchedulerOutputs) -> worker_pb2.WorkerOutputs:
        """Run one step: sleep for the modelled time and draw tokens from the cache's contents.

        Raises FailedPrecondition: KV_LOST if a row's blocks do not hold its computed tokens,
        BLOCK_WRITTEN_TWICE if different contents are written to one slot.
        """
        rows, cache = self._ready()
        begin = time.monotonic_ns()
        cache.images.check(outputs.placed)
        batch = rows.apply(outputs)
        cache.place(outputs.placed)
        cache.move(batch.changes.swap_in, batch.changes.swap_out, batch.changes.copies)
        moved = time.monotonic_ns()
        has_logprobs = bool(rows.logprobs[batch.sampled_rows].any())
        results, num_computed = StepResults(), 0
        batch = self._guessed(rows, cache, batch)
        for i in range(batch.num_decode_steps):
            batch = rows.next_decode(batch) if i else batch
            self._run(rows, cache, batch, results)
            num_computed += batch.num_tokens
        end = time.monotonic_ns()
        timings = worker_pb2.StepTimings(cache_ns=moved - begin, model_ns=end - moved)
        return results.outputs(num_computed, timings, logprobs=has_logprobs)

    def _ready(self) -> tuple[RowTable, SimulatedCache]:
        if self._rows is None or self._cache is None:
            raise FailedPrecondition("the cache is not allocated; call AllocateCache first", reason="WORKER_STATE")
        return self._rows, self._cache

    def _guessed(self, rows: RowTable, cache: SimulatedCache, batch: StepBatch) -> StepBatch:
        drafting = batch.num_drafts > 0
        if not drafting.any():
            return batch
        draws = SimulatedDraws(rows, self._settings.eos_probability)
        return rows.drafted(batch, draws.guesses(cache, batch.rows[drafting], batch.num_drafts[drafting]))

    def _wait(self, seconds: float) -> None:
        if seconds > 0 and self._settings.time_scale > 0:
            self._sleep(seconds * self._settings.time_scale)

    def _run(self, rows: RowTable, cache: SimulatedCache, batch: StepBatch, results: StepResults) -> None:
        packed = rows.pack(batch)
        try:
            contents = cache.compute(rows, batch, packed)
        except Exception:
            rows.void(batch)
            raise
        self._wait(self._cost_s(batch))
        draws = SimulatedDraws(rows, self._settings.eos_probability)
        plan = plan_draws(rows, batch)
        places = contents[packed.sampled_at]
        words = draws.words(plan, places)
        tokens = draws.tokens(words, plan.draw_rows, plan.lengths[plan.draw_places])
        fit = np.ones(len(places), np.bool_)
        settled = settle(plan, tokens, fit, fit)
        drawn = _Drawn(plan, settled, words[settled.kept], tokens[settled.kept])
        _report(rows, draws, drawn, places, results)
        _report_prompts(rows, draws, batch.rows, packed, contents, results)
        _report_vectors(rows, batch, contents[packed.row_offsets[1:] - 1], results)
        rows.commit(batch, drawn.tokens, counts=settled.counts)

    def _cost_s(self, batch: StepBatch) -> float:
        num_decode = int((batch.samples & (batch.counts == 1)).sum())
        num_context = int((batch.starts + batch.counts).sum(dtype=np.int64))
        return self._settings.cost_model.step_s(StepShape(batch.num_tokens - num_decode, num_decode, num_context))


@dataclass(frozen=True, slots=True)
class _Drawn:
    """The draws that count, in batch order."""

    plan: DrawPlan
    settled: Settled
    words: U64Array
    tokens: NDArray[np.int32]


def _report(rows: RowTable, draws: SimulatedDraws, drawn: _Drawn, places: U64Array, results: StepResults) -> None:
    """Report tokens and candidates."""
    plan, settled, options = drawn.plan, drawn.settled, rows.options
    owners = plan.draw_rows[settled.kept]
    yields = settled.counts > 0
    found = Yield(
        rows=plan.rows[yields],
        incarnations=rows.incarnations[plan.rows[yields]],
        counts=settled.counts[yields],
        flags=settled.flags[yields],
        token_ids=drawn.tokens,
        logprobs=np.where(rows.logprobs[owners], logprobs(drawn.words), np.float32(0)),
        tops=draws.tops(drawn.words, drawn.tokens, options.num_tops[owners]),
    )
    results.add(found)
    beams = np.flatnonzero(options.num_candidates[plan.rows])
    if len(beams):
        of = plan.rows[beams]
        words = mix(places[plan.first_places[beams]])
        tokens = draws.tokens(words, of, plan.lengths[plan.first_places[beams]])
        results.add_candidates(
            Candidates(of, rows.incarnations[of], draws.tops(words, tokens, options.num_candidates[of]))
        )


def _report_prompts(
    rows: RowTable,
    draws: SimulatedDraws,
    batch_rows: NDArray[np.int32],
    packed: PackedTokens,
    contents: U64Array,
    results: StepResults,
) -> None:
    """Report prompt logprobs of the rows that request them."""
    wanted = rows.options.num_prompt_tops
    for i in np.flatnonzero(wanted[batch_rows] != NO_PROMPT_LOGPROBS).tolist():
        row = int(batch_rows[i])
        at = np.arange(packed.row_offsets[i], packed.row_offsets[i + 1])
        at = at[packed.positions[at] + 1 < rows.num_prompt[row]]
        if len(at):
            words, start = mix(contents[at]), int(packed.positions[at[0]]) + 1
            tokens = rows.token_ids[row, start : start + len(at)]
            tops = draws.tops(words, tokens, np.full(len(at), wanted[row], np.int32))
            results.add_prompt(row, int(rows.incarnations[row]), start, logprobs(words), tops)


def _report_vectors(rows: RowTable, batch: StepBatch, ends: U64Array, results: StepResults) -> None:
    """Report embeddings of pooling rows; `ends`: content of each row's last token."""
    for i in np.flatnonzero(batch.reaches_end & ~batch.samples).tolist():
        row = int(batch.rows[i])
        results.add_embedding(row, int(rows.incarnations[row]), vector(ends[i]))
