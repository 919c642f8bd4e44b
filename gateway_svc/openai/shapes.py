"""What differs between answers of completions and of chat, in OpenAI's JSON. Pure."""

from typing import Protocol

from gateway_svc.openai.answer_options import AnswerOptions
from gateway_svc.openai.outputs import Json, Output, OutputEvent, Prompt
from gateway_svc.openai.token_entries import TokenEntries
from protos.inference.v1 import inference_pb2 as pb
from svc_common import public_ids


class Shape(Protocol):
    """One kind of answer. `tells_marks`: log probabilities of tokens without text are told too."""

    prefix: str
    whole: str
    chunk: str
    tells_marks: bool

    def choice(self, output: Output, logprobs: Json | None) -> Json:
        """Fields of a complete choice."""

    def delta(self, event: OutputEvent, logprobs: Json | None, options: AnswerOptions) -> Json | None:
        """Fields of a choice in a chunk; None = there is nothing to tell."""

    def end(self) -> Json:
        """Fields of a choice's last chunk."""

    def opening(self, echo: Json) -> Json | None:
        """Fields of a choice's first chunk, if it has one without output; `echo`: fields of what comes before the output."""

    def logprobs(self, entries: list[Json], offsets: list[int]) -> Json:
        """Log probabilities; `offsets`: places of the tokens in the text."""

    def add_prompts(self, answer: Json, prompts: list[Prompt], entries: TokenEntries, options: AnswerOptions) -> None:
        """Puts what was asked of prompts, one for each choice, where vLLM has it; into a whole answer or a first chunk."""


class CompletionShape:
    """/v1/completions."""

    prefix = public_ids.COMPLETION
    whole = chunk = "text_completion"
    tells_marks = True

    def choice(self, output: Output, logprobs: Json | None) -> Json:
        """See Shape."""
        return {"text": output.text, "logprobs": logprobs}

    def delta(self, event: OutputEvent, logprobs: Json | None, options: AnswerOptions) -> Json | None:
        """See Shape."""
        if not isinstance(event, pb.Delta):
            return None
        return {"text": event.text, "logprobs": logprobs} if event.text or logprobs else None

    def end(self) -> Json:
        """See Shape."""
        return {"text": "", "logprobs": None}

    def opening(self, echo: Json) -> Json | None:
        """See Shape."""
        return echo or None

    def logprobs(self, entries: list[Json], offsets: list[int]) -> Json:
        """See Shape. The first token of a prompt has neither a log probability nor likelier ones."""
        return {
            "tokens": [_name(entry) for entry in entries],
            "token_logprobs": [entry["logprob"] for entry in entries],
            "top_logprobs": [_likeliest(entry) for entry in entries],
            "text_offset": offsets,
        }

    def add_prompts(self, answer: Json, prompts: list[Prompt], entries: TokenEntries, options: AnswerOptions) -> None:
        """See Shape."""
        for choice, prompt in zip(answer["choices"], prompts, strict=True):
            choice.update(_of_prompt(prompt, entries, options))


def _name(entry: Json) -> str:
    """Tokens that are no text by themselves are named by their bytes, as OpenAI does: `bytes:\\xe2\\x80`."""
    if "\ufffd" not in entry["token"]:
        return str(entry["token"])
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in entry["bytes"])


def _likeliest(entry: Json) -> Json | None:
    """{token: logprob} of the likeliest and of the chosen one; of two with one name the likelier."""
    if entry["top_logprobs"] is None:
        return None
    return {_name(each): each["logprob"] for each in [entry, *reversed(entry["top_logprobs"])]}


class ChatShape:
    """/v1/chat/completions."""

    prefix = public_ids.CHAT
    whole = "chat.completion"
    chunk = "chat.completion.chunk"
    tells_marks = False

    def choice(self, output: Output, logprobs: Json | None) -> Json:
        """See Shape. What was thought is there under both names in use; content is null beside calls alone."""
        message: Json = {"role": "assistant", "content": output.text or (None if output.calls else ""), "refusal": None}
        if output.reasoning:
            message |= _thought("".join(output.reasoning))
        if output.calls:
            message["tool_calls"] = output.calls
        return {"message": message, "logprobs": logprobs}

    def delta(self, event: OutputEvent, logprobs: Json | None, options: AnswerOptions) -> Json | None:
        """See Shape."""
        match event:
            case pb.ToolCallDelta():
                delta = _call_delta(event)
            case pb.ReasoningDelta():
                delta = _thought(event.text) if event.text and options.reasoning else {}
            case _:
                delta = {"content": event.text} if event.text else {}
        return {"delta": delta, "logprobs": logprobs} if delta or logprobs else None

    def end(self) -> Json:
        """See Shape."""
        return {"delta": {}, "logprobs": None}

    def opening(self, echo: Json) -> Json | None:
        """See Shape."""
        return {"delta": {"role": "assistant", "content": ""}, "logprobs": None}

    def logprobs(self, entries: list[Json], offsets: list[int]) -> Json:
        """See Shape."""
        return {"content": entries, "refusal": None}

    def add_prompts(self, answer: Json, prompts: list[Prompt], entries: TokenEntries, options: AnswerOptions) -> None:
        """See Shape. A conversation is one prompt."""
        answer |= _of_prompt(prompts[0], entries, options)


def _of_prompt(prompt: Prompt, entries: TokenEntries, options: AnswerOptions) -> Json:
    """vLLM's fields; null where they were not asked for."""
    return {
        "prompt_logprobs": entries.vllm_prompt_logprobs(prompt.logprobs) if options.prompt_logprobs else None,
        "prompt_token_ids": prompt.token_ids if options.token_ids else None,
    }


def _thought(text: str) -> Json:
    """DeepSeek's name and vLLM's newer one: clients read one or the other."""
    return {"reasoning_content": text, "reasoning": text}


def _call_delta(event: pb.ToolCallDelta) -> Json:
    """The first piece of a call has its id and name, the others more of its arguments."""
    if event.id or event.name:
        function = {"name": event.name, "arguments": event.arguments}
        return {"tool_calls": [{"index": event.index, "id": event.id, "type": "function", "function": function}]}
    if not event.arguments:
        return {}
    return {"tool_calls": [{"index": event.index, "function": {"arguments": event.arguments}}]}
