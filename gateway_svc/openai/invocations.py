"""POST /invocations, as SageMaker calls a model: the fields of the body say which route is meant, as in vLLM."""

from collections.abc import Sequence

from gateway_svc.calls import Call
from gateway_svc.http.endpoint import HttpRequest, Respond
from gateway_svc.http.io import Reply
from gateway_svc.http.json_body import json_object
from svc_common.errors import InvalidArgument


class Invocations:
    """Passes a body to the first of `handlers` whose fields it has."""

    def __init__(self, handlers: Sequence[tuple[Sequence[str], Respond]]) -> None:
        self._handlers = handlers

    async def respond(self, http: HttpRequest, call: Call, reply: Reply) -> None:
        """Answer as the route does. Raises InvalidArgument for a body of none."""
        given = {name for name, value in json_object(http.body).items() if value is not None}
        for fields, respond in self._handlers:
            if given.issuperset(fields):
                await respond(http, call, reply)
                return
        known = "; ".join(" and ".join(fields) for fields, _ in self._handlers)
        raise InvalidArgument.field("body", f"has the fields of no route; send one of: {known}")
