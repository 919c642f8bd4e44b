"""A decoder run as a program: replaces the decoder's own forward pass wherever its modules need not be called."""

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

from paged_kernels.backend import SCALED_MOST, AttentionBatch, CacheShape
from paged_kernels.decoder import (
    DecodeProgram,
    DecoderKernels,
    DecodeRows,
    DecodeRun,
    FixedSteps,
    KeptRows,
    MixtureKernels,
    PreparedProgram,
)
from paged_kernels.host_memory import CleanFilePages
from paged_kernels.program import Choose, Embed, Gather, Head, PackedWeights, Program
from paged_kernels.ranks import RankSums
from worker_svc.model.attention import LayerCall
from worker_svc.model.cache.cache_groups import CacheGroups
from worker_svc.model.decoder.part import decoder_of
from worker_svc.model.dummy_batch import LONGEST
from worker_svc.model.fused.elsewhere import StageArrival
from worker_svc.model.fused.operators import program_of
from worker_svc.model.fused.packed_linear import WeightOf, pack_all, plain_weight
from worker_svc.model.fused.packed_mixture import pack_mixtures
from worker_svc.model.fused.parts import DecoderParts, match
from worker_svc.model.fused.positions import Entry, enter, scale_of

log = logging.getLogger(__name__)

_WORTH_DROPPING_BYTES = 64 * 2**20  # for less, listing the mappings takes longer than it is worth


class FusedDecoder:
    """Runs the decoder's program, or its own modules where they must be called.

    Call `bind` and `begin` before a forward pass. Until the first `begin`, the modules compute.
    """

    def __init__(
        self, decoder: nn.Module, embedding: nn.Embedding | StageArrival, scale: float, form: "ProgramForm"
    ) -> None:
        """`embedding`: of token ids to the stream; an StageArrival where another stage computes that."""
        self._embedding, self._scale, self._form = embedding, scale, form
        self._program = form.prepared()
        self._decoder, self._modules = decoder, decoder.forward
        self._batches: Sequence[AttentionBatch] = ()
        self._pool = torch.empty(0)
        self.uses_modules = True
        """True if the decoder's own modules compute the next forward pass."""
        decoder.forward = self._forward  # type: ignore[method-assign]

    def remove(self) -> None:
        """Restore the decoder's own forward pass."""
        del self._decoder.forward

    def bind(self, pool: torch.Tensor) -> None:
        """Store keys and values in `pool`, [num_layers, 2, num_blocks, block_elements], from now on."""
        self._pool = pool

    def begin(self, batches: Sequence[AttentionBatch], *, uses_modules: bool) -> None:
        """Set the tokens of the next forward pass, for each cache group.

        `uses_modules`: True if modules must be called, for example for adapters.
        """
        self._batches, self.uses_modules = batches, uses_modules

    def states(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Last hidden states [1, T, H] of `token_ids` [1, T], computed by the program."""
        return self._through_program(self._embedding(token_ids))

    def decode_program(self, head: PackedWeights) -> DecodeProgram | None:
        """A program from token ids to those that `head` makes most likely.

        None if the embedding is of another kind, or rows are not on the host.
        """
        embed = self._embed()
        return None if embed is None else self._form.decoding(embed, head)

    def fixed_steps(self, head: Head, num_rows: int, kept: KeptRows) -> FixedSteps | None:
        """Decode steps of rows of `kept` at fixed addresses, over the bound cache.

        None if the embedding is of another kind, or rows are on the host.
        """
        embed = self._embed()
        return None if embed is None else self._form.fixed(embed, head, num_rows, kept, self._pool)

    def _embed(self) -> Embed | None:
        """The lookup of token ids; None if the embedding does more, or is another stage's."""
        if isinstance(self._embedding, StageArrival):
            return None
        table = self._embedding.weight
        token = torch.tensor(self._embedding.num_embeddings // 2, device=table.device)
        inner = scale_of(table[token], self._embedding(token))
        if inner is None or 1.0 not in {inner, self._scale}:
            return None
        return Embed(table.detach(), float(torch.tensor(inner * self._scale, dtype=table.dtype)))

    def decode(self, program: DecodeProgram, rows: DecodeRows) -> DecodeRun:
        """Prepare steps of `rows` by a `decode_program`, over the bound cache."""
        return program.begin(rows, self._pool)

    def _forward(self, input_ids: torch.Tensor | None = None, **given: Any) -> Any:
        if self.uses_modules:
            return self._modules(input_ids=input_ids, **given)
        # A multimodal model embeds tokens itself, but not where another stage has done so.
        is_embedded = input_ids is None and not isinstance(self._embedding, StageArrival)
        stream = given["inputs_embeds"].clone() if is_embedded else self._embedding(input_ids)
        return MoeModelOutputWithPast(last_hidden_state=self._through_program(stream))

    def _through_program(self, stream: torch.Tensor) -> torch.Tensor:
        """Embedded tokens to last hidden states; may work in place."""
        if self._scale != 1.0:
            stream = stream * torch.tensor(self._scale, dtype=stream.dtype)
        self._program.run(stream[0], self._batches, self._pool)
        return stream


HeadOf = Callable[[PackedWeights], tuple[Head, *tuple[Gather, ...]]]
"""The operators from last hidden states to the logits of the whole vocabulary."""


def whole_head(weights: PackedWeights) -> tuple[Head]:
    """The `HeadOf` of a model in one process."""
    return (Head(weights),)


@dataclass(frozen=True, slots=True)
class ProgramForm:
    """A decoder's program, and what prepares it."""

    kernels: DecoderKernels
    program: Program
    cache_dtype: torch.dtype

    head_of: HeadOf

    def prepared(self) -> PreparedProgram:
        """The decoder alone."""
        return self.kernels.prepare(self.program, self.cache_dtype)

    def decoding(self, embed: Embed, head: PackedWeights) -> DecodeProgram | None:
        """The decoder between an embedding and a head, with the choice of the next tokens."""
        parts = self.head_of(head)
        operators = [embed, *self.program.operators, *parts, Choose(parts[0].width or head.columns)]
        return self.kernels.prepare_decode(replace(self.program, operators=operators), self.cache_dtype)

    def fixed(self, embed: Embed, head: Head, num_rows: int, kept: KeptRows, pool: torch.Tensor) -> FixedSteps | None:
        """The decoder between an embedding and a head."""
        part, *gathers = self.head_of(head.weights)
        operators = [embed, *self.program.operators, replace(part, cap=head.cap), *gathers]
        return self.kernels.fixed_steps(replace(self.program, operators=operators), num_rows, kept, pool)


@dataclass(frozen=True, slots=True)
class Fusing:
    """What a decoder is fused for.

    `calls`: from a probe, one per layer in order, which `groups` divides. `weight_of`: the form in which each module's weight
    is packed. `reads_late`: it reads weights, and modules that are not packed yet have none. `sums`: over the ranks
    of a group, None without one. `head_of`: for a head that ranks divide.
    """

    kernels: DecoderKernels
    calls: Sequence[LayerCall]
    groups: CacheGroups
    shape: CacheShape
    cache_dtype: torch.dtype
    max_model_len: int
    weight_of: WeightOf = plain_weight
    reads_late: bool = False
    sums: RankSums | None = None
    head_of: HeadOf = whole_head

    @property
    def is_quantized(self) -> bool:
        """True if packing may round weights, or takes them from a quantized checkpoint."""
        return self.weight_of is not plain_weight

    @property
    def rounds(self) -> bool:
        """True if rows, or keys and values, are rounded to numbers with scales."""
        return self.is_quantized or self.cache_dtype in SCALED_MOST


def fuse(model: PreTrainedModel, given: Fusing, kept: Collection[nn.Module] = ()) -> FusedDecoder | None:
    """Pack the model's linear modules irreversibly, but those `kept`, and replace its decoder by a program where one can be made.

    Returns None if the decoder's structure is not known; its modules are then used, with packed weights.
    """
    gives_back = model.get_memory_footprint() >= _WORTH_DROPPING_BYTES
    pages = CleanFilePages.of_process() if gives_back else CleanFilePages()
    made = _program(model, given, pages)
    pack_mixtures(model, given.kernels, given.weight_of, pages)
    pack_all(model, given.kernels, model.get_output_embeddings(), given.weight_of, pages, kept)
    return made


def _program(model: PreTrainedModel, given: Fusing, pages: CleanFilePages) -> FusedDecoder | None:
    decoder = decoder_of(model)
    found = _found(decoder, given)
    if found is None:
        return None
    parts, entry = found
    places = given.groups.places
    program = program_of(
        parts, entry, given.calls, places, given.shape, given.kernels, given.weight_of, pages, given.sums
    )
    form = ProgramForm(given.kernels, program, given.cache_dtype, given.head_of)
    return FusedDecoder(decoder, parts.embedding or _arrival(decoder), entry.scale, form)


def _arrival(decoder: nn.Module) -> StageArrival:
    """Where the stream of a stage comes from."""
    return next(module for module in decoder.modules() if isinstance(module, StageArrival))


def _found(decoder: nn.Module, given: Fusing) -> tuple[DecoderParts, Entry] | None:
    """The decoder's parts; None also if running its modules shows that they need to be called differently."""
    try:
        mixes = isinstance(given.kernels, MixtureKernels) and given.sums is None
        parts = match(decoder, mixes=mixes)
        if parts is None or not _suits(parts.norm.weight.dtype, given):
            return None
        entry = enter(decoder, parts.embedding, max(given.max_model_len, LONGEST))
    except (TypeError, ValueError, RuntimeError, AttributeError, LookupError) as error:
        log.info("the decoder's modules cannot be probed one by one: %s", error)
        return None
    return None if entry is None else (parts, entry)


def _suits(dtype: torch.dtype, given: Fusing) -> bool:
    same_heads = len({(call.num_heads, call.num_kv_heads, call.head_dim) for call in given.calls}) == 1
    own_keys = all(call.source is None for call in given.calls)
    first = given.calls[0].layer
    in_order = [call.layer for call in given.calls] == list(range(first, first + len(given.calls)))
    sums_fit = given.sums is None or given.sums.in_programs
    return same_heads and own_keys and in_order and sums_fit and given.kernels.runs(dtype, given.cache_dtype)
