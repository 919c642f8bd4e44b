"""The engine that runs a real model: start-up and steps, composed behind `engine.Engine`.

Blocking; called from one thread. Importing this module imports torch and transformers, which takes seconds.
"""

import logging
import math
import os
from collections.abc import Sequence

import torch

import worker_svc.openmp  # noqa: F401  (before anything that imports torch)
from protos.common.v1 import common_pb2
from protos.worker.v1 import worker_pb2
from svc_common.errors import ConfigError, FailedPrecondition, InvalidArgument
from worker_svc.adapters.adapter_loading import AdapterLimits, Adapters
from worker_svc.block_images import BlockImages, check_blocks
from worker_svc.device import malloc_tuning
from worker_svc.device.choice import choose_backend, choose_device
from worker_svc.device.devices import CUDA_DEVICES, HOST, Devices
from worker_svc.device.streams import device_errors
from worker_svc.device.swaps import staging_bytes
from worker_svc.engine import Pending, Progress
from worker_svc.executor import profile
from worker_svc.executor.stage_draws import StageDraws
from worker_svc.executor.step_runner import StepRunner
from worker_svc.invariance import FREE, RowRule
from worker_svc.model import device_memory, memory
from worker_svc.model import loading as model_loading
from worker_svc.model.cache.joint_cache import Cache
from worker_svc.model.drafts.draft_model import DraftModel, load_drafts
from worker_svc.model.loading import LoadedModel
from worker_svc.ranks.member import ALONE, RankPlace, rows_digest
from worker_svc.rows.table import ChangeLimits, RowTable
from worker_svc.sampling.grammar_masks import GrammarMasks
from worker_svc.sampling.row_grammar import MaskBudget
from worker_svc.settings import AUTO, WorkerSettings

log = logging.getLogger(__name__)


class ModelEngine:
    """`engine.Engine` on a transformers checkpoint. Owns the model, the cache and the persistent batch.

    `invariant`: True if results are batch invariant. `row_rule`: row counts the model is run with. Both are
    set by `profile`.
    """

    def __init__(self, settings: WorkerSettings, devices: Devices = CUDA_DEVICES, ranks: RankPlace = ALONE) -> None:
        """Choose device and backend; raises ConfigError if this release does not have them."""
        self._ranks = ranks
        malloc_tuning.keep_freed_memory(os.environ)
        self._device = choose_device(settings, devices)
        self.device, self.backend = str(self._device.torch_device), choose_backend(settings, self._device)
        if ranks.num_stages > 1 and self._device is not HOST:
            raise ConfigError(
                f"--pipeline-parallel {ranks.num_stages} runs on the CPU only, and the device is {self.device}: use --device cpu",
                reason="PIPELINE_PARALLEL",
            )
        if settings.invariant and self.backend != "cpu":
            raise ConfigError(f"the backend {self.backend} is not invariant: use --backend cpu", reason="NOT_INVARIANT")
        self.invariant = False
        self.row_rule: RowRule = FREE
        self._max_num_seqs = 0
        self._settings = settings
        self._loaded: LoadedModel | None = None
        self._drafts: DraftModel | None = None
        self._cache: Cache | None = None
        self._adapters: Adapters | None = None
        self._masks: GrammarMasks | None = None
        self._rows: RowTable | None = None
        self._progress: Progress = lambda stage, fraction: None
        self._runner: StepRunner | None = None

    # --- start-up ----------------------------------------------------------------------------------------------------

    def load(self, progress: Progress) -> common_pb2.ModelLimits:
        """See Engine."""
        self._progress = progress
        self._loaded = model_loading.load(self._settings, self._device, self.backend, progress, self._ranks)
        self._drafts = load_drafts(self._settings, self._loaded, self._device, self.backend, progress)
        limits = AdapterLimits(self._settings.max_adapters, self._settings.max_adapter_rank)
        model, shard = self._loaded.model, self._loaded.shard
        self._adapters = Adapters(model.adapter_layers, limits, self._device.free_bytes, shard)
        # Here rather than with the cache: its thread reads the tokenizer while `profile` runs, so the first
        # request does not wait.
        self._masks = GrammarMasks.of_bundle(self._loaded.bundle, MaskBudget(self._mask_budget_ms))
        return self._loaded.limits

    @property
    def _mask_budget_ms(self) -> float:
        """Without end in a group: measured times differ between ranks, and their rows must be alike."""
        return self._settings.mask_budget_ms if self._ranks.size == 1 else math.inf

    def bundle(self) -> bytes:
        """See Engine."""
        return self._need_loaded().bundle

    def profile(self, max_num_batched_tokens: int, max_num_seqs: int) -> worker_pb2.ProfileCacheResponse:
        """See Engine. Also determines the row rule, which depends on the largest step."""
        loaded = self._need_loaded()
        if self._settings.invariant is not False and self._device is HOST:
            self._settle_row_rule(loaded, max_num_batched_tokens)
            max_rows = max_num_batched_tokens if self.invariant else 0
            self._need_adapters().settle(max_rows, strict=bool(self._settings.invariant))
        tokens, seqs = max_num_batched_tokens, max_num_seqs
        if self._device is HOST:
            tokens, seqs = min(tokens, profile.MOST_HOST_TOKENS), min(seqs, profile.MOST_HOST_SEQUENCES)
        self._max_num_seqs = max_num_seqs
        held_bytes = loaded.workspace_bytes
        activation_bytes = self._device.peak_bytes(
            lambda: profile.run_largest_step(loaded, self.row_rule, tokens, seqs)
        )
        activation_bytes -= loaded.workspace_bytes - held_bytes  # allocated in that step, for good
        if self._device is not HOST:  # where nothing is recorded
            activation_bytes += self._device.peak_bytes(lambda: profile.run_fixed_step(loaded, max_num_seqs))
        budget = self._budget(loaded, activation_bytes, tokens)
        counts = memory.count_blocks(budget)
        if self._settings.max_model_len == AUTO:
            _shorten(loaded.limits, budget, counts)
        memory.check_blocks(counts, budget, loaded.limits.max_model_len)
        return memory.profile_response(budget, counts, loaded.limits.max_model_len)

    def _settle_row_rule(self, loaded: LoadedModel, max_num_batched_tokens: int) -> None:
        rule = profile.settle_row_rule(loaded, max_num_batched_tokens, self._ranks)
        if rule is None and self._settings.invariant:
            raise ConfigError(_why_not_invariant(loaded), reason="NOT_INVARIANT")
        if rule is None:
            log.warning("batch invariance is off: a request's tokens may depend on the other requests of the batch")
        self.invariant, self.row_rule = rule is not None, rule or FREE

    def _budget(self, loaded: LoadedModel, activation_bytes: int, profiled_tokens: int) -> memory.MemoryBudget:
        settings, drafts = self._settings, self._drafts
        parts = [loaded.block_bytes, *(pool.block_bytes for pool in (drafts.pools if drafts else ()))]
        block_bytes, draft_bytes = sum(parts), drafts.weight_bytes if drafts else 0
        swap_bytes = int(settings.swap_space_gib * memory.GIB)
        staged_bytes = 0
        if self._device is not HOST:
            staged_bytes = sum(staging_bytes(part, swap_bytes * part // block_bytes) for part in parts)
        return device_memory.measured(
            self._device,
            memory.MemoryBudget(
                block_size=loaded.shape.block_size,
                block_bytes=block_bytes,
                weight_bytes=loaded.model.weight_bytes + draft_bytes,
                draft_weight_bytes=draft_bytes,
                draft_block_bytes=block_bytes - loaded.block_bytes,
                activation_bytes=activation_bytes,
                workspace_bytes=loaded.workspace_bytes,
                staging_bytes=staged_bytes,
                swap_bytes=swap_bytes,
                utilization=settings.gpu_memory_utilization,
                cache_bytes=settings.kv_cache_memory_bytes,
                num_gpu_blocks_override=settings.num_gpu_blocks_override,
                profiled_tokens=profiled_tokens,
                groups=loaded.groups,
                num_state_blocks=loaded.num_state_blocks,
            ),
        )

    def allocate(self, num_gpu_blocks: int, num_cpu_blocks: int) -> None:
        """See Engine."""
        loaded = self._need_loaded()
        limits = loaded.limits
        own = loaded.new_cache(num_gpu_blocks, num_cpu_blocks)
        loaded.model.bind(own.device_pool)
        drafts = None if self._drafts is None else self._drafts.bind(own, loaded, num_cpu_blocks)
        self._cache = own if drafts is None else drafts.cache
        self._cache.expect(0)
        self._rows = RowTable(
            ChangeLimits(
                limits.vocab_size,
                limits.max_model_len,
                limits.block_size,
                num_gpu_blocks,
                num_cpu_blocks,
                num_groups=loaded.num_groups,
                num_state_blocks=loaded.num_state_blocks,
            )
        )
        self._need_adapters().guard(self._rows)
        recorded = None
        if drafts is None or drafts.kept is None:  # recorded steps keep no hidden states
            recorded = profile.record_decode_steps(loaded, own.device_pool, self._max_num_seqs, self._progress)
        self._runner = StepRunner(
            loaded.model,
            self._cache,
            self._rows,
            self.row_rule,
            masks=self._masks if self._ranks.is_last_stage else None,
            queue=self._device.queue(),
            draws=loaded.draws,
            greedy=loaded.greedy,
            recorded=recorded,
            stages=self._connected_stages(loaded),
            drafts=drafts,
            **self._drafts_that_fit(loaded),
        )

    def _drafts_that_fit(self, loaded: LoadedModel) -> dict[str, int]:
        """Limit of draft tokens in a step of a model with states: half of the memory that is free takes their states."""
        if not loaded.model.draft_bytes:
            return {}
        most = self._device.free_bytes() // (2 * loaded.model.draft_bytes)
        log.info(
            "a step can have up to %d draft tokens, each of which takes %s for states",
            *(most, memory.size_text(loaded.model.draft_bytes)),
        )
        return {"most_drafts": min(most, 2**30)}

    def _connected_stages(self, loaded: LoadedModel) -> StageDraws | None:
        connected = self._ranks.connect_stages()
        if connected is None:
            return None
        links, tokens = connected
        loaded.model.link(links)
        return StageDraws(tokens)

    # --- adapters ----------------------------------------------------------------------------------------------------

    def load_adapter(self, adapter_id: int, path: str) -> tuple[int, int]:
        """See Engine. RefusedStep with several stages."""
        if self._ranks.num_stages > 1:
            raise InvalidArgument(
                f"--pipeline-parallel {self._ranks.num_stages} excludes adapters, and {path} is to be loaded; use "
                "--tensor-parallel for them",
                reason="ADAPTER_UNSUPPORTED",
            )
        adapter = self._need_adapters().load(adapter_id, path)
        return adapter.num_bytes, adapter.rank

    def unload_adapter(self, adapter_id: int) -> None:
        """See Engine."""
        self._need_adapters().unload(adapter_id, self._rows)

    # --- steps -------------------------------------------------------------------------------------------------------

    def launch(self, outputs: worker_pb2.SchedulerOutputs) -> Pending:
        """See Engine."""
        if self._runner is None:
            raise FailedPrecondition("the cache is not allocated; call AllocateCache first", reason="WORKER_STATE")
        with device_errors():
            return self._runner.launch(outputs)

    def state_digest(self, outputs: worker_pb2.SchedulerOutputs) -> int:
        """Checksum of the rows, and after a step that changed some of their block tables, as `launch(outputs)` left them."""
        return 0 if self._rows is None else rows_digest(self._rows, outputs)

    def execute(self, outputs: worker_pb2.SchedulerOutputs) -> worker_pb2.WorkerOutputs:
        """See Engine."""
        return self.launch(outputs).finish()

    @property
    def images(self) -> BlockImages:
        """See Engine."""
        return self.cache.images

    @property
    def block_bytes(self) -> int:
        """See Engine."""
        return self.cache.block_bytes

    @property
    def cache_layout(self) -> str:
        """See Engine."""
        return f"{self.backend} {self.cache.layout}"

    def read_blocks(self, blocks: Sequence[int]) -> memoryview:
        """See Engine."""
        check_blocks(blocks, self.cache.device_pool.shape[2])
        with device_errors(), torch.inference_mode():
            return memoryview(self.cache.read(blocks).numpy().reshape(-1))

    def reset(self) -> None:
        """See Engine."""
        if self._runner is not None:
            self._runner.reset()
        if self._adapters is not None:
            self._adapters.begin_owner()

    # --- read access for tests and tools -----------------------------------------------------------------------------

    @property
    def cache(self) -> Cache:
        """Both block pools; raises FailedPrecondition before `allocate`."""
        if self._cache is None:
            raise FailedPrecondition("the cache is not allocated; call AllocateCache first", reason="WORKER_STATE")
        return self._cache

    def _need_adapters(self) -> Adapters:
        _ = self._need_loaded()
        assert self._adapters is not None
        return self._adapters

    def _need_loaded(self) -> LoadedModel:
        if self._loaded is None:
            raise FailedPrecondition("the model is not loaded; call LoadModel first", reason="WORKER_STATE")
        return self._loaded


def _why_not_invariant(loaded: LoadedModel) -> str:
    if loaded.num_state_blocks:
        return "the model's states depend on how prompts are cut into chunks: start the worker without --invariant"
    return (
        "on this CPU the model's results depend on the batch at any padding: start the worker without --invariant, "
        "or try another --dtype"
    )


def _shorten(limits: common_pb2.ModelLimits, budget: memory.MemoryBudget, counts: memory.BlockCounts) -> None:
    """Shorten `limits` to what the blocks hold, unless they hold all or nothing (vLLM's `_auto_fit_max_model_len`)."""
    longest = budget.longest(counts.num_gpu_blocks, limits.max_model_len)
    if not 0 < longest < limits.max_model_len:
        return
    log.warning(
        "--max-model-len auto: %d tokens, not the model's %d, for which the KV cache would need %s and has %s",
        *(
            longest,
            limits.max_model_len,
            memory.size_text(budget.num_blocks(limits.max_model_len) * budget.block_bytes),
        ),
        memory.size_text(counts.num_gpu_blocks * budget.block_bytes),
    )
    limits.max_model_len = longest
