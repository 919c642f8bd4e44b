"""A loaded model as a function of packed rows: tokens of all sequences in one row in, logits of chosen places out.

Owns the transformers model and its connection to the paged cache. Knows neither rows of the batch nor sampling.
"""

from collections.abc import Iterable

import torch
from transformers import PreTrainedModel

from paged_kernels.backend import CacheShape, KernelBackend
from worker_svc import attention
from worker_svc.input_batch import ModelInput
from worker_svc.invariance import RowModules

_PROBE_TOKENS = 4


class PackedModel:
    """Call `probe` once, `bind` for each cache, then `logits` for each step."""

    def __init__(self, model: PreTrainedModel, backend: KernelBackend) -> None:
        self._model, self._backend = model, backend
        self._paged: attention.PagedAttention | None = None
        self.row_modules = RowModules()

    @property
    def weight_bytes(self) -> int:
        """Bytes of parameters and buffers, shared ones once."""
        tensors = {t.data_ptr(): t.nbytes for t in (*self._model.parameters(), *self._model.buffers())}
        return sum(tensors.values())

    def probe(self) -> list[attention.LayerCall]:
        """Runs a few tokens: the attention calls made, and the row-wise modules met, stay in `row_modules`."""
        recorder = attention.ProbeAttention()
        attention.attach(self._model, recorder)
        places = torch.arange(_PROBE_TOKENS)[None]
        with torch.inference_mode(), self.row_modules.collected(self._model):
            self._model(input_ids=places, position_ids=places, use_cache=False)
        return recorder.calls

    def bind(self, shape: CacheShape, pool: torch.Tensor) -> None:
        """From now on keys and values live in `pool`, [num_layers, 2, num_blocks, block_elements]."""
        self._paged = attention.PagedAttention(self._backend, shape, pool)
        attention.attach(self._model, self._paged)

    @torch.inference_mode()
    def logits(self, inputs: Iterable[ModelInput]) -> torch.Tensor:
        """Runs the passes in order; float32 [wanted rows, vocab] of all of them, [0, 0] when there is no pass."""
        assert self._paged is not None, "bind() comes before logits()"
        parts = []
        for step in inputs:
            self._paged.begin(step.attention)
            out = self._model(
                input_ids=step.token_ids, position_ids=step.positions, use_cache=False, logits_to_keep=step.logit_rows
            )
            parts.append(out.logits[0, : step.num_logits])
        return torch.cat(parts).float() if parts else torch.empty(0, 0)
