"""Builders for the parts of an `EngineMessage`: token columns, ends, embeddings and prompt log probabilities; KV events."""

import struct
from dataclasses import dataclass, field
from typing import Any

from block_manager.hashing import BlockContents
from protos.engine.v1 import engine_pb2
from scheduler_svc.observe.kv_events import KvChange
from scheduler_svc.requests.choice_output import ChoiceOutput, PromptLogprobs
from scheduler_svc.requests.live_request import Delivery, LiveRequest
from scheduler_svc.requests.waiting_room import WaitingRoom
from scheduler_svc.worker_values import Top
from svc_common import wire_arrays
from svc_common.clock import NS_PER_S


@dataclass(slots=True)
class TokenRuns:
    """Token columns of a message being built."""

    handles: list[int] = field(default_factory=list)
    choices: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    outputs: list[ChoiceOutput] = field(default_factory=list)
    has_logprobs: bool = False
    has_tops: bool = False

    def put(self, delivery: Delivery, choice: int, output: ChoiceOutput) -> None:
        """Add the tokens of a choice that were not sent yet, and advance its sent count."""
        start = delivery.sent_counts[choice]
        new = output.tokens[start:]
        self.handles.append(delivery.handle)
        self.choices.append(choice)
        self.offsets.append(start)
        self.counts.append(len(new))
        self.token_ids.extend(new)
        self.outputs.append(output)
        self.has_logprobs |= bool(output.logprobs)
        self.has_tops |= bool(output.tops)
        delivery.sent_counts[choice] = start + len(new)

    def fill(self, found: engine_pb2.TokenColumns) -> None:
        """Pack the columns into an empty message."""
        found.handles = wire_arrays.pack(self.handles, wire_arrays.U32)
        found.choices = wire_arrays.pack(self.choices, wire_arrays.U32)
        found.token_offsets = wire_arrays.pack(self.offsets, wire_arrays.U32)
        found.counts = wire_arrays.pack(self.counts, wire_arrays.U32)
        found.token_ids = wire_arrays.pack(self.token_ids)
        if self.has_logprobs:
            found.logprobs = wire_arrays.pack(self._beside("logprobs", 0.0), wire_arrays.F32)
        if self.has_tops:
            self._put_tops(self._beside("tops", []), found)

    def _beside(self, name: str, none: Any) -> list[Any]:
        """Values parallel to the tokens; `none` for tokens of choices without them."""
        found: list[Any] = []
        for output, start, count in zip(self.outputs, self.offsets, self.counts, strict=True):
            values = getattr(output, name)
            found += values[start : start + count] if values else [none] * count
        return found

    @staticmethod
    def _put_tops(tops: list[Top], found: engine_pb2.TokenColumns) -> None:
        if any(tops):
            pairs = [pair for top in tops for pair in top]
            found.top_counts = wire_arrays.pack([len(top) for top in tops], wire_arrays.U32)
            found.top_token_ids = wire_arrays.pack([token for token, _ in pairs])
            found.top_logprobs = wire_arrays.pack([logprob for _, logprob in pairs], wire_arrays.F32)


def finished_message(
    handle: int, number: int, choice: ChoiceOutput, account: engine_pb2.RequestAccount | None = None
) -> engine_pb2.Finished:
    """The end of a choice; the last one's carries the request's account."""
    ending = choice.ending
    assert ending is not None
    return engine_pb2.Finished(
        handle=handle,
        choice=number,
        reason=ending.reason,
        stop_token_id=ending.stop_token_id,
        num_output_tokens=choice.num_tokens,
        last=account is not None,
        account=account,
        score=ending.score,
    )


def held_message(handle: int, live: LiveRequest) -> engine_pb2.HeldRequest:
    """Description of a detached or retained request, for a gateway that may read it."""
    return engine_pb2.HeldRequest(
        handle=handle,
        request_id=live.submission.request_id,
        token_offsets=wire_arrays.pack([len(choice.tokens) for choice in live.output.choices], wire_arrays.U32),
        frontend_state=live.submission.frontend_state,
    )


def put_extras(delivery: Delivery, message: engine_pb2.EngineMessage) -> None:
    """Put what is sent once, before the end: embedding and prompt log probabilities."""
    output = delivery.live.output
    if output.embedding:
        message.embeddings.add(handle=delivery.handle, values=output.embedding)
    if output.prompt is not None:
        message.prompt_logprobs.append(prompt_logprobs_message(delivery.handle, output.prompt))


def prompt_logprobs_message(handle: int, prompt: PromptLogprobs) -> engine_pb2.PromptLogprobs:
    """Log probabilities of a prompt's tokens."""
    return engine_pb2.PromptLogprobs(
        handle=handle,
        logprobs=prompt.logprobs.tobytes(),
        num_top=prompt.top_ids.shape[1],
        top_token_ids=prompt.top_ids.tobytes(),
        top_logprobs=prompt.top_logprobs.tobytes(),
    )


def queue_message(room: WaitingRoom, now_ns: int) -> engine_pb2.QueueState:
    """The tenants for which the waiting queue has no room, and when to retry."""
    closed_for = room.closed_for
    retry_after_ns = int(room.retry_after_s(now_ns) * NS_PER_S) if closed_for else 0
    return engine_pb2.QueueState(closed_for=closed_for, retry_after_ns=retry_after_ns)


def kv_message(change: KvChange) -> engine_pb2.SubscribeKvEventsResponse:
    """The change; routers know blocks by the first eight bytes of their hashes."""
    return engine_pb2.SubscribeKvEventsResponse(
        stored=[_stored(key, contents) for key, contents in change.stored.items()],
        removed=map(_short, change.removed),
    )


def _stored(key: bytes, contents: BlockContents) -> engine_pb2.StoredBlock:
    return engine_pb2.StoredBlock(
        block_hash=_short(key),
        parent_hash=None if contents.parent is None else _short(contents.parent),
        token_ids=struct.unpack(f"<{len(contents.tokens) // 4}i", contents.tokens),
        lora_id=contents.lora_id,
    )


def _short(key: bytes) -> int:
    return int.from_bytes(key[:8], "little", signed=True)
