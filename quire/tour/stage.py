"""The stack that a stop drives and reads: started for it, or a running one where the stop wants nothing special of it."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.client.connections import Credentials
from quire.client.messages import Prompt
from quire.client.outputs import RequestOutput
from quire.client.sampling_params import SamplingParams
from quire.client.streams import Stream
from quire.client.sync_client import Client, RequestOptions
from quire.local_stack.otlp_receiver import OtlpReceiver
from quire.local_stack.stack import LocalStack
from quire.local_stack.stack_options import StackOptions
from quire.operators.admin import AdminClient, blocks_json, step_json
from quire.operators.memory import memory_json
from quire.operators.why import why_json
from svc_common.errors import DeadlineExceeded, FailedPrecondition, QuireError

_POLL_S = 0.005
_QUEUED_TIMEOUT_S = 20.0
_START_TIMEOUT_S = 300.0
"""A busy machine is no reason for a verdict."""
EXACT = ("--device", "cpu", "--dtype", "float32")
"""Options of a worker where equal requests are to make equal tokens, whatever runs beside them and whatever machine this is."""
GATE = "gate"
"""Id of the request that holds the door in `TourStack.at_once`."""


@dataclass(frozen=True, slots=True)
class Request:
    """A request to submit. Its `id` is the public one and, as no tenants are served here, the one in steps and tables."""

    id: str
    prompt: Prompt
    params: SamplingParams
    options: RequestOptions = field(default_factory=RequestOptions)


@dataclass(frozen=True, slots=True)
class RunningStack:
    """A stack that runs already: the gateway's gRPC door and the operators' API, HOST:PORT each, and what lets in there."""

    grpc_address: str
    admin_address: str
    credentials: Credentials = field(default_factory=Credentials)


@dataclass(frozen=True, slots=True)
class Milestone:
    """Something that a start came to: seconds after its beginning, and what."""

    at_s: float
    what: str


class _Start:
    """Notes the milestones of a start, each when it is reached first."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()
        self.milestones: list[Milestone] = []

    def note(self, what: str) -> None:
        """It is there now."""
        if all(milestone.what != what for milestone in self.milestones):
            self.milestones.append(Milestone(time.monotonic() - self._began_s, what))


class TourStack:
    """A stack to drive and to read. `since`: first step that is the stop's. `local`: None where it is not the stop's own."""

    def __init__(
        self,
        client: Client,
        admin: AdminClient,
        local: LocalStack | None,
        receiver: OtlpReceiver | None,
        since: int,
        milestones: Sequence[Milestone] = (),
    ) -> None:
        """`milestones`: how its start went, where it is the stop's own."""
        self.client = client
        self.admin = admin
        self.milestones = milestones
        self._local = local
        self._receiver = receiver
        self._since = since

    @property
    def local(self) -> LocalStack:
        """Its processes; FailedPrecondition where the stack is somebody else's."""
        if self._local is None:
            raise FailedPrecondition("this stack was running before the tour: its processes are not the tour's")
        return self._local

    @property
    def records(self) -> OtlpReceiver:
        """Spans of the services; FailedPrecondition where they were not asked for (`traced`)."""
        if self._receiver is None:
            raise FailedPrecondition("this stack's spans go elsewhere: ask for a traced one")
        return self._receiver

    # --- driving --------------------------------------------------------------------------------------------------

    def start(self, request: Request) -> Stream:
        """Submits one request and returns at once; iterate over the stream for its deltas."""
        return self.client.generate_stream(
            request.prompt, request.params, options=request.options, request_id=request.id
        )

    def together(self, requests: Sequence[Request], *, keep_errors: bool = False) -> list[RequestOutput]:
        """Submits all, in order, without waiting for one another; returns when all have ended, their outputs in the same order.

        The first error is raised and the others are ended; with `keep_errors` it is in its output's `error` instead.
        """
        with ExitStack() as opened:
            streams = [opened.enter_context(self.start(request)) for request in requests]
            return [_whole(stream, keep_error=keep_errors) for stream in streams]

    def at_once(
        self, requests: Sequence[Request], *, gate_stays: bool = False, keep_errors: bool = False
    ) -> list[RequestOutput]:
        """`together`, but no step is planned before all of them wait, in their order: a request GATE holds every place meanwhile.

        It shows in a few steps at the beginning and is ended then; with `gate_stays` it decodes on until the others have ended.
        """
        places = max(request.params.best_of or request.params.n for request in requests)
        with ExitStack() as opened:
            gate = opened.enter_context(self.start(_gate(places)))
            reading = iter(gate)
            next(reading)
            before = self._set("max_num_seqs", str(places))
            streams = [self._start_next(request, opened, number) for number, request in enumerate(requests, 1)]
            self._set("max_num_seqs", before)
            if not gate_stays:
                gate.cancel()
            return [_whole(stream, keep_error=keep_errors) for stream in streams]

    def _start_next(self, request: Request, opened: ExitStack, number: int) -> Stream:
        """Starts the `number`th one and waits until it is in the queue."""
        stream = opened.enter_context(self.start(request))
        self.wait(lambda: self.admin.load().num_waiting >= number, f"{request.id} to wait in the queue")
        return stream

    def _set(self, key: str, value: str) -> str:
        """Sets a key of the policy and returns what it was."""
        changes = self.admin.set_policy([f"{key}={value}"]).changes
        return next((change.old_value for change in changes if change.key == key), value)

    def wait(self, condition: Callable[[], object], what: str, timeout_s: float = _QUEUED_TIMEOUT_S) -> None:
        """Returns as soon as the condition holds; DeadlineExceeded naming `what` was waited for."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                raise DeadlineExceeded(f"waited {timeout_s:g} s for {what}", reason="TOUR_TIMEOUT")
            time.sleep(_POLL_S)

    # --- reading --------------------------------------------------------------------------------------------------

    def steps(self, *, tables: bool = False) -> list[dict[str, Any]]:
        """The stop's steps so far, as `quire steps --json` (with `tables` as `quire steps --json --tables`) has them."""
        return [step_json(report, tables=tables) for report in self.admin.steps(since=self._since, tables=tables)]

    def why(self, request_id: str, *, needs: bool = False) -> dict[str, Any]:
        """A request's timeline, as `quire why --json` has it."""
        return why_json(self.admin.explain(request_id, needs=needs))

    def blocks(self) -> dict[str, Any]:
        """Pools, tables and reference counts at this instant, as `quire blocks --json` has them."""
        return blocks_json(self.admin.blocks())

    def cached_blocks(self) -> list[str]:
        """Device blocks that nobody holds and that hold a reusable prefix, next to be evicted first; named as in tables."""
        return list(self.admin.blocks(cached=True).cached_blocks)

    def memory_after(self) -> tuple[int, dict[str, Any]]:
        """How well the memory is used at this instant, as `quire blocks --memory --json` has it, and the step it was read after."""
        response = self.admin.blocks(memory=True)
        return response.step, memory_json(response)


class Stage:
    """Where one stop plays: starts its stacks and keeps their steps.

    `steps_folder`: where to write the steps of each stack, NAME.json, NAME-2.json and so on. `progress(text)`: a context in which
    that text says what is waited for.
    """

    def __init__(
        self,
        name: str,
        *,
        running: RunningStack | None = None,
        steps_folder: Path | None = None,
        progress: Callable[[str], AbstractContextManager[object]] = lambda text: nullcontext(),
    ) -> None:
        self._name = name
        self._running = running
        self._steps_folder = steps_folder
        self._progress = progress
        self._num_written = 0

    @contextmanager
    def stack(self, *, traced: bool = False, tables: bool = False, **options: Any) -> Iterator[TourStack]:
        """A stack with these fields of StackOptions; without any, and untraced, the running one if there is one.

        `traced`: its spans come to `TourStack.records`. `tables`: its steps are written with their block tables.
        """
        with ExitStack() as opened:
            if self._running is not None and not traced and not options:
                stack = _attached(opened, self._running)
            else:
                stack = self._started(opened, options, traced=traced)
            try:
                yield stack
            except BaseException:
                with suppress(QuireError):  # what went wrong is the news, not that the stack is gone
                    self.keep_steps(stack.steps, tables=tables)
                raise
            self.keep_steps(stack.steps, tables=tables)

    def keep_steps(self, read: Callable[..., list[dict[str, Any]]], *, tables: bool = False) -> None:
        """Writes what `read(tables=...)` returns into the stop's next file, a step a line; nothing where no folder is wanted."""
        if self._steps_folder is None:
            return
        self._num_written += 1
        suffix = "" if self._num_written == 1 else f"-{self._num_written}"
        lines = "".join(f"{json.dumps(step)}\n" for step in read(tables=tables))
        (self._steps_folder / f"{self._name}{suffix}.json").write_text(lines, encoding="utf-8")

    def waiting(self, text: str) -> AbstractContextManager[object]:
        """A context in which people see that the stop is at something."""
        return self._progress(f"{self._name}: {text}")

    def _started(self, opened: ExitStack, options: dict[str, Any], *, traced: bool) -> TourStack:
        chosen = StackOptions(**options)
        receiver = opened.enter_context(OtlpReceiver()) if traced else None
        if receiver is not None:
            chosen = StackOptions(**options | {"environ": {**chosen.environ, **receiver.environ()}})
        with self.waiting(f"starting a stack, policy {chosen.policy or 'quire'}"):
            start = _Start()
            local = LocalStack(
                chosen,
                start_timeout_s=_START_TIMEOUT_S,
                on_service=lambda service: start.note(f"the {service.name} listens"),
                on_progress=lambda stage, fraction: start.note(f"worker: {stage}"),
            )
            opened.enter_context(local)
            start.note("the gateway serves")
        client = opened.enter_context(Client(local.grpc_address, credentials=local.credentials))
        admin = opened.enter_context(AdminClient(local.admin_address, credentials=local.credentials))
        return TourStack(client, admin, local, receiver, since=0, milestones=start.milestones)


def _attached(opened: ExitStack, running: RunningStack) -> TourStack:
    """Steps count from the next one on."""
    client = opened.enter_context(Client(running.grpc_address, credentials=running.credentials))
    admin = opened.enter_context(AdminClient(running.admin_address, credentials=running.credentials))
    since = admin.blocks().step + 1
    return TourStack(client, admin, None, None, since)


def _gate(places: int) -> Request:
    """Runs until it is cancelled."""
    return Request(GATE, [7, 8], SamplingParams(n=places, max_tokens=1_000, ignore_eos=True, temperature=0.0))


def _whole(stream: Stream, *, keep_error: bool) -> RequestOutput:
    try:
        for _ in stream:
            pass
    except QuireError as error:
        if not keep_error:
            raise
        stream.result.error = error
    return stream.result
