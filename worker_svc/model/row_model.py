"""A loaded model as a function of packed rows: tokens of all sequences in, logits and hidden states out.

Owns the transformers model and its connection to the paged cache. Independent of the batch's rows and of
sampling.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import PreTrainedModel

from paged_kernels.backend import CacheShape, KernelBackend
from paged_kernels.decoder import DecodeProgram, DecodeRows, DecodeRun, FixedSteps, KeptRows
from paged_kernels.program import Head
from paged_kernels.ranks import RankSums
from worker_svc.adapters.layers import AdapterLayers
from worker_svc.device.devices import Device
from worker_svc.invariance import RowModules
from worker_svc.model import attention
from worker_svc.model.cache.cache_groups import CacheGroups
from worker_svc.model.cache.joint_cache import KeptStates
from worker_svc.model.cache.layer_cache import LayerCache, PoolLayers
from worker_svc.model.decoder.module_states import ModuleStates
from worker_svc.model.decoder.part import PackedPast, decoder_of
from worker_svc.model.fused.fused_decoder import FusedDecoder, Fusing, HeadOf, fuse, whole_head
from worker_svc.model.fused.operators import packed_tensors, quantized_bytes
from worker_svc.model.fused.packed_linear import PackedLinear
from worker_svc.model.fused.recorded_steps import RecordedSteps
from worker_svc.model.input_batch import ModelInput
from worker_svc.model.sharding.reductions import Reductions
from worker_svc.model.sharding.shards import Shard
from worker_svc.model.stages.division import StagePart
from worker_svc.model.stages.ends import StageEnds, StateLinks
from worker_svc.model.states.layout import StateLayout
from worker_svc.model.states.probe import StateModule, StateProbe, mixes_tokens
from worker_svc.model.states.sequences import SequenceStates

_PROBE_TOKENS = 4


class RowModel:
    """Call `probe` once, optionally `fuse`, `bind` for each cache, then `logits`, `hidden` or both for each step."""

    def __init__(self, model: PreTrainedModel, backend: KernelBackend) -> None:
        self._model, self._backend, self._device = model, backend, model.device
        self._paged: attention.PagedAttention | None = None
        self._calls: Sequence[attention.LayerCall] = ()
        self._caches: Mapping[int, Sequence[LayerCache]] = {}
        self._past: PackedPast | None = None
        self.state_modules: Sequence[StateModule] = ()
        """Modules with a state per sequence, as `probe` found them."""
        self._states: SequenceStates | None = None
        self._kept_linears: frozenset[nn.Module] = frozenset()
        self._fused: FusedDecoder | None = None
        self._uses_modules = False
        self._plain_head: nn.Module | None = None
        self._decode_program: DecodeProgram | None = None
        self._logit_cap: float | None = None
        self._hidden = _LastHidden(model)
        self._reductions: Reductions | None = None
        self._ends: StageEnds | None = None
        self._kept: KeptStates | None = None
        self._step: ModelInput | None = None
        self.row_modules = RowModules()
        self.adapter_layers = AdapterLayers(model)

    def reduce(self, shard: Shard, sums: RankSums, *, divides_head: bool) -> Shard:
        """Join over ranks what this rank's modules compute a part of. Call it before `probe`.

        `divides_head`: of the logits too, if the head divides. Returns the shard with its part.
        """
        self._reductions = Reductions(self._model, shard, sums)
        if divides_head:
            self._reductions.divide_head(self._model)
        return self._reductions.shard

    def divide(self, part: StagePart) -> None:
        """Take hidden states from, and give them to, other stages: see StageEnds. Call it before `probe`."""
        self._ends = StageEnds(self._model, part)

    def link(self, links: StateLinks) -> None:
        """Pass hidden states between stages from now on."""
        assert self._ends is not None
        self._ends.link(links)

    @property
    def head_of(self) -> HeadOf:
        """For `Fusing`."""
        return whole_head if self._reductions is None else self._reductions.head_of

    def computed_alone(self) -> AbstractContextManager[None]:
        """Inside the block, modules return this rank's part of a sum, and no other rank need call them."""
        return nullcontext() if self._reductions is None else self._reductions.paused()

    @property
    def weight_bytes(self) -> int:
        """Bytes of parameters, buffers and packed weights, shared ones counted once."""
        tensors = (*self._model.parameters(), *self._model.buffers(), *packed_tensors(self._model))
        return sum({t.data_ptr(): t.nbytes for t in tensors}.values())

    @property
    def quantized_bytes(self) -> int:
        """Bytes of the packed weights that are quantized."""
        return quantized_bytes(self._model)

    @property
    def device(self) -> torch.device:
        """Where its weights are."""
        return self._device

    @property
    def dtype(self) -> torch.dtype:
        """Compute dtype."""
        return self._model.dtype

    @property
    def is_fused(self) -> bool:
        """True if the decoder runs as a fused program wherever its modules need not be called."""
        return self._fused is not None

    def probe(self, max_model_len: int) -> list[attention.LayerCall]:
        """Run a few tokens and return the attention calls; `row_modules` keeps the row-wise modules.

        Masks are evaluated for sequences of up to `max_model_len` tokens.
        """
        places = torch.arange(_PROBE_TOKENS, device=self._device)[None]
        seen_by_adapters = self.adapter_layers.targets.probed(_PROBE_TOKENS)
        probing = attention.probing(self._model, max_model_len)
        with torch.inference_mode(), self.row_modules.collected(self._model), seen_by_adapters, probing as calls:
            seen = StateProbe(_PROBE_TOKENS, calls.__len__)
            past = PackedPast(self._model.config, seen)
            if self._ends is not None:
                self._ends.enter(places)
            with seen.watching(self._model):
                self._model(
                    input_ids=places,
                    position_ids=places,
                    use_cache=False,
                    past_key_values=past,
                    logits_to_keep=places[0],
                )
        with torch.inference_mode():
            self.state_modules = seen.modules()
        self._kept_linears = frozenset(seen.idle_linears(self.state_modules))
        self._past = PackedPast(self._model.config) if past.is_asked or self.state_modules else None
        self._calls = calls
        return calls

    def divide_cache(self, shapes: Mapping[int, CacheShape], layers: PoolLayers, groups: CacheGroups) -> None:
        """Keep keys and values of layers of these shapes in `layers` of the pool. Call it after `probe`, before `bind`."""
        self._caches = attention.caches_of(self._calls, shapes, layers, groups)

    def divide_states(self, layout: StateLayout) -> None:
        """Keep states by `layout`. Call it after `probe`, before `fuse` and `bind`."""
        if self.state_modules:
            self._states = SequenceStates(self.state_modules, layout, ModuleStates(), self._within)

    @torch.inference_mode()
    def drop_states(self, blocks: NDArray[np.int32]) -> None:
        """Make the states in `blocks` [sequences, blocks] unusable: a row that begins with them fails."""
        if self._states is not None and len(blocks):
            self._states.drop(blocks)

    @torch.inference_mode()
    def settle_states(self, rows: NDArray[np.int32], num_tokens: NDArray[np.int32], blocks: NDArray[np.int32]) -> None:
        """See SequenceStates.settle; call it after each step with draft tokens. No-op without states."""
        if self._states is not None:
            self._states.settle(rows, num_tokens, blocks)

    @property
    def draft_bytes(self) -> int:
        """Bytes that each draft token of a step takes until it is accepted or rejected."""
        return 0 if self._states is None else self._states.num_bytes

    def _within(self, places: NDArray[np.int64]) -> AbstractContextManager[None]:
        return self.adapter_layers.within(places)

    def mixes_tokens(self, max_model_len: int) -> bool:
        """True if tokens depend on each other by more than attention and states. Call it after `probe`."""
        with attention.probing(self._model, max_model_len):
            return mixes_tokens(self._model, [each.module for each in self.state_modules])

    @torch.inference_mode()
    def check_stage(self, max_model_len: int) -> None:
        """Raise ConfigError if the stage's layers read more than hidden states and positions. Call it after `probe`."""
        if self._ends is not None:
            with attention.probing(self._model, max_model_len):
                self._ends.check(self._model)

    def fuse(self, given: Fusing) -> None:
        """Pack the weights irreversibly, and replace the decoder by a fused program where possible."""
        self._fused = fuse(self._model, given, self._kept_linears)
        self.row_modules, self.adapter_layers = RowModules(), AdapterLayers(self._model)
        self.probe(given.max_model_len)
        if self._states is not None:
            self._states.continues = all(each.continues for each in self.state_modules)
        if self._past is not None:  # layers use positions themselves: far ones may differ, which no trial reaches
            self.unfuse()

    def unfuse(self) -> None:
        """Return to the decoder's modules, with packed weights."""
        if self._fused is not None:
            self._fused.remove()
            self._fused = self._plain_head = self._decode_program = self._logit_cap = None

    @torch.inference_mode()
    def find_plain_head(self, step: ModelInput) -> None:
        """Skip the model's own forward pass from now on, if the head alone gives bit-identical logits for `step`.

        Needs a fused and bound model. Saves 0.2 ms per step of one row.
        """
        if not self.has_logits:
            return
        expected = self._pass(step)
        self._plain_head = self._model.get_output_embeddings()
        for cap in (None, getattr(self._model.config.get_text_config(), "final_logit_softcapping", None)):
            self._logit_cap = cap
            if self._plain_head is None or torch.equal(self._pass(step), expected):
                return
        self._plain_head = self._logit_cap = None

    @torch.inference_mode()
    def find_decode_program(self, step: ModelInput) -> None:
        """Have `decode` use a program, if that gives bit-identical logits for `step`, in which n sequences decode.

        Needs a fused and bound model with a plain head, in one stage.
        """
        if self._ends is not None or self._fused is None or self._logit_cap is not None:
            return
        if not isinstance(self._plain_head, PackedLinear):
            return
        self._decode_program = self._fused.decode_program(self._plain_head.weights)
        if self._decode_program is None:
            return
        expected, batch = self._pass(step), step.attention[0]
        columns = (step.token_ids[0].int(), batch.positions, batch.sequences)
        tables = np.stack([of_group.block_tables.numpy() for of_group in step.attention])
        run = self.decode(DecodeRows(*(column.numpy().copy() for column in columns), tables))
        if run is not None and not (run.step() and torch.equal(run.logits, expected)):
            self._decode_program = None

    def decode(self, rows: DecodeRows) -> DecodeRun | None:
        """Prepare decode steps of rows without adapters, over the bound cache, with the logits of `logits`.

        None if this model has no program for them.
        """
        if self._fused is None or self._decode_program is None:
            return None
        return self._fused.decode(self._decode_program, rows)

    @torch.inference_mode()
    def fixed_steps(self, num_rows: int, kept: KeptRows) -> FixedSteps | None:
        """Decode steps of up to `num_rows` rows of `kept`, over the bound cache; None if the model has none."""
        if self._fused is None or not isinstance(self._plain_head, PackedLinear):
            return None
        return self._fused.fixed_steps(Head(self._plain_head.weights, cap=self._logit_cap), num_rows, kept)

    @torch.inference_mode()
    def record(
        self, device: Device, num_rows: int, kept: KeptRows, step: ModelInput, on_made: Callable[[int, int], None]
    ) -> RecordedSteps | None:
        """`fixed_steps` recorded on `device`; `on_made`: see RecordedSteps.

        None if there are none, or the logits of `step`, one token in block 0, are not those computed without.
        """
        steps = self.fixed_steps(num_rows, kept)
        if steps is None:
            return None
        expected = self._pass(step)
        made = RecordedSteps(steps, device, num_rows, on_made)
        is_right = made.gives(int(step.token_ids[0, 0]), int(step.attention[0].positions[0]), expected)
        return made if is_right else None

    @contextmanager
    def computed_by_modules(self) -> Iterator[None]:
        """Inside the block, compute with the decoder's modules one by one, with their present weights."""
        self._uses_modules = True
        try:
            yield
        finally:
            self._uses_modules = False

    def bind(self, pool: torch.Tensor) -> None:
        """Store keys and values in `pool`, [num_layers, 2, num_blocks, block_elements], from now on."""
        self._kept = None  # kept beside another pool
        if self._fused is not None:
            self._fused.bind(pool)
        self._paged = attention.PagedAttention(self._backend, pool, self._caches)
        attention.attach(self._model, self._paged)
        if self._states is not None:
            self._states.bind(pool)

    def keep_states(self, kept: KeptStates) -> None:
        """Store the last hidden states of each pass from now on, until `bind`. Not those of `decode` and of recorded steps."""
        self._kept = kept
        self._hidden.on_seen = self._keep

    def _keep(self, states: torch.Tensor) -> None:
        """`states`: [1, T, H] of the present pass, padding included."""
        if self._kept is not None and self._step is not None:
            count = self._step.num_tokens
            self._kept.put(states[0, :count], self._step.attention[0].slots[:count])

    @property
    def ends(self) -> tuple[nn.Module, nn.Module]:
        """The modules that embed tokens and that compute logits, for a head that shares them."""
        return self._model.get_input_embeddings(), self._model.get_output_embeddings()

    @property
    def hidden_size(self) -> int:
        """Elements of a token's last hidden state; 0 if the model does not expose it. Valid after `probe`."""
        return self._hidden.size

    @torch.inference_mode()
    def logits(self, inputs: Iterable[ModelInput]) -> torch.Tensor:
        """Run the passes in order; float32 [wanted rows, vocab] of all of them, or [0, 0] without passes.

        In a stage that is not the last, hidden states [wanted rows, H].
        """
        return _joined(list(map(self._pass, inputs)))

    @torch.inference_mode()
    def hidden(self, inputs: Iterable[ModelInput]) -> torch.Tensor:
        """Run the passes in order, without the LM head; float32 [packed tokens, hidden size], padding left out.

        A token's last hidden state is the input of the LM head, after the final norm.
        """
        compute = self._last_states if self.has_logits else self._handed_on
        return _joined([compute(step)[0, : step.num_tokens].float() for step in inputs])

    @torch.inference_mode()
    def logits_and_hidden(self, inputs: Iterable[ModelInput]) -> tuple[torch.Tensor, torch.Tensor]:
        """`logits` and `hidden` of the same passes, each run once."""
        if not self.has_logits:
            return torch.empty(0, 0), self.hidden(inputs)
        logits, hidden = [], []
        for step in inputs:
            with self._hidden.kept():
                logits.append(self._full_pass(self._begun(step)))
                hidden.append(self._hidden.taken()[0, : step.num_tokens].float())
        return _joined(logits), _joined(hidden)

    @property
    def has_logits(self) -> bool:
        """False in a stage that is not the last."""
        return self._ends is None or self._ends.part.is_last

    def _last_states(self, step: ModelInput) -> torch.Tensor:
        """Last hidden states [1, T, H]."""
        step = self._begun(step)
        out = decoder_of(self._model)(input_ids=step.token_ids, use_cache=False, **self._places(step))
        states: torch.Tensor = out.last_hidden_state
        return states

    def _handed_on(self, step: ModelInput) -> torch.Tensor:
        """Compute the stage's layers, and hand their hidden states [1, T, H], which it returns, to the next one."""
        step = self._begun(step)
        assert self._ends is not None
        if self._fused is not None and not self._fused.uses_modules:
            states = self._fused.states(step.token_ids)
        else:
            decoder_of(self._model)(input_ids=step.token_ids, use_cache=False, **self._places(step))
            states = self._ends.left
        self._ends.leave(states)
        return states

    def _pass(self, step: ModelInput) -> torch.Tensor:
        if not self.has_logits:
            return self._handed_on(step)[0, step.logit_rows][: step.num_logits].float()
        step = self._begun(step)
        if self._plain_head is None or self._fused is None or self._fused.uses_modules:
            return self._full_pass(step)
        states = self._fused.states(step.token_ids)
        self._keep(states)
        logits = self._plain_head(states[0, step.logit_rows])[: step.num_logits]
        return (logits if self._logit_cap is None else torch.tanh(logits / self._logit_cap) * self._logit_cap).float()

    def _full_pass(self, step: ModelInput) -> torch.Tensor:
        out = self._model(
            input_ids=step.token_ids, use_cache=False, logits_to_keep=step.logit_rows, **self._places(step)
        )
        return out.logits[0, : step.num_logits].float()

    def _places(self, step: ModelInput) -> dict[str, Any]:
        """Arguments of the model that say where tokens are in their sequences."""
        if self._past is None:
            return {"position_ids": step.positions}
        past = self._past.begin(step.positions)
        if self._states is not None:
            past.states = self._states.states
        return {"position_ids": step.positions, "past_key_values": past}

    def _begun(self, step: ModelInput) -> ModelInput:
        """Move the pass to the model's device and announce it to attention and adapters."""
        assert self._paged is not None, "bind() comes before a forward pass"
        if step.adapter_ids is not None or self.adapter_layers.is_used:
            self.adapter_layers.begin(step.adapter_ids, step.logit_rows[: step.num_logits])
        step = step.to(self._device)
        self._step = step
        self._paged.begin(step.attention)
        if self._states is not None:
            assert step.states is not None
            self._states.begin(step.states)
        if self._fused is not None:
            by_modules = self._uses_modules or self.adapter_layers.is_used
            self._fused.begin(step.attention, uses_modules=by_modules)
        if self._ends is not None:
            self._ends.enter(step.token_ids)
        return step


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts) if parts else torch.empty(0, 0)


class _LastHidden:
    """Captures the decoder's output, the input of the LM head. Keeps it only inside `kept`."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.size = 0
        self._keeps, self._seen = False, torch.empty(0)
        self.on_seen: Callable[[torch.Tensor], None] = lambda states: None
        """Called with those of each pass, [1, T, H]."""
        decoder_of(model).register_forward_hook(self._see)

    def _see(self, _module: nn.Module, _given: object, out: object) -> None:
        hidden = getattr(out, "last_hidden_state", None)
        if hidden is not None:
            self.size = hidden.shape[-1]
            self.on_seen(hidden)
            if self._keeps:
                self._seen = hidden

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep the hidden states of the pass inside the block, for `taken`."""
        self._keeps = True
        try:
            yield
        finally:
            self._keeps, self._seen = False, torch.empty(0)

    def taken(self) -> torch.Tensor:
        """[1, T, hidden size] of the last pass, padding included."""
        return self._seen
