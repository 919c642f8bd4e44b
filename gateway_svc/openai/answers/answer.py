"""Build OpenAI's JSON from events of generations, whole or in chunks. Pure."""

from collections.abc import Sequence

from gateway_svc.generating.generation import Event
from gateway_svc.openai.answers.answer_options import AnswerOptions
from gateway_svc.openai.answers.outputs import Json, Output, OutputEvent, Prompt
from gateway_svc.openai.answers.shapes import AnswerShape
from gateway_svc.openai.answers.token_entries import TokenEntries
from gateway_svc.text.text_model import TextModel
from protos.common.v1 import common_pb2
from protos.inference.v1 import inference_pb2 as pb

_FINISH_REASONS = {
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
    common_pb2.FINISH_REASON_TOOL_CALLS: "tool_calls",
    common_pb2.FINISH_REASON_DEADLINE: "deadline",
    common_pb2.FINISH_REASON_CANCELLED: "cancelled",
}


class HttpAnswer:
    """One answer to `prompts` with `num_choices` choices for each; each prompt is fed its generation's events.

    Choice c of prompt p has index p * num_choices + c, as in OpenAI's API. `head`: fields common to all parts
    of the answer.
    """

    def __init__(
        self,
        shape: AnswerShape,
        head: Json,
        text: TextModel,
        prompts: Sequence[Prompt],
        options: AnswerOptions,
        *,
        num_choices: int,
    ) -> None:
        self._shape = shape
        self._head = head
        self._text = text
        self._entries = TokenEntries(text, as_ids=options.tokens_as_ids)
        self._prompts = list(prompts)
        self._options = options
        self._num_choices = num_choices
        self._outputs = [Output(num_chars=len(prompt.text)) for prompt in prompts for _ in range(num_choices)]

    # --- in chunks ---------------------------------------------------------------------------------------------------

    def chunks(self, prompt: int, events: list[Event]) -> list[Json]:
        """Stream chunks for a prompt's new events. A finish that arrives with the last output shares its chunk."""
        made: list[Json] = []
        for event in self._prompts[prompt].in_order(events):
            last = made[-1]["choices"][0] if made else None
            if isinstance(event, pb.Finished) and last is not None and last["index"] == self._index(prompt, event):
                last |= _finish(event)
                made[-1] |= self._usage_so_far()
            else:
                made += self._chunks_of(prompt, event)
        return made

    def _index(self, prompt: int, event: pb.Finished | OutputEvent) -> int:
        return prompt * self._num_choices + event.choice

    def _chunks_of(self, prompt: int, event: Event) -> list[Json]:
        if not isinstance(event, pb.Finished | OutputEvent):
            return []
        index = self._index(prompt, event)
        if isinstance(event, pb.Finished):
            return [*self._opening(index, prompt), self._chunk(index, self._shape.end(), event)]
        fields = None if self._options.only_echo else self._delta(index, event)
        is_told = fields is not None or self._options.only_echo
        opening = self._opening(index, prompt) if is_told else []
        self._outputs[index].num_tokens += len(event.token_ids)
        return opening if fields is None else [*opening, self._chunk(index, fields)]

    def _delta(self, index: int, event: OutputEvent) -> Json | None:
        output = self._outputs[index]
        self._add_entries(output, event)
        logprobs = self._take_logprobs(output) if output.entries else None
        fields = self._shape.delta(event, logprobs, self._options)
        if self._options.token_ids:
            fields = (fields or self._shape.end()) | {"token_ids": list(event.token_ids)}
        return fields

    def _opening(self, index: int, prompt: int) -> list[Json]:
        """First chunk of a choice, sent only with its first output.

        Until then an error can still set the HTTP status.
        """
        output, asked = self._outputs[index], self._prompts[prompt]
        if output.is_open:
            return []
        output.is_open = True
        fields = self._shape.opening(self._echo(asked))
        if fields is None and self._options.token_ids:
            fields = self._shape.end()
        if fields is None:
            return []
        chunk = self._chunk(index, fields)
        self._shape.add_prompts(chunk, [asked], self._entries, self._options)
        return [chunk]

    def _chunk(self, index: int, fields: Json, finished: pb.Finished | None = None) -> Json:
        made: Json = {"token_ids": []} if self._options.token_ids else {}
        choice = {"index": index, **made, **fields, **_finish(finished)}
        return {**self._head, "object": self._shape.chunk, "choices": [choice], **self._usage_so_far()}

    def _usage_so_far(self) -> Json:
        if not self._options.usage_last:
            return {}
        return {"usage": self._usage() if self._options.usage_always else None}

    def last_chunks(self) -> list[Json]:
        """Final chunk of a stream: usage, if requested."""
        if not self._options.usage_last:
            return []
        return [{**self._head, "object": self._shape.chunk, "choices": [], "usage": self._usage()}]

    # --- whole -------------------------------------------------------------------------------------------------------

    def add(self, prompt: int, events: list[Event]) -> None:
        """Add a prompt's new events."""
        for event in self._prompts[prompt].in_order(events):
            if not isinstance(event, pb.Finished | OutputEvent):
                continue
            output = self._outputs[prompt * self._num_choices + event.choice]
            if isinstance(event, pb.Finished):
                output.finished = event
            elif not self._options.only_echo:
                output.add(event)
                output.num_tokens += len(event.token_ids)
                self._add_entries(output, event)

    def whole(self) -> Json:
        """Return the complete answer."""
        answer = {**self._head, "object": self._shape.whole, "choices": [], "usage": self._usage()}
        answer["choices"] = [self._choice(index, output) for index, output in enumerate(self._outputs)]
        each = [prompt for prompt in self._prompts for _ in range(self._num_choices)]
        self._shape.add_prompts(answer, each, self._entries, self._options)
        return answer

    def _choice(self, index: int, output: Output) -> Json:
        asked = self._prompts[index // self._num_choices]
        output.texts.insert(0, asked.text)
        if not self._options.reasoning:
            output.reasoning.clear()
        if self._options.echo_logprobs:
            entries, offsets = self._prompt_entries(asked)
            output.entries, output.offsets = entries + output.entries, offsets + output.offsets
        choice = {"index": index, **self._shape.choice(output, self._take_logprobs(output)), **_finish(output.finished)}
        return choice | {"token_ids": output.token_ids if self._options.token_ids else None}

    # --- parts -------------------------------------------------------------------------------------------------------

    def _echo(self, prompt: Prompt) -> Json:
        if not self._options.echo:
            return {}
        logprobs = self._shape.logprobs(*self._prompt_entries(prompt)) if self._options.echo_logprobs else None
        return {"text": prompt.text, "logprobs": logprobs}

    def _prompt_entries(self, prompt: Prompt) -> tuple[list[Json], list[int]]:
        entries = self._entries.of_prompt(prompt.token_ids, prompt.known_logprobs)
        return entries, [
            min(start, len(prompt.text)) for start in self._text.char_starts(prompt.token_ids, special_tokens=True)
        ]

    def _add_entries(self, output: Output, event: OutputEvent) -> None:
        """Add logprob entries: only for the text, not for reasoning and calls."""
        if not isinstance(event, pb.Delta):
            return
        if event.logprobs and (event.text or self._shape.tells_marks):
            starts = self._text.char_starts(event.token_ids)
            output.offsets += [output.num_chars + start for start in starts]
            output.entries += self._entries.of(event.token_ids, event.logprobs, event.top_logprobs)
        output.num_chars += len(event.text)

    def _take_logprobs(self, output: Output) -> Json | None:
        if not output.entries:
            return None
        entries, output.entries = output.entries, []
        offsets, output.offsets = output.offsets, []
        return self._shape.logprobs(entries, offsets)

    def _usage(self) -> Json:
        prompts = [prompt.usage or pb.Usage(prompt_tokens=prompt.num_tokens) for prompt in self._prompts]
        num_prompt = sum(usage.prompt_tokens for usage in prompts)
        num_output = self._num_output_tokens()
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
            "prompt_tokens_details": {"cached_tokens": sum(usage.cached_prompt_tokens for usage in prompts)},
            "completion_tokens_details": {"reasoning_tokens": sum(usage.reasoning_tokens for usage in prompts)},
        }

    def _num_output_tokens(self) -> int:
        """Completion tokens, from the usage event if there is one, since tokens after a stop string are no output."""
        if self._options.only_echo:
            return 0
        told = 0
        for i, prompt in enumerate(self._prompts):
            outputs = self._outputs[i * self._num_choices : (i + 1) * self._num_choices]
            so_far = sum(output.num_tokens for output in outputs)
            told += so_far if prompt.usage is None else prompt.usage.completion_tokens
        return told


def _finish(finished: pb.Finished | None) -> Json:
    """OpenAI's finish_reason, and the match (vLLM's `stop_reason`)."""
    if finished is None:
        return {"finish_reason": None}
    match = finished.WhichOneof("stop_match")
    return {
        "finish_reason": _FINISH_REASONS[finished.reason],
        "stop_reason": getattr(finished, match) if match else None,
    }
