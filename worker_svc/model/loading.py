"""Load a model from settings, the first part of start-up. Composes checks, kernels, weights and bundle."""

import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from paged_kernels.backend import CacheShape, KernelBackend, scale_bytes
from paged_kernels.ranks import RankSums
from paged_kernels.registry import (
    GreedyKernel,
    attention_limits,
    decoder_kernels,
    drawing_kernels,
    greedy_kernel,
    make_attention_backend,
    make_backend,
    workspace_bytes,
)
from protos.common.v1 import common_pb2
from svc_common.errors import ConfigError
from worker_svc import container
from worker_svc.device.devices import HOST, Device
from worker_svc.engine import Progress
from worker_svc.model import architecture, attention, bundle, checkpoint, latent, memory, packed_cache, rotary
from worker_svc.model.attention import LayerCall
from worker_svc.model.cache.cache_engine import CacheEngine
from worker_svc.model.cache.cache_groups import CacheGroups, groups_of, one_group
from worker_svc.model.cache.layer_cache import pool_layers
from worker_svc.model.decoder import text_half
from worker_svc.model.fused.equivalence_check import fuse_tried
from worker_svc.model.fused.fused_decoder import Fusing
from worker_svc.model.row_model import RowModel
from worker_svc.model.sharding.plan import sharded
from worker_svc.model.sharding.refusals import refused
from worker_svc.model.sharding.shards import WHOLE, Shard
from worker_svc.model.stages.division import StagePart, staged
from worker_svc.model.states.layout import StateLayout, default_checkpoint_tokens, layout_of
from worker_svc.model.weight_choices import (
    chosen_rounding,
    late_weights,
    loaded_onto,
    weight_bytes,
    with_stored_numbers,
)
from worker_svc.ranks.member import ALONE, RankPlace, arithmetic_id
from worker_svc.sampling import sampler
from worker_svc.settings import WorkerSettings

log = logging.getLogger(__name__)

_WEIGHTS_FROM, _WEIGHTS_TO = 0.1, 0.9


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to be bound to a cache.

    `bundle`: serialised ModelBundle; `limits` holds its digest. `dtype`: compute type. `cache_dtype`: storage
    type of keys and values. `draws`: token sampling on the device. `greedy`: argmax of logits.
    """

    model: RowModel
    limits: common_pb2.ModelLimits
    bundle: bytes
    shape: CacheShape
    groups: CacheGroups
    dtype: torch.dtype
    cache_dtype: torch.dtype
    device: Device
    kernels: KernelBackend
    draws: sampler.TokenDraws
    greedy: GreedyKernel
    shard: Shard = WHOLE
    num_state_blocks: int = 0

    def new_cache(self, num_gpu_blocks: int, num_cpu_blocks: int = 0) -> CacheEngine:
        """Allocate a zeroed cache of the model's shape."""
        return CacheEngine(
            self.shape,
            num_layers=self.groups.num_layers,
            num_gpu_blocks=num_gpu_blocks,
            num_cpu_blocks=num_cpu_blocks,
            dtype=self.cache_dtype,
            device=self.device,
            blocks=self.kernels.blocks,
        )

    @property
    def num_groups(self) -> int:
        """Number of cache groups."""
        return len(self.groups.windows)

    def state_tables(self, num_rows: int, first: int) -> NDArray[np.int32] | None:
        """Blocks of states that so many rows share, from `first` on: [num_rows, blocks]; None without states."""
        if not self.num_state_blocks:
            return None
        blocks = np.arange(first, first + self.num_state_blocks, dtype=np.int32)
        return np.tile(blocks, (num_rows, 1))

    @property
    def workspace_bytes(self) -> int:
        """Device memory that the kernels hold now."""
        return workspace_bytes(self.kernels)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over the layers of a cache group."""
        return memory.block_bytes(
            dtype_bytes=self.cache_dtype.itemsize,
            scale_bytes=scale_bytes(self.cache_dtype),
            num_layers=self.groups.num_layers,
            block_size=self.shape.block_size,
            num_kv_heads=self.shape.num_kv_heads,
            head_dim=self.shape.head_dim,
        )


def load(
    settings: WorkerSettings, device: Device, backend: str, progress: Progress, ranks: RankPlace = ALONE
) -> LoadedModel:
    """Load the checkpoint, or this rank's part of it. Raises ConfigError saying what is wrong with it and what to do."""
    torch.set_num_threads(settings.num_threads or max(1, container.num_compute_threads() // ranks.num_on_host))
    device.use()
    log.info("--device %s: the model runs on %s with the backend %s", settings.device, device.describe(), backend)
    progress("checkpoint", 0.0)
    found, cls, shard, part = _opened(settings, ranks)
    dtype = checkpoint.choose_dtype(found, settings.dtype)
    max_model_len = checkpoint.choose_max_model_len(found, settings.max_model_len)
    progress("kernels", _WEIGHTS_FROM / 2)
    kernels = _make_kernels(settings, device, backend, lambda line: progress(line, _WEIGHTS_FROM / 2))

    sums = ranks.sums_with(kernels, device.torch_device)
    fast = decoder_kernels(kernels) if settings.fuse else None
    dtype = with_stored_numbers(settings, found, dtype, fast)
    rounded = chosen_rounding(settings, found, dtype, fast)
    late = late_weights(found, cls, device, dtype, fast)
    num_bytes = weight_bytes(found, cls, dtype, late)
    memory.check_weights(num_bytes, device.free_bytes(), str(device.torch_device))
    # One rank might find its part, and another not: ranks must take the same steps.
    cache = None if fast is None or ranks.size > 1 else packed_cache.cache_of(found, settings, dtype, fast, os.environ)

    on_weights = _weights_progress(progress, num_bytes)
    on_weights(0.0)
    where = loaded_onto(device)
    attends = attention.register()
    packs = () if cache is None else cache.find()
    left_out = late or packed_cache.shapes(packs)
    loaded, stored = checkpoint.load_model(found, cls, dtype, attends, on_weights, where, left_out)
    if fast is not None and packs and not packed_cache.restored(loaded, fast, packs):
        packs, (loaded, stored) = (), checkpoint.load_model(found, cls, dtype, attends, on_weights, where)
    progress("checks", _WEIGHTS_TO)
    _adjust(loaded, found, max_model_len, keeps_latents=settings.latent_cache and not late)
    _agree(ranks, found, shard, arithmetic_id() if device is HOST else device.describe().partition(" ")[2])
    model, shard = _joined_model(RowModel(loaded, kernels), found, shard, sums, part)
    calls = architecture.probed(loaded, lambda: model.probe(max_model_len))
    model.check_stage(max_model_len)
    shapes = architecture.check_calls(
        loaded,
        found.text_config,
        calls,
        part.layers,
        block_size=settings.block_size,
        max_model_len=max_model_len,
        state_layers={each.layer for each in model.state_modules},
    )
    architecture.check_hidden(loaded, model.hidden_size)
    cache_dtype = checkpoint.choose_cache_dtype(settings.kv_cache_dtype, dtype)
    shape, groups = _divided_cache(model, settings, calls, shapes, cache_dtype, part, max_model_len)
    _check_attention(settings, kernels, {*shapes.values()}, (dtype, cache_dtype), calls)
    layout = _laid_out(model, shape, groups, cache_dtype)
    if fast is not None:
        fusing = Fusing(
            fast,
            calls,
            groups,
            shape,
            cache_dtype,
            max_model_len,
            rounded or stored,
            bool(late),
            sums,
            model.head_of,
        )
        _fuse(model, fusing, found.text_config.vocab_size, ranks)
        if cache is not None and model.is_fused and not packs:
            cache.save(loaded)
    architecture.check_apart(loaded, lambda: bool(model.state_modules) and model.mixes_tokens(max_model_len))
    limits = _limits(settings, found, max_model_len, dtype, groups, layout)
    limits.sliding_window = _of_all_stages(architecture.sliding_window(calls), ranks)
    made = _bundled(found, limits)
    progress("loaded", 1.0)
    return LoadedModel(
        model=model,
        limits=limits,
        bundle=made,
        shape=shape,
        groups=groups,
        dtype=dtype,
        cache_dtype=cache_dtype,
        device=device,
        kernels=kernels,
        draws=drawing_kernels(backend, device.torch_device) or sampler.TORCH_DRAWS,
        greedy=greedy_kernel(kernels) or sampler.greedy,
        shard=shard,
        num_state_blocks=layout.num_blocks,
    )


def _weights_progress(progress: Progress, num_bytes: int) -> Callable[[float], None]:
    """Reports the share of the weights that is loaded, as size and time left."""
    begun_s = time.monotonic()

    def on_weights(done: float) -> None:
        left_s = f", {(time.monotonic() - begun_s) / done * (1 - done):.0f} s left" if done else ""
        stage = f"weights: {memory.size_text(int(done * num_bytes))} of {memory.size_text(num_bytes)}{left_s}"
        progress(stage, _WEIGHTS_FROM + (_WEIGHTS_TO - _WEIGHTS_FROM) * done)

    return on_weights


def _opened(
    settings: WorkerSettings, ranks: RankPlace
) -> tuple[checkpoint.Checkpoint, type[PreTrainedModel], Shard, StagePart]:
    """The checkpoint and its class as this rank reads them, and the rank's parts of weights and layers."""
    found = checkpoint.open_checkpoint(settings.model)
    cls = checkpoint.model_class(found)
    architecture.check_class(found, cls)
    architecture.check_one_rank(cls, found.text_config, ranks.size)
    found, cls, shard = sharded(found, cls, ranks.tensor_rank, ranks.tensor_size)
    if shard.experts is not None and ranks.num_stages > 1:
        raise refused(
            f"{cls.__name__}: experts are divided over the ranks of one stage; serve it without --pipeline-parallel"
        )
    found, cls, part = staged(found, cls, ranks.stage, ranks.num_stages)
    return found, cls, shard, part


def _divided_cache(
    model: RowModel,
    settings: WorkerSettings,
    calls: Sequence[LayerCall],
    shapes: Mapping[int, CacheShape],
    dtype: torch.dtype,
    part: StagePart,
    max_model_len: int,
) -> tuple[CacheShape, CacheGroups]:
    """The shape of blocks and the cache groups, which the model uses from now on; one group with several stages, which share
    block tables.
    """
    layers = pool_layers(shapes, {call.layer: call.window for call in calls if call.source is None}, dtype)
    if part.count > 1 or not settings.cache_groups:
        groups = one_group(list(layers.windows))
    else:
        groups = groups_of(layers.windows, settings.block_size, max_model_len)
    model.divide_cache(shapes, layers, groups)
    return layers.shape, groups


def _laid_out(model: RowModel, shape: CacheShape, groups: CacheGroups, cache_dtype: torch.dtype) -> StateLayout:
    """The layout of the model's states, which it uses from now on."""
    index_bytes = 2 * shape.block_elements(cache_dtype) * cache_dtype.itemsize
    layout = layout_of([each.states for each in model.state_modules], groups.num_layers, index_bytes)
    model.divide_states(layout)
    if layout.num_blocks:
        kinds = ", ".join(sorted({each.name for each in model.state_modules}))
        log.info("a sequence has states of %s in %d blocks, whatever its length", kinds, layout.num_blocks)
    return layout


def _fuse(model: RowModel, fusing: Fusing, vocab_size: int, ranks: RankPlace) -> None:
    fuse_tried(model, fusing, vocab_size)
    if not ranks.all_have(model.is_fused):  # they divide rows into passes by one rule
        model.unfuse()


def _bundled(found: checkpoint.Checkpoint, limits: common_pb2.ModelLimits) -> bytes:
    """The serialised bundle; `limits` gets its digest."""
    made = bundle.make_bundle(found.path, limits)
    limits.bundle_digest = bundle.digest_of(made)
    return made


def _of_all_stages(window: int, ranks: RankPlace) -> int:
    """The largest sliding window of all stages, 0 if a layer of one attends to the whole sequence."""
    windows = [int(found) for found in ranks.exchange(str(window).encode())]
    return 0 if 0 in windows else max(windows)


def _make_kernels(settings: WorkerSettings, device: Device, backend: str, say: Callable[[str], None]) -> KernelBackend:
    """The device's kernels, with the attention that is asked for."""
    name = settings.attention_backend
    if name == "auto":
        return make_backend(backend, os.environ, say)
    if backend != "cuda" or device is HOST:
        here = f"this worker has the backend {backend} on {device.torch_device}"
        raise _refused_attention(name, f"needs a CUDA device with --backend auto or cuda, and {here}")
    log.info(
        "--attention-backend %s: it has the steps that are not recorded; its first use may compile for minutes", name
    )
    return make_attention_backend(name, os.environ, say)


def _check_attention(
    settings: WorkerSettings,
    kernels: KernelBackend,
    shapes: Iterable[CacheShape],
    dtypes: tuple[torch.dtype, torch.dtype],
    calls: Sequence[LayerCall],
) -> None:
    """Raise ConfigError if the attention that was asked for does not support the model; `dtypes`: of rows and of the cache."""
    taken = attention_limits(kernels)
    for shape in shapes if taken else ():
        if problem := taken.problem(shape, *dtypes, [call.rule for call in calls]):
            raise _refused_attention(settings.attention_backend, problem)


def _refused_attention(name: str, problem: str) -> ConfigError:
    return ConfigError(
        f"--attention-backend {name} {problem}: use --attention-backend auto", reason="ATTENTION_UNSUPPORTED"
    )


def _agree(ranks: RankPlace, found: checkpoint.Checkpoint, shard: Shard, computed_with: str) -> None:
    """Raise ConfigError, with both values, for ranks that would not compute the same."""
    ranks.agree("the checkpoint's digest", found.digest())
    if shard.experts is not None:  # each rank routes tokens itself, and the last bits decide a near tie
        ranks.agree("what routers are computed with", computed_with)


def _adjust(loaded: PreTrainedModel, found: checkpoint.Checkpoint, max_model_len: int, *, keeps_latents: bool) -> None:
    """Make the loaded model what is served."""
    text_half.report(loaded)
    rotary.fix_longrope(loaded, found.text_config, max_model_len)
    if keeps_latents and (count := latent.absorb(loaded)):
        log.info("%d layers keep latents instead of keys and values of each head (--no-latent-cache: off)", count)


def _joined_model(
    model: RowModel, found: checkpoint.Checkpoint, shard: Shard, sums: RankSums | None, part: StagePart
) -> tuple[RowModel, Shard]:
    """The model, with sums, logits and hidden states joined over ranks if there are any, and this rank's parts."""
    if part.count > 1:
        model.divide(part)
    if sums is None:
        return model, shard
    # Quantized numbers of a checkpoint are found by the parameter that has them.
    is_quantized = found.reader is not None and found.reader.is_quantized
    return model, model.reduce(shard, sums, divides_head=not is_quantized)


def _limits(
    settings: WorkerSettings,
    found: checkpoint.Checkpoint,
    max_model_len: int,
    dtype: torch.dtype,
    groups: CacheGroups,
    layout: StateLayout,
) -> common_pb2.ModelLimits:
    num_groups, num_state_blocks = len(groups.windows), layout.num_blocks
    checkpoint_tokens = default_checkpoint_tokens(num_state_blocks, num_groups, settings.block_size)
    return common_pb2.ModelLimits(
        model=settings.name,
        max_model_len=max_model_len,
        vocab_size=found.text_config.vocab_size,
        model_digest=found.digest(),
        block_size=settings.block_size,
        eos_token_ids=bundle.eos_token_ids(found.path, found.text_config),
        dtype=str(dtype).removeprefix("torch."),
        cache_windows=groups.windows if num_groups > 1 or num_state_blocks else (),
        num_state_blocks=num_state_blocks,
        checkpoint_tokens=settings.checkpoint_tokens or checkpoint_tokens if num_state_blocks else 0,
    )
