"""Stored responses with their conversations, for `previous_response_id`, item references and the routes of one response."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from gateway_svc.engine.stored_values import StoredValues
from gateway_svc.openai.responses.input_items import kind_of
from gateway_svc.openai.responses.output_items import IN_PROGRESS
from gateway_svc.openai.responses.response_head import response_id
from gateway_svc.openai.responses.response_request import ResponseRequest
from svc_common.clipping import clip
from svc_common.errors import FieldViolation, InvalidArgument, NotFound

Json = dict[str, Any]

MAX_REFERENCED = 128
_MAX_ID_CHARS = 160
_LOST = "it was deleted or not stored, has expired, made room for others, or was lost when the scheduler restarted"
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response, and the items that it answers, those of earlier responses included.

    `carries_reasoning`: its reasoning items have `encrypted_content`.
    """

    response: Json
    given: list[Json]
    carries_reasoning: bool = False

    @property
    def is_in_progress(self) -> bool:
        """True for one in the background that has not ended, as far as is stored."""
        return bool(self.response["status"] == IN_PROGRESS)

    def with_response(self, response: Json) -> "StoredResponse":
        """The same with a later state of the response."""
        return replace(self, response=response)

    @property
    def conversation(self) -> list[Json]:
        """Items that a request continues."""
        return [*self.given, *self.response["output"]]

    def to_json(self) -> bytes:
        """As stored."""
        return json.dumps(
            [self.response, self.given, self.carries_reasoning], ensure_ascii=False, separators=(",", ":")
        ).encode()


class ResponseStore:
    """Stores responses of tenants; an item's id has that of its response in it, so that items are found by theirs."""

    def __init__(self, values: StoredValues) -> None:
        self._values = values

    async def put(self, tenant: str, stored: StoredResponse) -> bool:
        """Store a response. False: it could not be stored."""
        return await self._values.put(tenant, stored.response["id"], stored.to_json())

    async def get(self, tenant: str, name: str) -> StoredResponse:
        """Return the response of that id. Raises NotFound."""
        found = await self._find(tenant, name)
        if found is None:
            raise _unknown("response", name)
        return found

    async def has(self, tenant: str, name: str) -> bool:
        """True if a response of that id is stored."""
        return await self._values.get(tenant, name) is not None

    async def delete(self, tenant: str, name: str) -> None:
        """Drop the response of that id. Raises NotFound."""
        if not await self._values.delete(tenant, name):
            raise _unknown("response", name)

    async def conversation(self, tenant: str, request: ResponseRequest) -> list[Json]:
        """Items that the request answers: those of the response that it continues, then its own, references resolved.

        Raises InvalidArgument for an unknown response, and NotFound for an unknown item.
        """
        items: list[Json] = []
        if (name := request.previous_response_id) is not None:
            items += (await self._previous(tenant, name)).conversation
        known: dict[str, StoredResponse | None] = {}
        for i, item in enumerate(request.items()):
            is_reference = kind_of(item) == "item_reference"
            items.append(await self._referenced(tenant, i, str(item.get("id", "")), known) if is_reference else item)
        return items

    async def _previous(self, tenant: str, name: str) -> StoredResponse:
        found = await self._find(tenant, name)
        if found is None:
            problem = f"no response {clip(name, _MAX_ID_CHARS)!r}: {_LOST}; send the conversation as input"
            raise InvalidArgument(
                f"previous_response_id: {problem}",
                reason="PREVIOUS_RESPONSE_NOT_FOUND",
                violations=[FieldViolation("previous_response_id", problem)],
            )
        if found.is_in_progress:
            raise InvalidArgument.field("previous_response_id", "names a response in progress; wait for its end")
        return found

    async def _referenced(self, tenant: str, i: int, name: str, known: dict[str, StoredResponse | None]) -> Json:
        owner = response_id(name.partition("_")[2].rpartition("_")[0])
        if owner not in known:
            if len(known) == MAX_REFERENCED:
                raise InvalidArgument.field(f"input[{i}]", f"refers to more than the {MAX_REFERENCED}th response")
            known[owner] = await self._find(tenant, owner)
        stored = known[owner]
        for item in stored.conversation if stored is not None else ():
            if item["id"] == name:
                return item
        raise _unknown("item", name)

    async def _find(self, tenant: str, name: str) -> StoredResponse | None:
        value = await self._values.get(tenant, name) if len(name) <= _MAX_ID_CHARS else None
        return None if value is None else StoredResponse(*json.loads(value))


def listed_items(items: Sequence[Json], request_id: str) -> list[Json]:
    """Items as they are stored and listed: with ids, types, and content in parts."""
    return [_listed(item, f"{request_id}_i{i}") for i, item in enumerate(items)]


def _listed(item: Json, name: str) -> Json:
    kind = kind_of(item)
    made = {**item, "type": kind}
    if not made.get("id"):
        made["id"] = f"{_PREFIXES.get(kind, 'item')}_{name}"
    if kind == "message" and isinstance(item.get("content"), str):
        made["content"] = [_text_part(item)]
    if kind != "reasoning":
        made["status"] = item.get("status") or "completed"
    return made


def _text_part(message: Json) -> Json:
    if message["role"] == "assistant":
        return {"type": "output_text", "text": message["content"], "annotations": [], "logprobs": []}
    return {"type": "input_text", "text": message["content"]}


def _unknown(kind: str, name: str) -> NotFound:
    shown = clip(name, _MAX_ID_CHARS)
    return NotFound(
        f"no {kind} {shown!r}: {_LOST}", reason="RESPONSE_NOT_FOUND", resource_type=kind, resource_name=shown
    )
