"""What a request may ask for, and every default, in one place. Pure: no I/O, no tokenizer; also used in process by `quire.LLM`.

defaults = SamplingDefaults.from_generation_config(text_model.generation_config)
check_parameters(request, limits)                                   before tokenising: cheap mistakes first
resolved = resolve(request, prompt_token_ids, limits, defaults)     after it
"""

import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from google.protobuf.message import DecodeError, Message

from protos.common.v1 import common_pb2
from protos.inference.v1 import inference_pb2
from svc_common.errors import FieldViolation, InvalidArgument, OutOfRange

AnyRequest = inference_pb2.GenerateRequest | inference_pb2.ChatRequest
M = TypeVar("M", bound=Message)

MAX_TEMPERATURE = 10.0
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 256
MAX_STOP_TOKEN_IDS = 256
MAX_LABELS = 16
MAX_LABEL_BYTES = 64
MAX_CACHE_SALT_BYTES = 256
MAX_ROLE_CHARS = 64
MAX_MESSAGES = 4096
MAX_PRIORITY = 2**31 - 1
MAX_VIOLATIONS = 16


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Values that absent sampling fields take. `top_k` 0 = all."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0

    @classmethod
    def from_generation_config(cls, config: Mapping[str, Any]) -> "SamplingDefaults":
        """The model author's values where the checkpoint has them."""
        return cls(
            temperature=float(_value(config, "temperature", cls().temperature)),
            top_p=float(_value(config, "top_p", cls().top_p)),
            top_k=int(_value(config, "top_k", cls().top_k)),
        )


@dataclass(frozen=True, slots=True)
class ResolvedRequest:
    """A request with every default applied. `priority` has the public polarity: higher = sooner."""

    prompt_token_ids: list[int]
    sampling: common_pb2.ResolvedSampling
    stop: common_pb2.StopRules
    stop_strings: tuple[str, ...]
    priority: int
    cache_salt: str
    no_cache_reuse: bool
    labels: dict[str, str]


def parse(cls: type[M], raw: bytes) -> M:
    """`raw` as a message. InvalidArgument for malformed protobuf and for text that is not UTF-8."""
    try:
        return cls.FromString(raw)
    except DecodeError as error:
        raise InvalidArgument.field(
            "request",
            f"is no valid {cls.DESCRIPTOR.full_name}: malformed protobuf, or a text field that is not UTF-8",
        ) from error


def check_parameters(request: AnyRequest, limits: common_pb2.ModelLimits) -> None:
    """InvalidArgument with one violation per wrong field; looks at everything but the prompt's tokens."""
    found = _Violations()
    if isinstance(request, inference_pb2.ChatRequest):
        _check_messages(request, found)
    else:
        _check_prompt(request, limits, found)
    _check_sampling(request.sampling, found)
    _check_stop(request.stop, limits, found)
    _check_labels(request.labels, found)
    if abs(request.scheduling.priority) > MAX_PRIORITY:
        found.add("scheduling.priority", f"must lie between {-MAX_PRIORITY} and {MAX_PRIORITY}")
    if len(request.cache.cache_salt.encode()) > MAX_CACHE_SALT_BYTES:
        found.add("cache.cache_salt", f"is longer than {MAX_CACHE_SALT_BYTES} bytes")
    found.raise_if_any()


def check_token_ids(token_ids: Sequence[int], field: str, limits: common_pb2.ModelLimits) -> None:
    """InvalidArgument naming the first id that is outside the vocabulary."""
    found = _Violations()
    _check_token_ids(token_ids, field, limits, found)
    found.raise_if_any()


def check_prompt_length(num_tokens: int, limits: common_pb2.ModelLimits) -> None:
    """OutOfRange, with limit and length in its metadata, when no output token would fit behind the prompt."""
    longest = limits.max_model_len - 1
    if num_tokens > longest:
        raise OutOfRange(
            f"the prompt has {num_tokens} tokens; {limits.model} takes at most {longest} (its context is "
            f"{limits.max_model_len}, prompt and output together); send a shorter one",
            reason="PROMPT_TOO_LONG",
            metadata={
                "limit": str(longest),
                "prompt_tokens": str(num_tokens),
                "max_model_len": str(limits.max_model_len),
            },
        )


def resolve(
    request: AnyRequest,
    prompt_token_ids: Sequence[int],
    limits: common_pb2.ModelLimits,
    defaults: SamplingDefaults,
    *,
    draw_seed: Callable[[], int] = lambda: secrets.randbits(64),
) -> ResolvedRequest:
    """Applies the defaults to a request that passed `check_parameters`.

    Raises InvalidArgument for a prompt of no tokens, OutOfRange for one that is too long. `max_tokens` is cut to what fits.
    """
    if not prompt_token_ids:
        field = "messages" if isinstance(request, inference_pb2.ChatRequest) else request.WhichOneof("prompt")
        raise InvalidArgument.field(field or "prompt", "has no tokens; send at least one")
    check_prompt_length(len(prompt_token_ids), limits)
    room = limits.max_model_len - len(prompt_token_ids)
    return ResolvedRequest(
        prompt_token_ids=list(prompt_token_ids),
        sampling=_resolved_sampling(request, limits, defaults, draw_seed),
        stop=_resolved_stop(request.stop, room),
        stop_strings=tuple(request.stop.stop_strings),
        priority=request.scheduling.priority,
        cache_salt=request.cache.cache_salt,
        no_cache_reuse=request.cache.no_reuse,
        labels=dict(request.labels),
    )


# --- defaults --------------------------------------------------------------------------------------------------------


def _value(config: Mapping[str, Any], name: str, default: float) -> Any:
    value = config.get(name)
    return default if value is None else value


def _given(message: Message, name: str, default: Any) -> Any:
    return getattr(message, name) if message.HasField(name) else default


def _resolved_sampling(
    request: AnyRequest,
    limits: common_pb2.ModelLimits,
    defaults: SamplingDefaults,
    draw_seed: Callable[[], int],
) -> common_pb2.ResolvedSampling:
    asked = request.sampling
    return common_pb2.ResolvedSampling(
        temperature=_given(asked, "temperature", defaults.temperature),
        top_p=_given(asked, "top_p", defaults.top_p),
        top_k=min(_given(asked, "top_k", defaults.top_k), limits.vocab_size),
        seed=asked.seed if asked.HasField("seed") else draw_seed(),
        logprobs=request.response.logprobs,
    )


def _resolved_stop(stop: inference_pb2.StopConditions, room: int) -> common_pb2.StopRules:
    max_tokens = min(_given(stop, "max_tokens", room), room)
    return common_pb2.StopRules(
        max_tokens=max_tokens,
        min_tokens=min(stop.min_tokens, max_tokens),
        ignore_eos=stop.ignore_eos,
        stop_token_ids=stop.stop_token_ids,
    )


# --- checks ----------------------------------------------------------------------------------------------------------


class _Violations:
    """Collects what is wrong, to report all of it at once."""

    def __init__(self) -> None:
        self._found: list[FieldViolation] = []

    def add(self, field: str, description: str) -> None:
        """One more; beyond the first 16 nobody reads on."""
        if len(self._found) < MAX_VIOLATIONS:
            self._found.append(FieldViolation(field, description))

    def raise_if_any(self) -> None:
        """InvalidArgument with all of them."""
        if self._found:
            message = "; ".join(f"{v.field}: {v.description}" for v in self._found)
            raise InvalidArgument(message, reason="INVALID_FIELD", violations=self._found)


def _check_prompt(request: inference_pb2.GenerateRequest, limits: common_pb2.ModelLimits, found: _Violations) -> None:
    kind = request.WhichOneof("prompt")
    if kind is None:
        found.add("prompt", "is missing; set text or token_ids")
    elif kind == "text" and not request.text:
        found.add("text", "is empty; send at least one token")
    elif kind == "token_ids":
        _check_token_ids(request.token_ids.ids, "token_ids.ids", limits, found)
        if not request.token_ids.ids:
            found.add("token_ids.ids", "is empty; send at least one token")


def _check_token_ids(token_ids: Sequence[int], field: str, limits: common_pb2.ModelLimits, found: _Violations) -> None:
    if not token_ids or max(token_ids) < limits.vocab_size:
        return
    i = next(i for i, token_id in enumerate(token_ids) if token_id >= limits.vocab_size)
    found.add(f"{field}[{i}]", f"is {token_ids[i]}; the vocabulary has {limits.vocab_size} tokens, from 0")


def _check_messages(request: inference_pb2.ChatRequest, found: _Violations) -> None:
    if not 1 <= len(request.messages) <= MAX_MESSAGES:
        found.add("messages", f"has {len(request.messages)} messages; send 1 to {MAX_MESSAGES}")
    for i, message in enumerate(request.messages):
        if not 1 <= len(message.role) <= MAX_ROLE_CHARS:
            found.add(f"messages[{i}].role", f"must have 1 to {MAX_ROLE_CHARS} characters")


def _check_sampling(sampling: inference_pb2.SamplingParams, found: _Violations) -> None:
    temperature, top_p = sampling.temperature, sampling.top_p
    if not (math.isfinite(temperature) and 0 <= temperature <= MAX_TEMPERATURE):
        found.add("sampling.temperature", f"is {temperature:g}; must be finite and lie in [0, {MAX_TEMPERATURE:g}]")
    if sampling.HasField("top_p") and not (math.isfinite(top_p) and 0 < top_p <= 1):
        found.add("sampling.top_p", f"is {top_p:g}; must lie in (0, 1]")
    if sampling.HasField("n") and sampling.n != 1:
        found.add("sampling.n", f"is {sampling.n}; only 1 is supported so far, send {sampling.n} requests")


def _check_stop(stop: inference_pb2.StopConditions, limits: common_pb2.ModelLimits, found: _Violations) -> None:
    if stop.HasField("max_tokens") and stop.max_tokens == 0:
        found.add("stop.max_tokens", "is 0; must be at least 1 (leave it out for up to the model's context)")
    if stop.HasField("max_tokens") and stop.min_tokens > stop.max_tokens > 0:
        found.add("stop.min_tokens", f"is {stop.min_tokens}, above max_tokens = {stop.max_tokens}")
    if stop.min_tokens >= limits.max_model_len:
        found.add("stop.min_tokens", f"is {stop.min_tokens}; the context has {limits.max_model_len} tokens")
    if len(stop.stop_strings) > MAX_STOP_STRINGS:
        found.add("stop.stop_strings", f"has {len(stop.stop_strings)} strings; at most {MAX_STOP_STRINGS} are allowed")
    for i, text in enumerate(stop.stop_strings[:MAX_STOP_STRINGS]):
        if not 1 <= len(text) <= MAX_STOP_STRING_CHARS:
            found.add(f"stop.stop_strings[{i}]", f"must have 1 to {MAX_STOP_STRING_CHARS} characters")
    if len(stop.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        found.add(
            "stop.stop_token_ids", f"has {len(stop.stop_token_ids)} ids; at most {MAX_STOP_TOKEN_IDS} are allowed"
        )
    _check_token_ids(stop.stop_token_ids, "stop.stop_token_ids", limits, found)


def _check_labels(labels: Mapping[str, str], found: _Violations) -> None:
    if len(labels) > MAX_LABELS:
        found.add("labels", f"has {len(labels)} labels; at most {MAX_LABELS} are allowed")
    for name, value in labels.items():
        if not name or len(name.encode()) > MAX_LABEL_BYTES or len(value.encode()) > MAX_LABEL_BYTES:
            found.add(
                "labels", f"has a name or value that is empty or longer than {MAX_LABEL_BYTES} bytes: {name[:64]!r}"
            )
