"""What a checkpoint's MTP head adds to a plan: its layer is built on the meta device; headers have names and shapes."""

from math import prod
from pathlib import Path

import torch

from quire_tools.plan.model_sizes import ModelSizes, probed
from worker_svc.model import architecture, attention, checkpoint, latent, stored_weights
from worker_svc.model.cache.layer_cache import pool_layers
from worker_svc.model.drafts.draft_model import head_pools
from worker_svc.model.drafts.mtp_head import described_head

_OF_THE_MODEL = ("model.embed_tokens.", "lm_head.")


def head_bytes(path: Path, sizes: ModelSizes, *, block_size: int, latent_cache: bool) -> tuple[int, int]:
    """Bytes of the head's weights, and of its part of a block. `sizes`: of the model. Raises ConfigError if there is no head."""
    found = checkpoint.open_checkpoint(path)
    entries = stored_weights.entries_of(found.weight_files)
    layout, _, config = described_head(found, entries)
    computed, cached = getattr(torch, sizes.dtype), getattr(torch, sizes.cache_dtype)
    with torch.device("meta"):
        head = checkpoint.model_class(found)._from_config(  # type: ignore[no-untyped-call]
            config, dtype=computed, attn_implementation=attention.register(), experts_implementation="batched_mm"
        )
    head.eval()
    if latent_cache:
        latent.absorb(head)
    num_layers = found.text_config.num_hidden_layers
    parts = [layout.of(part, num_layers) for part in (layout.embed_norm, layout.hidden_norm, layout.projection)]
    weights = [each.nbytes for name, each in head.named_parameters() if not name.startswith(_OF_THE_MODEL)]
    inputs = [prod(entries[name]["shape"]) * computed.itemsize for name in parts if name in entries]
    calls, _ = probed(head, config, sizes.max_model_len)
    shapes = architecture.check_calls(
        head, config, calls, range(1), block_size=block_size, max_model_len=sizes.max_model_len
    )
    shape = pool_layers(shapes, {call.layer: call.window for call in calls}, cached).shape
    pools = head_pools(shape, sizes.hidden_size, computed, cached)
    return sum(weights) + sum(inputs), sum(pool.block_bytes for pool in pools)
