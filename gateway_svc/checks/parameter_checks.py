"""Checks of everything in a request except sampling. Pure.

Prompts, messages, stop conditions, labels, scheduling and cache options; for sampling see `sampling_checks`.
"""

from collections.abc import Mapping
from typing import Protocol

from gateway_svc.checks.sampling_checks import num_choices
from gateway_svc.checks.violations import Violations
from protos.common.v1 import common_pb2
from protos.inference.v1 import inference_pb2 as pb

MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 256
MAX_STOP_TOKEN_IDS = 256
MAX_LABELS = 16
MAX_LABEL_BYTES = 64
MAX_CACHE_SALT_BYTES = 256
MAX_ROLE_CHARS = 64
MAX_MESSAGES = 4096
MAX_PRIORITY = 2**31 - 1
MAX_EMBED_INPUTS = 256


class _Surrounded(Protocol):
    """Fields common to all kinds of requests."""

    @property
    def scheduling(self) -> pb.Scheduling: ...

    @property
    def cache(self) -> pb.CacheOptions: ...

    @property
    def labels(self) -> Mapping[str, str]: ...


def check_prompt(request: pb.GenerateRequest, limits: common_pb2.ModelLimits, found: Violations) -> None:
    """Check that there is a non-empty text or a list of token ids."""
    kind = request.WhichOneof("prompt")
    if kind is None:
        found.add("prompt", "is missing; set text or token_ids")
    elif kind == "text" and not request.text:
        found.add("text", "is empty; send at least one token")
    elif kind == "token_ids":
        _check_ids(request.token_ids, "token_ids.ids", limits, found)


def check_embed_inputs(request: pb.EmbedRequest, limits: common_pb2.ModelLimits, found: Violations) -> None:
    """Check that each input is a non-empty text or a list of token ids."""
    num_inputs = len(request.inputs)
    good = 1 <= num_inputs <= MAX_EMBED_INPUTS
    if not good:
        found.add("inputs", f"has {num_inputs} prompts; send 1 to {MAX_EMBED_INPUTS}")
    for i, item in enumerate(request.inputs[:MAX_EMBED_INPUTS]):
        kind = item.WhichOneof("input")
        if kind == "token_ids":
            _check_ids(item.token_ids, f"inputs[{i}].token_ids.ids", limits, found)
        elif not item.text:
            found.add(f"inputs[{i}]", "is empty; send at least one token")
    known = request.pooling in pb.Pooling.values()
    if not known:
        found.add("pooling", f"is {request.pooling}, which is no Pooling")


def _check_ids(token_ids: pb.TokenIds, field: str, limits: common_pb2.ModelLimits, found: Violations) -> None:
    found.add_unknown_ids(token_ids.ids, field, limits)
    if not token_ids.ids:
        found.add(field, "is empty; send at least one token")


def check_messages(request: pb.ChatRequest, found: Violations) -> None:
    """Check the number of messages and their roles."""
    if not 1 <= len(request.messages) <= MAX_MESSAGES:
        found.add("messages", f"has {len(request.messages)} messages; send 1 to {MAX_MESSAGES}")
    for i, message in enumerate(request.messages):
        if not 1 <= len(message.role) <= MAX_ROLE_CHARS:
            found.add(f"messages[{i}].role", f"must have 1 to {MAX_ROLE_CHARS} characters")


def check_stop(
    stop: pb.StopConditions, sampling: pb.SamplingParams, limits: common_pb2.ModelLimits, found: Violations
) -> None:
    """Check the stop conditions, and that they fit the sampling."""
    if stop.HasField("max_tokens") and stop.max_tokens == 0:
        found.add("stop.max_tokens", "is 0; must be at least 1 (leave it out for up to the model's context)")
    if stop.HasField("max_tokens") and stop.min_tokens > stop.max_tokens > 0:
        found.add("stop.min_tokens", f"is {stop.min_tokens}, above max_tokens = {stop.max_tokens}")
    if stop.min_tokens >= limits.max_model_len:
        found.add("stop.min_tokens", f"is {stop.min_tokens}; the context has {limits.max_model_len} tokens")
    if stop.stop_strings and (sampling.HasField("beam") or sampling.best_of > num_choices(sampling)):
        text = "cannot be used with best_of above n or beams, which are ranked as tokens; use stop_token_ids"
        found.add("stop.stop_strings", text)
    if len(stop.stop_strings) > MAX_STOP_STRINGS:
        found.add("stop.stop_strings", f"has {len(stop.stop_strings)} strings; at most {MAX_STOP_STRINGS} are allowed")
    for i, text in enumerate(stop.stop_strings[:MAX_STOP_STRINGS]):
        if not 1 <= len(text) <= MAX_STOP_STRING_CHARS:
            found.add(f"stop.stop_strings[{i}]", f"must have 1 to {MAX_STOP_STRING_CHARS} characters")
    if len(stop.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        found.add(
            "stop.stop_token_ids", f"has {len(stop.stop_token_ids)} ids; at most {MAX_STOP_TOKEN_IDS} are allowed"
        )
    if stop.stop_token_ids:
        found.add_unknown_ids(stop.stop_token_ids, "stop.stop_token_ids", limits)


def check_ignored_end(request: pb.GenerateRequest | pb.ChatRequest, found: Violations) -> None:
    """Check that a request which ignores end-of-sequence tokens has no structured output."""
    kind = request.WhichOneof("structured_output")
    if kind is not None:
        found.add(
            "stop.ignore_eos",
            f"is true beside structured_output.{kind}: an output that matches ends with an end-of-sequence token, and nothing can "
            "follow it; leave one of the two out",
        )


def check_surroundings(request: _Surrounded, found: Violations) -> None:
    """Check scheduling, cache options and labels."""
    if abs(request.scheduling.priority) > MAX_PRIORITY:
        found.add("scheduling.priority", f"must lie between {-MAX_PRIORITY} and {MAX_PRIORITY}")
    on_deadline = request.scheduling.on_deadline
    known = on_deadline in pb.OnDeadline.values()
    if not known:
        found.add("scheduling.on_deadline", f"is {on_deadline}, which is no OnDeadline")
    if len(request.cache.cache_salt.encode()) > MAX_CACHE_SALT_BYTES:
        found.add("cache.cache_salt", f"is longer than {MAX_CACHE_SALT_BYTES} bytes")
    if request.labels:
        _check_labels(request.labels, found)


def _check_labels(labels: Mapping[str, str], found: Violations) -> None:
    if len(labels) > MAX_LABELS:
        found.add("labels", f"has {len(labels)} labels; at most {MAX_LABELS} are allowed")
    for name, value in labels.items():
        if not name or len(name.encode()) > MAX_LABEL_BYTES or len(value.encode()) > MAX_LABEL_BYTES:
            found.add(
                "labels", f"has a name or value that is empty or longer than {MAX_LABEL_BYTES} bytes: {name[:64]!r}"
            )
