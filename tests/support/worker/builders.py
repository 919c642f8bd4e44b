"""Messages and a scripted scheduler for the tests of the worker's shell."""

import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import grpc.aio

from protos.common.v1 import common_pb2
from protos.worker.v1 import worker_pb2, worker_pb2_grpc
from svc_common import wire_arrays
from svc_common.net import rpc
from svc_common.version import SPOKEN


@dataclass(slots=True)
class Row:
    """A row to add; everything that a test does not care for has a default."""

    row: int
    tokens: Sequence[int]
    blocks: Sequence[int]
    num_tokens: int
    incarnation: int = 1
    num_computed: int = 0
    num_prompt: int | None = None
    temperature: float = 0.0
    seed: int = 0
    index: int = 0
    logprobs: bool = False
    trace: common_pb2.TraceContext | None = None
    top_p: float = 1.0
    top_k: int = 0
    options: worker_pb2.RowOptions | None = None

    @property
    def name(self) -> str:
        return f"r{self.row}/{self.index}"


def added(rows: Sequence[Row]) -> worker_pb2.AddedRows:
    pack = wire_arrays.pack
    traced = any(r.trace for r in rows)
    return worker_pb2.AddedRows(
        rows=pack([r.row for r in rows]),
        incarnations=pack([r.incarnation for r in rows]),
        num_known_tokens=pack([len(r.tokens) for r in rows]),
        token_ids=pack([t for r in rows for t in r.tokens]),
        num_prompt_tokens=pack([len(r.tokens) if r.num_prompt is None else r.num_prompt for r in rows]),
        num_computed_tokens=pack([r.num_computed for r in rows]),
        num_tokens=pack([r.num_tokens for r in rows]),
        num_blocks=pack([len(r.blocks) for r in rows]),
        block_ids=pack([b for r in rows for b in r.blocks]),
        temperatures=pack([r.temperature for r in rows], wire_arrays.F32),
        top_ps=pack([r.top_p for r in rows], wire_arrays.F32),
        top_ks=pack([r.top_k for r in rows]),
        seeds=pack([r.seed for r in rows], wire_arrays.U64),
        sequence_indexes=pack([r.index for r in rows]),
        logprobs=pack([r.logprobs for r in rows], wire_arrays.U8),
        names=[r.name for r in rows],
        traces=[r.trace or common_pb2.TraceContext() for r in rows] if traced else [],
        options=[_options(i, r.options) for i, r in enumerate(rows) if r.options],
    )


def _options(at: int, given: worker_pb2.RowOptions) -> worker_pb2.RowOptions:
    made = worker_pb2.RowOptions()
    made.CopyFrom(given)
    made.at = at
    return made


def rare(sampling: common_pb2.ResolvedSampling | None = None, **fields: object) -> worker_pb2.RowOptions:
    """Options of a row: `sampling`, and the fields of RowOptions."""
    return worker_pb2.RowOptions(sampling=sampling, **fields)


@dataclass(slots=True)
class Change:
    """A row to change."""

    row: int
    num_tokens: int
    new_blocks: Sequence[int] = ()
    incarnation: int = 1
    told: Sequence[int] = ()
    num_drafts: int = 0


def changed(rows: Sequence[Change]) -> worker_pb2.ChangedRows:
    return worker_pb2.ChangedRows(
        rows=wire_arrays.pack([r.row for r in rows]),
        incarnations=wire_arrays.pack([r.incarnation for r in rows]),
        num_tokens=wire_arrays.pack([r.num_tokens for r in rows]),
        num_new_blocks=wire_arrays.pack([len(r.new_blocks) for r in rows]),
        new_block_ids=wire_arrays.pack([b for r in rows for b in r.new_blocks]),
        num_new_tokens=wire_arrays.pack([len(r.told) for r in rows]) if any(r.told for r in rows) else b"",
        new_token_ids=wire_arrays.pack([t for r in rows for t in r.told]),
        num_draft_tokens=wire_arrays.pack([r.num_drafts for r in rows]) if any(r.num_drafts for r in rows) else b"",
    )


def step(
    step_id: int = 1,
    *,
    epoch: int = 1,
    add: Sequence[Row] = (),
    change: Sequence[Change] = (),
    remove: Sequence[int] = (),
    swap_in: Sequence[tuple[int, int]] = (),
    swap_out: Sequence[tuple[int, int]] = (),
    copy: Sequence[tuple[int, int]] = (),
    num_decode_steps: int = 1,
) -> worker_pb2.SchedulerOutputs:
    return worker_pb2.SchedulerOutputs(
        step_id=step_id,
        epoch=epoch,
        num_decode_steps=num_decode_steps,
        added=added(add) if add else None,
        changed=changed(change) if change else None,
        removed_rows=wire_arrays.pack(remove),
        blocks_to_swap_in=wire_arrays.pack_pairs(swap_in),
        blocks_to_swap_out=wire_arrays.pack_pairs(swap_out),
        blocks_to_copy=wire_arrays.pack_pairs(copy),
    )


def tokens_by_row(result: worker_pb2.WorkerOutputs) -> dict[int, list[int]]:
    assert not result.HasField("error"), result.error.message
    rows = wire_arrays.unpack(result.rows, "rows").tolist()
    counts = wire_arrays.unpack(result.num_tokens, "num_tokens")
    runs = wire_arrays.split(wire_arrays.unpack(result.token_ids, "token_ids"), counts, "token_ids")
    return {row: run.tolist() for row, run in zip(rows, runs, strict=True)}


def identity(boot_id: str = "scheduler-a", revision: int = SPOKEN.newest) -> common_pb2.PeerIdentity:
    return common_pb2.PeerIdentity(protocol_revision=revision, build="test", boot_id=boot_id)


@dataclass(slots=True)
class Owner:
    """A scheduler that has said hello on a stream."""

    call: grpc.aio.StreamStreamCall
    welcome: worker_pb2.RunWelcome
    sent: int = field(default=0)

    async def send(self, message: worker_pb2.SchedulerOutputs) -> None:
        await self.call.write(message)

    async def read(self) -> worker_pb2.WorkerOutputs:
        message = await self.call.read()
        assert message is not grpc.aio.EOF, "the worker ended the stream"
        return message

    async def ask(self, message: worker_pb2.SchedulerOutputs) -> worker_pb2.WorkerOutputs:
        await self.send(message)
        return await self.read()


async def run(stub: worker_pb2_grpc.WorkerServiceStub, boot_id: str = "scheduler-a", **hello: object) -> Owner:
    """Says hello; raises the typed error of a refusal."""
    call = stub.Run(timeout=30)
    try:
        await call.write(worker_pb2.SchedulerOutputs(hello=worker_pb2.RunHello(identity=identity(boot_id), **hello)))
        first = await call.read()
        if first is grpc.aio.EOF:
            raise AssertionError(f"no welcome: {await call.code()}")
    except grpc.aio.AioRpcError as error:
        raise rpc.from_rpc_error(error) from None
    assert first.HasField("welcome")
    return Owner(call, first.welcome)


async def ending(call: grpc.aio.Call) -> Exception:
    """The typed error that a stream ends with; results before it are passed over."""
    try:
        while await call.read() is not grpc.aio.EOF:
            pass
    except grpc.aio.AioRpcError as error:
        return rpc.from_rpc_error(error)
    raise AssertionError("the stream ended in order")


@contextlib.asynccontextmanager
async def typed() -> AsyncIterator[None]:
    """Turns a refused call into the error of svc_common.errors."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise rpc.from_rpc_error(error) from None
