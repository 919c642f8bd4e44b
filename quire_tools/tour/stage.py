"""The stack that a stop drives and reads: started for it, or a running one if the stop needs no special options."""

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
"""Long, since a busy machine should not fail a stop."""
EXACT = ("--device", "cpu", "--dtype", "float32")
"""Worker options with which equal requests give equal tokens, whatever else is in the batch and on any machine."""
GATE = "gate"
"""Id of the request that fills the batch in `TourStack.at_once`."""


@dataclass(frozen=True, slots=True)
class TourRequest:
    """A request to submit. Without tenants, its `id` is both the public id and the one in steps and tables."""

    id: str
    prompt: Prompt
    params: SamplingParams
    options: RequestOptions = field(default_factory=RequestOptions)


@dataclass(frozen=True, slots=True)
class RunningStack:
    """A stack that is already running: HOST:PORT of its gRPC API and its admin API, and credentials for them."""

    grpc_address: str
    admin_address: str
    credentials: Credentials = field(default_factory=Credentials)


@dataclass(frozen=True, slots=True)
class Milestone:
    """An event of a stack's startup, `at_s` seconds after its beginning."""

    at_s: float
    what: str


class _Start:
    """Records the milestones of a startup, each when first reached."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()
        self.milestones: list[Milestone] = []

    def note(self, what: str) -> None:
        """Record a milestone, unless it was recorded before."""
        if all(milestone.what != what for milestone in self.milestones):
            self.milestones.append(Milestone(time.monotonic() - self._began_s, what))


class TourStack:
    """A stack to drive and read. `since`: the stop's first step. `local`: None if the stack was already running."""

    def __init__(
        self,
        client: Client,
        admin: AdminClient,
        local: LocalStack | None,
        receiver: OtlpReceiver | None,
        since: int,
        milestones: Sequence[Milestone] = (),
    ) -> None:
        """`milestones`: of the startup, if the stack was started for the stop."""
        self.client = client
        self.admin = admin
        self.milestones = milestones
        self._local = local
        self._receiver = receiver
        self._since = since

    @property
    def local(self) -> LocalStack:
        """The stack's processes. Raises FailedPrecondition if it was not started by the tour."""
        if self._local is None:
            raise FailedPrecondition("this stack was running before the tour: its processes are not the tour's")
        return self._local

    @property
    def records(self) -> OtlpReceiver:
        """Spans of the services. Raises FailedPrecondition unless the stack is `traced`."""
        if self._receiver is None:
            raise FailedPrecondition("this stack's spans go elsewhere: ask for a traced one")
        return self._receiver

    # --- driving --------------------------------------------------------------------------------------------------

    def start(self, request: TourRequest) -> Stream:
        """Submit one request and return at once; iterate over the stream for its deltas."""
        return self.client.generate_stream(
            request.prompt, request.params, options=request.options, request_id=request.id
        )

    def together(self, requests: Sequence[TourRequest], *, keep_errors: bool = False) -> list[RequestOutput]:
        """Submit all requests in order without waiting in between; return their outputs, in order, when all have ended.

        Raises the first error and ends the other requests; with `keep_errors`, errors are in the outputs'
        `error` instead.
        """
        with ExitStack() as opened:
            streams = [opened.enter_context(self.start(request)) for request in requests]
            return [ended(stream, keep_error=keep_errors) for stream in streams]

    def at_once(
        self, requests: Sequence[TourRequest], *, gate_stays: bool = False, keep_errors: bool = False
    ) -> list[RequestOutput]:
        """`together`, but no step is planned before all of them wait, in order: a request GATE fills the batch meanwhile.

        GATE appears in a few steps at the beginning and is then ended; with `gate_stays` it decodes until
        the others have ended.
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
            return [ended(stream, keep_error=keep_errors) for stream in streams]

    def _start_next(self, request: TourRequest, opened: ExitStack, number: int) -> Stream:
        """Start request number `number` and wait until it is in the queue."""
        stream = opened.enter_context(self.start(request))
        self.wait(lambda: self.admin.load().num_waiting >= number, f"{request.id} to wait in the queue")
        return stream

    def _set(self, key: str, value: str) -> str:
        """Set a policy key and return its previous value."""
        changes = self.admin.set_policy([f"{key}={value}"]).changes
        return next((change.old_value for change in changes if change.key == key), value)

    def wait(self, condition: Callable[[], object], what: str, timeout_s: float = _QUEUED_TIMEOUT_S) -> None:
        """Wait until the condition holds. Raises DeadlineExceeded naming `what`."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                raise DeadlineExceeded(f"waited {timeout_s:g} s for {what}", reason="TOUR_TIMEOUT")
            time.sleep(_POLL_S)

    # --- reading --------------------------------------------------------------------------------------------------

    def steps(self, *, tables: bool = False) -> list[dict[str, Any]]:
        """The stop's steps so far, in the format of `quire steps --json`.

        With `tables`, in that of `quire steps --json --tables`.
        """
        return [step_json(report, tables=tables) for report in self.admin.steps(since=self._since, tables=tables)]

    def why(self, request_id: str, *, needs: bool = False) -> dict[str, Any]:
        """A request's timeline, in the format of `quire why --json`."""
        return why_json(self.admin.explain(request_id, needs=needs))

    def blocks(self) -> dict[str, Any]:
        """Pools, tables and reference counts at this instant, in the format of `quire blocks --json`."""
        return blocks_json(self.admin.blocks())

    def cached_blocks(self) -> list[str]:
        """Unreferenced device blocks with a reusable prefix, next to be evicted first; named as in tables."""
        return list(self.admin.blocks(cached=True).cached_blocks)

    def memory_after(self) -> tuple[int, dict[str, Any]]:
        """Memory use at this instant, and the step after which it was read.

        The format is that of `quire blocks --memory --json`.
        """
        response = self.admin.blocks(memory=True)
        return response.step, memory_json(response)


class Stage:
    """Provides one stop with stacks and saves their steps.

    `steps_folder`: folder for the steps of each stack, NAME.json, NAME-2.json and so on. `progress(text)`:
    a context that shows the text while the stop waits.
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
        """A stack with these StackOptions fields; the running one, if any, when no options and no tracing are wanted.

        `traced`: its spans are collected in `TourStack.records`. `tables`: its steps are saved with their
        block tables.
        """
        with ExitStack() as opened:
            if self._running is not None and not traced and not options:
                stack = _attached(opened, self._running)
            else:
                stack = self._started(opened, options, traced=traced)
            try:
                yield stack
            except BaseException:
                with suppress(QuireError):  # report the original error, not that the stack is gone
                    self.keep_steps(stack.steps, tables=tables)
                raise
            self.keep_steps(stack.steps, tables=tables)

    def keep_steps(self, read: Callable[..., list[dict[str, Any]]], *, tables: bool = False) -> None:
        """Write the steps from `read(tables=...)` to the stop's next file, one per line; no-op without folder."""
        if self._steps_folder is None:
            return
        self._num_written += 1
        suffix = "" if self._num_written == 1 else f"-{self._num_written}"
        lines = "".join(f"{json.dumps(step)}\n" for step in read(tables=tables))
        (self._steps_folder / f"{self._name}{suffix}.json").write_text(lines, encoding="utf-8")

    def waiting(self, text: str) -> AbstractContextManager[object]:
        """A context that shows that the stop is busy with `text`."""
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
    """Attach to a running stack; steps count from its next one on."""
    client = opened.enter_context(Client(running.grpc_address, credentials=running.credentials))
    admin = opened.enter_context(AdminClient(running.admin_address, credentials=running.credentials))
    since = admin.blocks().step + 1
    return TourStack(client, admin, None, None, since)


def _gate(places: int) -> TourRequest:
    """A request that runs until it is cancelled."""
    return TourRequest(GATE, [7, 8], SamplingParams(n=places, max_tokens=1_000, ignore_eos=True, temperature=0.0))


def ended(stream: Stream, *, keep_error: bool = False) -> RequestOutput:
    """Read a stream to its end and return its output. Its error is raised, or kept in the output."""
    try:
        for _ in stream:
            pass
    except QuireError as error:
        if not keep_error:
            raise
        stream.result.error = error
    return stream.result
