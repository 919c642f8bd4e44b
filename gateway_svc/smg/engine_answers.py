"""Events of a generation as the contract's messages. Pure."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from gateway_svc.generating.generation import Event
from protos.common.v1 import common_pb2
from protos.inference.v1 import inference_pb2
from protos.routers.v1 import vllm_engine_pb2 as pb


@dataclass(slots=True)
class _Output:
    """One output so far. `deltas`: kept only where there are no chunks."""

    num_tokens: int = 0
    deltas: list[inference_pb2.Delta] = field(default_factory=list)
    finished: inference_pb2.Finished | None = None


class EngineAnswer:
    """Makes the messages of one answer: chunks, if it streams, then a Complete for each output, once usage is known."""

    def __init__(self, prompt: Sequence[int], num_outputs: int, *, stream: bool) -> None:
        self._prompt = prompt
        self._stream = stream
        self._outputs = [_Output() for _ in range(num_outputs)]
        self._prompt_logprobs: pb.InputLogProbs | None = None

    def take(self, events: Iterable[Event]) -> Iterator[pb.GenerateResponse]:
        """The messages of new events."""
        for event in events:
            if isinstance(event, inference_pb2.Delta):
                yield from self._take_delta(event)
            elif isinstance(event, inference_pb2.PromptLogprobs):
                self._prompt_logprobs = _input_logprobs(event, self._prompt)
            elif isinstance(event, inference_pb2.Finished):
                self._outputs[event.choice].finished = event
            elif isinstance(event, inference_pb2.Usage):
                for number, output in enumerate(self._outputs):
                    yield pb.GenerateResponse(complete=self._complete(number, output, event))

    def _take_delta(self, delta: inference_pb2.Delta) -> Iterator[pb.GenerateResponse]:
        output = self._outputs[delta.choice]
        output.num_tokens += len(delta.token_ids)
        if not self._stream:
            output.deltas.append(delta)
        elif delta.token_ids:
            chunk = pb.GenerateStreamChunk(
                token_ids=delta.token_ids,
                prompt_tokens=len(self._prompt),
                completion_tokens=len(delta.token_ids),
                output_logprobs=_output_logprobs([delta]),
                index=delta.choice,
            )
            yield pb.GenerateResponse(chunk=chunk)

    def _complete(self, number: int, output: _Output, usage: inference_pb2.Usage) -> pb.GenerateComplete:
        assert output.finished is not None
        finished = output.finished
        complete = pb.GenerateComplete(
            output_ids=[token for delta in output.deltas for token in delta.token_ids],
            finish_reason="length" if finished.reason == common_pb2.FINISH_REASON_LENGTH else "stop",
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=output.num_tokens,
            cached_tokens=usage.cached_prompt_tokens,
            output_logprobs=_output_logprobs(output.deltas),
            input_logprobs=self._prompt_logprobs,
            index=number,
            spec_accepted_tokens=usage.accepted_draft_tokens,
            spec_draft_tokens=usage.accepted_draft_tokens + usage.rejected_draft_tokens,
        )
        match finished.WhichOneof("stop_match"):
            case "stop_string":
                complete.matched_stop_str = finished.stop_string
            case "stop_token_id":
                complete.matched_token_id = finished.stop_token_id
        return complete


def _output_logprobs(deltas: Sequence[inference_pb2.Delta]) -> pb.OutputLogProbs | None:
    """None if none were requested."""
    if not any(delta.logprobs for delta in deltas):
        return None
    return pb.OutputLogProbs(
        token_logprobs=[value for delta in deltas for value in delta.logprobs],
        token_ids=[token for delta in deltas for token in delta.token_ids],
        top_logprobs=[_top(top) for delta in deltas for top in delta.top_logprobs],
    )


def _input_logprobs(told: inference_pb2.PromptLogprobs, prompt: Sequence[int]) -> pb.InputLogProbs:
    """Those before `start_index` have no value."""
    unknown = [pb.InputTokenLogProb() for _ in range(told.start_index)]
    known = [pb.InputTokenLogProb(value=value) for value in told.logprobs]
    tops = [pb.TopLogProbs() for _ in range(told.start_index)] if told.top_logprobs else []
    return pb.InputLogProbs(
        token_logprobs=unknown + known,
        token_ids=[*prompt[: told.start_index], *told.token_ids],
        top_logprobs=tops + [_top(top) for top in told.top_logprobs],
    )


def _top(top: inference_pb2.TopLogprobs) -> pb.TopLogProbs:
    return pb.TopLogProbs(values=top.logprobs, token_ids=top.token_ids)
