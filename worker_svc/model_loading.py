"""From settings to a model that can run: the first part of start-up (R8). Composes checks, kernels, weights and bundle."""

import os
from dataclasses import dataclass

import torch

from paged_kernels.backend import CacheShape
from paged_kernels.registry import make_backend
from protos.common.v1 import common_pb2
from svc_common.errors import ConfigError
from worker_svc import architecture, attention, bundle, checkpoint, container, memory, rotary
from worker_svc.cache_engine import CacheEngine
from worker_svc.engine import Progress
from worker_svc.packed_model import PackedModel
from worker_svc.settings import WorkerSettings

_WEIGHTS_FROM, _WEIGHTS_TO = 0.1, 0.9


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to be bound to a cache. `bundle`: serialised ModelBundle, whose digest `limits` carries.

    `may_be_invariant`: the kernels keep the invariance contract.
    """

    model: PackedModel
    limits: common_pb2.ModelLimits
    bundle: bytes
    shape: CacheShape
    num_layers: int
    dtype: torch.dtype
    device: torch.device
    may_be_invariant: bool

    def new_cache(self, num_gpu_blocks: int, num_cpu_blocks: int = 0) -> CacheEngine:
        """A zeroed cache of the model's shape."""
        return CacheEngine(
            self.shape,
            num_layers=self.num_layers,
            num_gpu_blocks=num_gpu_blocks,
            num_cpu_blocks=num_cpu_blocks,
            dtype=self.dtype,
            device=self.device,
        )

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return memory.block_bytes(
            dtype_bytes=self.dtype.itemsize,
            num_layers=self.num_layers,
            block_size=self.shape.block_size,
            num_kv_heads=self.shape.num_kv_heads,
            head_dim=self.shape.head_dim,
        )


def choose_device(settings: WorkerSettings) -> str:
    """ "cpu"; ConfigError for devices that this release has no kernels for."""
    if settings.device.startswith("cuda") or settings.backend == "cuda":
        raise ConfigError(
            "this release has no CUDA kernels: use --device cpu and --backend cpu", reason="NO_CUDA_KERNELS"
        )
    return "cpu"


def choose_backend(settings: WorkerSettings) -> str:
    """Name of the kernels' backend: what was asked for, on CPU "cpu" unless told otherwise."""
    return "cpu" if settings.backend == "auto" else settings.backend


def load(settings: WorkerSettings, device: str, backend: str, progress: Progress) -> LoadedModel:
    """Loads the checkpoint. ConfigError says what is wrong with it and what to do."""
    torch.set_num_threads(settings.num_threads or container.num_processors())
    progress("checkpoint", 0.0)
    found = checkpoint.open_checkpoint(settings.model)
    cls = checkpoint.model_class(found)
    architecture.check_class(found, cls)
    dtype = checkpoint.choose_dtype(found, settings.dtype)
    max_model_len = checkpoint.choose_max_model_len(found, settings.max_model_len)
    memory.check_weights(found.weight_bytes, container.free_memory_bytes())
    progress("kernels", _WEIGHTS_FROM / 2)
    kernels = make_backend(backend, os.environ, lambda line: progress(line, _WEIGHTS_FROM / 2))

    def on_weights(done: float) -> None:
        progress("weights", _WEIGHTS_FROM + (_WEIGHTS_TO - _WEIGHTS_FROM) * done)

    on_weights(0.0)
    loaded = checkpoint.load_model(found, cls, dtype, attention.register(), on_weights)
    progress("checks", _WEIGHTS_TO)
    rotary.fix_longrope(loaded, found.text_config, max_model_len)
    model = PackedModel(loaded, kernels)
    shape = architecture.check_calls(loaded, found.text_config, model.probe(), settings.block_size)
    limits = _limits(settings, found, max_model_len, dtype)
    made = bundle.make_bundle(found.path, limits)
    limits.bundle_digest = bundle.digest_of(made)
    progress("loaded", 1.0)
    num_layers = found.text_config.num_hidden_layers
    return LoadedModel(model, limits, made, shape, num_layers, dtype, torch.device(device), kernels.invariant)


def _limits(
    settings: WorkerSettings, found: checkpoint.Checkpoint, max_model_len: int, dtype: torch.dtype
) -> common_pb2.ModelLimits:
    return common_pb2.ModelLimits(
        model=settings.name,
        max_model_len=max_model_len,
        vocab_size=found.text_config.vocab_size,
        model_digest=found.digest(),
        block_size=settings.block_size,
        eos_token_ids=bundle.eos_token_ids(found.path, found.text_config),
        dtype=str(dtype).removeprefix("torch."),
    )
