"""Outputs of requests, with vLLM's field names, for models in process and behind a gateway alike."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from svc_common.errors import QuireError


@dataclass(frozen=True, slots=True)
class Logprob:
    """Natural log probability of one token under the unmodified distribution.

    `rank`: 1 = the most likely; None if the token is not among the requested top tokens. `decoded_token`:
    None unless the application fills it in.
    """

    logprob: float
    decoded_token: str | None = None
    rank: int | None = None


TopTokens = Sequence[tuple[int, float]]
"""The most likely tokens at one position, best first, with their log probabilities."""


def logprobs_at(token_id: int, logprob: float, top: TopTokens = ()) -> dict[int, Logprob]:
    """{token id: Logprob} at one position: the token that is there, and the most likely ones."""
    ranked = {other: Logprob(value, rank=rank) for rank, (other, value) in enumerate(top, 1)}
    return {token_id: ranked.get(token_id, Logprob(logprob)), **ranked}


@dataclass(slots=True)
class ToolCall:
    """A tool call made by the model. `arguments`: JSON text as the model wrote it; complete once the output is finished."""

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class CompletionOutput:
    """One output of a request.

    `logprobs`: per token {token id: Logprob} of the chosen token, and of the most likely ones if requested; None if not requested.
    `finish_reason`: "stop", "length", "tool_calls", "deadline" (if a partial answer was requested), "abort"; None while running.
    `stop_reason`: the stop string or token id (end-of-sequence included) that ended it; None for length.
    `score`: the ranking score of beams, and of best_of above n.
    `reasoning`, `tool_calls`: of chats, the text that the model thought before its answer, and the tools that it called.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    score: float | None = None
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)

    def finished(self) -> bool:
        """True once the output is complete."""
        return self.finish_reason is not None

    def extend(
        self,
        text: str,
        token_ids: Sequence[int],
        logprobs: Sequence[float] | None,
        tops: Sequence[TopTokens] | None = None,
    ) -> None:
        """Append new output.

        `logprobs`: one per token, or None if not requested. `tops`: the most likely tokens at each
        position, or None.
        """
        self.text += text
        self.token_ids.extend(token_ids)
        if logprobs is None:
            return
        self.logprobs = self.logprobs or []
        tops = tops or [()] * len(token_ids)
        self.logprobs.extend(logprobs_at(*place) for place in zip(token_ids, logprobs, tops, strict=True))
        self.cumulative_logprob = (self.cumulative_logprob or 0.0) + sum(logprobs)


@dataclass(slots=True)
class RequestOutput:
    """A request with its outputs so far.

    `seed`: the seed in force, with which the request can be repeated. `error`: why it failed; it then has no finish reason.
    `prompt_token_ids`: None if only the gateway knows them (a text prompt sent by `Client`); `num_prompt_tokens` then has their
    number once the request is complete.
    `prompt_logprobs`, if requested: None for the first token, which has no predecessor, then {token id: Logprob} for each.
    `embedding`: the vector of an embedding request, which has no outputs.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int] | None
    outputs: list[CompletionOutput]
    finished: bool = False
    seed: int | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int | None = None
    num_preemptions: int = 0
    num_reasoning_tokens: int = 0
    model: str = ""
    error: QuireError | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    embedding: list[float] | None = None

    @property
    def text(self) -> str:
        """Text of the first output."""
        return self.outputs[0].text


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of tool call number `index` of a choice: more of its `arguments`; only the first piece has `id` and `name`."""

    index: int
    arguments: str
    id: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class Delta:
    """New output of one choice of a stream; text never splits a code point and may lag behind its tokens.

    In a chat, a delta is a piece of the answer (`text`), of the `reasoning` before it, or of a `tool_call`.
    """

    text: str
    token_ids: list[int]
    token_offset: int
    logprobs: list[float] | None = None
    choice: int = 0
    tops: list[TopTokens] | None = None
    reasoning: str = ""
    tool_call: ToolCallDelta | None = None


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """An embedding vector."""

    embedding: list[float]


@dataclass(frozen=True, slots=True)
class EmbeddingRequestOutput:
    """The embedding of one prompt, with vLLM's fields. `prompt_token_ids`: None if only the gateway knows them."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int] | None
    num_prompt_tokens: int
    finished: bool = True


@dataclass(frozen=True, slots=True)
class ModelCard:
    """A served model: name and limits in tokens. `base_model`: for an adapter, the model it is loaded on."""

    name: str
    max_model_len: int
    vocab_size: int
    block_size: int
    chat: bool
    model_digest: str
    base_model: str = ""
