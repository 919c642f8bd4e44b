"""The routes of one stored response: retrieve, delete, list what it answered."""

from collections.abc import Mapping, Sequence
from typing import Any

from gateway_svc.calls import Call
from gateway_svc.http.endpoint import HttpRequest
from gateway_svc.http.io import Reply
from gateway_svc.http.json_body import refuse
from gateway_svc.openai.responses.stored_responses import ResponseStore
from svc_common.errors import InvalidArgument

Json = dict[str, Any]

DEFAULT_LIMIT = 20
MAX_LIMIT = 100


class StoredResponseRoutes:
    """Answers the routes."""

    def __init__(self, store: ResponseStore) -> None:
        self._store = store

    async def get(self, http: HttpRequest, call: Call, reply: Reply) -> None:
        """Answer with a stored response."""
        if http.query.get("stream", "false") != "false":
            refuse("stream", "is for responses that run in the background, which this server does not offer")
        await reply.json((await self._store.get(call.caller.tenant, http.path_params["id"])).response)

    async def delete(self, http: HttpRequest, call: Call, reply: Reply) -> None:
        """Delete a stored response."""
        name = http.path_params["id"]
        await self._store.delete(call.caller.tenant, name)
        await reply.json({"id": name, "object": "response", "deleted": True})

    async def input_items(self, http: HttpRequest, call: Call, reply: Reply) -> None:
        """List the items that a stored response answers, those of earlier responses included."""
        stored = await self._store.get(call.caller.tenant, http.path_params["id"])
        await reply.json(_page(stored.given, http.query))


def _page(items: Sequence[Json], query: Mapping[str, str]) -> Json:
    """A page of a list: the newest first, unless `order` is asc."""
    order, limit = query.get("order", "desc"), query.get("limit", str(DEFAULT_LIMIT))
    if order not in ("asc", "desc"):
        raise InvalidArgument.field("order", "must be asc or desc")
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit) <= MAX_LIMIT):
        raise InvalidArgument.field("limit", f"must be a number from 1 to {MAX_LIMIT}")
    ordered = list(items) if order == "asc" else list(reversed(items))
    begin = _behind(ordered, query["after"]) if "after" in query else 0
    page = ordered[begin : begin + int(limit)]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else "",
        "last_id": page[-1]["id"] if page else "",
        "has_more": begin + len(page) < len(ordered),
    }


def _behind(items: Sequence[Json], name: str) -> int:
    for i, item in enumerate(items):
        if item["id"] == name:
            return i + 1
    raise InvalidArgument.field("after", "is the id of no item in this list")
