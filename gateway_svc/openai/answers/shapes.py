"""Differences between the JSON of completions and of chats. Pure."""

from typing import Protocol

from gateway_svc.openai.answers.answer_options import AnswerOptions
from gateway_svc.openai.answers.outputs import Json, Output, OutputEvent, Prompt
from gateway_svc.openai.answers.token_entries import TokenEntries
from protos.inference.v1 import inference_pb2 as pb
from svc_common import public_ids


class AnswerShape(Protocol):
    """JSON format of one kind of answer. `tells_marks`: include logprobs of tokens without text."""

    prefix: str
    whole: str
    chunk: str
    tells_marks: bool

    def choice(self, output: Output, logprobs: Json | None) -> Json:
        """Fields of a complete choice."""

    def delta(self, event: OutputEvent, logprobs: Json | None, options: AnswerOptions) -> Json | None:
        """Fields of a choice in a chunk; None = nothing to send."""

    def end(self) -> Json:
        """Fields of a choice's last chunk."""

    def opening(self, echo: Json) -> Json | None:
        """Fields of a choice's first chunk, if it has one without output; `echo`: fields of the echoed prompt."""

    def logprobs(self, entries: list[Json], offsets: list[int]) -> Json:
        """Logprobs object; `offsets`: positions of the tokens in the text."""

    def add_prompts(self, answer: Json, prompts: list[Prompt], entries: TokenEntries, options: AnswerOptions) -> None:
        """Add the prompts' fields, one prompt per choice, in vLLM's place.

        `answer` is a whole answer or a first chunk.
        """


class CompletionShape:
    """JSON of /v1/completions."""

    prefix = public_ids.COMPLETION
    whole = chunk = "text_completion"
    tells_marks = True

    def choice(self, output: Output, logprobs: Json | None) -> Json:
        """Fields of a complete choice."""
        return {"text": output.text, "logprobs": logprobs}

    def delta(self, event: OutputEvent, logprobs: Json | None, options: AnswerOptions) -> Json | None:
        """Fields of a choice in a chunk."""
        if not isinstance(event, pb.Delta):
            return None
        return {"text": event.text, "logprobs": logprobs} if event.text or logprobs else None

    def end(self) -> Json:
        """Fields of a choice's last chunk."""
        return {"text": "", "logprobs": None}

    def opening(self, echo: Json) -> Json | None:
        """Fields of a choice's first chunk: only an echo."""
        return echo or None

    def logprobs(self, entries: list[Json], offsets: list[int]) -> Json:
        """Logprobs object. The first token of a prompt has neither a logprob nor alternatives."""
        return {
            "tokens": [_name(entry) for entry in entries],
            "token_logprobs": [entry["logprob"] for entry in entries],
            "top_logprobs": [_likeliest(entry) for entry in entries],
            "text_offset": offsets,
        }

    def add_prompts(self, answer: Json, prompts: list[Prompt], entries: TokenEntries, options: AnswerOptions) -> None:
        """Add the prompts' fields to each choice."""
        for choice, prompt in zip(answer["choices"], prompts, strict=True):
            choice.update(_of_prompt(prompt, entries, options))


def _name(entry: Json) -> str:
    """Name of a token in `tokens`.

    One that is not valid text by itself is named by its bytes, as in OpenAI's API: `bytes:\\xe2\\x80`.
    """
    if "\ufffd" not in entry["token"]:
        return str(entry["token"])
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in entry["bytes"])


def _likeliest(entry: Json) -> Json | None:
    """{token: logprob} of the likeliest tokens and the chosen one; of two with the same name, the likelier."""
    if entry["top_logprobs"] is None:
        return None
    return {_name(each): each["logprob"] for each in [entry, *reversed(entry["top_logprobs"])]}


class ChatShape:
    """JSON of /v1/chat/completions."""

    prefix = public_ids.CHAT
    whole = "chat.completion"
    chunk = "chat.completion.chunk"
    tells_marks = False

    def choice(self, output: Output, logprobs: Json | None) -> Json:
        """Fields of a complete choice. Reasoning has both names in use; content is null if there are only calls."""
        message: Json = {"role": "assistant", "content": output.text or (None if output.calls else ""), "refusal": None}
        if output.reasoning:
            message |= _thought("".join(output.reasoning))
        if output.calls:
            message["tool_calls"] = output.calls
        return {"message": message, "logprobs": logprobs}

    def delta(self, event: OutputEvent, logprobs: Json | None, options: AnswerOptions) -> Json | None:
        """Fields of a choice in a chunk."""
        match event:
            case pb.ToolCallDelta():
                delta = _call_delta(event)
            case pb.ReasoningDelta():
                delta = _thought(event.text) if event.text and options.reasoning else {}
            case _:
                delta = {"content": event.text} if event.text else {}
        return {"delta": delta, "logprobs": logprobs} if delta or logprobs else None

    def end(self) -> Json:
        """Fields of a choice's last chunk."""
        return {"delta": {}, "logprobs": None}

    def opening(self, echo: Json) -> Json | None:
        """Fields of a choice's first chunk: the role."""
        return {"delta": {"role": "assistant", "content": ""}, "logprobs": None}

    def logprobs(self, entries: list[Json], offsets: list[int]) -> Json:
        """Logprobs object."""
        return {"content": entries, "refusal": None}

    def add_prompts(self, answer: Json, prompts: list[Prompt], entries: TokenEntries, options: AnswerOptions) -> None:
        """Add the prompt's fields to the answer; a chat is one prompt."""
        answer |= _of_prompt(prompts[0], entries, options)


def _of_prompt(prompt: Prompt, entries: TokenEntries, options: AnswerOptions) -> Json:
    """vLLM's prompt fields; null if not requested."""
    return {
        "prompt_logprobs": entries.vllm_prompt_logprobs(prompt.logprobs) if options.prompt_logprobs else None,
        "prompt_token_ids": prompt.token_ids if options.token_ids else None,
    }


def _thought(text: str) -> Json:
    """Reasoning under DeepSeek's name and vLLM's newer one, since clients read either."""
    return {"reasoning_content": text, "reasoning": text}


def _call_delta(event: pb.ToolCallDelta) -> Json:
    """Delta of a call: id and name with its first piece, then more of its arguments."""
    if event.id or event.name:
        function = {"name": event.name, "arguments": event.arguments}
        return {"tool_calls": [{"index": event.index, "id": event.id, "type": "function", "function": function}]}
    if not event.arguments:
        return {}
    return {"tool_calls": [{"index": event.index, "function": {"arguments": event.arguments}}]}
