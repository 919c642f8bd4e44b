"""OpenEngine's Inference service: one method, Generate."""

from collections.abc import AsyncGenerator
from typing import Any

import grpc
from google.protobuf.message import Message

from gateway_svc.calls import Call
from gateway_svc.checks.validation import parse
from gateway_svc.engine_calls import EngineCalls, EngineParts, FailureTold, named
from gateway_svc.generating.generation import Generation
from gateway_svc.generating.generator import wait_for_model
from gateway_svc.openengine.contract_answers import OpenEngineAnswer
from gateway_svc.openengine.contract_requests import TokenDetails, generate_request
from gateway_svc.openengine.engine_errors import name_as_sent
from protos.routers.v1 import openengine_pb2 as pb
from svc_common.errors import InvalidArgument, NotFound, QuireError
from svc_common.net import rpc

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["Inference"].full_name


class OpenEngineInference:
    """Methods of one gateway."""

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts

    def handler(self, calls: EngineCalls) -> "grpc.GenericRpcHandler[Any, Any]":
        """Return the handler for `server.add_generic_rpc_handlers`."""
        return calls.handler({}, {"Generate": self.generate})

    async def generate(self, raw: bytes, call: Call) -> AsyncGenerator[Message, None]:
        """Generate; the stream's end cancels the request.

        An error before the first events of the generation, which are those of a request that the scheduler has, is
        raised; a later one is told by the last event.
        """
        request = parse(pb.GenerateRequest, raw)
        call = named(call, request.request_id)
        answer: OpenEngineAnswer | None = None
        try:
            made = generate_request(request)
            made.model = await self._model(call, request)
            async with self._parts.generator.generate(call, made) as generation:
                async for events in generation:
                    answer = answer or _answer(generation, TokenDetails.of(request))
                    for message in answer.take(events):
                        yield message
        except Exception as error:
            if isinstance(error, InvalidArgument):
                name_as_sent(error)
            if answer is None:
                raise
            known = error if isinstance(error, QuireError) else rpc.hide(error)
            yield answer.failure(known)
            raise FailureTold(known) from error

    async def _model(self, call: Call, request: pb.GenerateRequest) -> str:
        """The name under which the catalog has the model, or its adapter. Raises NotFound, or as `wait_for_model`."""
        if not request.lora_name:
            return request.model
        adapter = await wait_for_model(self._parts.catalog, call, request.lora_name)
        model = await self._parts.catalog.wait(request.model, call)
        if not adapter.adapter or model.name not in (adapter.name, adapter.base_model):
            raise NotFound(
                f"model {model.name} has no adapter {adapter.name}; ListLoras tells those that there are",
                reason="MODEL_NOT_FOUND",
                resource_type="adapter",
                resource_name=adapter.name,
            )
        return adapter.name


def _answer(generation: Generation, details: TokenDetails) -> OpenEngineAnswer:
    return OpenEngineAnswer(
        generation.request_id, generation.prompt_token_ids, generation.num_choices, details, generation.model.text
    )
