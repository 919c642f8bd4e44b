"""The live requests of an engine in this process, as steps change them."""

from collections.abc import Callable, Iterable, Iterator

from quire.client.outputs import RequestOutput
from quire.offline.in_process_request import InProcessRequest
from scheduler_svc.core.plan import EndedSequence, SequenceTokens
from scheduler_svc.requests.choice_output import Ending
from scheduler_svc.requests.sequence_errors import sequence_error
from scheduler_svc.worker_values import PromptRun, TokenExtras
from svc_common.errors import QuireError


class InProcessRequests:
    """Owner of the live requests, by id; as `settling.StepRequests` it takes what steps give them.

    `stop_at(name, num_tokens)` ends a sequence in the core. `step_error`: why the current step could not run, if so.
    """

    def __init__(self, stop_at: Callable[[str, int], object]) -> None:
        self._stop_at = stop_at
        self._live: dict[str, InProcessRequest] = {}
        self._reported: dict[str, RequestOutput] = {}
        self._with_tokens: dict[str, None] = {}
        self.step_error: QuireError | None = None

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._live

    def __iter__(self) -> Iterator[str]:
        return iter(self._live)

    def __getitem__(self, request_id: str) -> InProcessRequest:
        return self._live[request_id]

    @property
    def has_news(self) -> bool:
        """True if there are live requests, or outputs to report."""
        return bool(self._live or self._reported)

    def add(self, request_id: str, live: InProcessRequest) -> None:
        """Add a request that is in the core."""
        self._live[request_id] = live

    def abort(self, request_id: str) -> None:
        """End a request that was removed from the core."""
        live = self._live.pop(request_id)
        live.abort()
        self._reported[request_id] = live.output

    def forget(self, request_ids: Iterable[str]) -> None:
        """Do not report these requests."""
        for request_id in request_ids:
            self._reported.pop(request_id, None)

    def take_reported(self) -> list[RequestOutput]:
        """Outputs that are new since the last call; those of finished requests for the last time."""
        reported, self._reported = list(self._reported.values()), {}
        return reported

    # --- what a step gave (StepRequests) ---------------------------------------------------------------------------

    def preempted(self, core_id: str, step: int, mode: str) -> None:
        """See StepRequests. Counted by the core."""

    def scheduled(self, core_id: str, step: int, cached_prompt_tokens: int, worker_id: str) -> None:
        """See StepRequests. Counted by the core."""

    def drafts_verified(self, core_id: str, num_accepted: int, num_rejected: int) -> None:
        """See StepRequests. Not counted."""

    def put_tokens(self, run: SequenceTokens, step: int, extras: TokenExtras | None) -> None:
        """See StepRequests."""
        self._with_tokens[run.request_id] = None
        live = self._live[run.request_id]
        wants_tops = live.submission.num_top_logprobs > 0
        live.made.put(run, extras, logprobs=live.submission.sampling.logprobs, tops=wants_tops)

    def put_prompt(self, core_id: str, run: PromptRun) -> None:
        """See StepRequests."""
        prompt = self._live[core_id].made.prompt
        if prompt is not None:
            prompt.put(run)

    def put_embedding(self, core_id: str, values: bytes) -> None:
        """See StepRequests."""
        self._live[core_id].made.embedding = values

    def sequence_ended(self, ended: EndedSequence) -> None:
        """See StepRequests. No-op if the request ended by a stop string or with another sequence."""
        live = self._live.get(ended.request_id)
        if live is None:
            return
        if ended.error is not None:
            del self._live[ended.request_id]
            live.fail(self.step_error or sequence_error(ended.error, live.submission))
            self._reported[ended.request_id] = live.output
        elif live.made.ranked:
            if ended.request_done:
                live.made.rank(live.request)
                self._report(ended.request_id)
        else:
            choice = live.made.choices[ended.index]
            choice.ending = choice.ending or Ending.of(ended.status, ended.stop_token_id)
            self._report(ended.request_id)

    def deliver(self) -> None:
        """Report the requests that got tokens; ranked ones only at their end."""
        for request_id in self._with_tokens:
            if request_id in self._live and not self._live[request_id].made.ranked:
                self._report(request_id)
        self._with_tokens.clear()

    def _report(self, request_id: str) -> None:
        """Report a request's new output; a stop string ends its choice, and the last choice ends the request."""
        live = self._live[request_id]
        for choice, num_tokens in live.deliver():
            if not live.made.ranked:
                self._stop_at(f"{request_id}/{choice}", num_tokens)
        self._reported[request_id] = live.output
        if live.is_complete:
            del self._live[request_id]
            live.finish()
