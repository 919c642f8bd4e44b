"""What comes back for a request, in vLLM's shapes, whether it ran in process or behind a gateway."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from svc_common.errors import QuireError


@dataclass(frozen=True, slots=True)
class Logprob:
    """Natural log probability of one token under the unmodified distribution."""

    logprob: float
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One output of a request.

    `logprobs`: one {chosen token id: Logprob} per token, or None when not asked. `finish_reason`: "stop", "length", "abort", or
    None while it runs. `stop_reason`: the stop string or the token id (end-of-sequence included) that ended it; None for length.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        """Whether it is complete."""
        return self.finish_reason is not None

    def extend(self, text: str, token_ids: Sequence[int], logprobs: Sequence[float] | None) -> None:
        """Adds new output; `logprobs` one per token, or None when not asked."""
        self.text += text
        self.token_ids.extend(token_ids)
        if logprobs is None:
            return
        self.logprobs = self.logprobs or []
        self.logprobs.extend({token: Logprob(value)} for token, value in zip(token_ids, logprobs, strict=True))
        self.cumulative_logprob = (self.cumulative_logprob or 0.0) + sum(logprobs)


@dataclass(slots=True)
class RequestOutput:
    """A request with its outputs so far. `seed`: the one in force, to repeat it. `error`: why it failed; no finish reason then.

    `prompt_token_ids` is None where only a gateway knows them (a text prompt sent by `Client`); `num_prompt_tokens` then has
    their number once the request is complete.
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
    model: str = ""
    error: QuireError | None = None

    @property
    def text(self) -> str:
        """Text of the first output."""
        return self.outputs[0].text


@dataclass(frozen=True, slots=True)
class Delta:
    """New output of one choice of a stream; text never splits a code point and may lag behind its tokens."""

    text: str
    token_ids: list[int]
    token_offset: int
    logprobs: list[float] | None = None
    choice: int = 0


@dataclass(frozen=True, slots=True)
class ModelCard:
    """A served model: its name and limits, in tokens."""

    name: str
    max_model_len: int
    vocab_size: int
    block_size: int
    chat: bool
    model_digest: str
