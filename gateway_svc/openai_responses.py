"""Events of generations in OpenAI's JSON shapes: completions and chat, whole or in chunks. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from gateway_svc.bundle import TextModel
from gateway_svc.generation import Event
from protos.common.v1 import common_pb2
from protos.inference.v1 import inference_pb2 as pb

_FINISH_REASONS = {common_pb2.FINISH_REASON_STOP: "stop", common_pb2.FINISH_REASON_LENGTH: "length"}

Json = dict[str, Any]


@dataclass(slots=True)
class _Output:
    """One choice while it grows."""

    texts: list[str] = field(default_factory=list)
    num_chars: int = 0
    tokens: list[Json] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    finished: pb.Finished | None = None
    usage: pb.Usage = field(default_factory=pb.Usage)


class Shape(Protocol):
    """What differs between the two kinds of answers."""

    prefix: str
    whole: str
    chunk: str

    def choice(self, text: str, logprobs: Json | None) -> Json:
        """Fields of a complete choice."""

    def delta(self, text: str, logprobs: Json | None) -> Json:
        """Fields of a choice in a chunk."""

    def opening(self) -> Json | None:
        """Fields of a choice's first chunk, if it has one without text."""

    def logprobs(self, tokens: list[Json], offsets: list[int]) -> Json:
        """Log probabilities; `tokens` have token, logprob and bytes."""


class CompletionShape:
    """/v1/completions."""

    prefix = "cmpl"
    whole = chunk = "text_completion"

    def choice(self, text: str, logprobs: Json | None) -> Json:
        """See Shape."""
        return {"text": text, "logprobs": logprobs}

    delta = choice

    def opening(self) -> Json | None:
        """See Shape."""
        return None

    def logprobs(self, tokens: list[Json], offsets: list[int]) -> Json:
        """See Shape."""
        return {
            "tokens": [token["token"] for token in tokens],
            "token_logprobs": [token["logprob"] for token in tokens],
            "top_logprobs": None,
            "text_offset": offsets,
        }


class ChatShape:
    """/v1/chat/completions."""

    prefix = "chatcmpl"
    whole = "chat.completion"
    chunk = "chat.completion.chunk"

    def choice(self, text: str, logprobs: Json | None) -> Json:
        """See Shape."""
        return {"message": {"role": "assistant", "content": text, "refusal": None}, "logprobs": logprobs}

    def delta(self, text: str, logprobs: Json | None) -> Json:
        """See Shape."""
        return {"delta": {"content": text} if text else {}, "logprobs": logprobs}

    def opening(self) -> Json | None:
        """See Shape."""
        return {"delta": {"role": "assistant", "content": ""}, "logprobs": None}

    def logprobs(self, tokens: list[Json], offsets: list[int]) -> Json:
        """See Shape."""
        return {"content": [{**token, "top_logprobs": []} for token in tokens], "refusal": None}


class Answer:
    """One answer of `num_choices` choices, each fed with the events of its own generation."""

    def __init__(
        self, shape: Shape, request_id: str, model: str, text: TextModel, created_s: int, *, num_choices: int
    ) -> None:
        self._shape = shape
        self._text = text
        self._head = {"id": f"{shape.prefix}-{request_id}", "created": created_s, "model": model}
        self._outputs = [_Output() for _ in range(num_choices)]

    # --- in chunks ---------------------------------------------------------------------------------------------------

    def chunks(self, index: int, events: list[Event]) -> list[Json]:
        """What a choice's new events are in a stream."""
        return [chunk for event in events if (chunk := self._chunk(index, event)) is not None]

    def _chunk(self, index: int, event: Event) -> Json | None:
        output = self._outputs[index]
        if isinstance(event, pb.Started):
            opening = self._shape.opening()
            return None if opening is None else self._chunk_of(index, opening)
        if isinstance(event, pb.Delta):
            self._add(output, event)
            return self._chunk_of(index, self._shape.delta(event.text, self._take_logprobs(output)))
        if isinstance(event, pb.Finished):
            return self._chunk_of(index, self._shape.delta("", None), event)
        output.usage = event
        return None

    def _chunk_of(self, index: int, fields: Json, finished: pb.Finished | None = None) -> Json:
        choice = {"index": index, **fields, **_finish(finished)}
        return {**self._head, "object": self._shape.chunk, "choices": [choice]}

    def usage_chunk(self) -> Json:
        """The last chunk, where asked for."""
        return {**self._head, "object": self._shape.chunk, "choices": [], "usage": self._usage()}

    # --- whole -------------------------------------------------------------------------------------------------------

    def add(self, index: int, events: list[Event]) -> None:
        """Takes a choice's new events."""
        output = self._outputs[index]
        for event in events:
            if isinstance(event, pb.Delta):
                output.texts.append(event.text)
                self._add(output, event)
            elif isinstance(event, pb.Finished):
                output.finished = event
            elif isinstance(event, pb.Usage):
                output.usage = event

    def whole(self) -> Json:
        """The complete answer."""
        choices = [
            {
                "index": index,
                **self._shape.choice("".join(output.texts), self._take_logprobs(output)),
                **_finish(output.finished),
            }
            for index, output in enumerate(self._outputs)
        ]
        return {**self._head, "object": self._shape.whole, "choices": choices, "usage": self._usage()}

    # --- parts -------------------------------------------------------------------------------------------------------

    def _add(self, output: _Output, delta: pb.Delta) -> None:
        if delta.logprobs:
            starts = self._text.char_starts(delta.token_ids)
            output.offsets += [output.num_chars + start for start in starts]
            output.tokens += [
                self._token(token_id, logprob)
                for token_id, logprob in zip(delta.token_ids, delta.logprobs, strict=True)
            ]
        output.num_chars += len(delta.text)

    def _token(self, token_id: int, logprob: float) -> Json:
        raw = self._text.token_bytes(token_id)
        return {"token": raw.decode(errors="replace"), "logprob": logprob, "bytes": list(raw)}

    def _take_logprobs(self, output: _Output) -> Json | None:
        if not output.tokens:
            return None
        tokens, output.tokens = output.tokens, []
        offsets, output.offsets = output.offsets, []
        return self._shape.logprobs(tokens, offsets)

    def _usage(self) -> Json:
        prompt = sum(output.usage.prompt_tokens for output in self._outputs)
        completion = sum(output.usage.completion_tokens for output in self._outputs)
        cached = sum(output.usage.cached_prompt_tokens for output in self._outputs)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }


def _finish(finished: pb.Finished | None) -> Json:
    """OpenAI's reason, and what matched (vLLM's `stop_reason`)."""
    if finished is None:
        return {"finish_reason": None}
    match = finished.WhichOneof("stop_match")
    return {
        "finish_reason": _FINISH_REASONS[finished.reason],
        "stop_reason": getattr(finished, match) if match else None,
    }


def model_card(name: str, max_model_len: int, created_s: int) -> Mapping[str, Any]:
    """An entry of /v1/models."""
    return {"id": name, "object": "model", "created": created_s, "owned_by": "quire", "max_model_len": max_model_len}
