"""Events of generations in OpenAI's JSON shapes: completions and chat, whole or in chunks. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from gateway_svc.generation import Event
from gateway_svc.text.bundle import TextModel
from protos.common.v1 import common_pb2
from protos.inference.v1 import inference_pb2 as pb

_FINISH_REASONS = {common_pb2.FINISH_REASON_STOP: "stop", common_pb2.FINISH_REASON_LENGTH: "length"}

Json = dict[str, Any]
_NO_TOPS = pb.TopLogprobs()


@dataclass(slots=True)
class _Output:
    """One choice while it grows."""

    texts: list[str] = field(default_factory=list)
    num_chars: int = 0
    tokens: list[Json] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    finished: pb.Finished | None = None


@dataclass(slots=True)
class _Prompt:
    """What is known of a whole generation."""

    usage: pb.Usage = field(default_factory=pb.Usage)
    logprobs: pb.PromptLogprobs | None = None


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
        """Log probabilities; `tokens` have token, logprob, bytes and top_logprobs, which have the same."""

    def with_prompt_logprobs(self, answer: Json, each: list[list[Json | None]]) -> None:
        """Puts log probabilities of prompts, one list for each choice, where vLLM has them."""


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
            "top_logprobs": [_likeliest(token) for token in tokens] if any(t["top_logprobs"] for t in tokens) else None,
            "text_offset": offsets,
        }

    def with_prompt_logprobs(self, answer: Json, each: list[list[Json | None]]) -> None:
        """See Shape."""
        for choice, logprobs in zip(answer["choices"], each, strict=True):
            choice["prompt_logprobs"] = logprobs


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
        return {"content": tokens, "refusal": None}

    def with_prompt_logprobs(self, answer: Json, each: list[list[Json | None]]) -> None:
        """See Shape."""
        answer["prompt_logprobs"] = each[0]


class Answer:
    """One answer to `num_prompts` prompts, with `num_choices` choices for each; each prompt is fed with its generation's events.

    Choice c of prompt p has the index p * num_choices + c, as OpenAI numbers them.
    """

    def __init__(
        self,
        shape: Shape,
        request_id: str,
        model: str,
        text: TextModel,
        created_s: int,
        *,
        num_prompts: int,
        num_choices: int,
    ) -> None:
        self._shape = shape
        self._text = text
        self._head = {"id": f"{shape.prefix}-{request_id}", "created": created_s, "model": model}
        self._num_choices = num_choices
        self._prompts = [_Prompt() for _ in range(num_prompts)]
        self._outputs = [_Output() for _ in range(num_prompts * num_choices)]

    # --- in chunks ---------------------------------------------------------------------------------------------------

    def chunks(self, prompt: int, events: list[Event]) -> list[Json]:
        """What a prompt's new events are in a stream."""
        return [chunk for event in events for chunk in self._chunks_of(prompt, event)]

    def _chunks_of(self, prompt: int, event: Event) -> list[Json]:
        match event:
            case pb.Started():
                opening = self._shape.opening()
                return [] if opening is None else [self._chunk(index, opening) for index in self._indexes(prompt)]
            case pb.Delta():
                index = self._index(prompt, event.choice)
                output = self._outputs[index]
                self._add(output, event)
                return [self._chunk(index, self._shape.delta(event.text, self._take_logprobs(output)))]
            case pb.Finished():
                return [self._chunk(self._index(prompt, event.choice), self._shape.delta("", None), event)]
        self._add_account(prompt, event)
        return []

    def _chunk(self, index: int, fields: Json, finished: pb.Finished | None = None) -> Json:
        choice = {"index": index, **fields, **_finish(finished)}
        return {**self._head, "object": self._shape.chunk, "choices": [choice]}

    def usage_chunk(self) -> Json:
        """The last chunk, where asked for."""
        return {**self._head, "object": self._shape.chunk, "choices": [], "usage": self._usage()}

    # --- whole -------------------------------------------------------------------------------------------------------

    def add(self, prompt: int, events: list[Event]) -> None:
        """Takes a prompt's new events."""
        for event in events:
            if isinstance(event, pb.Delta):
                output = self._outputs[self._index(prompt, event.choice)]
                output.texts.append(event.text)
                self._add(output, event)
            elif isinstance(event, pb.Finished):
                self._outputs[self._index(prompt, event.choice)].finished = event
            else:
                self._add_account(prompt, event)

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
        answer = {**self._head, "object": self._shape.whole, "choices": choices, "usage": self._usage()}
        if any(prompt.logprobs is not None for prompt in self._prompts):
            each = [
                self._prompt_logprobs(prompt.logprobs) for prompt in self._prompts for _ in range(self._num_choices)
            ]
            self._shape.with_prompt_logprobs(answer, each)
        return answer

    # --- parts -------------------------------------------------------------------------------------------------------

    def _index(self, prompt: int, choice: int) -> int:
        return prompt * self._num_choices + choice

    def _indexes(self, prompt: int) -> range:
        return range(self._index(prompt, 0), self._index(prompt + 1, 0))

    def _add_account(self, prompt: int, event: Event) -> None:
        if isinstance(event, pb.Usage):
            self._prompts[prompt].usage = event
        elif isinstance(event, pb.PromptLogprobs):
            self._prompts[prompt].logprobs = event

    def _add(self, output: _Output, delta: pb.Delta) -> None:
        if delta.logprobs:
            starts = self._text.char_starts(delta.token_ids)
            output.offsets += [output.num_chars + start for start in starts]
            tops = delta.top_logprobs or [_NO_TOPS] * len(delta.token_ids)
            output.tokens += [
                {**self._token(token_id, logprob), "top_logprobs": self._tops(top)}
                for token_id, logprob, top in zip(delta.token_ids, delta.logprobs, tops, strict=True)
            ]
        output.num_chars += len(delta.text)

    def _tops(self, top: pb.TopLogprobs) -> list[Json]:
        return [self._token(*pair) for pair in zip(top.token_ids, top.logprobs, strict=True)]

    def _token(self, token_id: int, logprob: float) -> Json:
        raw = self._text.token_bytes(token_id)
        return {"token": raw.decode(errors="replace"), "logprob": logprob, "bytes": list(raw)}

    def _prompt_logprobs(self, given: pb.PromptLogprobs | None) -> list[Json | None]:
        """vLLM's list: None for the first token, then {token id: {logprob, rank, decoded_token}}; rank null where not known."""
        if given is None:
            return []
        tops = given.top_logprobs or [_NO_TOPS] * len(given.token_ids)
        entries: list[Json | None] = [None] * given.start_index
        for token_id, logprob, top in zip(given.token_ids, given.logprobs, tops, strict=True):
            ranked = {
                t: (value, rank) for rank, (t, value) in enumerate(zip(top.token_ids, top.logprobs, strict=True), 1)
            }
            entry = {token_id: ranked.get(token_id, (logprob, None)), **ranked}
            entries.append({str(t): self._ranked(t, *found) for t, found in entry.items()})
        return entries

    def _ranked(self, token_id: int, logprob: float, rank: int | None) -> Json:
        decoded = self._text.token_bytes(token_id).decode(errors="replace")
        return {"logprob": logprob, "rank": rank, "decoded_token": decoded}

    def _take_logprobs(self, output: _Output) -> Json | None:
        if not output.tokens:
            return None
        tokens, output.tokens = output.tokens, []
        offsets, output.offsets = output.offsets, []
        return self._shape.logprobs(tokens, offsets)

    def _usage(self) -> Json:
        usages = [prompt.usage for prompt in self._prompts]
        prompt = sum(usage.prompt_tokens for usage in usages)
        completion = sum(usage.completion_tokens for usage in usages)
        cached = sum(usage.cached_prompt_tokens for usage in usages)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }


def _likeliest(token: Json) -> Json:
    """{token: logprob} of the likeliest and of the chosen one."""
    return {entry["token"]: entry["logprob"] for entry in [*token["top_logprobs"], token]}


def _finish(finished: pb.Finished | None) -> Json:
    """OpenAI's reason, and what matched (vLLM's `stop_reason`)."""
    if finished is None:
        return {"finish_reason": None}
    match = finished.WhichOneof("stop_match")
    return {
        "finish_reason": _FINISH_REASONS[finished.reason],
        "stop_reason": getattr(finished, match) if match else None,
    }


def model_card(name: str, max_model_len: int, created_s: int, base_model: str = "") -> Mapping[str, Any]:
    """An entry of /v1/models; `base_model`: of an adapter, the model that it is on (vLLM's `parent`)."""
    return {
        "id": name,
        "object": "model",
        "created": created_s,
        "owned_by": "quire",
        "root": name,
        "parent": base_model or None,
        "max_model_len": max_model_len,
    }
