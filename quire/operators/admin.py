"""Client of the admin API, and its answers as JSON values and as text.

Used by `quire steps`, `quire blocks` and others.
"""

from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self

import grpc

from protos.inference.v1 import admin_pb2, admin_pb2_grpc
from quire.client.calls import ADMIN, typed_errors
from quire.client.connections import Credentials, blocking_channel
from svc_common.errors import DeadlineExceeded
from svc_common.net import rpc

_UNARY_TIMEOUT_S = 30.0
_LOAD_TIMEOUT_S = 120.0
_NO_CREDENTIALS = Credentials()


class _KeyedChannel:
    """Adds metadata, such as an API key, to every call on `channel`; implements what stubs need of grpc.Channel."""

    def __init__(self, channel: grpc.Channel, metadata: Sequence[tuple[str, str]]) -> None:
        self._channel = channel
        self._metadata = tuple(metadata)

    def close(self) -> None:
        """See grpc.Channel."""
        self._channel.close()

    def unary_unary(self, *how: Any, **more: Any) -> Callable[..., Any]:
        """See grpc.Channel."""
        return self._keyed(self._channel.unary_unary(*how, **more))

    def unary_stream(self, *how: Any, **more: Any) -> Callable[..., Any]:
        """See grpc.Channel."""
        return self._keyed(self._channel.unary_stream(*how, **more))

    def _keyed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def keyed(request: Any, *, metadata: Sequence[tuple[str, str]] = (), **options: Any) -> Any:
            return call(request, metadata=(*metadata, *self._metadata), **options)

        return keyed


class AdminClient:
    """Blocking client of AdminService at a gateway's or scheduler's admin listener. Context manager."""

    def __init__(self, target: str, *, credentials: Credentials = _NO_CREDENTIALS) -> None:
        self.target = target
        make = blocking_channel(credentials, [("grpc.max_receive_message_length", rpc.INTERNAL_MESSAGE_BYTES)])
        self._channel = _KeyedChannel(make(target), credentials.metadata())
        self._stub = admin_pb2_grpc.AdminServiceStub(self._channel)  # type: ignore[no-untyped-call]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._channel.close()

    def steps(self, *, since: int = 0, follow: bool = False, tables: bool = False) -> Iterator[admin_pb2.StepReport]:
        """Steps from `since` on (0 = the oldest held), oldest first; with `follow`, continues as further steps complete."""
        request = admin_pb2.WatchSchedulerRequest(since_step=since, follow=follow, tables=tables)
        call = self._stub.WatchScheduler(request)
        try:
            with typed_errors(self.target, ADMIN):
                yield from call
        finally:
            call.cancel()

    def set_policy(self, settings: Sequence[str]) -> admin_pb2.SetPolicyResponse:
        """Change policy keys ("KEY=VALUE") from the next step on.

        Raises InvalidArgument, changing none, if one cannot change.
        """
        request = admin_pb2.SetPolicyRequest(settings=settings)
        with typed_errors(self.target, ADMIN):
            return self._stub.SetPolicy(request, timeout=_UNARY_TIMEOUT_S)  # type: ignore[no-any-return]

    def list_adapters(self) -> Sequence[admin_pb2.Adapter]:
        """The adapters that requests may name."""
        with typed_errors(self.target, ADMIN):
            answer = self._stub.ListAdapters(admin_pb2.ListAdaptersRequest(), timeout=_UNARY_TIMEOUT_S)
            return answer.adapters  # type: ignore[no-any-return]

    def load_adapter(self, name: str, path: str) -> admin_pb2.Adapter:
        """Load an adapter into every worker. `path` is resolved on the workers.

        Raises the workers' error if it does not fit.
        """
        request = admin_pb2.LoadAdapterRequest(name=name, path=path)
        with typed_errors(self.target, ADMIN):
            return self._stub.LoadAdapter(request, timeout=_LOAD_TIMEOUT_S).adapter  # type: ignore[no-any-return]

    def unload_adapter(self, name: str) -> None:
        """Unload an adapter. Raises NotFound, or FailedPrecondition while requests use it."""
        with typed_errors(self.target, ADMIN):
            self._stub.UnloadAdapter(admin_pb2.UnloadAdapterRequest(name=name), timeout=_UNARY_TIMEOUT_S)

    def explain(self, request_id: str, *, tenant: str = "", needs: bool = False) -> admin_pb2.ExplainRequestResponse:
        """Where a request's time went; `needs` adds what would have ended each wait. Raises NotFound for an unknown id."""
        request = admin_pb2.ExplainRequestRequest(request_id=request_id, tenant=tenant, needs=needs)
        with typed_errors(self.target, ADMIN):
            return self._stub.ExplainRequest(request, timeout=_UNARY_TIMEOUT_S)  # type: ignore[no-any-return]

    def recording(
        self, *, since: int = 0, follow: bool = False, for_s: float | None = None
    ) -> Iterator[admin_pb2.DumpRecordingResponse]:
        """Segments of a recording from number `since` on.

        With `follow`, continues with further ones as they complete, forever or for `for_s` seconds.
        """
        call = self._stub.DumpRecording(
            admin_pb2.DumpRecordingRequest(since_segment=since, follow=follow), timeout=for_s if follow else None
        )
        try:
            with typed_errors(self.target, ADMIN):
                yield from call
        except DeadlineExceeded:
            return
        finally:
            call.cancel()

    def load(self) -> admin_pb2.GetLoadResponse:
        """Load of the scheduler: queues, free blocks, throughput."""
        with typed_errors(self.target, ADMIN):
            return self._stub.GetLoad(admin_pb2.GetLoadRequest(), timeout=_UNARY_TIMEOUT_S)  # type: ignore[no-any-return]

    def workers(self) -> Sequence[admin_pb2.Worker]:
        """The workers, by dp rank."""
        with typed_errors(self.target, ADMIN):
            answer = self._stub.ListWorkers(admin_pb2.ListWorkersRequest(), timeout=_UNARY_TIMEOUT_S)
            return answer.workers  # type: ignore[no-any-return]

    def drain(self, *, undo: bool = False, worker: str = "", move: bool = False) -> int:
        """Stop accepting requests, or accept them again with `undo`; returns the number of unfinished requests.

        `worker`: only start no more requests on the worker at that address; returns the number of those that run there.
        `move`: they continue on other workers.
        """
        request = admin_pb2.DrainRequest(undo=undo, worker=worker, move=move)
        with typed_errors(self.target, ADMIN):
            answer = self._stub.Drain(request, timeout=_UNARY_TIMEOUT_S)
            return int(answer.num_requests)

    def blocks(self, *, memory: bool = False, cached: bool = False) -> admin_pb2.GetBlocksResponse:
        """Pools, tables and reference counts at one instant.

        `memory` adds utilization, `cached` the names of cached blocks.
        """
        request = admin_pb2.GetBlocksRequest(memory=memory, cached=cached)
        with typed_errors(self.target, ADMIN):
            return self._stub.GetBlocks(request, timeout=_UNARY_TIMEOUT_S)  # type: ignore[no-any-return]

    def requests(self, *, at_most: int = 0) -> admin_pb2.ListRequestsResponse:
        """Unfinished requests, and the reasons of those that wait; at most `at_most` are listed, 0 = 1,000."""
        request = admin_pb2.ListRequestsRequest(max_requests=at_most)
        with typed_errors(self.target, ADMIN):
            return self._stub.ListRequests(request, timeout=_UNARY_TIMEOUT_S)  # type: ignore[no-any-return]


# --- as JSON values ------------------------------------------------------------------------------------------------


def step_json(report: admin_pb2.StepReport, *, tables: bool) -> dict[str, Any]:
    """One step as JSON values; `tables` adds its block tables."""
    values: dict[str, Any] = {
        "step": report.step,
        "epoch": report.epoch,
        "lane": report.lane,
        "policy": report.policy,
        "scheduled": [_scheduled_json(group) for group in report.scheduled],
        "swap_in": _pairs(report.swap_in),
        "swap_out": _pairs(report.swap_out),
        "copy": _pairs(report.copy),
        "preempted": [[item.id, item.mode] for item in report.preempted],
        "queues": _fields_json(report.queues),
        "free": [report.free.gpu, report.free.cpu],
        "sampled": {item.sequence: list(item.tokens) for item in report.sampled},
        "computed_tokens": report.computed_tokens,
        "times": _fields_json(report.times),
    }
    if tables:
        values["tables"] = _tables_json(report.tables)
    rare = {name: getattr(report, name) for name in ("error", "granted_steps", "is_repeat", "revoked")}
    return values | {name: value for name, value in rare.items() if value}


def _fields_json(message: Any) -> dict[str, int]:
    return {field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields}


def blocks_json(response: admin_pb2.GetBlocksResponse) -> dict[str, Any]:
    """Block pools, tables and reference counts as JSON values; with states also how many blocks of each table hold them."""
    values = {
        "block_size": response.block_size,
        "gpu": _fields_json(response.gpu),
        "cpu": _fields_json(response.cpu),
        "tables": _tables_json(response.tables),
        "refs": {name: response.refs[name] for name in sorted(response.refs, key=_block_order)},
    }
    return values | ({"num_state_blocks": response.num_state_blocks} if response.num_state_blocks else {})


def _scheduled_json(group: admin_pb2.ScheduledGroup) -> dict[str, Any]:
    return {
        "id": group.id,
        "seqs": list(group.seqs),
        "tokens": group.tokens,
        "computed_before": group.computed_before,
        "prefill": group.prefill,
    }


def _pairs(pairs: Any) -> list[list[int]]:
    return [[pair.src, pair.dst] for pair in pairs]


def _tables_json(tables: Any) -> dict[str, list[str]]:
    return {table.sequence: list(table.blocks) for table in tables}


def _block_order(name: str) -> tuple[str, int]:
    """Sort key that puts "g3" before "g10"."""
    return name[:1], int(name[1:]) if name[1:].isdigit() else -1


# --- as text -------------------------------------------------------------------------------------------------------


def step_line(report: admin_pb2.StepReport) -> str:
    """The step in one line of text."""
    num_prefill = sum(group.prefill for group in report.scheduled)
    num_tokens = sum(group.tokens for group in report.scheduled)
    num_sampled = sum(len(item.tokens) for item in report.sampled)
    line = (
        f"step {report.step}  {num_tokens} tokens of {len(report.scheduled)} requests ({num_prefill} prefill)  "
        f"-> {num_sampled} sampled  waiting {report.queues.waiting} running {report.queues.running}  "
        f"free {report.free.gpu}"
    )
    if report.preempted:
        line += f"  preempted {len(report.preempted)}"
    return f"{line}  FAILED: {report.error}" if report.error else line


def blocks_text(response: admin_pb2.GetBlocksResponse) -> str:
    """Pools and block tables as text."""
    lines = [f"block size {response.block_size} tokens"]
    for name, pool in (("gpu", response.gpu), ("cpu", response.cpu)):
        lines.append(f"{name}: {pool.total} blocks, {pool.free} free, {pool.cached} of these cached")
    shared = {name: count for name, count in response.refs.items() if count > 1}
    for table in response.tables:
        of_states, of_tokens = table.blocks[: response.num_state_blocks], table.blocks[response.num_state_blocks :]
        states = f"states {' '.join(of_states)}, tokens " if of_states else ""
        lines.append(f"{table.sequence}: {states}{' '.join(of_tokens)}")
    if shared:
        names = sorted(shared, key=_block_order)
        lines.append("shared: " + ", ".join(f"{name} by {shared[name]}" for name in names))
    return "\n".join(lines)
