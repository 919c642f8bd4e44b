"""The routes of one stored response: retrieve, delete, cancel, list what it answered."""

from collections.abc import Mapping, Sequence
from typing import Any

from starlette.routing import Route

from gateway_svc.calls import Call
from gateway_svc.http.endpoint import Doorman, HttpRequest
from gateway_svc.http.io import Reply
from gateway_svc.http.json_body import refuse
from gateway_svc.openai.responses.background import BackgroundResponses
from gateway_svc.openai.responses.response_dialect import RESPONSES
from gateway_svc.openai.responses.stored_responses import ResponseStore
from svc_common.errors import InvalidArgument

Json = dict[str, Any]

DEFAULT_LIMIT = 20
MAX_LIMIT = 100


class StoredResponseRoutes:
    """Answers the routes."""

    def __init__(self, store: ResponseStore, background: BackgroundResponses) -> None:
        self._store = store
        self._background = background

    def routes(self, door: Doorman) -> Sequence[Route]:
        """All of them."""
        path = "/v1/responses/{id}"
        return [
            door.route("GET", path, self.get, RESPONSES),
            door.route("DELETE", path, self.delete, RESPONSES),
            door.route("POST", f"{path}/cancel", self.cancel, RESPONSES, has_body=False),
            door.route("GET", f"{path}/input_items", self.input_items, RESPONSES),
        ]

    async def get(self, http: HttpRequest, call: Call, reply: Reply) -> None:
        """Answer with a stored response, as far as it is complete."""
        if http.query.get("stream", "false") != "false":
            refuse("stream", "is not supported for stored responses; ask again until status is not in_progress")
        stored = await self._background.find(call.caller.tenant, http.path_params["id"])
        await reply.json(await self._background.current(call, stored))

    async def cancel(self, http: HttpRequest, call: Call, reply: Reply) -> None:
        """Cancel a response in the background."""
        stored = await self._background.find(call.caller.tenant, http.path_params["id"])
        await reply.json(await self._background.cancel(call.caller.tenant, stored))

    async def delete(self, http: HttpRequest, call: Call, reply: Reply) -> None:
        """Delete a stored response; one in progress is cancelled."""
        name, tenant = http.path_params["id"], call.caller.tenant
        stored = await self._background.find(tenant, name)
        if stored.is_in_progress:
            await self._background.cancel(tenant, stored)
        await self._store.delete(tenant, name)
        await reply.json({"id": name, "object": "response", "deleted": True})

    async def input_items(self, http: HttpRequest, call: Call, reply: Reply) -> None:
        """List the items that a stored response answers, those of earlier responses included."""
        stored = await self._background.find(call.caller.tenant, http.path_params["id"])
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
