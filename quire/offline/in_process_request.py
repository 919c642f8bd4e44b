"""One request of the engine in this process: its output so far, and its conversion to what programs read.

Built from the services' parts: outputs as the scheduler keeps them, events as a gateway makes them of
tokens.
"""

from collections.abc import Iterator

from gateway_svc.generating.choice_events import ChoiceEvent, ChoiceEvents
from gateway_svc.generating.vectors import as_asked
from gateway_svc.requests.request_update import ChoiceUpdate
from gateway_svc.requests.token_runs import ChoiceTokens, public_prompt_logprobs
from protos.common.v1 import common_pb2
from protos.inference.v1 import inference_pb2 as pb
from quire.client.messages import EventMerger, Prompt
from quire.client.outputs import RequestOutput
from scheduler_svc.core.request import Request
from scheduler_svc.gateways.output_messages import finished_message, prompt_logprobs_message
from scheduler_svc.requests.choice_output import ChoiceOutput
from scheduler_svc.requests.submission import Submission
from svc_common import wire_arrays
from svc_common.errors import QuireError


class InProcessRequest:
    """Owns one live request's output. `request`: the core's request. `made`: output so far. `normalize`:
    scale vectors to length 1."""

    def __init__(
        self,
        submission: Submission,
        request: Request,
        prompt: Prompt | None,
        choices: list[ChoiceEvents],
        model: str,
        *,
        normalize: bool = False,
    ) -> None:
        self.submission, self.request = submission, request
        self.made = submission.new_output()
        self._choices = choices
        self._normalize = normalize
        self._cursors = [0] * len(choices)
        self._merger = EventMerger(request.request_id, prompt)
        output = self._merger.output
        output.prompt_token_ids = submission.prompt.tolist()
        output.num_prompt_tokens = len(submission.prompt)
        output.seed, output.model = submission.sampling.seed, model

    @property
    def output(self) -> RequestOutput:
        """The output as the program sees it."""
        return self._merger.output

    @property
    def is_complete(self) -> bool:
        """True once all choices have ended."""
        return all(choice.finished is not None for choice in self._choices)

    def deliver(self) -> Iterator[tuple[int, int]]:
        """Detokenize new output; yield the choices ended by a stop string now, as (choice, number of tokens that count)."""
        for number, choice in enumerate(self.made.choices):
            events = self._choices[number]
            was_over = events.finished is not None
            for event in events.take(self._update(number, choice)):
                self._merge(event)
            if events.was_stopped_by_string and not was_over:
                yield number, events.num_output_tokens

    def finish(self) -> None:
        """Complete the output: prompt log probabilities, embedding and counts."""
        output = self.output
        if self.made.prompt is not None:
            message = prompt_logprobs_message(0, self.made.prompt)
            prompt = wire_arrays.pack(self.submission.prompt)
            self._merger.add(pb.GenerateEvent(prompt_logprobs=public_prompt_logprobs(message, prompt)))
        if self.made.embedding:
            vector = wire_arrays.unpack(self.made.embedding, "embedding", wire_arrays.F32)
            output.embedding = as_asked(vector, normalize=self._normalize).tolist()
            output.outputs = []
        self._account()

    def abort(self) -> None:
        """End the request as aborted, keeping the output that its choices have."""
        for choice in self.made.choices:
            choice.ending = None
        for _ in self.deliver():
            pass
        for number, events in enumerate(self._choices):
            if events.finished is None:
                self._merge(pb.Finished(choice=number, reason=common_pb2.FINISH_REASON_CANCELLED))
        self._account()

    def fail(self, error: QuireError) -> None:
        """End the request with an error and without finish reason."""
        self.output.error = error
        self._account()

    def _update(self, number: int, choice: ChoiceOutput) -> ChoiceUpdate:
        start, self._cursors[number] = self._cursors[number], len(choice.tokens)
        tops = [
            pb.TopLogprobs(token_ids=[token for token, _ in top], logprobs=[value for _, value in top])
            for top in choice.tops[start:]
        ]
        run = ChoiceTokens(start, choice.tokens[start:], choice.logprobs[start:], tops)
        end = None if choice.ending is None else finished_message(0, number, choice)
        return ChoiceUpdate(run, finished=end)

    def _merge(self, event: ChoiceEvent) -> None:
        match event:
            case pb.Delta():
                self._merger.add(pb.GenerateEvent(delta=event))
            case pb.ReasoningDelta():
                self._merger.add(pb.GenerateEvent(reasoning_delta=event))
            case pb.ToolCallDelta():
                self._merger.add(pb.GenerateEvent(tool_call_delta=event))
            case pb.Finished():
                self._merger.add(pb.GenerateEvent(finished=event))

    def _account(self) -> None:
        output = self.output
        output.finished = True
        output.num_reasoning_tokens = sum(events.num_reasoning_tokens for events in self._choices)
        output.num_cached_tokens = self.request.num_cached_tokens or 0
        output.num_preemptions = sum(sequence.num_preemptions for sequence in self.request.sequences)
