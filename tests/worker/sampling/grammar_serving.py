"""Streams with grammars on the real engine and models/tiny: served like a scheduler would, with preemption, chunks, drafts, several
decode steps in one message."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from protos.common.v1 import common_pb2
from protos.worker.v1 import worker_pb2
from svc_common import wire_arrays
from tests.support.worker.driver import BLOCK_SIZE
from tests.support.worker.grammar_rows import EOS_IDS, ids_of
from worker_svc.executor.model_engine import ModelEngine

PROMPT = ids_of("Here is the document that you asked for, in the form that you asked for:\n")
MAX_ROWS = 8
_ROOM = 24  # tokens that blocks are taken for beyond the known ones


@dataclass
class Stream:
    """One sequence. `row` None: not at the worker (waiting or preempted). `told`: the token that a beam goes on with next;
    `num_accepted`: guesses that were right."""

    name: str
    grammar: common_pb2.Grammar
    seed: int
    index: int = 0
    output: list[int] = field(default_factory=list)
    row: int | None = None
    incarnation: int = 0
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    flags: int = 0
    num_children: int = 0
    num_candidates: int = 0
    told: list[int] = field(default_factory=list)
    num_accepted: int = 0

    @property
    def known(self) -> list[int]:
        """Prompt and output."""
        return PROMPT + self.output

    @property
    def ended(self) -> bool:
        """By an end-of-sequence token."""
        return bool(self.output) and self.output[-1] in EOS_IDS

    @property
    def text_ids(self) -> list[int]:
        """The output without the token that ended it."""
        return self.output[:-1] if self.ended else self.output


class Serving:
    """Owner of the engine's rows and blocks for one test."""

    def __init__(self, engine: ModelEngine, num_blocks: int) -> None:
        engine.reset()
        self.engine = engine
        self.streams: dict[str, Stream] = {}
        self._free_blocks = list(range(num_blocks))
        self._lives: dict[int, int] = {}
        self._removed: list[int] = []
        self._step_id = 0

    def start(self, name: str, grammar: common_pb2.Grammar, **options: Any) -> Stream:
        """A stream that joins with the next step; `seed`, `output`, `index`, `num_children`, `num_candidates`."""
        self.streams[name] = Stream(name, grammar, options.pop("seed", 0), **options)
        return self.streams[name]

    def preempt(self, stream: Stream) -> None:
        """It leaves the worker; the next step brings it back with its tokens, to be computed again."""
        assert stream.row is not None
        self._removed.append(stream.row)
        self._free_blocks += stream.blocks
        stream.row, stream.blocks, stream.computed = None, [], 0

    def drop(self, name: str) -> Stream:
        """It leaves for good."""
        stream = self.streams.pop(name)
        if stream.row is not None:
            self.preempt(stream)
        return stream

    def step(self, *, chunk: int = 1000, num_drafts: int = 0, num_decode_steps: int = 1) -> worker_pb2.WorkerOutputs:
        """All streams compute: the next `chunk` of the tokens they know, or one and `num_drafts` guesses."""
        self._step_id += 1
        joining = [stream for stream in self.streams.values() if stream.row is None]
        staying = [stream for stream in self.streams.values() if stream.row is not None]
        message = worker_pb2.SchedulerOutputs(
            step_id=self._step_id, num_decode_steps=num_decode_steps, removed_rows=wire_arrays.pack(self._removed)
        )
        self._removed = []
        if staying:
            message.changed.CopyFrom(self._changed(staying, chunk, num_drafts))
        if joining:
            message.added.CopyFrom(self._added(joining, chunk))
        outputs = self.engine.execute(message)
        self._take_in(outputs, verified=num_decode_steps == 1)
        return outputs

    def _share(self, stream: Stream, chunk: int) -> int:
        return min(chunk, len(stream.known) - stream.computed)

    def _grow(self, stream: Stream) -> list[int]:
        wanted = -(-(len(stream.known) + _ROOM) // BLOCK_SIZE)
        new = [self._free_blocks.pop() for _ in range(wanted - len(stream.blocks))]
        stream.blocks += new
        return new

    def _changed(self, streams: Sequence[Stream], chunk: int, num_drafts: int) -> worker_pb2.ChangedRows:
        told = [stream.told for stream in streams]
        for stream in streams:
            stream.output, stream.told = stream.output + stream.told, []
        new, shares = [self._grow(stream) for stream in streams], [self._share(stream, chunk) for stream in streams]
        reaches = [stream.computed + share == len(stream.known) for stream, share in zip(streams, shares, strict=True)]
        drafts = [
            num_drafts * reach * (not stream.num_candidates) for stream, reach in zip(streams, reaches, strict=True)
        ]
        for stream, share in zip(streams, shares, strict=True):
            stream.computed += share
        pack = wire_arrays.pack
        return worker_pb2.ChangedRows(
            rows=pack([stream.row for stream in streams]),
            incarnations=pack([stream.incarnation for stream in streams]),
            num_tokens=pack([share + draft for share, draft in zip(shares, drafts, strict=True)]),
            num_new_blocks=pack([len(blocks) for blocks in new]),
            new_block_ids=pack([block for blocks in new for block in blocks]),
            num_new_tokens=pack([len(ids) for ids in told]),
            new_token_ids=pack([token_id for ids in told for token_id in ids]),
            num_draft_tokens=pack(drafts),
        )

    def _added(self, streams: Sequence[Stream], chunk: int) -> worker_pb2.AddedRows:
        taken = {stream.row for stream in self.streams.values()}
        free_rows = iter([row for row in range(MAX_ROWS) if row not in taken])
        for stream in streams:
            stream.row = next(free_rows)
            stream.incarnation = self._lives[stream.row] = self._lives.get(stream.row, -1) + 1
            self._grow(stream)
        shares = [self._share(stream, chunk) for stream in streams]
        for stream, share in zip(streams, shares, strict=True):
            stream.computed = share
        pack, n = wire_arrays.pack, len(streams)
        return worker_pb2.AddedRows(
            rows=pack([stream.row for stream in streams]),
            incarnations=pack([stream.incarnation for stream in streams]),
            num_known_tokens=pack([len(stream.known) for stream in streams]),
            token_ids=pack([token_id for stream in streams for token_id in stream.known]),
            num_prompt_tokens=pack([len(PROMPT)] * n),
            num_computed_tokens=pack([0] * n),
            num_tokens=pack(shares),
            num_blocks=pack([len(stream.blocks) for stream in streams]),
            block_ids=pack([block for stream in streams for block in stream.blocks]),
            temperatures=pack([0.8] * n, wire_arrays.F32),
            top_ps=pack([0.95] * n, wire_arrays.F32),
            top_ks=pack([0] * n),
            seeds=pack([stream.seed for stream in streams], wire_arrays.U64),
            sequence_indexes=pack([stream.index for stream in streams]),
            logprobs=pack([0] * n, wire_arrays.U8),
            names=[stream.name for stream in streams],
            options=[_options(i, stream) for i, stream in enumerate(streams)],
        )

    def _take_in(self, outputs: worker_pb2.WorkerOutputs, *, verified: bool) -> None:
        of_row = {stream.row: stream for stream in self.streams.values()}
        rows = wire_arrays.unpack(outputs.rows, "rows").tolist()
        counts = wire_arrays.unpack(outputs.num_tokens, "num_tokens").tolist()
        flags = wire_arrays.unpack(outputs.flags, "flags", wire_arrays.U8).tolist()
        token_ids = iter(wire_arrays.unpack(outputs.token_ids, "token_ids").tolist())
        for row, count, flag in zip(rows, counts, flags, strict=True):
            stream = of_row[row]
            stream.flags = flag
            stream.num_accepted += max(0, count - 1) * (verified and not stream.num_children)
            self._take(stream, [next(token_ids) for _ in range(count)])

    def _take(self, stream: Stream, token_ids: list[int]) -> None:
        if stream.num_children:  # siblings go their own ways; the row goes on with the first
            for i, token_id in enumerate(token_ids[1:], 1):
                self.start(f"{stream.name}.{i}", stream.grammar, seed=stream.seed, index=i, output=[token_id])
            stream.num_children, token_ids = 0, token_ids[:1]
        if token_ids:
            stream.computed = len(stream.known) + len(token_ids) - 1
        ends = [i for i, token_id in enumerate(token_ids) if token_id in EOS_IDS]
        stream.output += token_ids[: ends[0] + 1] if ends else token_ids


def _options(at: int, stream: Stream) -> worker_pb2.RowOptions:
    return worker_pb2.RowOptions(
        at=at,
        sampling=common_pb2.ResolvedSampling(grammar=stream.grammar),
        num_children=stream.num_children,
        num_candidates=stream.num_candidates,
    )
