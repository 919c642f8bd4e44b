"""/v1/models in Anthropic's form, for requests with its version header."""

import datetime

from gateway_svc.anthropic.message_events import Json
from gateway_svc.calls import Call
from gateway_svc.generating.model_catalog import ModelCatalog, ServedModel
from gateway_svc.http.endpoint import HttpRequest
from gateway_svc.http.io import Reply


class ModelCards:
    """Routes that list the model and its adapters. All are on one page."""

    def __init__(self, catalog: ModelCatalog) -> None:
        self._catalog = catalog
        self._created_at = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")

    async def list(self, http: HttpRequest, call: Call, reply: Reply) -> None:
        """Answer with all that the caller may use; empty before the first is loaded."""
        theirs = [self._card(model) for model in self._catalog.served if call.caller.terms.may_use(model.name)]
        ids = [card["id"] for card in theirs] or [None]
        await reply.json({"data": theirs, "has_more": False, "first_id": ids[0], "last_id": ids[-1]})

    async def get(self, http: HttpRequest, call: Call, reply: Reply) -> None:
        """Answer with one by name."""
        model = self._catalog.get(http.path_params["name"])
        call.caller.terms.check_model(model.name)
        await reply.json(self._card(model))

    def _card(self, model: ServedModel) -> Json:
        """Model object. `max_tokens`: the most that any prompt leaves room for."""
        return {
            "id": model.name,
            "type": "model",
            "display_name": model.name,
            "created_at": self._created_at,
            "lifecycle": "active",
            "max_input_tokens": model.limits.max_model_len - 1,
            "max_tokens": model.limits.max_model_len - 1,
        }
