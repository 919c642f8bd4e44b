"""Builders of the row tables in `SchedulerOutputs` (worker.proto): added and changed rows."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from block_manager.cache_rules import StateBlocks
from protos.common.v1 import common_pb2
from protos.worker.v1 import worker_pb2
from scheduler_svc.core.plan import ScheduledSequence
from scheduler_svc.worker_values import RowSampling
from svc_common import wire_arrays
from svc_common.errors import Internal


@dataclass(slots=True)
class Row:
    """State of one sequence at the worker. `repeats`: if unmentioned in a step, it computes its next token.

    `num_children`: tokens that it yields in its next result, one for each child sequence. `num_known`: tokens
    that the worker was sent, for a beam all of them.
    """

    name: str
    index: int
    incarnation: int
    sampling: RowSampling
    num_children: int = 1
    num_known: int = 0
    repeats: bool = False


@dataclass(slots=True)
class AddedColumns:
    """Rows that the worker does not hold yet."""

    rows: list[int] = field(default_factory=list)
    incarnations: list[int] = field(default_factory=list)
    num_known_tokens: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    num_prompt_tokens: list[int] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    num_blocks: list[int] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)
    samplings: list[RowSampling] = field(default_factory=list)
    sequence_indexes: list[int] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    options: list[worker_pb2.RowOptions] = field(default_factory=list)

    def put(self, entry: ScheduledSequence, row: Row) -> None:
        """Add a row with all its tokens and blocks."""
        if entry.token_ids is None:
            raise Internal(f"plan carries no tokens for {entry.name}, which the worker does not hold")
        if not row.sampling.is_plain or row.num_children > 1:
            self.options.append(_options(len(self.rows), row))
        self.rows.append(row.index)
        self.incarnations.append(row.incarnation)
        self.num_known_tokens.append(len(entry.token_ids))
        self.token_ids.extend(entry.token_ids)
        self.num_prompt_tokens.append(entry.num_prompt_tokens)
        self.num_computed_tokens.append(entry.computed_before)
        self.num_tokens.append(entry.num_tokens)
        self.num_blocks.append(len(entry.new_block_ids))
        self.block_ids.extend(entry.new_block_ids)
        self.samplings.append(row.sampling)
        self.sequence_indexes.append(entry.index)
        self.names.append(entry.name)

    def message(self) -> worker_pb2.AddedRows:
        """The table as a message."""
        pack, samplings = wire_arrays.pack, self.samplings
        traces = [s.trace or common_pb2.TraceContext() for s in samplings]
        return worker_pb2.AddedRows(
            rows=pack(self.rows),
            incarnations=pack(self.incarnations),
            num_known_tokens=pack(self.num_known_tokens),
            token_ids=pack(self.token_ids),
            num_prompt_tokens=pack(self.num_prompt_tokens),
            num_computed_tokens=pack(self.num_computed_tokens),
            num_tokens=pack(self.num_tokens),
            num_blocks=pack(self.num_blocks),
            block_ids=pack(self.block_ids),
            temperatures=pack([s.temperature for s in samplings], wire_arrays.F32),
            top_ps=pack([s.top_p for s in samplings], wire_arrays.F32),
            top_ks=pack([s.top_k for s in samplings]),
            seeds=pack([s.seed for s in samplings], wire_arrays.U64),
            sequence_indexes=pack(self.sequence_indexes),
            logprobs=pack([int(s.logprobs or s.ranked) for s in samplings], wire_arrays.U8),
            names=self.names,
            traces=traces if any(t.traceparent for t in traces) else [],
            options=self.options,
        )


def _options(at: int, row: Row) -> worker_pb2.RowOptions:
    sampling = row.sampling
    return worker_pb2.RowOptions(
        at=at,
        sampling=sampling.options,
        min_tokens=sampling.min_tokens,
        min_tokens_ids=wire_arrays.pack(sampling.end_ids) if sampling.min_tokens else b"",
        num_children=row.num_children if row.num_children > 1 else 0,
        num_candidates=sampling.num_candidates,
        adapter_id=sampling.adapter_id,
        task=sampling.task,
    )


@dataclass(slots=True)
class ChangedColumns:
    """Rows that the worker holds and that do not simply repeat."""

    rows: list[int] = field(default_factory=list)
    incarnations: list[int] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    num_new_blocks: list[int] = field(default_factory=list)
    new_block_ids: list[int] = field(default_factory=list)
    num_new_tokens: list[int] = field(default_factory=list)
    new_token_ids: list[int] = field(default_factory=list)
    num_draft_tokens: list[int] = field(default_factory=list)

    def put(self, row: Row, entry: ScheduledSequence) -> None:
        """Add a row's tokens and blocks of this step; a resumed beam's last token is omitted, as it was sent with all others."""
        told = entry.told_token_ids if row.num_known < entry.computed_before + entry.num_tokens else []
        row.num_known += len(told)
        self._put(row, entry.num_tokens, entry.new_block_ids, told, entry.num_drafts)

    def pause(self, row: Row) -> None:
        """Add a row that computes nothing until it is mentioned again."""
        self._put(row, 0, [], [], 0)

    def _put(self, row: Row, num_tokens: int, blocks: list[int], tokens: list[int], num_drafts: int) -> None:
        self.rows.append(row.index)
        self.incarnations.append(row.incarnation)
        self.num_tokens.append(num_tokens)
        self.num_new_blocks.append(len(blocks))
        self.new_block_ids.extend(blocks)
        self.num_new_tokens.append(len(tokens))
        self.new_token_ids.extend(tokens)
        self.num_draft_tokens.append(num_drafts)

    def message(self) -> worker_pb2.ChangedRows:
        """The table as a message."""
        pack = wire_arrays.pack
        return worker_pb2.ChangedRows(
            rows=pack(self.rows),
            incarnations=pack(self.incarnations),
            num_tokens=pack(self.num_tokens),
            num_new_blocks=pack(self.num_new_blocks),
            new_block_ids=pack(self.new_block_ids),
            num_new_tokens=pack(self.num_new_tokens) if self.new_token_ids else b"",
            new_token_ids=pack(self.new_token_ids),
            num_draft_tokens=pack(self.num_draft_tokens) if any(self.num_draft_tokens) else b"",
        )


def state_blocks(moves: Sequence[StateBlocks], rows: list[int]) -> worker_pb2.StateBlocks:
    """States of rows as a message. `rows`: the row of each."""
    return worker_pb2.StateBlocks(
        rows=wire_arrays.pack(rows),
        num_tokens=wire_arrays.pack([each.num_tokens for each in moves]),
        block_ids=wire_arrays.pack([block for each in moves for block in each.block_ids]),
    )
