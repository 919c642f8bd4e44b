"""Events of a generation as OpenEngine's events. Pure."""

from collections.abc import Iterator, Sequence
from itertools import zip_longest

from gateway_svc.generating.generation import Event
from gateway_svc.openengine.contract_requests import TokenDetails
from gateway_svc.openengine.engine_errors import engine_error
from gateway_svc.text.text_model import TextModel
from protos.common.v1 import common_pb2
from protos.inference.v1 import inference_pb2
from protos.routers.v1 import openengine_pb2 as pb
from svc_common.errors import QuireError

_NO_TOPS = inference_pb2.TopLogprobs()


class OpenEngineAnswer:
    """Makes the events of one answer; the last one has the usage. `prompt`: the tokens; `text` knows the texts of tokens."""

    def __init__(
        self, request_id: str, prompt: Sequence[int], num_outputs: int, details: TokenDetails, text: TextModel
    ) -> None:
        self._request_id = request_id
        self._prompt = prompt
        self._details = details
        self._text = text
        self._num_open = num_outputs
        self._num_tokens = 0
        self._last: pb.GenerateResponse | None = None

    def take(self, events: Sequence[Event]) -> Iterator[pb.GenerateResponse]:
        """The events of new events. The end of the last output waits for the usage."""
        num_hidden = self._num_hidden(events)
        for event in events:
            if isinstance(event, inference_pb2.Delta):
                yield from self._take_delta(event, num_hidden.get(id(event), 0))
            elif isinstance(event, inference_pb2.PromptLogprobs) and self._details.prompt:
                yield self._response(prompt=self._prompt_output(event))
            elif isinstance(event, inference_pb2.Finished):
                yield from self._take_end(event)
            elif isinstance(event, inference_pb2.Usage) and self._last is not None:
                self._last.usage.CopyFrom(_usage(event))
                yield self._last

    def failure(self, error: QuireError) -> pb.GenerateResponse:
        """The event that ends all outputs with an error."""
        num_prompt = len(self._prompt)
        usage = pb.Usage(
            prompt_tokens=num_prompt, completion_tokens=self._num_tokens, total_tokens=num_prompt + self._num_tokens
        )
        return self._response(error=engine_error(error), usage=usage)

    # --- parts of it -------------------------------------------------------------------------------------------------

    def _response(self, **parts: object) -> pb.GenerateResponse:
        return pb.GenerateResponse(request_id=self._request_id, **parts)  # type: ignore[arg-type]

    def _num_hidden(self, events: Sequence[Event]) -> dict[int, int]:
        """Number of tokens to leave out of deltas, by identity: a stop token that is to be hidden ends its output's last one."""
        last = {event.choice: event for event in events if isinstance(event, inference_pb2.Delta)}
        ends = [event for event in events if isinstance(event, inference_pb2.Finished)]
        hidden = [
            end for end in ends if end.HasField("stop_token_id") and end.stop_token_id in self._details.hidden_stops
        ]
        deltas = [(last[end.choice], end.stop_token_id) for end in hidden if end.choice in last]
        return {id(delta): 1 for delta, stop in deltas if delta.token_ids and delta.token_ids[-1] == stop}

    def _take_delta(self, delta: inference_pb2.Delta, num_hidden: int) -> Iterator[pb.GenerateResponse]:
        num_shown = len(delta.token_ids) - num_hidden
        self._num_tokens += len(delta.token_ids)
        infos = self._infos(delta.token_ids, delta.logprobs, delta.top_logprobs, with_logprobs=self._details.logprobs)
        if num_shown or delta.text:
            token = pb.TokenOutput(output_index=delta.choice, tokens=infos[:num_shown], text=delta.text)
            yield self._response(token=token)

    def _prompt_output(self, told: inference_pb2.PromptLogprobs) -> pb.PromptOutput:
        """Tokens before `start_index` have no values."""
        first = self._infos(self._prompt[: told.start_index], [], [], with_logprobs=False)
        shown = self._details.prompt_logprobs
        return pb.PromptOutput(
            tokens=first + self._infos(told.token_ids, told.logprobs, told.top_logprobs, with_logprobs=shown)
        )

    def _infos(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        tops: Sequence[inference_pb2.TopLogprobs],
        *,
        with_logprobs: bool,
    ) -> list[pb.TokenInfo]:
        values = logprobs if with_logprobs else ()
        return [
            pb.TokenInfo(
                token_id=token_id,
                token=self._named(token_id),
                logprob=value,
                candidates=self._candidates(top or _NO_TOPS),
            )
            for token_id, value, top in zip_longest(token_ids, values, tops)
        ]

    def _candidates(self, top: inference_pb2.TopLogprobs) -> list[pb.LogProb]:
        pairs = zip(top.token_ids, top.logprobs, strict=True)
        return [pb.LogProb(token_id=token_id, logprob=value, token=self._named(token_id)) for token_id, value in pairs]

    def _named(self, token_id: int) -> str:
        return self._text.token_bytes(token_id).decode(errors="replace")

    def _take_end(self, finished: inference_pb2.Finished) -> Iterator[pb.GenerateResponse]:
        is_full = finished.reason == common_pb2.FINISH_REASON_LENGTH
        end = pb.GenerationFinished(
            output_index=finished.choice, reason=pb.FINISH_REASON_LENGTH if is_full else pb.FINISH_REASON_STOP
        )
        match finished.WhichOneof("stop_match"):
            case "stop_string":
                end.stop_match.stop_text = finished.stop_string
            case "stop_token_id" if finished.stop_token_id in self._details.stops:
                end.stop_match.stop_token_id = finished.stop_token_id
            case "stop_token_id":
                end.stop_match.eos_token_id = finished.stop_token_id
        self._num_open -= 1
        if self._num_open:
            yield self._response(finished=end)
        else:
            self._last = self._response(finished=end)


def _usage(usage: inference_pb2.Usage) -> pb.Usage:
    return pb.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        cached_prompt_tokens=usage.cached_prompt_tokens,
    )
