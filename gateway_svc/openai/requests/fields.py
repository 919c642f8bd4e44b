"""Fields common to completions and chat: sampling, stop conditions, scheduling, and answer options. Pure.

Unknown fields are accepted, as in other OpenAI-compatible servers. Known fields that would change the output
and are not supported are refused, never ignored. vLLM's extra fields have vLLM's names, but `priority` has
Quire's polarity: higher = sooner.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from gateway_svc.checks.parameter_checks import MAX_LABEL_BYTES, MAX_LABELS
from gateway_svc.checks.sampling_checks import MAX_TOP_LOGPROBS
from gateway_svc.http.json_body import I32, U32, Ids, Texts, refuse, unset_if_none
from gateway_svc.openai.answers.answer_options import AnswerOptions
from protos.common.v1 import common_pb2
from protos.inference.v1 import inference_pb2 as pb
from svc_common.clipping import clip
from svc_common.errors import InvalidArgument

_EARLY_STOPPING: dict[bool | str | None, common_pb2.BeamStop] = {
    None: common_pb2.BEAM_STOP_UNSPECIFIED,
    False: common_pb2.BEAM_STOP_WHEN_UNBEATABLE,
    True: common_pb2.BEAM_STOP_WHEN_ENOUGH,
    "never": common_pb2.BEAM_STOP_NEVER,
}
MAX_KEY_BYTES = 64
MAX_NAMED_KEYS = 8
_ON_DEADLINE: dict[str | None, pb.OnDeadline] = {
    "fail": pb.ON_DEADLINE_FAIL,
    "return_partial": pb.ON_DEADLINE_RETURN_PARTIAL,
}


def _bounded_tops(number: int) -> int:
    if number == -1:
        raise ValueError(f"-1 asks for the whole vocabulary; at most {MAX_TOP_LOGPROBS} are given")
    return number


TopLogprobs = Annotated[int, Field(ge=-1, le=MAX_TOP_LOGPROBS), AfterValidator(_bounded_tops)]

AnyRequests = Sequence[pb.GenerateRequest | pb.ChatRequest]

# Values without effect; any other value of these fields is refused. None always has no effect.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "kv_transfer_params": ({},),
    "logits_processors": ([],),
    "logprob_token_ids": ([],),
    "prediction": (),
    "prompt_embeds": (),
    "repetition_detection": (),
    "spaces_between_special_tokens": (True,),
    "thinking_token_budget": (-1,),
    "truncation_side": ("left",),
    "vllm_xargs": ({},),
    "guided_whitespace_pattern": (),
}


class StreamOptions(BaseModel):
    """Additional contents of a stream. `continuous_usage_stats`: vLLM's, usage so far in every chunk."""

    model_config = ConfigDict(strict=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationFields(BaseModel):
    """Fields common to completions and chat. Structured output is checked in `structured`."""

    model_config = ConfigDict(strict=True, extra="ignore")
    NEUTRAL: ClassVar = NEUTRAL

    model: str = ""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: U32 | None = None
    best_of: U32 | None = None
    max_tokens: U32 | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**32 - 1)] | None = None
    min_p: float | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**64 - 1)] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: Ids | None = None
    bad_words: Texts | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    stop: str | Texts | None = None
    stop_token_ids: Ids | None = None
    min_tokens: U32 | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=2**32 - 1)] | None = None
    prompt_logprobs: TopLogprobs | None = None
    priority: I32 | None = None
    cache_salt: str | None = None
    metadata: dict[str, str] | None = None
    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    request_id: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    on_deadline: Literal["fail", "return_partial"] | None = None
    resumable: bool | None = None

    @abstractmethod
    def messages(self) -> AnyRequests:
        """Convert to one request per prompt."""

    def options(self) -> AnswerOptions:
        """What the answer shows."""
        asked = self.stream_options or StreamOptions()
        return AnswerOptions(
            usage_last=bool(asked.include_usage),
            usage_always=bool(asked.include_usage and asked.continuous_usage_stats),
            token_ids=bool(self.return_token_ids),
            tokens_as_ids=bool(self.return_tokens_as_token_ids),
            prompt_logprobs=self.prompt_logprobs is not None,
        )

    def fill(self, request: pb.GenerateRequest | pb.ChatRequest) -> None:
        """Fill in all but prompt, structured output and output logprobs; absent fields stay absent."""
        self._check_together()
        given = type(request)(
            model=self.model,
            sampling=self._sampling(),
            stop=pb.StopConditions(
                max_tokens=self.max_tokens,
                min_tokens=self.min_tokens,
                ignore_eos=unset_if_none(self.ignore_eos),
                include_in_output=unset_if_none(self.include_stop_str_in_output),
                stop_strings=[self.stop] if isinstance(self.stop, str) else self.stop,
                stop_token_ids=self.stop_token_ids,
            ),
            # vLLM's -1 is 0 here: as many tokens as fit.
            truncate_prompt_tokens=0 if self.truncate_prompt_tokens == -1 else self.truncate_prompt_tokens,
            resumable=unset_if_none(self.resumable),
            response=pb.ResponseOptions(
                num_prompt_logprobs=self.prompt_logprobs,
                special_tokens=unset_if_none(
                    None if self.skip_special_tokens is None else not self.skip_special_tokens
                ),
            ),
            scheduling=pb.Scheduling(priority=self.priority, on_deadline=_ON_DEADLINE.get(self.on_deadline)),
            cache=pb.CacheOptions(cache_salt=self.cache_salt),
            labels=_labels(self.metadata) if self.metadata else None,
        )
        request.MergeFrom(given)  # type: ignore[arg-type]

    def _check_together(self) -> None:
        """Refuse fields that do not go with others."""
        if self.stream_options is not None and not self.stream:
            raise InvalidArgument.field("stream_options", "is for streams alone; send stream=true, or leave it out")
        if not self.use_beam_search and (self.length_penalty not in (None, 1) or self.early_stopping is not None):
            refuse("length_penalty", "and early_stopping need use_beam_search")
        if self.truncate_prompt_tokens == 0:
            refuse(
                "truncate_prompt_tokens",
                "is 0, which leaves no prompt; send at least 1, or -1 for as many tokens as fit",
            )
        if self.stream and self.prompt_logprobs is not None:
            refuse("prompt_logprobs", "is not available in a stream; send stream=false, or use the gRPC API")

    def _sampling(self) -> pb.SamplingParams:
        return pb.SamplingParams(
            n=self.n,
            best_of=self.best_of,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=max(self.top_k, 0) if self.top_k is not None else None,
            min_p=self.min_p,
            seed=self.seed % 2**64 if self.seed is not None else None,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=_by_token(self.logit_bias) if self.logit_bias else None,
            allowed_token_ids=self.allowed_token_ids,
            bad_words=self.bad_words,
            beam=self._beam() if self.use_beam_search else None,
        )

    def _beam(self) -> pb.BeamSearch:
        return pb.BeamSearch(length_penalty=self.length_penalty, early_stopping=_EARLY_STOPPING[self.early_stopping])


def _by_token(biases: dict[str, float]) -> dict[int, float]:
    bad = [key for key in biases if not (key.isascii() and key.isdigit() and len(key) <= 10 and int(key) < 2**32)]
    if bad:
        named = ", ".join(repr(clip(key, MAX_KEY_BYTES)) for key in bad[:MAX_NAMED_KEYS])
        refuse("logit_bias", f"has keys that are no token ids: {named}; keys are whole numbers as text")
    return {int(key): bias for key, bias in biases.items()}


def _labels(metadata: dict[str, str]) -> dict[str, str]:
    """Entries of OpenAI's metadata that fit labels.

    Longer ones (OpenAI allows values of up to 512 characters) are dropped, as they have no effect.
    """
    fits = {key: value for key, value in metadata.items() if key and _num_bytes(key, value) <= MAX_LABEL_BYTES}
    return dict(list(fits.items())[:MAX_LABELS])


def _num_bytes(key: str, value: str) -> int:
    return max(len(key.encode()), len(value.encode()))
