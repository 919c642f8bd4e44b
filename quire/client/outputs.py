"""What comes back for a request, in vLLM's shapes, whether it ran in process or behind a gateway."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from svc_common.errors import QuireError


@dataclass(frozen=True, slots=True)
class Logprob:
    """Natural log probability of one token under the unmodified distribution.

    `rank`: 1 = the likeliest; None where it is not among those asked for. `decoded_token`: None, except where a caller fills it in.
    """

    logprob: float
    decoded_token: str | None = None
    rank: int | None = None


TopTokens = Sequence[tuple[int, float]]
"""The likeliest tokens at one place, best first, with their log probabilities."""


def logprobs_at(token_id: int, logprob: float, top: TopTokens = ()) -> dict[int, Logprob]:
    """{token id: Logprob} at one place: the token that is there, and the likeliest beside it."""
    ranked = {other: Logprob(value, rank=rank) for rank, (other, value) in enumerate(top, 1)}
    return {token_id: ranked.get(token_id, Logprob(logprob)), **ranked}


@dataclass(slots=True)
class ToolCall:
    """A call that the model made. `arguments`: JSON text, as the model wrote it; complete when the output is."""

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class CompletionOutput:
    """One output of a request.

    `logprobs`: for each token {token id: Logprob} of the chosen one, and of the likeliest where asked; or None when not asked.
    `finish_reason`: "stop", "length", "tool_calls", "deadline" (where a partial answer was asked for), "abort", None while it runs.
    `stop_reason`: the stop string or the token id (end-of-sequence included) that ended it; None for length. `score`: what it was
    ranked by, for beams and best_of above n. Of chats: `reasoning`, what the model thought before; `tool_calls`, what it called.
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
        """Whether it is complete."""
        return self.finish_reason is not None

    def extend(
        self,
        text: str,
        token_ids: Sequence[int],
        logprobs: Sequence[float] | None,
        tops: Sequence[TopTokens] | None = None,
    ) -> None:
        """Adds new output; `logprobs` one per token, or None when not asked; `tops` the likeliest for each, or None."""
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
    """A request with its outputs so far. `seed`: the one in force, to repeat it. `error`: why it failed; no finish reason then.

    `prompt_token_ids` is None where only a gateway knows them (a text prompt sent by `Client`); `num_prompt_tokens` then has
    their number once the request is complete. `prompt_logprobs`, where asked: None for the first token, which has nothing before
    it, then {token id: Logprob} for each. `embedding`: the vector of a request for one, which has no outputs.
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
    """A piece of a tool call: which of the choice's, from 0, more of its arguments; `id` and `name` with its first piece only."""

    index: int
    arguments: str
    id: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class Delta:
    """New output of one choice of a stream; text never splits a code point and may lag behind its tokens.

    Of chats: it is a piece of the answer (`text`), of the `reasoning` before it, or of a `tool_call`.
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
    """A vector."""

    embedding: list[float]


@dataclass(frozen=True, slots=True)
class EmbeddingRequestOutput:
    """The vector of one prompt, in vLLM's shape. `prompt_token_ids`: None where only a gateway knows them."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int] | None
    num_prompt_tokens: int
    finished: bool = True


@dataclass(frozen=True, slots=True)
class ModelCard:
    """A served model: its name and limits, in tokens. `base_model`: of an adapter, the model that it is on."""

    name: str
    max_model_len: int
    vocab_size: int
    block_size: int
    chat: bool
    model_digest: str
    base_model: str = ""
