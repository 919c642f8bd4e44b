"""/v1/models: the models served."""

from collections.abc import Mapping
from typing import Any

from gateway_svc.calls import Call
from gateway_svc.generating.cell_model import ServedModel
from gateway_svc.generating.model_catalog import ModelCatalog
from gateway_svc.http.endpoint import HttpRequest
from gateway_svc.http.io import Reply
from svc_common.clock import unix_s


class Models:
    """Routes that list the model and its adapters."""

    def __init__(self, catalog: ModelCatalog) -> None:
        self._catalog = catalog
        self._created_s = unix_s()

    async def list(self, http: HttpRequest, call: Call, reply: Reply) -> None:
        """Answer with all that the caller may use, under all their names; empty before the first is loaded."""
        theirs = [(name, model) for name, model in self._catalog.named if call.caller.terms.may_use(model.name)]
        await reply.json({"object": "list", "data": [self._card(model, name) for name, model in theirs]})

    async def get(self, http: HttpRequest, call: Call, reply: Reply) -> None:
        """Answer with one by name."""
        model = self._catalog.get(http.path_params["name"])
        call.caller.terms.check_model(model.name)
        await reply.json(self._card(model, http.path_params["name"]))

    def _card(self, model: ServedModel, name: str) -> Mapping[str, Any]:
        """Model object under one of its names. `parent`, as in vLLM: the base model of an adapter."""
        return {
            "id": name,
            "object": "model",
            "created": self._created_s,
            "owned_by": "quire",
            "root": model.name,
            "parent": model.base_model or None,
            "max_model_len": model.limits.max_model_len,
        }
