"""Loads the model that proposes draft tokens, and counts its memory. Its layers are more layers of the model's blocks."""

import logging
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer

from paged_kernels.backend import CacheShape, scale_bytes
from protos.worker.v1 import worker_pb2
from svc_common.errors import ConfigError
from worker_svc.device.devices import HOST, Device
from worker_svc.engine import Progress
from worker_svc.model import architecture, attention, checkpoint, latent, loading, memory
from worker_svc.model.cache.cache_engine import CacheEngine
from worker_svc.model.cache.cache_groups import FULL, one_group
from worker_svc.model.cache.joint_cache import JointCache, KeptStates, states_shape
from worker_svc.model.cache.layer_cache import pool_layers
from worker_svc.model.drafts.mtp_head import MtpInput, load_head
from worker_svc.model.loading import LoadedModel
from worker_svc.model.row_model import RowModel
from worker_svc.settings import WorkerSettings

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PoolShape:
    """A pool beside the model's own, with the same block ids."""

    shape: CacheShape
    num_layers: int
    dtype: torch.dtype

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return memory.block_bytes(
            dtype_bytes=self.dtype.itemsize,
            scale_bytes=scale_bytes(self.dtype),
            num_layers=self.num_layers,
            block_size=self.shape.block_size,
            num_kv_heads=self.shape.num_kv_heads,
            head_dim=self.shape.head_dim,
        )


@dataclass(frozen=True, slots=True)
class DraftModel:
    """A model that proposes draft tokens. `pools`: of its keys and values, then of the hidden states that it reads, if any.

    `weight_bytes`: of weights that are not the model's own too. `states_input`: None if it reads tokens alone.
    """

    model: RowModel
    pools: tuple[PoolShape, ...]
    weight_bytes: int
    states_input: MtpInput | None = None

    @property
    def block_bytes(self) -> int:
        """Bytes that a block has beside the model's own."""
        return sum(pool.block_bytes for pool in self.pools)

    def bind(self, own: CacheEngine, loaded: LoadedModel, num_cpu_blocks: int) -> "BoundDrafts":
        """Allocate the pools, and use them from now on."""
        beside = [
            CacheEngine(
                pool.shape,
                num_layers=pool.num_layers,
                num_gpu_blocks=own.device_pool.shape[2],
                num_cpu_blocks=num_cpu_blocks,
                dtype=pool.dtype,
                device=loaded.device,
                blocks=loaded.kernels.blocks,
            )
            for pool in self.pools
        ]
        self.model.bind(beside[0].device_pool)
        kept = None
        if self.states_input is not None:
            kept = KeptStates(beside[1].device_pool, own.shape.block_size)
            loaded.model.keep_states(kept)
        return BoundDrafts(self, JointCache([own, *beside]), kept)


@dataclass(frozen=True, slots=True)
class BoundDrafts:
    """A draft model with its pools. `cache`: of these and of the model. `kept`: the model's hidden states, None if not read."""

    made: DraftModel
    cache: JointCache
    kept: KeptStates | None


def load_drafts(
    settings: WorkerSettings, loaded: LoadedModel, device: Device, backend: str, progress: Progress
) -> DraftModel | None:
    """The model that `settings` names for drafts; None for n-grams.

    Raises ConfigError if it does not go with the model: another vocabulary, or blocks that are freed behind a window.
    """
    if settings.proposer == "ngram":
        return None
    made = (
        _head(settings, loaded, device)
        if settings.proposer == "mtp"
        else _model(settings, loaded, device, backend, progress)
    )
    log.info(
        "drafts are proposed by %s: weights of %s, and %s more in each block",
        *(f"--draft-model {settings.draft_model}" if settings.proposer == "model" else "the model's MTP head",),
        *(memory.size_text(made.weight_bytes), memory.size_text(made.block_bytes)),
    )
    return made


def _model(
    settings: WorkerSettings, loaded: LoadedModel, device: Device, backend: str, progress: Progress
) -> DraftModel:
    limits = loaded.limits
    own = settings.model_copy(
        update={"model": settings.draft_model, "max_model_len": limits.max_model_len, "cache_groups": False}
    )
    try:
        draft = loading.load(own, device, backend, progress)
    except ConfigError as error:
        raise ConfigError(
            f"--draft-model: {error.message.replace('--model ', '')}", reason=error.reason, metadata=error.metadata
        ) from error
    _check_states(draft.model, f"--draft-model {settings.draft_model} has")
    _check_vocabulary(settings, draft, loaded)
    _check_window("model", draft.limits.sliding_window, loaded)
    pool = PoolShape(draft.shape, draft.groups.num_layers, draft.cache_dtype)
    return DraftModel(draft.model, (pool,), draft.model.weight_bytes)


def _check_states(model: RowModel, owner: str) -> None:
    """Raise ConfigError for a draft model with states: it takes in its proposals, and would have to give them back."""
    if model.state_modules:
        kinds = ", ".join(sorted({each.name for each in model.state_modules}))
        raise ConfigError(
            f"{owner} layers with states of sequences ({kinds}), from which rejected draft tokens are not taken back: use a draft "
            "model that has attention only, or --drafts ngram",
            reason="DRAFTS_UNSUPPORTED",
        )


def _check_vocabulary(settings: WorkerSettings, draft: LoadedModel, loaded: LoadedModel) -> None:
    sizes = draft.limits.vocab_size, loaded.limits.vocab_size
    if sizes[0] != sizes[1]:
        problem = f"has a vocabulary of {sizes[0]} tokens, and the model one of {sizes[1]}"
    elif _vocabulary(draft.bundle) != _vocabulary(loaded.bundle):
        problem = "has a tokenizer with other tokens than the model's"
    else:
        return
    raise ConfigError(
        f"--draft-model {settings.draft_model} {problem}: use a smaller model of the same family, or --drafts ngram",
        reason="DRAFTS_UNSUPPORTED",
    )


def _vocabulary(bundle: bytes) -> dict[str, int]:
    text = worker_pb2.ModelBundle.FromString(bundle).tokenizer_json
    found: dict[str, int] = Tokenizer.from_str(text.decode()).get_vocab(with_added_tokens=True)
    return found


def _check_window(name: str, window: int, loaded: LoadedModel) -> None:
    """Raise ConfigError if blocks that drafts need are freed. `window`: the largest of the draft layers, 0 = none."""
    first, held = loaded.groups.windows[0], loaded.limits.sliding_window
    if first == FULL and (not held or 0 < window <= held):
        return
    raise ConfigError(
        f"--drafts {name}: the model keeps only blocks of its last {held or first} tokens, and drafts need more; "
        "use --drafts ngram",
        reason="DRAFTS_UNSUPPORTED",
    )


def _head(settings: WorkerSettings, loaded: LoadedModel, device: Device) -> DraftModel:
    found = checkpoint.open_checkpoint(settings.model)
    where = None if device is HOST else device.torch_device
    made, config, states_input = load_head(found, loaded.dtype, attention.register(), loaded.model.ends, where)
    if settings.latent_cache:
        latent.absorb(made)
    model = RowModel(made, loaded.kernels)
    shared = {parameter.data_ptr() for end in loaded.model.ends for parameter in end.parameters()}
    weight_bytes = sum(each.nbytes for each in made.parameters() if each.data_ptr() not in shared)
    calls = model.probe(loaded.limits.max_model_len)
    _check_states(model, "--drafts mtp: the model's MTP head has")
    shapes = architecture.check_calls(
        made, config, calls, range(1), block_size=settings.block_size, max_model_len=loaded.limits.max_model_len
    )
    layers = pool_layers(shapes, {call.layer: call.window for call in calls}, loaded.cache_dtype)
    model.divide_cache(shapes, layers, one_group(list(layers.windows)))
    _check_window("mtp", architecture.sliding_window(calls), loaded)
    pools = head_pools(layers.shape, model.hidden_size, loaded.dtype, loaded.cache_dtype)
    return DraftModel(model, pools, weight_bytes, states_input)


def head_pools(
    shape: CacheShape, hidden_size: int, dtype: torch.dtype, cache_dtype: torch.dtype
) -> tuple[PoolShape, PoolShape]:
    """Of an MTP head with this cache shape in its layer: its keys and values, and the hidden states that it reads."""
    states = states_shape(shape.block_size, hidden_size)
    return PoolShape(shape, 1, cache_dtype), PoolShape(states, 1, dtype)
